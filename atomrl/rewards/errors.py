"""The error of this package, and packages that not everyone has."""

from __future__ import annotations

import importlib.util


class RewardError(ValueError):
    """A reward that cannot be built or gave no usable value; the message names it and the sample."""


def require(reward: str, package: str, extra: str) -> None:
    """
    Raises:
        RewardError: the package that a built-in reward needs is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise RewardError(f"the {reward} reward needs the extra: pip install 'atomrl[{extra}]'")
