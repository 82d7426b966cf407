"""`RankedKind`: the interface of a back end of several ranks; and the number of ranks of a run.

`distributed.DistributedBackend` forwards each call to handles. `rank_group.RankGroup` is the handle of a group whose
rank 0 is this process; rank 0 sends each call to the other ranks. `rank_actors.ActorHandle` is the handle of a Ray
actor, which has a back end of one process or rank 0 of a group.

Launchers create them: `start_ranks` for worker processes of this one or the processes of torchrun, `start_actors` and
`start_rank_actors` for Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from atomrl.backends.group import Ranks
from atomrl.common.launchers import launched
from atomrl.config import ConfigError, ModelConfig, RankedConfig
from atomrl.models.memory import Sizes
from atomrl.protocols import TrainingBackend

Build = Callable[[Ranks, torch.device], TrainingBackend]
EXIT_S, REPORT_S, POLL_S = 10.0, 1.0, 0.2
"""Seconds that a worker process gets to exit, that a failed collective gets to report a death before the watcher does,
and between two looks of the watcher."""


class RankedKind(Protocol):
    """Class of a back end that runs on each rank, with the checks and memory estimate that a dry run needs.

    `settings` is the config section of the back end.
    """

    supports_images: bool
    """True if rows may have pictures; if not, data with pictures are refused."""

    def __call__(self, settings: Any, **named: Any) -> TrainingBackend:
        """Create the back end of this rank; `named` are arguments of `BaseBackend`."""

    def check(self, settings: Any, model: ModelConfig, shapes: Mapping[str, Any], device: str) -> None:
        """Raise ConfigError if it cannot train these models with these settings.

        Args:
            model: the config section `model`.
            shapes: transformers configs of the models to load, by path, or by config key for a model from scratch.
            device: `model.device` after `auto` is resolved.
        """

    def memory(self, settings: Any, parts: Mapping[str, int], sizes: Sizes, ranks: int) -> dict[str, int]:
        """Return the bytes of each part of the memory estimate on rank 0.

        Args:
            parts: bytes of each part on a single device.
            sizes: parameter counts of the policy.
        """


def rank_count(settings: RankedConfig, device: str) -> int:
    """Return the number of ranks: `backend.ranks`, else the launcher's, else one per GPU.

    Args:
        device: `model.device` after `auto` is resolved.

    Raises:
        ConfigError: a launcher started another number, or there are fewer GPUs.
    """
    count, started = settings.ranks, launched()
    if started is not None:
        if count not in (None, started.world):
            raise ConfigError(
                f"backend.ranks={count}, but the launcher started {started.world} (WORLD_SIZE); leave it out"
            )
        return started.world
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    if gpus and count is not None and count > gpus:
        raise ConfigError(f"backend.ranks={count}: torch sees {gpus} CUDA devices on this machine")
    if gpus and ":" in device and count != 1:
        raise ConfigError(f"model.device={device}: each rank has its own GPU; remove the number")
    return count or gpus or 1


def rank_device(device: str, local_rank: int) -> torch.device:
    """Return the device of a rank: its GPU, or the CPU.

    The modulo is for launchers that show each rank only its own GPU.
    """
    if not device.startswith("cuda"):
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
