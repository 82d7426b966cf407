"""A group of ranks, of which this process is rank 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch

from atomrl.backends.distributed import DistributedBackend
from atomrl.backends.group import START_S, RankFailed, RankLost, Ranks
from atomrl.backends.launcher import join_launched
from atomrl.backends.rank_worker import OwnRank
from atomrl.backends.ranks import EXIT_S, POLL_S, REPORT_S, Build, rank_count, rank_device
from atomrl.common.launchers import launched
from atomrl.common.threads import fixed_threads
from atomrl.common.workers import WorkerProcess
from atomrl.config import RankedConfig
from atomrl.weight_sync.broadcast import LOOPBACK, open_store


class RankGroup:
    """Handle of a group of ranks; this process is rank 0.

    Args:
        join: joins the process group. It may start other ranks; it adds them to its argument, rank -> process.
        build: creates the back end of a rank, called on each rank; must be picklable.
        tokenizer: saved with checkpoints.
        threads: CPU threads of rank 0 in a call; None: those of this process.

    Raises:
        ConfigError: `build` raised it on all ranks.
        RankFailed: a rank did not start.
    """

    def __init__(
        self,
        join: Callable[[dict[int, WorkerProcess]], Ranks],
        build: Build,
        tokenizer: Any = None,
        threads: int | None = None,
    ) -> None:
        self.processes: dict[int, WorkerProcess] = {}
        self.broken, self.busy, self.lock = False, False, threading.Lock()
        self.threads = threads
        self.ranks: Ranks | None = None
        self._handler: Any = None
        try:
            self.ranks = join(self.processes)
            self.ranks.exited = self._exited
            self.own = OwnRank(self.ranks)
            self.start("build", build)
            self.own.backend.tokenizer = tokenizer
        except BaseException:
            self.broken = True
            self.close()
            raise
        # A rank that dies during rollouts interrupts them by a signal. Only the main thread can handle signals;
        # elsewhere (ValueError) the next call of the ranks fails instead.
        if self.processes:
            with suppress(ValueError):
                self._handler = signal.signal(signal.SIGUSR1, self._on_death)
                threading.Thread(target=self._watch, name="watch ranks", daemon=True).start()

    def share(self, value: Any) -> Any:
        """Return the value: rank 0 sends it with each call."""
        return value

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method on every rank; return a function that returns the result of rank 0."""
        if self.broken or self.ranks is None:
            raise RankFailed("the ranks have ended")
        self.busy = True
        try:
            self.ranks.send((method, arguments))
            with fixed_threads(self.threads):
                result = self.own.run(method, *arguments)
        except RankFailed as error:
            self.broken = True
            raise type(error)(f"{error}; {method} was interrupted", *error.args[1:]) from error
        except Exception:
            raise
        except BaseException:  # interrupted: the other ranks are stuck in the middle of the call
            self.broken = True
            raise
        finally:
            self.busy = False
        return lambda: result

    def _exited(self) -> dict[int, str]:
        """Return how each worker process that is no longer running ended, by rank."""
        codes = {rank: worker.process.poll() for rank, worker in self.processes.items()}
        return {
            rank: f"(pid {self.processes[rank].process.pid}) died "
            + (f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")
            for rank, code in codes.items()
            if code is not None
        }

    def _watch(self) -> None:
        """Interrupt this process when a rank dies, so that a long rollout does not continue without its trainer."""
        while not self._exited():
            time.sleep(POLL_S)
            if self.broken:
                return
        time.sleep(REPORT_S)  # a collective operation that fails by it has the better message
        with self.lock:
            if not self.broken:
                os.kill(os.getpid(), signal.SIGUSR1)

    def _on_death(self, number: int, frame: FrameType | None) -> None:
        if not self.broken and not self.busy and (exited := self._exited()):
            self.broken = True
            raise RankLost(", ".join(f"rank {rank} {how}" for rank, how in exited.items()))

    def close(self) -> None:
        """Shut the other ranks down; kill those that do not exit."""
        self.busy = True
        if not self.broken and self.ranks is not None:
            with suppress(RankFailed):
                self.ranks.send(None)
                self.own.backend.close()
        with self.lock:
            orderly, self.broken = not self.broken, True
        for worker in self.processes.values():
            if orderly:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(EXIT_S)
            worker.kill()
        if self.ranks is not None:
            if orderly or len(self.processes) == self.ranks.world - 1:  # else it would wait for ranks that are gone
                self.ranks.close()
            self.ranks = None
        if self._handler is not None:
            signal.signal(signal.SIGUSR1, self._handler)


def start_ranks(
    build: Build, settings: RankedConfig, device: str, tokenizer: Any = None, given: Mapping[str, Any] | None = None
) -> DistributedBackend:
    """Create a back end on several ranks, of which this process is rank 0.

    The others are worker processes of this one, or the processes that torchrun has started.

    Args:
        build, tokenizer: arguments of `RankGroup`.
        settings: number of ranks and timeout of their collective operations.
        device: `model.device` after `auto` is resolved.
        given: see `join_launched`.

    Raises:
        ConfigError: the ranks cannot be started, or were given different configs, or `build` raised it on all of them.
        RankFailed: a rank did not start.
    """
    count = rank_count(settings, device)
    if launched() is not None:
        join_all = partial(join_launched, device, settings.timeout_s, given or {})
        return DistributedBackend(RankGroup(lambda _: join_all(), build, tokenizer))
    threads = max(1, torch.get_num_threads() // count)

    def join(processes: dict[int, WorkerProcess]) -> Ranks:
        store, port = open_store(LOOPBACK, timedelta(seconds=START_S))
        shared = {"port": port, "world": count, "device": device, "timeout_s": settings.timeout_s, "threads": threads}
        for rank in range(1, count):
            processes[rank] = WorkerProcess.start("atomrl.backends.rank_worker")
            processes[rank].connection.send_bytes(json.dumps(shared | {"rank": rank}).encode())
        end = time.monotonic() + START_S
        for rank, worker in processes.items():
            if not worker.connection.poll(max(0.0, end - time.monotonic())):
                raise RankLost(f"rank {rank} (pid {worker.process.pid}) has not started within {START_S:g} s")
            try:
                worker.answer()
            except (EOFError, OSError, ValueError) as error:
                raise RankFailed(f"rank {rank} did not start") from error
        return Ranks(store, 0, count, rank_device(device, 0), settings.timeout_s)

    return DistributedBackend(RankGroup(join, build, tokenizer, threads))
