"""Worker processes: fresh interpreters that hear from the process that started them, and end with it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from atomrl.launcher import without_launcher

_PR_SET_PDEATHSIG = 1
_KILLS = 20
"""Times that a worker's processes are looked for: they may start others meanwhile."""
_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import importlib; "
    "from atomrl.worker_process import begin; "
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # who started it decides when it ends
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))


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
