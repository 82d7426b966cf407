"""What several adapters share: names of peers for our reductions, reshaping, and conventions that only peers have.

verl, OpenRLHF and NeMo-RL add an epsilon to a count before they divide by it; our means are exact. `thinned` is the
factor between the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atomrl.atoms import masks, policy_losses
from atomrl.atoms import policy_losses as reductions

Values = dict[str, Any]


def rows(values: Tensor, like: Tensor) -> Tensor:
    """A value per row, on every token."""
    return values[:, None].expand(like.shape)


SMALL = 1e-8


def thinned(count: Tensor, eps: float = SMALL) -> Tensor:
    """n / (n + eps)"""
    return count / (count + eps)


def mean(values: Tensor, mask: Tensor, eps: float = SMALL) -> Tensor:
    return masks.masked_mean(values, mask) * thinned(mask.sum(), eps)


def thin_moments(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance with verl's epsilon on the count."""
    centre, count = mean(values, mask), mask.sum()
    return centre, mean((values - centre).square(), mask) * count / (count - 1).clamp(min=1)


def row_mean(values: Tensor, mask: Tensor, eps: float = SMALL) -> Tensor:
    return masks.row_mean(values, mask) * thinned(mask.sum(1), eps).to(values.dtype)


def sequence_mean(mask: Tensor, total_rows: float | None = None) -> Tensor:
    return reductions.sequence_mean(mask, total_rows) * thinned(mask.sum(1, keepdim=True))


def fraction(flags: Tensor, mask: Tensor, eps: float = 0.0) -> Tensor:
    """Share of the masked entries that are flagged."""
    values = flags.to(torch.float64)
    return mean(values, mask, eps) if eps else masks.masked_mean(values, mask)


def group_sizes(group_ids: Tensor) -> Tensor:
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return sizes[index]


def raw_if_alone(advantages: Tensor, rewards: Tensor, group_ids: Tensor) -> Tensor:
    """verl's convention for the only completion of a prompt: its bare reward."""
    return torch.where(group_sizes(group_ids) == 1, rewards, advantages)


def zero_as_negative(advantages: Tensor) -> Tensor:
    """verl's and prime-rl's trust regions bound a token of advantage 0 like one of a negative advantage."""
    return torch.where(advantages == 0, -1.0, advantages)


def clamped_kl(estimator: Any, logprobs: Tensor, other: Tensor, mask: Tensor, **limits: float | None) -> Tensor:
    """An estimate with the bounds of peers: on the log-ratio (`of_ratio`) and on the result (`of_result`)."""
    log_ratio = policy_losses.token_log_ratio(logprobs, other, mask, limits.get("of_ratio"))
    estimate = estimator(log_ratio, torch.zeros_like(log_ratio), mask)
    bound = limits.get("of_result")
    return estimate if bound is None else estimate.clamp(-bound, bound)


def every(values: Tensor) -> Tensor:
    """A mask that leaves out nothing."""
    return torch.ones_like(values, dtype=torch.bool)


def token_sum(mask: Tensor) -> Tensor:
    return reductions.token_mean(mask, total_tokens=1.0)


def verl_weights(mode: str, mask: Tensor) -> Tensor:
    """`loss_agg_mode`, without the values that verl's trainer may give for the whole batch."""
    if mode == "token-mean":
        return reductions.token_mean(mask)
    if mode == "token-sum":
        return token_sum(mask)
    if mode == "seq-mean-token-mean":
        return sequence_mean(mask)
    length = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": mask.shape[1]}[mode]
    return reductions.constant_length(mask, length, total_rows=written_rows(mask))


def written_rows(mask: Tensor) -> float:
    """Rows with a token: verl does not count the others."""
    return max(1.0, float(mask.any(1).sum()))
