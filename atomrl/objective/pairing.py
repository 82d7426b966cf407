"""Which completions a preference sets against each other, over all rows of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from atomrl.stages import RowBatch


def row_keys(rows: RowBatch) -> Tensor:
    """[B] a number made of what a row holds, so that no order of rows decides between equals."""
    multipliers = torch.randint(2**62, (rows.tokens.shape[1],), generator=torch.Generator().manual_seed(0))
    inside = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    return ((rows.tokens + 1) * multipliers).masked_fill(~inside, 0).sum(1)  # int64 wraps around: a hash


def best_and_worst(rows: RowBatch) -> Tensor:
    """[B] 1 for the completion of its group with the highest reward, -1 for that with the lowest, else 0. Groups in
    which all earn the same have neither; a row without a trained token is no completion.

    Example:
        >>> from tests.algorithms.batches import make_rows
        >>> best_and_worst(make_rows(groups=1, rewards=torch.tensor([0.0, 2.0, 1.0, 3.0]))).tolist()
        [-1, 1, 0, 0]
    """
    signs = torch.zeros(rows.rows, dtype=torch.long)
    order = row_keys(rows).argsort(stable=True)
    order = order[rows.loss_mask.any(1)[order]]
    for group in rows.group_ids.unique():
        index = order[rows.group_ids[order] == group]
        rewards = rows.rewards[index]
        if len(index) > 1 and rewards.max() > rewards.min():
            signs[index[rewards.argmax()]] = 1
            signs[index[rewards.argmin()]] = -1
    return signs


def labels(rows: RowBatch) -> Tensor:
    """[B] 1 for a good completion and -1 for a bad one: by the sign of its reward where it is alone in its group, else
    `best_and_worst`."""
    return torch.where(alone(rows), rows.rewards.sign().long(), best_and_worst(rows))


def alone(rows: RowBatch) -> Tensor:
    """[B] whether a row is the only one of its group."""
    return (rows.group_ids[:, None] == rows.group_ids[None]).sum(1) == 1


def pair_rows(signs: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [P] of the chosen and of the rejected rows of each pair, by the group's number.

    Example:
        >>> pair_rows(torch.tensor([-1, 1, 0, 1, -1]), torch.tensor([7, 7, 7, 3, 3]))
        (tensor([3, 1]), tensor([4, 0]))
    """
    chosen, rejected = ((signs == sign).nonzero()[:, 0] for sign in (1, -1))
    chosen, rejected = (index[group_ids[index].argsort(stable=True)] for index in (chosen, rejected))
    return chosen, rejected


def shared_lengths(mask: Tensor, group_ids: Tensor) -> Tensor:
    """[B] tokens of the shortest completion of a row's group, those without a token left out."""
    counts = mask.sum(1)
    same = (group_ids[:, None] == group_ids[None]) & (counts > 0)[None]
    longest = int(counts.max()) if len(counts) else 0
    return counts[None].expand(len(counts), -1).masked_fill(~same, longest).amin(1) if len(counts) else counts
