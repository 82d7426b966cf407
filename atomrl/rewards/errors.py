"""The error of this package."""

from __future__ import annotations


class RewardError(ValueError):
    """A reward that cannot be built or gave no usable value; the message names it and the sample."""
