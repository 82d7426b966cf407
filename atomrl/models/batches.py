"""Rows of like length together in forward passes."""

import torch
from torch import Tensor


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
