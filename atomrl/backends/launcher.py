"""Ranks that a launcher started (torchrun): how they meet, and that all have the same config."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from atomrl.backends.group import START_S, STOPPED_S, RankFailed, RankLost, Ranks
from atomrl.backends.rank_worker import follow, reach_store
from atomrl.backends.ranks import POLL_S, rank_count, rank_device
from atomrl.common.errors import reraise_as
from atomrl.common.launchers import launched
from atomrl.config import ConfigError, RankedConfig

CONTENTS = "contents of "
"""Prefix of the keys of hashes in `given`, before a path."""
PREPARE_S = 2400.0
"""Seconds for rank 0 of a launcher to read the data, before it meets the others."""


def join_launched(device: str, timeout_s: float, given: Mapping[str, Any] | None) -> Ranks:
    """Join the process group of torchrun, or of a launcher that sets the same environment variables.

    Args:
        given: the config that this rank was started with, by dotted keys. The run is that of rank 0's, so another one
            would be ignored. With `CONTENTS` before a path: a hash of what is there, compared by the ranks that have
            it. None: this rank has none, and is not compared.

    Raises:
        ConfigError: on rank 0, if those of another rank differ.
        RankLost: a rank has not started.
    """
    started = launched()
    assert started is not None
    rank, world = started.rank, started.world
    store = _launcher_store(rank)
    configs = PrefixStore("config", store)
    configs.set(str(rank), json.dumps(given))
    _wait_for_all(configs, rank, world)
    ranks = Ranks(store, rank, world, rank_device(device, started.local_rank), timeout_s, started[2:])
    if rank == 0:
        try:
            check_same_configs(configs, world)
        except ConfigError:
            ranks.close()
            raise
    return ranks


def _launcher_store(rank: int) -> Any:
    """Return the store at which the ranks of a launcher meet: torchrun's, else one that rank 0 hosts.

    Raises:
        RankLost: it is not there within `PREPARE_S`.
    """
    host, port, end = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), time.monotonic() + PREPARE_S
    if host is None or port is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(rendezvous("env://", timeout=timedelta(seconds=START_S)))[0]
    while rank:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=START_S):
            return reach_store(host, int(port))
        if time.monotonic() > end:
            raise RankLost(f"rank 0 does not answer at {host}:{port} (MASTER_ADDR, MASTER_PORT) after {PREPARE_S:g} s")
        time.sleep(POLL_S)
    # Rank 0 waits for the others later, where it can name those that are missing.
    return TCPStore(host, int(port), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S))


def _wait_for_all(configs: Any, rank: int, world: int) -> None:
    """Wait until all ranks have left their config.

    Raises:
        RankLost: some have not `START_S` after rank 0 has.
        RankFailed: rank 0 has ended, which hosts the store.
    """
    begun, prepared = time.monotonic(), False
    end = begun + PREPARE_S
    with reraise_as(RankFailed, "rank 0 has ended before all ranks were there", DistError):
        while absent := [other for other in range(world) if not configs.check([str(other)])]:
            if not prepared and 0 not in absent:  # rank 0, which takes the store with it, goes last
                prepared, end = True, time.monotonic() + START_S + (0.0 if rank else STOPPED_S)
            if time.monotonic() > end:
                names = ", ".join(map(str, absent))
                raise RankLost(f"rank {names} has not started within {end - begun:.0f} s")
            time.sleep(POLL_S)


def check_same_configs(configs: Any, world: int) -> None:
    """Raise ConfigError if ranks were given other configs than rank 0, with the keys.

    Args:
        configs: store with the config of each rank.
    """
    first, *others = (json.loads(configs.get(str(rank))) for rank in range(world))
    for rank, other in enumerate(others, 1):
        if not other:
            continue
        keys = [key for key in first | other if not key.startswith(CONTENTS) or {key} <= first.keys() & other.keys()]
        different = [key for key in keys if first.get(key) != other.get(key)]
        if different:
            lines = [f"{key}: {other.get(key)!r} on rank {rank}, {first.get(key)!r} on rank 0" for key in different]
            raise ConfigError("the ranks were started with different configs or files: " + "; ".join(lines))


def follow_launcher(settings: RankedConfig, device: str, given: Mapping[str, Any] | None) -> None:
    """Run as a rank other than 0 of a launcher's group, until rank 0 closes the back end.

    Args:
        given: see `join_launched`.
    """
    rank_count(settings, device)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 finishes its step and then closes this rank
    follow(join_launched(device, settings.timeout_s, given))
