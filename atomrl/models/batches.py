"""Split rows into micro-batches by a token budget; offload activations to CPU memory."""

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
    """Split rows of similar length into micro-batches within a budget of padded tokens.

    A row (or group) that exceeds the budget by itself is its own micro-batch.

    Args:
        lengths: [B] tokens of each row.
        group_ids: [B]; rows with the same id stay together. None: rows are independent.
        tokens_per_micro_batch: maximum number of rows times the longest of them.
        rows_per_micro_batch: maximum number of rows; None: no limit.

    Returns:
        Row indices of each micro-batch, longest rows first; every row once.

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
    """Split rows into micro-batches of similar size whose number is a multiple of the number of ranks.

    So no rank waits for one with more micro-batches. There are fewer if there are fewer rows (or groups) than ranks.

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
    """Return the padded tokens of the rows at `index`: their number times the longest of them.

    Example:
        >>> padded_tokens(torch.tensor([2, 9, 3, 8]), torch.tensor([0, 3]))
        16
    """
    return len(index) * int(lengths[index].max())


def group_pieces(
    lengths: Tensor, group_ids: Tensor, tokens_per_micro_batch: int, rows_per_micro_batch: int | None = None
) -> Tensor:
    """Keep the rows of a group together as far as the budget allows, because a shared prompt is computed once.

    Args:
        lengths, group_ids, tokens_per_micro_batch, rows_per_micro_batch: as in `micro_batches`.

    Returns:
        [B] piece ids: the same for rows to keep together. A group over the budget is split into equal pieces.

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
    """Return the first row with loss mask and loss weights 0, for a rank that has no rows left."""
    row = select_rows(rows, torch.tensor([0]))
    off: dict[str, Any] = {
        name: torch.zeros_like(getattr(row, name)) for name in ("loss_mask", "loss_weights") if hasattr(row, name)
    }
    return replace(row, **off)


# --------------------------------------------------------------------------------------------------------------------
# Activation offloading: activations are in CPU memory between forward and backward pass.
#
# Copies use pinned memory and the compute stream. So they are in order with the computation, and the CPU does not wait.

LEAST_BYTES = 1 << 20
"""Smaller tensors are not offloaded."""
Kept = Tensor | tuple[torch.device, Tensor]

_active = False


@contextmanager
def offloading(active: bool = True) -> Iterator[None]:
    """Offload tensors that autograd saves inside the block to CPU memory, except for weights and small tensors.

    Gradients are bit-identical. With gradient checkpointing the input of each layer is offloaded, without it all
    activations.

    Args:
        active: False: do nothing.

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
    """Pack a saved tensor: copy it to the CPU, or detach it. Nested hooks call it too, as only the innermost run.

    Never returns the tensor itself: an operation that saves its own output would be in a reference cycle, and the graph
    of a failed forward pass would never be freed.
    """
    expanded = tensor.untyped_storage().nbytes() < tensor.nbytes
    weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    if not _active or weight or tensor.nbytes < LEAST_BYTES or expanded:
        return tensor.detach()
    held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    held.copy_(tensor, non_blocking=True)
    return tensor.device, held


def get(kept: Kept) -> Tensor:
    """Unpack what `put` returned."""
    if isinstance(kept, Tensor):
        return kept
    device, held = kept
    return held.to(device, non_blocking=True)
