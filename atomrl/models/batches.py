"""Rows of like length together in forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from atomrl.batches import Rows, select_rows


def micro_batches(
    lengths: Tensor, group_ids: Tensor | None, tokens_per_micro_batch: int, rows_per_micro_batch: int | None = None
) -> list[Tensor]:
    """Indices of the rows of each micro-batch: rows of like length together, within a budget of padded tokens.

    A row (or group) that is over the budget alone is a micro-batch of its own.

    Args:
        lengths: [B] tokens of each row.
        group_ids: [B]; rows with the same id stay together. None splits anywhere.
        tokens_per_micro_batch: rows times the longest of them.
        rows_per_micro_batch: a further limit in rows.

    Returns:
        Index tensors that together hold every row once, longest rows first.

    Example:
        >>> micro_batches(torch.tensor([2, 9, 3, 8]), None, tokens_per_micro_batch=18)
        [tensor([1, 3]), tensor([2, 0])]
    """
    sizes = lengths.tolist()
    units: dict[int, list[int]] = {}
    for row, unit in enumerate(range(len(sizes)) if group_ids is None else group_ids.tolist()):
        units.setdefault(unit, []).append(row)
    ordered = sorted(units.values(), key=lambda rows: -max(sizes[row] for row in rows))
    most_rows = rows_per_micro_batch or len(sizes)
    batches: list[list[int]] = []
    longest = 0
    for rows in ordered:
        together = len(batches[-1]) + len(rows) if batches else 0
        if not batches or together * longest > tokens_per_micro_batch or together > most_rows:
            batches.append(list(rows))
            longest = max(sizes[row] for row in rows)  # of the whole micro-batch: later ones are shorter
        else:
            batches[-1] += rows
    return [torch.tensor(batch) for batch in batches]


def micro_batches_for(
    ranks: int,
    lengths: Tensor,
    group_ids: Tensor | None,
    tokens_per_micro_batch: int,
    rows_per_micro_batch: int | None = None,
) -> list[Tensor]:
    """`micro_batches` of about equally many padded tokens, as many as there are ranks, or a multiple of it: ranks wait
    for each other at each.

    Fewer where there are fewer rows (or groups) than ranks.

    Example:
        >>> micro_batches_for(2, torch.tensor([8, 4, 4, 2, 2, 2]), None, tokens_per_micro_batch=99)
        [tensor([0, 1]), tensor([2, 3, 4, 5])]
    """

    def split(budget: int) -> list[Tensor]:
        return micro_batches(lengths, group_ids, budget, rows_per_micro_batch)

    wanted = -(-len(split(tokens_per_micro_batch)) // ranks) * ranks
    low, high = 1, tokens_per_micro_batch  # the smallest budget with no more micro-batches than that
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(split(middle)) <= wanted else (middle + 1, high)
    return split(high)


def padded_tokens(lengths: Tensor, index: Tensor) -> int:
    """What the rows at `index` take in one forward pass: rows times the longest of them.

    Example:
        >>> padded_tokens(torch.tensor([2, 9, 3, 8]), torch.tensor([0, 3]))
        16
    """
    return len(index) * int(lengths[index].max())


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


# --------------------------------------------------------------------------------------------------------------------
# Activations in the CPU's memory between the forward and the backward pass.
#
# Copies are made from and to pinned memory, on the stream that computes: in order with it, and the host does not wait.

LEAST_BYTES = 1 << 20
"""What is smaller is not worth a copy."""
Kept = Tensor | tuple[torch.device, Tensor]

_active = False


@contextmanager
def offloading(active: bool = True) -> Iterator[None]:
    """Within it, what autograd keeps for the backward pass lies in the CPU's memory, but for weights and small things.

    Gradients are the same to the last bit. With checkpointing that is the input of each layer, without it all that a
    layer keeps.

    Args:
        active: False changes nothing.

    Example:
        >>> x = torch.ones(1024, 1024, requires_grad=True)
        >>> with offloading():
        ...     y = (x * x).exp()
        >>> bool((torch.autograd.grad(y.sum(), x)[0] == 2 * x * (x * x).exp()).all())
        True
    """
    global _active
    before = _active
    if not active:
        yield
        return
    _active = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(put, get):
            yield
    finally:
        _active = before


def put(tensor: Tensor) -> Kept:
    """What is kept in the place of a tensor; called by hooks within these too, since the innermost alone are called.

    Never the tensor itself: an operation that saves its own result would hold itself through it, and the graph of a
    forward pass that fails would never be freed.
    """
    expanded = tensor.untyped_storage().nbytes() < tensor.nbytes
    weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    if not _active or weight or tensor.nbytes < LEAST_BYTES or expanded:
        return tensor.detach()
    held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    held.copy_(tensor, non_blocking=True)
    return tensor.device, held


def get(kept: Kept) -> Tensor:
    """The tensor that `put` was given."""
    if isinstance(kept, Tensor):
        return kept
    device, held = kept
    return held.to(device, non_blocking=True)
