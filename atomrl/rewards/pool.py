"""A pool of worker processes that can be killed, so that no reward can hang or end a run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from atomrl.rewards.calling import Outcome, Score, Task, failed
from atomrl.rewards.errors import RewardError
from atomrl.types import FailureKind

TICK_S = 0.05
LOAD_LIMIT_S = 300.0
"""For starting a worker and importing a reward's module in it; no part of a completion's time."""
MAX_ENDED_LOADING = 4
MAX_CHUNK = 16
_COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from atomrl.rewards.worker import serve; "
_COMMAND += "serve(int(sys.argv[2]), int(sys.argv[3]))"


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    pending: deque[Task] = field(default_factory=deque)
    """What it was given and has not answered; the first is under way."""
    loading: bool = False
    loaded: set[int] = field(default_factory=set)
    """The rewards (their `id`) that it has answered for before."""
    deadline: float = 0.0

    def end(self) -> None:
        for kill in (os.killpg, os.kill):  # its group with all that a reward started; itself, were it in another one
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.connection.close()


class WorkerPool:
    """Runs reward calls in processes of their own; they start when first needed.

    Every task has an outcome: a call that is not over in its time, or that ends its process, gives the failure
    `timeout` or `crash`; its worker is killed and replaced. Time in which this process itself stood still (a suspended
    machine, SIGSTOP) does not count.

    No worker outlives the pool: `close`, the end of the interpreter and (on Linux at once, elsewhere for idle workers)
    any death of this process end them. Ctrl-C and SIGTERM are this process's business; workers ignore them.

    Args:
        workers: the most processes at a time.
    """

    def __init__(self, workers: int) -> None:
        self.size = workers
        self._workers: list[_Worker] = []
        # on Linux a child is told of the end of the thread that started it: this one lives as long as the pool
        self._starter = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._clock = 0.0
        self._seen = 0.0
        self._ended_loading = 0
        self._finalizer = weakref.finalize(self, _end_all, self._workers, os.getpid())

    @property
    def pids(self) -> list[int]:
        """Of the workers alive."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill every process; a later `run` starts new ones."""
        _end_all(self._workers, os.getpid())

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[Task, Outcome], None, None]:
        """The outcome of each task as it comes. Close it to end before that.

        Raises:
            RewardError: a reward cannot be loaded in a worker, or its columns cannot be sent to one.
        """
        queue = deque(tasks)
        with self._lock:
            self._seen = time.monotonic()
            try:
                while queue or any(worker.pending for worker in self._workers):
                    self._assign(queue)
                    yield from self._collect(queue)
            finally:
                for worker in [worker for worker in self._workers if worker.pending]:
                    self._kill(worker)

    def _assign(self, queue: deque[Task]) -> None:
        """Give every idle worker something to do, starting workers as needed."""
        while queue:
            worker = next((worker for worker in self._workers if not worker.pending), None)
            if worker is None:
                if len(self._workers) >= self.size:
                    return
                worker = self._starter.submit(_start_worker).result()
                self._workers.append(worker)
            if worker.connection.poll(0):  # an idle worker has nothing to say: it has ended
                self._kill(worker)
                continue
            scorer = queue[0].scorer
            # of one reward; enough to keep a worker busy, few enough to share them out evenly
            most = max(1, min(MAX_CHUNK, len(queue) // (2 * self.size)))
            chunk = list(islice(queue, most))
            if any(task.scorer is not scorer for task in chunk):
                chunk = chunk[:1]
            try:
                worker.connection.send((scorer.name, dict(scorer.args), [task.payload() for task in chunk]))
            except (BrokenPipeError, ConnectionResetError):
                self._kill(worker)
                continue
            except Exception as error:  # pickling runs code of the columns' own
                raise RewardError(
                    f"reward {scorer.name!r}: the columns cannot be sent to a worker process: {error!r}"
                ) from error
            worker.pending.extend(queue.popleft() for _ in chunk)
            limit = scorer.timeout_s if id(scorer) in worker.loaded else LOAD_LIMIT_S
            worker.loading, worker.deadline = True, self._clock + limit

    def _collect(self, queue: deque[Task]) -> Iterator[tuple[Task, Outcome]]:
        """What busy workers said, or failed to say in time, within one tick."""
        busy = [worker for worker in self._workers if worker.pending]
        ready = multiprocessing.connection.wait([worker.connection for worker in busy], timeout=TICK_S)
        now = time.monotonic()
        self._clock += min(now - self._seen, 2 * TICK_S)
        self._seen = now
        for worker in busy:
            task = worker.pending[0]
            if worker.connection in ready:
                try:
                    answer = json.loads(worker.connection.recv_bytes())
                except (EOFError, OSError, ValueError):
                    crash = "its process ended (by os._exit, a signal, or for want of memory)"
                    yield from self._lost(worker, queue, "crash", crash)
                else:
                    yield from self._take(worker, answer)
            elif self._clock >= worker.deadline:
                if worker.loading and id(task.scorer) not in worker.loaded:
                    name = task.scorer.name
                    raise RewardError(f"reward {name!r}: importing it took over {LOAD_LIMIT_S:.0f} s")
                completions = f" for {len(task.rows)} completions" if len(task.rows) > 1 else ""
                limit = f"{task.scorer.timeout_s:g} s{completions} (a larger timeout_s of the reward allows more)"
                yield from self._lost(worker, queue, "timeout", f"over {limit}")

    def _take(self, worker: _Worker, answer: Any) -> Iterator[tuple[Task, Outcome]]:
        """What a worker said: that it loaded a reward, or the outcome of the call under way."""
        task = worker.pending[0]
        if not worker.loading:
            worker.pending.popleft()
            scores, *rest = answer
            yield task, Outcome([Score(*score) for score in scores], *rest)
        elif answer is not None:
            raise RewardError(f"reward {task.scorer.name!r} cannot be loaded in a worker process: {answer}")
        worker.loading, self._ended_loading = False, 0
        worker.loaded.add(id(task.scorer))
        worker.deadline = self._clock + task.scorer.timeout_s

    def _lost(
        self, worker: _Worker, queue: deque[Task], failure: FailureKind, message: str
    ) -> Iterator[tuple[Task, Outcome]]:
        """A worker ended or has to: the call under way failed, those behind it are put back."""
        self._kill(worker)
        task = worker.pending[0]
        if worker.loading:  # it ended before it began: killed while idle, or by the module that it imports
            self._ended_loading += 1
            if self._ended_loading >= MAX_ENDED_LOADING:
                raise RewardError(f"reward {task.scorer.name!r}: importing it ends the worker process")
        else:
            worker.pending.popleft()
            yield task, failed(len(task.rows), failure, message, task.scorer.timeout_s)
        queue.extendleft(reversed(worker.pending))

    def _kill(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


def _start_worker() -> _Worker:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _COMMAND, json.dumps(_import_path()), str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a reward prints must not mix with what a command prints
        # one thread each, and the same order of sets in every worker and every run
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"},
        start_new_session=True,  # a group of its own, which is killed with all that a reward started
    )
    theirs.close()
    return _Worker(process, Connection(ours.detach()))


def _import_path() -> list[str]:
    """This process's, with Python's own modules first: a user's `random.py` beside the run must not hide them."""
    python = [path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))]
    python += [path for path in sys.path if path.endswith("lib-dynload")]
    return list(dict.fromkeys([*python, *sys.path]))


def _end_all(workers: list[_Worker], owner: int) -> None:
    while workers and os.getpid() == owner:  # in a fork of this process they are not its own
        workers.pop().end()
