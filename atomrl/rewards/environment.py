"""The reward of an environment."""

from __future__ import annotations

from collections.abc import Sequence

from atomrl.rewards.errors import NoScore
from atomrl.types import Trajectory


class EnvironmentOutcome:
    """The reward `environment`: the outcome that the environment returned at the end of the episode, or None.

    Example:
        >>> EnvironmentOutcome()([])
        []
    """

    concurrent = True

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | NoScore | None]:
        """Return the outcome of each episode."""
        return [
            NoScore("invalid", "there is no episode: the run has no section environment")
            if item.episode is None
            else item.episode.outcome
            for item in trajectories
        ]
