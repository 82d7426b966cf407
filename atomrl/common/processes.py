"""Worker processes: fresh interpreters that hear from the process that started them, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLS = 20
"""Times that a worker's processes are looked for: they may start others meanwhile."""
_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import importlib; "
    "from atomrl.common.processes import begin; "
    "begin(importlib.import_module(sys.argv[2]).serve, int(sys.argv[3]), int(sys.argv[4]))"
)


@dataclass(eq=False)
class WorkerProcess:
    """A process and the connection to it.

    A worker may be sent anything that can be pickled; what it answers has to be JSON, so that nothing that ran beside
    a model's output is ever unpickled here.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    mark: bytes
    """Of the environment variables of the process, and of all that it starts."""

    @classmethod
    def start(cls, module: str) -> Self:
        """A process that runs `serve(connection)` of a module.

        On Linux it is told of the end of the thread that starts it, and then ends.
        """
        ours, theirs = socket.socketpair()
        mark = f"ATOMRL_WORKER={os.urandom(8).hex()}"
        arguments = [json.dumps(_import_path()), module, str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a user's function prints must not mix with what a command prints
            # one thread each, and the same order of sets in every worker and every run
            env={"OMP_NUM_THREADS": "1", **without_launcher(), "PYTHONHASHSEED": "0"} | dict([mark.split("=")]),
            start_new_session=True,  # a group of its own, which is killed with all that a function started
        )
        theirs.close()
        return cls(process, Connection(ours.detach()), mark.encode())

    def answer(self) -> Any:
        """The next thing that it says.

        Raises:
            EOFError, OSError, ValueError: it has ended, or what it said is no JSON.
        """
        return json.loads(self.connection.recv_bytes())

    def thread_seconds(self, thread: int) -> float:
        """The time of the processor that one of its threads has had, in hundredths; 0 where that is not to be known."""
        try:
            stat = Path(f"/proc/{self.process.pid}/task/{thread}/stat").read_bytes()
        except OSError:
            return 0.0
        user, system = stat.rpartition(b")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End it and all that it started: its group, and on Linux what has left that, for as long as there is some."""
        started = _marked(self.mark, self.process.pid)
        for kill in (os.killpg, os.kill):  # its group; itself, were it in another one
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        for _ in range(_KILLS):
            if not (started := started - {self.process.pid}):
                break
            for pid in started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            started = _marked(self.mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.connection.close()


def _marked(mark: bytes, ancestor: int | None = None) -> set[int]:
    """The processes that have a mark among the environment variables that they were started with, and all that come of
    them or of an ancestor; those that have ended are left out. None where there is no /proc."""
    parents, found = dict[int, int](), {ancestor} if ancestor else set[int]()
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:  # of what is no process there is none
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[int(name)] = int(parent)
                with open(f"/proc/{name}/environ", "rb") as environ:
                    if mark in environ.read():
                        found.add(int(name))
        except (OSError, ValueError):  # it has ended, or is somebody else's
            continue
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def begin(serve: Callable[[Connection], None], descriptor: int, parent: int) -> None:
    """What a worker does first; then it serves.

    Args:
        serve: answers on a connection until that is closed.
        descriptor: of a socket to the process that started it.
        parent: that process's id.
    """
    die_with(parent)
    faulthandler.enable()  # where native code ends the process, it says what called it
    for number in _SIGNALS:
        # A worker ends with its parent, not by signals. An empty handler and not SIG_IGN, which the programs that a
        # worker starts would inherit, so that `Popen.terminate` could not end them.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=partial(_end_with_worker, list(os.pipe())))
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))


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


def say(connection: Connection, message: Any) -> None:
    """Answer, from a worker."""
    connection.send_bytes(json.dumps(message).encode())


def die_with(parent: int) -> None:
    """Be killed when the process `parent` ends, however it does.

    On Linux the kernel sees to it; elsewhere a process that is idle notices that its socket is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def seed_everything(seed: int) -> None:
    """What draws random numbers gives the same ones whichever worker runs it, and in whatever order."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _import_path() -> list[str]:
    """This process's, with Python's own modules first: a user's `random.py` beside the run must not hide them."""
    python = [path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))]
    python += [path for path in sys.path if path.endswith("lib-dynload")]
    return list(dict.fromkeys([*python, *sys.path]))


# --------------------------------------------------------------------------------------------------------------------
# The environment that a launcher (torchrun, `accelerate launch`, srun) sets, and processes started without it.

