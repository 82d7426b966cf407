"""Errors of rewards, and the check for optional packages."""

import importlib.util
from collections.abc import Sequence

from atomrl.types import FailureKind, Trajectory


class RewardError(ValueError):
    """A reward cannot be built, or returned no usable values. The message names the reward and the problem.

    Args:
        message: description of the problem.
        scored: the batch without rewards, if the reward failed on all of it.
    """

    def __init__(self, message: str, scored: Sequence[Trajectory] = ()) -> None:
        super().__init__(message)
        self.scored = scored


class RewardStop(RewardError):
    """Ends the run at once, whatever `patience` allows: a budget or a time limit of the config is exhausted."""


class NoScore(Exception):
    """A reward returns this in place of a score that it could not compute.

    Args:
        kind: kind of failure, as counted in `reward/NAME/...`.
        message: description of the failure.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def require(reward: str, package: str, extra: str) -> None:
    """Check that an optional package of a built-in reward is installed.

    Raises:
        RewardError: it is not; the message has the `pip install` command.
    """
    if importlib.util.find_spec(package) is None:
        raise RewardError(f"the {reward} reward needs the extra: pip install 'atomrl[{extra}]'")
