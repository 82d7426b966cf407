"""Staleness: how old the tokens of a step are, and which groups may be trained on, are dropped or truncated.

`benchmarks/simulate_cluster.py` applies the policy to simulated groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

from atomrl.config import AsynchronousConfig
from atomrl.trainer.sources import Groups


def staleness(groups: Groups, version: int) -> dict[str, float]:
    """Compute by how many weight versions the tokens of a step lag behind.

    Args:
        groups: the groups of a step.
        version: weight version that the step starts from.

    Returns:
        Mean and maximum over the tokens that the model sampled; empty without any.
    """
    behind: Counter[int] = Counter()
    for part in (part for group in groups for item in group for part in item.segments):
        if part.policy_version is not None:
            behind[version - part.policy_version] += len(part.token_ids)
    tokens = behind.total()
    if not tokens:
        return {}
    mean = sum(versions * count for versions, count in behind.items()) / tokens
    return {"async/staleness_mean": mean, "async/staleness_max": float(max(behind))}


class OpenGroup(Protocol):
    """A group that is not trained on yet."""

    @property
    def position(self) -> int:
        """Position of its prompt in the stream of prompts."""

    @property
    def oldest(self) -> int:
        """Oldest weight version that may have sampled one of its tokens."""

    @property
    def drawing(self) -> bool:
        """True while the engine has requests of it."""

    @property
    def drawn(self) -> int:
        """Completions that could be trained on if the others were given up."""


G = TypeVar("G", bound=OpenGroup)


def open_limit(settings: AsynchronousConfig, groups: int, wanted: int, steps_left: int) -> int:
    """Return the maximum number of open groups.

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


def select_groups(ready: Iterable[G], groups: int) -> list[G]:
    """Select the groups to train on from those with rewards: the oldest, in the order of the stream."""
    oldest = sorted(ready, key=lambda group: (group.oldest, group.position))[:groups]
    return sorted(oldest, key=lambda group: group.position)


def too_old(opened: Iterable[G], settings: AsynchronousConfig, version: int) -> list[G]:
    """Return the groups that are too stale for this weight version."""
    return [group for group in opened if group.oldest < version - settings.max_staleness]


def groups_to_truncate(opened: Iterable[G], settings: AsynchronousConfig, wanted: int) -> list[G]:
    """Return groups to train on without their last completions, if the trainer waits for more groups than are complete.

    Of the groups with `min_completions`, those that lack the fewest.
    """
    least = settings.min_completions
    if least is None or not wanted:
        return []
    opened = list(opened)
    enough = [group for group in opened if group.drawing and group.drawn >= least]
    missing = wanted - sum(not group.drawing for group in opened)
    return sorted(enough, key=lambda group: -group.drawn)[: max(0, missing)]
