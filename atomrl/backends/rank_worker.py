"""The process of a rank that is not rank 0: it executes the commands of rank 0."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from atomrl.backends.group import START_S, RankFailed, Ranks
from atomrl.backends.ranks import Build, rank_device
from atomrl.common.workers import send_answer
from atomrl.weight_sync.broadcast import LOOPBACK


def worker_main(connection: Connection) -> None:
    """Run as a rank that rank 0 started (entry point of `WorkerProcess`)."""
    settings: Mapping[str, Any] = json.loads(connection.recv_bytes())
    torch.set_num_threads(settings["threads"])
    send_answer(connection, {"ready": True})
    rank = settings["rank"]
    device = rank_device(settings["device"], rank)
    follow(Ranks(reach_store(LOOPBACK, settings["port"]), rank, settings["world"], device, settings["timeout_s"]))


def reach_store(host: str, port: int) -> TCPStore:
    """Connect to the store at which the ranks join their group."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=START_S))


def follow(ranks: Ranks) -> None:
    """Execute the commands of rank 0, until it sends None."""
    logging.disable(logging.WARNING)  # rank 0 logs the same
    own = OwnRank(ranks)
    # A rank that waits for a command, which a frozen rank should forward, does not notice that rank 0 has ended.
    ranks.abandoned = lambda: os._exit(1)
    try:
        while (command := ranks.receive()) is not None:
            method, arguments = command
            try:
                own.run(method, *arguments)
            except RankFailed:
                raise
            except Exception:  # raised on all ranks: rank 0 handles it, and closes this rank if it has to
                continue
        own.backend.close()
        ranks.close()
    except Exception as error:
        if not isinstance(error, RankFailed) or ranks.own_error:
            traceback.print_exc()
        os._exit(1)  # so that the other ranks' collective operations fail at once


class OwnRank:
    """The back end of one rank; the first command builds it."""

    backend: Any = None

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def run(self, method: str, *arguments: Any) -> Any:
        """Execute a command together with the other ranks: `build`, or a method of the back end."""
        call = self._build if method == "build" else getattr(self.backend, method)
        return self.ranks.together(partial(call, *arguments))

    def _build(self, build: Build) -> None:
        self.ranks.barrier()  # unpickling `build` imported what it needs, at different speeds
        self.backend = build(self.ranks, self.ranks.device)
