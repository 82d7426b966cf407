"""What the asynchronous loop decides: how many groups are open, which are trained on, dropped, and cut short.

`Scheduler` asks it of real groups, and `benchmarks/simulate_cluster.py` of simulated ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

from atomrl.config import AsynchronousConfig


class OpenGroup(Protocol):
    """A group that is not trained on yet."""

    position: int
    """In the stream of prompts."""

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that may have drawn a token of it."""

    @property
    def drawing(self) -> bool:
        """Whether the engine holds requests of it."""

    @property
    def drawn(self) -> int:
        """Completions that could be trained on if the others were given up."""


G = TypeVar("G", bound=OpenGroup)


def open_limit(settings: AsynchronousConfig, groups: int, wanted: int, steps_left: int) -> int:
    """How many groups may be open.

    Args:
        settings: the section `asynchronous`.
        groups: of a step.
        wanted: those that the trainer waits for; 0 while it learns.
        steps_left: after the one that it waits for or learns from.

    Example:
        >>> open_limit(AsynchronousConfig(max_staleness=2), groups=4, wanted=4, steps_left=9)
        12
        >>> open_limit(AsynchronousConfig(max_staleness=2, oversampling=1.5), groups=4, wanted=0, steps_left=1)
        6
    """
    return math.ceil(settings.oversampling * (wanted + min(settings.max_staleness, steps_left) * groups))


def taken(ready: Iterable[G], groups: int) -> list[G]:
    """Those to train on, of the groups with rewards: the oldest, in the order of the stream."""
    oldest = sorted(ready, key=lambda group: (group.oldest, group.position))[:groups]
    return sorted(oldest, key=lambda group: group.position)


def too_old(opened: Iterable[G], settings: AsynchronousConfig, version: int) -> list[G]:
    """Those that no step may be trained on any more, now that the weights are of this version."""
    return [group for group in opened if group.oldest < version - settings.max_staleness]


def cut_short(opened: Iterable[G], settings: AsynchronousConfig, wanted: int) -> list[G]:
    """Those to go on without their last completions: where the trainer waits for more groups than are complete, the
    ones that lack the fewest of those that have `min_completions`."""
    least = settings.min_completions
    if least is None or not wanted:
        return []
    opened = list(opened)
    enough = [group for group in opened if group.drawing and group.drawn >= least]
    missing = wanted - sum(not group.drawing for group in opened)
    return sorted(enough, key=lambda group: -group.drawn)[: max(0, missing)]
