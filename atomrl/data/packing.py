"""Put demonstrations together to blocks of a fixed size, as TRL does with `packing=True`."""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray


class Row(Protocol):
    """A row of tokens, a named tuple (`offline.Example`)."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...

    @property
    def learned(self) -> NDArray[np.bool_]: ...

    def _replace(self, **fields: Any) -> Self: ...


AnyRow = TypeVar("AnyRow", bound=Row)
Strategy = Literal["bfd", "bfd_split", "wrapped"]
AT_ONCE = 1000
"""Demonstrations that are packed together, in the order of the data: TRL's `Dataset.map` has batches of this size."""


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Distribute rows to blocks of at most `size` tokens: the longest first, each to the block that it fills best.

    Args:
        lengths: tokens of each row, from 1 to `size`.

    Returns:
        The indices of the rows of each block.

    Example:
        >>> best_fit([4, 2, 3, 1], 4)
        [[0], [2, 3], [1]]
    """
    blocks: list[list[int]] = []
    spaces: list[int] = []  # sorted, each once
    with_space: dict[int, deque[int]] = defaultdict(deque)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        place = bisect.bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            block = with_space[space].popleft()
            if not with_space[space]:
                del spaces[place]
        else:
            space, block = size, len(blocks)
            blocks.append([])
        blocks[block].append(index)
        if left := space - length:
            if not with_space[left]:
                bisect.insort(spaces, left)
            with_space[left].append(block)
    return blocks


def packed(examples: Sequence[AnyRow], size: int, strategy: Strategy) -> list[list[AnyRow]]:
    """Put examples together to blocks of at most `size` tokens.

    Args:
        strategy: `bfd`: whole examples, cut at `size`, as rows of their own; `bfd_split`: the same, but what is cut off
            is a further row; `wrapped`: the examples end to end, cut every `size` tokens, as one row.
    """
    blocks: list[list[AnyRow]] = []
    for start in range(0, len(examples), AT_ONCE):
        chunk = examples[start : start + AT_ONCE]
        if strategy == "wrapped":
            joined = chunk[0]._replace(
                tokens=np.concatenate([one.tokens for one in chunk]),
                learned=np.concatenate([one.learned for one in chunk]),
            )
            blocks += [[part] for part in _cut(joined, size)]
            continue
        rows = [part for one in chunk for part in (_cut(one, size) if strategy == "bfd_split" else _cut(one, size)[:1])]
        blocks += [[rows[index] for index in block] for block in best_fit([len(row.tokens) for row in rows], size)]
    return blocks


def _cut(example: AnyRow, size: int) -> list[AnyRow]:
    starts = range(0, len(example.tokens), size)
    return [
        example._replace(tokens=example.tokens[at : at + size], learned=example.learned[at : at + size])
        for at in starts
    ]
