"""A server that this process starts on 127.0.0.1, and that ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from atomrl.common.files import TemporaryFolder
from atomrl.common.launchers import without_launcher

GRACE_S = 10.0
_TAIL_LINES = 15
# A launcher between this process and the server, since the server may ignore signals while it starts, and its children
# always do. On Linux it gets SIGTERM when this process ends, also by SIGKILL (PR_SET_PDEATHSIG). It then kills the
# process group and removes the shared memory that it had mapped, which killed processes leave behind.
_LAUNCH = """
import contextlib, ctypes, os, signal, subprocess, sys, time
def shared():
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getpgid(int(pid)) == os.getpgrp():
                with open(f"/proc/{pid}/maps") as maps:
                    found |= {line.split()[-1] for line in maps if " /dev/shm/" in line and "(deleted)" not in line}
    return found
def end(*_):
    names = shared() if sys.platform == "linux" else ()
    server.terminate()
    deadline = time.monotonic() + 2
    with contextlib.suppress(ChildProcessError):  # not server.wait, in the middle of which this is called
        while time.monotonic() < deadline and not os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.02)
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)
    os.killpg(0, signal.SIGKILL)
server = subprocess.Popen(sys.argv[2:])
signal.signal(signal.SIGTERM, end)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    end()
sys.exit(server.wait() % 256)
"""


class ServerProcess:
    """A server in a process group of its own; its output goes into a file.

    It ends with the thread that creates this object.

    Args:
        command: port -> command line, and environment variables to add.
    """

    def __init__(self, command: Callable[[int], tuple[Sequence[str], Mapping[str, str]]]) -> None:
        port, self._port = reserved_port()
        self.url = f"http://127.0.0.1:{port}"
        words, environment = command(port)
        self.folder = TemporaryFolder("serving", short=True)  # also for the files that it leaves behind
        self.output = self.folder.path / "output.txt"
        launcher = [sys.executable, "-c", _LAUNCH, str(os.getpid()), *words]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                launcher,
                env=without_launcher() | {"TMPDIR": str(self.folder.path)} | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the run, which ends it
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self.process.poll()

    def tail(self) -> str:
        """Return the last lines of its output."""
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line[:500] for line in lines[-_TAIL_LINES:])

    def end(self) -> None:
        """End it and all of its processes."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._port.close()
        self.folder.close()


def reserved_port() -> tuple[int, socket.socket]:
    """Return a free port of this machine, and a socket that reserves it.

    A server binds its port seconds after it was chosen. Until the socket is closed, Linux gives the port to nobody but
    who asks for it by number with SO_REUSEADDR, as servers do. On other systems it is not reserved.
    """
    keeper = socket.socket()
    keeper.bind(("127.0.0.1", 0))
    port = int(keeper.getsockname()[1])
    if sys.platform == "linux":
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        keeper.close()
    return port, keeper
