"""Worker processes: started, messaged and killed, alone and in a pool."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from atomrl.common.launchers import without_launcher

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MARK = "ATOMRL_WORKER"
_KILLS = 20
"""Maximum number of passes that search for and kill a process's descendants, which may start others in between."""
_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import importlib; from atomrl.common.workers import "
    "begin; begin(importlib.import_module(sys.argv[2]).worker_main, int(sys.argv[3]), int(sys.argv[4]))"
)
TICK_S = 0.05
LOAD_LIMIT_S = 300.0
"""Time limit for starting a worker and importing a user's module in it; not part of the time limit of a call."""
MAX_LOAD_CRASHES = 4
"""Consecutive workers that end while they import, after which the import counts as the cause."""
PROCESS_ENDED = "its process ended (by os._exit, a signal, or out of memory)"
_KILLED_FIRST = "1000"
"""Highest value of `oom_score_adj`. The programs that a worker starts inherit it."""
_FLUSH_S = 0.005
_CHUNK_BYTES, _MAX_CHUNKS = 1 << 16, 64


@dataclass(eq=False)
class WorkerProcess:
    """A worker process (a fresh interpreter) and the connection to it.

    Messages to a worker are pickled, its answers are JSON: a worker runs code next to a model's output, so nothing that
    it sends may be unpickled.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    mark: bytes
    """`NAME=VALUE` in the environment of the process, by which its descendants are recognised."""

    @classmethod
    def start(cls, module: str) -> Self:
        """Start a process that runs `worker_main(connection)` of a module.

        On Linux the kernel kills it when the thread that started it ends.
        """
        ours, theirs = socket.socketpair()
        mark = new_mark()
        arguments = [json.dumps(_import_path()), module, str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # to stderr: prints of users' functions must not mix with a command's output
            # one thread each, and the same order of sets in every worker and every run
            env={"OMP_NUM_THREADS": "1", **without_launcher(), "PYTHONHASHSEED": "0"} | dict([mark.split("=")]),
            start_new_session=True,  # a process group, which `kill` kills with all descendants in it
        )
        theirs.close()
        return cls(process, Connection(ours.detach()), mark.encode())

    def answer(self) -> Any:
        """Receive the next answer.

        Raises:
            EOFError, OSError: the process has ended.
            ValueError: the answer is not JSON.
        """
        return json.loads(self.connection.recv_bytes())

    def thread_seconds(self, thread: int) -> float:
        """Return the CPU time in seconds of one of its threads; 0 if it is not available."""
        try:
            stat = Path(f"/proc/{self.process.pid}/task/{thread}/stat").read_bytes()
        except OSError:
            return 0.0
        user, system = stat.rpartition(b")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Kill the process and its descendants: its process group, and on Linux also those that have left the group."""
        descendants = _marked(self.mark, self.process.pid)
        for kill in (os.killpg, os.kill):  # the group; the process itself, in case it has left its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        kill_marked(self.mark, descendants - {self.process.pid})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.connection.close()


@dataclass(eq=False)
class PoolWorker(WorkerProcess):
    """A worker of a `WorkerPool`, with non-blocking messages.

    Unsent bytes are buffered, and a message is returned once it is complete. So a worker that is stopped, or stuck in
    the middle of a message, does not block the trainer.
    """

    unsent: bytearray = field(default_factory=bytearray)
    _unread: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """It has closed its end of the connection, or died."""

    def __post_init__(self) -> None:
        os.set_blocking(self.connection.fileno(), False)

    def send(self, message: Any) -> None:
        """Pickle a message and send it, or buffer what the worker does not accept yet.

        Raises:
            Exception: it cannot be pickled.
        """
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, message: bytes) -> None:
        """Send a message that is pickled already. The frame is that of `multiprocessing.connection.Connection`."""
        size = len(message)
        self.unsent += (struct.pack("!i", size) if size <= 0x7FFFFFFF else struct.pack("!iQ", -1, size)) + message
        self.flush()

    def flush(self) -> None:
        """Send buffered bytes, as far as the worker accepts them."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.connection.fileno(), self.unsent[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:  # `receive` will report the end
            self.unsent.clear()

    def receive(self) -> list[list[Any]]:
        """Return all complete messages. `ended` is set as well if a user's code has written to the connection."""
        try:
            for _ in range(_MAX_CHUNKS):
                chunk = os.read(self.connection.fileno(), _CHUNK_BYTES)
                self._unread += chunk
                if not chunk:
                    self.ended = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        messages = []
        while len(self._unread) >= 4:
            (size,) = struct.unpack_from("!i", self._unread)
            if len(self._unread) < 4 + size:
                break
            try:
                message = json.loads(self._unread[4 : 4 + max(size, 0)])
            except ValueError:
                message = None
            if not isinstance(message, list) or not message:
                self.ended = True
                break
            messages.append(message)
            del self._unread[: 4 + size]
        return messages


Worker = TypeVar("Worker", bound=PoolWorker)


