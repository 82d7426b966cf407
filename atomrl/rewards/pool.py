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
from multiprocessing.connection import Connection

from atomrl.rewards.calling import Outcome, Score, Task, failed
from atomrl.rewards.errors import RewardError

TICK_S = 0.05
LOAD_LIMIT_S = 300.0
"""For starting a worker and importing a reward's module in it; no part of a completion's time."""
MAX_ENDED_LOADING = 4
_COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from atomrl.rewards.worker import serve; "
_COMMAND += "serve(int(sys.argv[2]), int(sys.argv[3]))"


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    loaded: set[int] = field(default_factory=set)
    """Keys of the rewards that it was told to load in this run: what it answers says that it is still alive."""
    task: Task | None = None
    """The one under way."""
    loading: bool = False
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
            for worker in self._workers:
                worker.loaded.clear()
            try:
                while queue or any(worker.task for worker in self._workers):
                    self._assign(queue)
                    yield from self._collect(queue)
            finally:
                for worker in [worker for worker in self._workers if worker.task]:
                    self._kill(worker)

    def _assign(self, queue: deque[Task]) -> None:
        """Give every idle worker something to do, starting workers as needed."""
        while queue:
            worker = next((worker for worker in self._workers if worker.task is None), None)
            if worker is None:
                if len(self._workers) >= self.size:
                    return
                worker = self._starter.submit(_start_worker).result()
                self._workers.append(worker)
            if worker.connection.poll(0):  # an idle worker has nothing to say: it has ended
                self._kill(worker)
                continue
            scorer, key = queue[0].scorer, id(queue[0].scorer)
            load = None if key in worker.loaded else (scorer.name, dict(scorer.args))
            try:
                worker.connection.send((key, load, queue[0].payload()))
            except (BrokenPipeError, ConnectionResetError):
                self._kill(worker)
                continue
            except Exception as error:  # pickling runs code of the columns' own
                raise RewardError(
                    f"reward {scorer.name!r}: the columns cannot be sent to a worker process: {error!r}"
                ) from error
            worker.task, worker.loading = queue.popleft(), load is not None
            worker.loaded.add(key)
            worker.deadline = self._clock + (LOAD_LIMIT_S if worker.loading else scorer.timeout_s)

    def _collect(self, queue: deque[Task]) -> Iterator[tuple[Task, Outcome]]:
        """What busy workers said, or failed to say in time, within one tick."""
        busy = [(worker, worker.task) for worker in self._workers if worker.task]
        ready = multiprocessing.connection.wait([worker.connection for worker, _ in busy], timeout=TICK_S)
        now = time.monotonic()
        self._clock += min(now - self._seen, 2 * TICK_S)
        self._seen = now
        for worker, task in busy:
            name, size, timeout_s = task.scorer.name, len(task.rows), task.scorer.timeout_s
            if worker.connection in ready:
                try:
                    answer = json.loads(worker.connection.recv_bytes())
                except (EOFError, OSError, ValueError):
                    self._kill(worker)
                    if worker.loading:  # killed while idle, or by the module that it imports
                        self._ended_loading += 1
                        if self._ended_loading >= MAX_ENDED_LOADING:
                            raise RewardError(f"reward {name!r}: importing it ends the worker process") from None
                        queue.appendleft(task)
                    else:
                        crash = "its process ended (by os._exit, a signal, or for want of memory)"
                        yield task, failed(size, "crash", crash, timeout_s)
                    continue
                if not worker.loading:
                    worker.task = None
                    scores, *rest = answer
                    yield task, Outcome([Score(*score) for score in scores], *rest)
                elif answer is not None:
                    raise RewardError(f"reward {name!r} cannot be loaded in a worker process: {answer}")
                else:
                    worker.loading, worker.deadline = False, self._clock + timeout_s
                    self._ended_loading = 0
            elif self._clock >= worker.deadline:
                if worker.loading:
                    raise RewardError(f"reward {name!r}: importing it took over {LOAD_LIMIT_S:.0f} s")
                self._kill(worker)
                completions = f" for {size} completions" if size > 1 else ""
                over = f"over {timeout_s:g} s{completions} (a larger timeout_s of the reward allows more)"
                yield task, failed(size, "timeout", over, timeout_s)

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
