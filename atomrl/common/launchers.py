"""Launchers (torchrun, `accelerate launch`, srun): the variables that they set, and processes started without them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_OF_LAUNCHERS = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|NODE_RANK|CROSS_RANK|CROSS_SIZE|LOCAL_SIZE|(GROUP|ROLE)_(NAME|RANK|WORLD_SIZE)|(TORCHELASTIC|PET|ACCELERATE|FSDP)_.*"
)
"""Variables of torchrun, accelerate and DeepSpeed with the rank, address and settings of this process. transformers,
vLLM, SGLang and `torch.distributed` read them."""


class Launched(NamedTuple):
    """The rank, world size and address that a launcher gave this process."""

    rank: int
    world: int
    local_rank: int
    """Rank on this machine."""
    local_world: int
    """Processes on this machine; 0 where the launcher does not say, and their address is another machine's."""


def launched() -> Launched | None:
    """Return what a launcher set for this process; None where there is no launcher, or it started one process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world, local_rank, local_world = (int(os.environ.get(name) or 0) for name in names)
    if not local_world and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost", "::1"):
        local_world = world
    return Launched(rank, world, local_rank, local_world) if world > 1 else None


def unmet_request(ranks: int) -> str | None:
    """Return a warning if the number of processes requested from a launcher differs from the run's ranks, else None.

    Args:
        ranks: processes that train.
    """
    if launched() is not None:
        return None  # the run has as many ranks
    there = f"this run has {ranks} rank{'s' if ranks > 1 else ''}"
    if ranks == 1 and "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ:
        return (
            f"accelerate launch was asked for several processes (num_processes) but started one, so {there}: without "
            "several GPUs it starts more only with --multi_gpu, and with --cpu none; or let this run start them: "
            "backend.type=fsdp backend.ranks=N"
        )
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if (count := os.environ.get(name, "")).isdigit() and int(count) > 1:
            return (
                f"a launcher started {count} processes ({name}), each of which is a separate run, and {there}: for a "
                "single run it must set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            )
    return None


def without_launcher() -> dict[str, str]:
    """Return the environment of this process without a launcher's variables, for a process that it starts: with them it
    would wait for the launcher's other processes.

    Example:
        >>> with launcher_hidden():
        ...     without_launcher() == dict(os.environ)
        True
    """
    return {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}


@contextmanager
def launcher_hidden() -> Iterator[None]:
    """Hide a launcher's variables from this process, and from those that it starts, within the block."""
    hidden = {name: os.environ[name] for name in os.environ.keys() - without_launcher().keys()}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