class WorkerPool(Generic[Worker]):
    """Worker processes that may hang or end at any time, and the clock of their time limits. Not thread-safe.

    The base of the pools of rewards and environments, which decide what a worker is sent and how long it may take.

    Args:
        module: its `worker_main(connection)` runs in the workers.
        kind: class of the workers.
    """

    def __init__(self, module: str, kind: type[Worker]) -> None:
        self.module, self.kind = module, kind
        self.workers: list[Worker] = []
        self.clock = 0.0
        """Seconds, at most `2 * TICK_S` per call of `receive`: time in which this process was stopped, or did something
        else, does not count towards a time limit."""
        self._clock_read = time.monotonic()
        self._load_crashes = 0

    def start_worker(self) -> Worker:
        """Start another worker."""
        worker = self.kind.start(self.module)
        # Without enough memory, the kernel should kill a worker, which is replaced, and not the trainer.
        with suppress(OSError):  # not Linux, or it has ended already
            Path(f"/proc/{worker.process.pid}/oom_score_adj").write_text(_KILLED_FIRST)
        self.workers.append(worker)
        return worker

    def kill(self, worker: Worker) -> None:
        """Kill a worker and all processes that it started, unless it was killed before."""
        if worker in self.workers:
            self.workers.remove(worker)
            worker.kill()

    def close(self) -> None:
        """Kill all workers."""
        for worker in [*self.workers]:
            self.kill(worker)

    def receive(self, wait_s: float | None, *others: Connection) -> Iterator[tuple[Worker, Any]]:
        """Yield (worker, message) for all messages of workers, which are non-empty lists. If a worker has ended, or
        sent anything else, its last message is None, and it has to be killed.

        Args:
            wait_s: seconds to wait for the first message; None: without limit.
            others: connections whose messages also end the wait.
        """
        if any(worker.unsent for worker in self.workers):
            wait_s = _FLUSH_S if wait_s is None else min(wait_s, _FLUSH_S)
        by_connection = {worker.connection: worker for worker in self.workers}
        ready = set(wait([*by_connection, *others], timeout=wait_s))
        now = time.monotonic()
        self.clock += min(now - self._clock_read, 2 * TICK_S)
        self._clock_read = now
        for worker in by_connection.values():
            worker.flush()
        for connection, worker in by_connection.items():
            if connection in ready and worker in self.workers:  # else it was killed because of another one's message
                messages = worker.receive()
                for message in [*messages, *([None] if worker.ended else [])]:
                    if worker in self.workers:
                        yield worker, message

    def loaded(self) -> None:
        """Record that a worker has imported the user's module."""
        self._load_crashes = 0

    def crashed_while_loading(self) -> bool:
        """Record that a worker ended while it imported the user's module.

        Returns:
            True if that happened `MAX_LOAD_CRASHES` times in a row.
        """
        self._load_crashes += 1
        return self._load_crashes >= MAX_LOAD_CRASHES


def new_mark() -> str:
    """Return `NAME=VALUE` for the environment of a new process, by which it and its descendants are recognised.

    It begins with the mark of this process, so that whoever kills this process kills them too.
    """
    return f"{_MARK}={os.environ.get(_MARK, '')}{os.urandom(8).hex()}"


def kill_marked(mark: bytes, pids: Collection[int] = ()) -> None:
    """Kill processes, and on Linux all that have `mark` in their environment, with their descendants."""
    for _ in range(_KILLS):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not (pids := _marked(mark)):
            return


def _marked(mark: bytes, ancestor: int | None = None) -> set[int]:
    """Return the ids of running processes with `mark` in their environment, of `ancestor`, and of all descendants of
    these. Without /proc: only `ancestor`."""
    parents, pids = dict[int, int](), {ancestor} if ancestor else set[int]()
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:  # fails for entries of /proc that are not processes
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[int(name)] = int(parent)
                with open(f"/proc/{name}/environ", "rb") as environ:
                    if mark in environ.read():
                        pids.add(int(name))
        except (OSError, ValueError):  # it has ended, or belongs to another user
            continue
    while children := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= children
    return pids


def begin(main: Callable[[Connection], None], descriptor: int, parent: int) -> None:
    """Set up a worker process, then answer requests. Runs in the worker.

    Args:
        main: answers requests on a connection until it is closed.
        descriptor: socket to the parent process.
        parent: id of the parent process.
    """
    die_with_parent(parent)
    faulthandler.enable()  # print the Python stack if native code crashes
    for number in _SIGNALS:
        # A worker ends with its parent, not by signals. An empty handler and not SIG_IGN, which the programs that a
        # worker starts would inherit, so that `Popen.terminate` could not end them.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=partial(_end_with_worker, list(os.pipe())))
    os.set_inheritable(descriptor, False)
    main(Connection(descriptor))


def _end_with_worker(pipe: list[int]) -> None:
    """Let a fork of a worker, which the kernel does not kill with its parent, end when the worker does.

    A fork of one of several threads may wait for ever for a lock that another thread held.

    Args:
        pipe: read end and write end. The worker alone keeps the write end, so that its death closes the pipe.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    while len(pipe) > 1:  # not again in a fork of this fork
        os.close(pipe.pop())

    def wait() -> None:
        os.read(pipe[0], 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def send_answer(connection: Connection, message: Any) -> None:
    """Send an answer from a worker, as JSON."""
    connection.send_bytes(json.dumps(message).encode())


def die_with_parent(parent: int) -> None:
    """Have this process killed when the process `parent` ends.

    On Linux the kernel does it; elsewhere an idle worker notices that its socket is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def seed_everything(seed: int) -> None:
    """Seed `random` and, if it is imported, NumPy, so that results do not depend on which worker runs a function."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _import_path() -> list[str]:
    """Return `sys.path` with the standard library first: a user's `random.py` must not hide a standard module."""
    python = [path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))]
    python += [path for path in sys.path if path.endswith("lib-dynload")]
    return list(dict.fromkeys([*python, *sys.path]))
