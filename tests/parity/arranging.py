"""What several adapters share: names of peers for our reductions, and reshaping. No arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atomrl.atoms import masks, reductions

Values = dict[str, Any]


def rows(values: Tensor, like: Tensor) -> Tensor:
    """A value per row, on every token."""
    return values[:, None].expand(like.shape)


def fraction(flags: Tensor, mask: Tensor, eps: float = 0.0) -> Tensor:
    """Share of the masked entries that are flagged."""
    return masks.masked_mean(flags.to(torch.float64), mask, eps)


def every(values: Tensor) -> Tensor:
    """A mask that leaves out nothing."""
    return torch.ones_like(values, dtype=torch.bool)


def token_sum(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return reductions.token_mean(mask, total_tokens=1.0, dtype=dtype)


def verl_weights(mode: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`loss_agg_mode`, without the values that verl's trainer may give for the whole batch."""
    if mode == "token-mean":
        return reductions.token_mean(mask, dtype=dtype)
    if mode == "token-sum":
        return token_sum(mask, dtype)
    if mode == "seq-mean-token-mean":
        return reductions.sequence_mean(mask, eps=1e-8, dtype=dtype)
    length = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": mask.shape[1]}[mode]
    return reductions.constant_length(mask, length, empty_rows="drop", dtype=dtype)