_OF_LAUNCHERS = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|NODE_RANK|CROSS_RANK|CROSS_SIZE|LOCAL_SIZE"
    "|(GROUP|ROLE)_(NAME|RANK|WORLD_SIZE)|(TORCHELASTIC|PET|ACCELERATE|FSDP)_.*"
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
    given = {name: int(os.environ.get(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    rank, world, local_rank, beside = given.values()
    if not beside and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost", "::1"):
        beside = world
    return Launched(rank, world, local_rank, beside) if world > 1 else None


def unmet_request(ranks: int) -> str | None:
    """Return a warning where a launcher was asked for another number of processes than the run has ranks, else None.

    Args:
        ranks: processes that train.
    """
    if launched() is not None:
        return None  # the run has as many ranks
    there = f"this run has {ranks} rank{'s' if ranks > 1 else ''}"
    if ranks == 1 and "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ:
        return (
            f"accelerate launch was asked for several processes (num_processes) and started one, so {there}: "
            "without several GPUs it starts more with --multi_gpu alone, and with --cpu none; or leave them to this "
            "run: backend.type=fsdp backend.ranks=N"
        )
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if (count := os.environ.get(name, "")).isdigit() and int(count) > 1:
            return (
                f"a launcher started {count} processes ({name}), each of which is a run of its own, and {there}: for "
                "one run of them all it must set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
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


# --------------------------------------------------------------------------------------------------------------------
# `EventLoopThread`: an event loop for callers that have none.

T = TypeVar("T")
_END_S = 5.0


class EventLoopThread:
    """An event loop in a thread of its own, which any thread may give tasks.

    Args:
        name: of the thread.

    Example:
        >>> import asyncio
        >>> loop = EventLoopThread("sums")
        >>> loop.start(asyncio.sleep(0, result=3)).result()
        3
        >>> loop.close(asyncio.sleep(0))
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def start(self, task: Coroutine[Any, Any, T]) -> Future[T]:
        """Have a task done."""
        return asyncio.run_coroutine_threadsafe(task, self.loop)

    def close(self, last: Coroutine[Any, Any, Any]) -> None:
        """Give up what is under way, do one last task, and end the thread. What takes longer than 5 s is left behind:
        the thread ends with the process."""
        with suppress(TimeoutError):
            self.start(self._end(last)).result(_END_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_END_S)
        if not self.thread.is_alive():
            self.loop.close()

    async def _end(self, last: Coroutine[Any, Any, Any]) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await last


# --------------------------------------------------------------------------------------------------------------------
# What this process is at, and whether it gets on; `HangWatch` ends one that does not.

HUNG = 75
"""The exit code of a run that hung: `EX_TEMPFAIL`, since it can be gone on with."""
_TICK_S = 1.0
_GRACE_S = 5.0
_phases: list[str] = []
_signs = 0
_waits_until = 0.0


def progress() -> None:
    """Say that this process gets on: a token was drawn, a micro-batch computed, a reward came."""
    global _signs
    _signs += 1  # one that is lost between two threads has the other one's


def wait_for_service(seconds: float) -> None:
    """Say that this process waits for so long, since a service is away: that is no hang."""
    global _waits_until
    _waits_until = max(_waits_until, time.monotonic() + seconds)


def waits_for_service() -> bool:
    """Whether it does."""
    return time.monotonic() < _waits_until


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What is done inside is watched, and called so."""
    progress()
    _phases.append(name)
    try:
        yield
    finally:
        _phases.remove(name)
        progress()


class HangWatch:
    """A thread that ends this process where no phase under way has shown progress for a time: a context manager.

    A blocked call cannot be made to raise, so the stacks of all threads are written, then one message, and the process
    exits with `HUNG`; what a killed run leaves is there to go on from. Time in which the process itself stood still
    does not count, nor what lies between phases. Some seconds are added, in which who waits for another process with
    the same limit says whom it waits for.

    Args:
        limit_s: how long there may be no progress.
        names: what a phase is of, for the message; of others it is "training".
        limit_name: the key of the limit.
    """

    def __init__(self, limit_s: float, names: Mapping[str, str], limit_name: str) -> None:
        self.limit_s, self.names, self.limit_name = limit_s, names, limit_name
        self._seen, self._silent_s = _signs, 0.0
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._work, name="watch over hangs", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _work(self) -> None:
        began = time.monotonic()
        while not self._closed.wait(_TICK_S):
            passed, began = time.monotonic() - began, time.monotonic()
            if (hung := self.look(passed)) and not self._closed.is_set():
                self._end(hung)

    def look(self, passed_s: float) -> str | None:
        """The phase that has hung, if one has; so many seconds after the last look."""
        under_way, signs = _phases[:], _signs
        silent = under_way and signs == self._seen and not waits_for_service()
        self._silent_s = self._silent_s + min(passed_s, 2 * _TICK_S) if silent else 0.0
        self._seen = signs
        return under_way[-1] if silent and self._silent_s > self.limit_s + _GRACE_S else None

    def _end(self, name: str) -> None:
        try:
            with suppress(Exception):  # whoever reads it may be gone
                output = sys.__stderr__ or sys.stderr
                faulthandler.dump_traceback(output, all_threads=True)
                print(
                    f"error: {self.names.get(name, 'training')} ({name}) has made no progress for {self.limit_s:g} s "
                    f"({self.limit_name}); above is where each thread stands. A run goes on from its newest "
                    f"checkpoint with --resume; if it was slow and not stuck, give it a larger {self.limit_name}",
                    file=output,
                    flush=True,
                )
        finally:
            os._exit(HUNG)
