"""Collective operations: every rank makes the same calls in the same order.

`Collective` is for a single process, `group.Ranks` for several.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from atomrl.common.metrics import Metrics


class Collective:
    """The collective operations of a single process: the identity.

    Example:
        >>> Collective().max(3), Collective().any(False)
        (3, False)
    """

    rank, world = 0, 1
    writing: Any = None
    """Process group of the threads that write checkpoints."""

    def max(self, number: int) -> int:
        """Return the maximum over ranks."""
        return number

    def any(self, condition: bool) -> bool:
        """Return True if the condition is true on any rank."""
        return bool(self.max(int(condition)))

    def total(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place (all-reduce)."""
        return tensor

    def union(self, names: Iterable[str]) -> list[str]:
        """Return the names of all ranks, sorted, each once."""
        return sorted(names)

    def sum(self, metrics: Metrics) -> Metrics:
        """Merge the metrics of all ranks; called once per step."""
        return metrics
