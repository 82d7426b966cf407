"""How the rows of one optimizer step are split into forward passes."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atomrl.types import Rows, select_rows


def padded_tokens(lengths: Tensor, index: Tensor) -> int:
    """What the rows at `index` take in one forward pass: rows times the longest of them.

    Example:
        >>> padded_tokens(torch.tensor([2, 9, 3, 8]), torch.tensor([0, 3]))
        16
    """
    return len(index) * int(lengths[index].max())


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, of a GPU or of the machine.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
        True
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    signs = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def group_pieces(
    lengths: Tensor, group_ids: Tensor, tokens_per_micro_batch: int, rows_per_micro_batch: int | None = None
) -> Tensor:
    """Groups as far as they fit: rows that share a prompt are best computed together, but no budget is broken for it.

    Args:
        lengths, group_ids, tokens_per_micro_batch, rows_per_micro_batch: as in `micro_batches`.

    Returns:
        [B] the same number for rows to keep together: a group, or its equal pieces where it is over the budget.

    Example:
        >>> group_pieces(torch.tensor([5, 5, 5, 5, 2, 2]), torch.tensor([7, 7, 7, 7, 8, 8]), 10)
        tensor([0, 0, 1, 1, 2, 2])
    """
    pieces, number = torch.empty_like(group_ids), 0
    for group in sorted(set(group_ids.tolist())):
        rows = (group_ids == group).nonzero()[:, 0]
        rows = rows[lengths[rows].argsort(descending=True, stable=True)]
        most = max(1, min(tokens_per_micro_batch // max(1, int(lengths[rows[0]])), rows_per_micro_batch or len(rows)))
        parts = -(-len(rows) // most)
        pieces[rows] = number + torch.arange(len(rows)) // -(-len(rows) // parts)
        number += parts
    return pieces


def zero_weight_row(rows: Rows) -> Rows:
    """The first row, without a token that is trained on: what a rank computes that has no rows left."""
    row = select_rows(rows, torch.tensor([0]))
    off: dict[str, Any] = {
        name: torch.zeros_like(getattr(row, name)) for name in ("loss_mask", "loss_weights") if hasattr(row, name)
    }
    return replace(row, **off)
