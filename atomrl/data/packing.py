"""Put demonstrations together to blocks of a fixed size, as TRL does with `packing=True`."""

import bisect
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomrl.types import Image

Strategy = Literal["bfd", "bfd_split", "wrapped"]
AT_ONCE = 1000
"""Demonstrations that are packed together, in the order of the data: TRL's `Dataset.map` has batches of this size."""


class Example(NamedTuple):
    """A prompt with a completion as tokens. 5 bytes per token, since a whole data set is kept in memory."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """[T] True for tokens that are trained."""
    label: int = 0
    """1: chosen or good; -1: rejected or bad; 0: no preference."""
    margin: float = 0.0
    """Score of the chosen completion of the pair minus that of the rejected one."""
    images: tuple[Image, ...] = ()
    """Pictures of the row, in the order of their tokens."""

    @property
    def prompt_length(self) -> int:
        return int(self.learned.argmax())


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


def packed(examples: Sequence[Example], size: int, strategy: Strategy) -> list[list[Example]]:
    """Put examples together to blocks of at most `size` tokens.

    Args:
        strategy: `bfd`: whole examples, cut at `size`, as rows of their own; `bfd_split`: the same, but what is cut off
            is a further row; `wrapped`: the examples end to end, cut every `size` tokens, as one row.
    """
    blocks: list[list[Example]] = []
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


def _cut(example: Example, size: int) -> list[Example]:
    starts = range(0, len(example.tokens), size)
    return [
        example._replace(tokens=example.tokens[at : at + size], learned=example.learned[at : at + size])
        for at in starts
    ]
