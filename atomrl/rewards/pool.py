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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from atomrl.rewards.calling import Outcome, Scorer, failed
from atomrl.rewards.errors import RewardError

TICK_S = 0.05
LOAD_LIMIT_S = 300.0
"""For importing a reward's module in a worker; no part of a completion's time."""
MAX_ENDED_LOADING = 4
MAX_CHUNK = 16
_COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from atomrl.rewards.worker import fork_server; "
_COMMAND += "fork_server(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])"


@dataclass(frozen=True)
class Task:
    """One call of a reward."""

    part: str
    """The term of the total that it is of."""
    scorer: Scorer
    rows: Sequence[int]
    payload: dict[str, Any]


@dataclass(eq=False)
class _Worker:
    pid: int
    connection: Connection
    pending: deque[int] = field(default_factory=deque)
    """Numbers of the tasks that it was given and has not answered; the first is under way."""
    loading: bool = False
    deadline: float = 0.0


class WorkerPool:
    """Runs reward calls in processes of their own; they start when first needed.

    Every task has an outcome: a call that is not over in its time, or that ends its process, gives the failure
    `timeout` or `crash`; its worker is killed and replaced, and the tasks behind it go to another. Time in which this
    process itself stood still (a suspended machine, SIGSTOP) does not count.

    No worker outlives the pool: `close`, the end of the interpreter and (on Linux at once, elsewhere for idle workers)
    any death of this process end them. Ctrl-C and SIGTERM are this process's business; workers ignore them.

    Args:
        workers: the most processes at a time.
        preload: built-in rewards whose packages are imported once, before workers are forked.
    """

    def __init__(self, workers: int, preload: Sequence[str] = ()) -> None:
        self.size = workers
        self._preload = list(preload)
        self._workers: list[_Worker] = []
        self._fork_servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._lock = threading.Lock()
        self._clock = 0.0
        self._seen = 0.0
        self._ended_loading = 0
        self._finalizer = weakref.finalize(self, _end_all, self._workers, self._fork_servers, os.getpid())

    @property
    def pids(self) -> list[int]:
        """Of the workers alive."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """Kill every process; a later `run` starts new ones."""
        _end_all(self._workers, self._fork_servers, os.getpid())

    def run(self, tasks: Sequence[Task], watch: Callable[[int, Outcome], None]) -> list[Outcome]:
        """The outcomes of all tasks, in their order.

        Args:
            watch: is told each (number of the task, outcome) as it comes; what it raises ends the run.

        Raises:
            RewardError: a reward cannot be loaded in a worker, or its columns cannot be sent to one.
        """
        outcomes: dict[int, Outcome] = {}
        queue = deque(range(len(tasks)))
        with self._lock:
            self._seen = time.monotonic()
            try:
                while len(outcomes) < len(tasks):
                    self._assign(queue, tasks)
                    for index, outcome in self._collect(queue, tasks):
                        outcomes[index] = outcome
                        watch(index, outcome)
            except BaseException:
                for worker in [worker for worker in self._workers if worker.pending]:
                    self._kill(worker)
                raise
        return [outcomes[index] for index in range(len(tasks))]

    def _assign(self, queue: deque[int], tasks: Sequence[Task]) -> None:
        """Give every idle worker something to do, starting workers as needed."""
        while queue:
            worker = next((worker for worker in self._workers if not worker.pending), None)
            if worker is None:
                if len(self._workers) >= self.size:
                    return
                worker = self._start_worker()
            if worker.connection.poll(0):  # an idle worker has nothing to say: it has ended
                self._kill(worker)
                continue
            chunk = self._next_chunk(queue, tasks)
            first = tasks[chunk[0]]
            message = (first.scorer.name, dict(first.scorer.args), [tasks[index].payload for index in chunk])
            worker.pending.extend(chunk)
            try:
                worker.connection.send(message)
            except (BrokenPipeError, ConnectionResetError):
                worker.pending.clear()
                queue.extendleft(reversed(chunk))
                self._kill(worker)
                continue
            except Exception as error:  # pickling runs code of the columns' own
                raise RewardError(
                    f"reward {first.scorer.name!r}: the columns cannot be sent to a worker process: {error!r}"
                ) from error
            worker.loading, worker.deadline = True, self._clock + LOAD_LIMIT_S

    def _next_chunk(self, queue: deque[int], tasks: Sequence[Task]) -> list[int]:
        """Some tasks of one reward: enough to keep a worker busy, few enough to share them out evenly."""
        most = max(1, min(MAX_CHUNK, len(queue) // (2 * self.size)))
        chunk = [queue.popleft()]
        while queue and len(chunk) < most and tasks[queue[0]].scorer is tasks[chunk[0]].scorer:
            chunk.append(queue.popleft())
        return chunk

    def _collect(self, queue: deque[int], tasks: Sequence[Task]) -> list[tuple[int, Outcome]]:
        """What busy workers said, or failed to say in time, within one tick."""
        busy = [worker for worker in self._workers if worker.pending]
        ready = multiprocessing.connection.wait([worker.connection for worker in busy], timeout=TICK_S)
        now = time.monotonic()
        self._clock += min(now - self._seen, 2 * TICK_S)
        self._seen = now
        found: list[tuple[int, Outcome]] = []
        for worker in busy:
            task = tasks[worker.pending[0]]
            if worker.connection in ready:
                try:
                    answer = json.loads(worker.connection.recv_bytes())
                except (EOFError, OSError, ValueError):
                    crash = "crash: its process ended (by os._exit, a signal, or for want of memory)"
                    found += self._lost(worker, queue, task, crash)
                else:
                    found += self._take(worker, answer, tasks)
            elif self._clock >= worker.deadline:
                if worker.loading:
                    raise RewardError(f"reward {task.scorer.name!r}: importing it took over {LOAD_LIMIT_S:.0f} s")
                completions = f" for {len(task.rows)} completions" if len(task.rows) > 1 else ""
                limit = f"{task.scorer.timeout_s:g} s{completions} (a larger timeout_s of the reward allows more)"
                found += self._lost(worker, queue, task, f"timeout: over {limit}")
        return found

    def _take(self, worker: _Worker, answer: dict[str, Any], tasks: Sequence[Task]) -> list[tuple[int, Outcome]]:
        """What a worker said: that it loaded a reward, or the outcome of the call under way."""
        if "load_error" in answer:
            name = tasks[worker.pending[0]].scorer.name
            raise RewardError(f"reward {name!r} cannot be loaded in a worker process: {answer['load_error']}")
        found = []
        if worker.loading:
            worker.loading = False
            self._ended_loading = 0
        else:
            found.append((worker.pending.popleft(), Outcome(**answer)))
        if worker.pending:
            worker.deadline = self._clock + tasks[worker.pending[0]].scorer.timeout_s
        return found

    def _lost(self, worker: _Worker, queue: deque[int], task: Task, failure: str) -> list[tuple[int, Outcome]]:
        """A worker ended or has to: the call under way failed, those behind it are put back."""
        self._kill(worker)
        found = []
        if worker.loading:  # it ended before it began: killed while idle, or by the module that it imports
            self._ended_loading += 1
            if self._ended_loading >= MAX_ENDED_LOADING:
                raise RewardError(f"reward {task.scorer.name!r}: importing it in a worker process ends the process")
        else:
            found.append((worker.pending.popleft(), failed(len(task.rows), failure, task.scorer.timeout_s)))
        queue.extendleft(reversed(worker.pending))
        worker.pending.clear()
        return found

    def _start_worker(self) -> _Worker:
        for fresh in (False, True):
            if fresh or not self._fork_servers:
                _end_fork_servers(self._fork_servers)  # its workers are noticed one by one, with what they had to do
                self._fork_servers.append(_start_fork_server(self._preload))
            control = self._fork_servers[0][1]
            ours, theirs = socket.socketpair()
            try:
                socket.send_fds(control, [b"w"], [theirs.fileno()])
                answer = control.recv(8, socket.MSG_WAITALL)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            finally:
                theirs.close()
            if len(answer) == 8:
                worker = _Worker(int.from_bytes(answer, "little"), Connection(ours.detach()))
                self._workers.append(worker)
                return worker
            ours.close()
        raise RewardError("the process that starts reward workers ended at once; what it said is above")

    def _kill(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        _end(worker)


def _start_fork_server(preload: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(LOAD_LIMIT_S)
    arguments = [json.dumps(_import_path()), str(theirs.fileno()), str(os.getpid()), *preload]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _COMMAND, *arguments],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a reward prints must not mix with what a command prints
        # one thread each, and the same order of sets in every worker and every run
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"},
        start_new_session=True,
    )
    theirs.close()
    return process, ours


def _import_path() -> list[str]:
    """This process's, with Python's own modules first: a user's `random.py` beside the run must not hide them."""
    python = [path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))]
    python += [path for path in sys.path if path.endswith("lib-dynload")]
    return list(dict.fromkeys([*python, *sys.path]))


def _end(worker: _Worker) -> None:
    for kill in (os.killpg, os.kill):  # the group with what a reward started; the process, if it has no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(worker.pid, signal.SIGKILL)
    worker.connection.close()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end_all(
    workers: list[_Worker], fork_servers: list[tuple[subprocess.Popen[bytes], socket.socket]], owner: int
) -> None:
    if os.getpid() != owner:  # a fork of this process: they are not its own
        return
    pids = [worker.pid for worker in workers]
    while workers:
        _end(workers.pop())
    patience = time.monotonic() + 2.0
    while any(map(_exists, pids)) and time.monotonic() < patience:
        time.sleep(0.002)  # the fork_server must see them die, or they stay as zombies where init reaps none
    _end_fork_servers(fork_servers)


def _end_fork_servers(fork_servers: list[tuple[subprocess.Popen[bytes], socket.socket]]) -> None:
    while fork_servers:
        process, control = fork_servers.pop()
        process.kill()
        process.wait()
        control.close()
