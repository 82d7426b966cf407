"""What the ranks of a back end agree on: decisions, sums and metrics.

Every rank makes the same calls in the same order. A single process agrees with itself at no cost; a back end of many
ranks brings a `Collective` of its own (tests/training/test_ranks.py has that of `torch.distributed`).
"""

import os

from torch import Tensor

from atomrl.config import ConfigError
from atomrl.metrics import Metrics


class Collective:
    """The collective operations of a single process: the identity.

    Example:
        >>> Collective().max(3), Collective().any(False)
        (3, False)
    """

    rank, world = 0, 1

    def max(self, number: int) -> int:
        """The largest number that a rank gave."""
        return number

    def any(self, condition: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.max(int(condition)))

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return tensor

    def sum(self, metrics: Metrics) -> Metrics:
        """Metrics of all ranks merged; called once per step."""
        return metrics


def check_launcher(world: int) -> None:
    """Raise ConfigError where a launcher (torchrun, accelerate) started another number of processes than `world`."""
    started = os.environ.get("WORLD_SIZE") or "1"
    if world == 1 and started != "1":
        raise ConfigError(
            f"this back end is a single process, and a launcher started {started} of it (WORLD_SIZE={started}), each "
            "of which would train a model of its own: start it without torchrun or accelerate"
        )
