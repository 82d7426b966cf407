"""Worker processes: fresh interpreters that hear from the process that started them, and end with it."""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import Any, Self

_PR_SET_PDEATHSIG = 1
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

    @classmethod
    def start(cls, module: str) -> Self:
        """A process that runs `serve(connection)` of a module.

        On Linux it is told of the end of the thread that starts it, and then ends.
        """
        ours, theirs = socket.socketpair()
        arguments = [json.dumps(_import_path()), module, str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a user's function prints must not mix with what a command prints
            # one thread each, and the same order of sets in every worker and every run
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # a group of its own, which is killed with all that a function started
        )
        theirs.close()
        return cls(process, Connection(ours.detach()))

    def answer(self) -> Any:
        """The next thing that it says.

        Raises:
            EOFError, OSError, ValueError: it has ended, or what it said is no JSON.
        """
        return json.loads(self.connection.recv_bytes())

    def kill(self) -> None:
        """End it and all that it started."""
        for kill in (os.killpg, os.kill):  # its group; itself, were it in another one
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.connection.close()


def begin(serve: Callable[[Connection], None], descriptor: int, parent: int) -> None:
    """What a worker does first; then it serves.

    Args:
        serve: answers on a connection until that is closed.
        descriptor: of a socket to the process that started it.
        parent: that process's id.
    """
    die_with(parent)
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
