"""Which completions a preference loss compares, over all rows of a step."""

import torch
from torch import Tensor

from atomrl.batches import RowBatch


def row_keys(rows: RowBatch) -> Tensor:
    """[B] a number made of what a row holds, so that no order of rows decides between equals."""
    multipliers = torch.randint(2**62, (rows.tokens.shape[1],), generator=torch.Generator().manual_seed(0))
    inside = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    return ((rows.tokens + 1) * multipliers).masked_fill(~inside, 0).sum(1)  # int64 wraps around: a hash


def labels_of(rows: RowBatch) -> Tensor:
    """[B] 1 for a chosen or good completion, -1 for a rejected or bad one, else 0: as the data says, or by reward
    (`best_and_worst`). A row without a trained token is no completion."""
    if rows.labels is None:
        return best_and_worst(rows)
    return rows.labels.masked_fill(~rows.loss_mask.any(1), 0)


def best_and_worst(rows: RowBatch) -> Tensor:
    """[B] 1 for the completion of its group with the highest reward, -1 for that with the lowest, else 0; token rewards
    count. Groups in which all earn the same have neither.

    Example:
        >>> from tests.algorithms.batches import make_rows
        >>> best_and_worst(make_rows(groups=1, rewards=torch.tensor([0.0, 2.0, 1.0, 3.0]))).tolist()
        [-1, 1, 0, 0]
    """
    labels = torch.zeros(rows.rows, dtype=torch.long)
    totals = rows.rewards if rows.token_rewards is None else rows.rewards + rows.token_rewards.sum(1)
    order = row_keys(rows).argsort(stable=True)
    order = order[rows.loss_mask.any(1)[order]]
    for group in torch.unique(rows.group_ids):
        index = order[rows.group_ids[order] == group]
        rewards = totals[index]
        if len(index) > 1 and rewards.max() > rewards.min():
            labels[index[rewards.argmax()]] = 1
            labels[index[rewards.argmin()]] = -1
    return labels


def complete(labels: Tensor, pair_ids: Tensor) -> Tensor:
    """The labels, 0 for a row whose pair lacks the other one.

    Example:
        >>> complete(torch.tensor([1, -1, 1, 1]), torch.tensor([4, 4, 5, -1])).tolist()
        [1, -1, 0, 0]
    """
    both = torch.isin(pair_ids, pair_ids[labels == 1]) & torch.isin(pair_ids, pair_ids[labels == -1])
    return labels.masked_fill(~both | (pair_ids < 0), 0)


def pair_rows(labels: Tensor, pair_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [P] of the chosen and of the rejected rows of each pair, by the pair's number.

    Example:
        >>> pair_rows(torch.tensor([-1, 1, 0, 1, -1]), torch.tensor([7, 7, 7, 3, 3]))
        (tensor([3, 1]), tensor([4, 0]))
    """
    chosen, rejected = ((labels == label).nonzero()[:, 0] for label in (1, -1))
    chosen, rejected = (index[pair_ids[index].argsort(stable=True)] for index in (chosen, rejected))
    return chosen, rejected


def shared_lengths(mask: Tensor, pair_ids: Tensor) -> Tensor:
    """[B] tokens of the shorter completion of a row's pair."""
    counts = mask.sum(1)
    same = pair_ids[:, None] == pair_ids[None]
    if not len(counts):
        return counts
    return counts[None].expand(len(counts), -1).masked_fill(~same, mask.shape[1]).amin(1)


def ranked(values: Tensor, index: Tensor, keys: Tensor) -> Tensor:
    """The places of `index` in ascending order of their values; between equals, by the rows' keys."""
    by_key = keys[index].argsort(stable=True)
    return by_key[values[by_key].argsort(stable=True)]
