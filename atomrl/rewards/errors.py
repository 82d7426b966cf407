"""The errors of this package, and packages that not everyone has."""

import importlib.util
from collections.abc import Sequence

from atomrl.types import FailureKind, Trajectory


class RewardError(ValueError):
    """A reward that cannot be built or gave no usable value; the message names it and the sample."""

    scored: Sequence[Trajectory] = ()
    """Those that it gave none for, where it failed on everything."""


class RewardStop(RewardError):
    """What ends the run at once, whatever its patience: going on would do what the config forbids."""


class NoScore(Exception):
    """That there is no score for a completion. A reward returns it in the score's place.

    Args:
        kind: of the failure.
        message: what happened.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def require(reward: str, package: str, extra: str) -> None:
    """
    Raises:
        RewardError: the package that a built-in reward needs is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise RewardError(f"the {reward} reward needs the extra: pip install 'atomrl[{extra}]'")
