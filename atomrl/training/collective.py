"""What the ranks of a back end agree on: decisions, sums and metrics.

Every rank makes the same calls in the same order. A single process agrees with itself at no cost; several have
`group.Ranks`.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from atomrl.config import ConfigError
from atomrl.launcher import launched
from atomrl.metrics import Metrics


class Collective:
    """The collective operations of a single process: the identity.

    Example:
        >>> Collective().max(3), Collective().any(False)
        (3, False)
    """

    rank, world = 0, 1
    writing: Any = None
    """The group of the threads that write checkpoints."""

    def max(self, number: int) -> int:
        """The largest number that a rank gave."""
        return number

    def any(self, condition: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.max(int(condition)))

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return tensor

    def union(self, names: Iterable[str]) -> list[str]:
        """The names that a rank gave, sorted."""
        return sorted(names)

    def sum(self, metrics: Metrics) -> Metrics:
        """Metrics of all ranks merged; called once per step."""
        return metrics


class OutOfMemory(ConfigError):
    """A micro-batch did not fit on a rank; the message has the setting with which to begin again.

    Args:
        size: padded tokens of the micro-batch.
        reason: what the allocator said.
        tokens: padded tokens of a micro-batch with which to begin again; None: with `model.gradient_checkpointing`.

    Example:
        >>> str(OutOfMemory(28, "CUDA", 14))
        'out of memory with 28 padded tokens in a micro-batch (CUDA); go on with train.tokens_per_micro_batch=14'
    """

    def __init__(self, size: int, reason: str, tokens: int | None) -> None:
        self.tokens = tokens
        setting = "model.gradient_checkpointing=true" if tokens is None else f"train.tokens_per_micro_batch={tokens}"
        super().__init__(f"out of memory with {size} padded tokens in a micro-batch ({reason}); go on with {setting}")


def check_launcher(world: int) -> None:
    """Raise ConfigError where a launcher (torchrun, accelerate) started another number of processes than `world`."""
    started = launched()
    if world == 1 and started is not None:
        raise ConfigError(
            f"this back end is a single process, and a launcher started {started.world} of it "
            f"(WORLD_SIZE={started.world}), each of which would train a model of its own: give the section backend "
            "(`backend.type=fsdp`), or start it without torchrun or accelerate"
        )
