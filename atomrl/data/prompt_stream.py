"""The prompts of a run in their order."""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import MutableSequence, Sequence
from functools import cached_property

from atomrl.data.columns import IMAGES
from atomrl.data.files import DataError
from atomrl.data.stored import alike
from atomrl.types import Problem


class PromptStream:
    """An endless stream of problems: every epoch has each problem once, in its own order.

    The order is a function of the seed and the epoch. So `position`, the number of problems drawn since the start of
    the run, is the whole state to resume from.

    Example:
        >>> problems = [Problem(problem_id=name, prompt=name, ground_truth="") for name in "abc"]
        >>> stream = PromptStream(problems, seed=0, shuffle=False)
        >>> [prompt_id for prompt_id, _ in stream.take(4)]
        ['0:a', '0:b', '0:c', '1:a']
        >>> stream.position = 2
        >>> [prompt_id for prompt_id, _ in stream.take(1)]
        ['0:c']
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        seed: int = 0,
        shuffle: bool = True,
        difficulty: Sequence[float] | None = None,
    ) -> None:
        """
        Args:
            difficulty: of each problem: an epoch goes from the lowest to the highest; equal ones are in the order of
                `shuffle`.

        Raises:
            DataError: no problems are given, or two have the same id.
        """
        if not problems:
            raise DataError("a stream needs at least one problem")
        same = [problem.problem_id for problem in alike(problems, lambda problem: problem.problem_id)]
        if len(set(same)) < len(same):
            count = len(problems) - len(same) + len(set(same))
            raise DataError(f"problem ids must be unique: {len(problems)} problems have {count} ids")
        self.problems = problems
        self.seed = seed
        self.shuffle = shuffle
        self.difficulty = difficulty
        self.position = 0
        self._order: tuple[int, MutableSequence[int]] = (-1, [])

    def take(self, count: int) -> list[tuple[str, Problem]]:
        """Return the next `count` problems, each with its prompt id `epoch:problem_id`; a batch may cross epochs."""
        start, self.position = self.position, self.position + count
        return [self.at(position) for position in range(start, self.position)]

    def next(self) -> int | None:
        """Return the next position. Never None: the stream is endless."""
        self.position += 1
        return self.position - 1

    def at(self, position: int) -> tuple[str, Problem]:
        """Return the problem at a position since the start of the run, with its prompt id."""
        epoch, index = divmod(position, len(self.problems))
        if self._order[0] != epoch:
            order = array("q", range(len(self.problems)))  # 8 bytes each, where a list has 40
            if self.shuffle:
                digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
                random.Random(int.from_bytes(digest, "little")).shuffle(order)
            if self.difficulty is not None:
                order = array("q", sorted(order, key=self.difficulty.__getitem__))
            self._order = (epoch, order)
        problem = self.problems[self._order[1][index]]
        return f"{epoch}:{problem.problem_id}", problem

    def settle(self, position: int) -> None:
        """Forget a position that is not drawn again. Nothing is kept of it here."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the problems in order; checkpoints store it to detect changed data."""
        digest, encoder = hashlib.blake2b(digest_size=16), json.JSONEncoder(sort_keys=True, default=str)
        for each in self.problems:
            columns, names = dict(each.columns), [image.name for image in each.images]
            if names:  # they are in the folder of a run
                columns[IMAGES] = names
            content = [each.problem_id, each.prompt, each.ground_truth, each.data_source, columns]
            digest.update(encoder.encode(content).encode() + b"\n")
        return digest.hexdigest()
