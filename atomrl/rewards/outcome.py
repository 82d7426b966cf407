"""The reward that an environment gives."""

from __future__ import annotations

from collections.abc import Sequence

from atomrl.rewards.errors import NoScore
from atomrl.types import Trajectory


class EnvironmentOutcome:
    """What the environment returned at the end of the episode (section `environment`); no value where it returned None.

    Example:
        >>> EnvironmentOutcome()([])
        []
    """

    concurrent = True

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | NoScore | None]:
        """The outcomes, in the same order."""
        return [
            NoScore("invalid", "there is no episode: the run has no section environment")
            if item.episode is None
            else item.episode.outcome
            for item in trajectories
        ]
