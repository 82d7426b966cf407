"""Start a program in a fresh sandbox: bubblewrap's command line, its seccomp filter, and the process (`Box`).

If this process is root, no user namespace is used: the program runs as an unprivileged user id of its own, so that the
limit on processes applies. Otherwise it runs in a user namespace, if the kernel allows that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from atomrl.sandbox.mounts import helper, interpreter, mounts
from atomrl.sandbox.seccomp import program

Sandbox = Literal["bubblewrap", "none"]
CODE = "/code"
"""Folder of a program's files inside the sandbox."""
_DEVICES = ("/dev/null", "/dev/urandom")
_FIRST_USER, _USERS = 60_578, 600
"""Range of user ids that Linux distributions and systemd do not assign. Each box uses one of its own, because limits on
processes count all processes of a user."""
LEASES = Path("/run" if os.access("/run", os.W_OK) else "/tmp", "atomrl-sandbox-users")
"""Folder with a lock file per user id, locked while a box uses the id."""
_PR_SET_CHILD_SUBREAPER = 36
user_turns = itertools.count(os.getpid() * 7)
"""Positions in the range of user ids that boxes of this process try in turn; each process begins elsewhere."""
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # deterministic order of sets
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of a program.

    Total memory is at most `processes * memory_mb + files_mb`.
    """

    wall_s: float = 10.0
    """Wall-clock seconds; the program is killed after them."""
    cpu_s: int = 5
    """CPU seconds per process; it is killed after them."""
    memory_mb: int = 512
    """Address space per process."""
    processes: int = 1
    """With 1 the program cannot start processes, so the limits per process are those of the whole program."""
    threads: int = 32
    """Threads and processes together."""
    files_mb: int = 32
    """Size of `/tmp`, the only writable folder, and of a single file."""
    output_bytes: int = 1 << 20
    """Bytes on stdout, and on stderr; the program is killed if it writes more."""


@dataclass(eq=False)
class Box:
    """A running program. `end` must be called."""

    process: subprocess.Popen[bytes]
    status: IO[bytes] | None = None
    """Pipe of bubblewrap's JSON status (`--json-status-fd`), at its end when the program has ended. None without a
    sandbox."""
    folder: str | None = None
    """Temporary folder of the program's files, if there is no sandbox."""
    status_output: bytearray = field(default_factory=bytearray)
    """Bytes read from `status` so far."""
    lease: IO[bytes] | None = None
    """Lock file of its user id, if this process is root."""

    def end(self) -> None:
        """Kill the program and all its processes, and delete its files."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        first = None
        if self.status is not None and self.process.poll() is None:
            readable(self.status, 1.0)  # bubblewrap reports the child's pid at once, or never
            if (first := self._status_field("child-pid")) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first, signal.SIGKILL)  # init of the PID namespace: the kernel kills all others with it
        self.process.kill()
        self.process.wait()
        if (first := first or self._status_field("child-pid")) is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(first, 0)  # init ends after all other processes of the box
        for stream in (self.process.stdout, self.process.stderr, self.status, self.lease):
            if stream is not None:
                stream.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def exit_code(self) -> int | None:
        """Return the exit code of a program that has ended: 128 + n if killed by signal n, None if it never ran."""
        if self.status is None:
            code = self.process.returncode
            return code if code >= 0 else 128 - code
        return self._status_field("exit-code")

    def _status_field(self, key: str) -> int | None:
        """Read bubblewrap's status as far as it is available, and return one of its numbers."""
        while self.status is not None and readable(self.status, 0.0):
            if not (data := os.read(self.status.fileno(), 1 << 12)):
                break
            self.status_output.extend(data)
        lines = [json.loads(line) for line in self.status_output.splitlines() if line.endswith(b"}")]
        return next((int(line[key]) for line in lines if key in line), None)


def readable(stream: IO[Any], wait_s: float) -> bool:
    """Wait up to `wait_s` seconds until a stream has data or is at its end, and return True if it has or is.

    Uses `poll`, because `select` rejects descriptors from 1,024 on, which a trainer with many connections has.
    """
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def start(
    files: Mapping[str, str],
    limits: Limits,
    sandbox: Sandbox,
    stdin: int | IO[bytes],
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> Box:
    """Run the first of the given Python files in a fresh box.

    Args:
        files: file name -> source. All are in the folder `CODE`.
        limits: resource limits.
        sandbox: `none` runs an ordinary process.
        stdin, stdout, stderr: as for `subprocess.Popen`.

    Raises:
        FileNotFoundError: a required program is not installed.
        ImportError, RuntimeError: as `program`.
    """
    if sandbox == "none":
        return _start_without_sandbox(files, limits, stdin, stdout, stderr)
    with contextlib.ExitStack() as stack:
        rules = stack.enter_context(sealed(program(fork=limits.processes > 1)))
        code_files = {name: stack.enter_context(sealed(_bytes(text))) for name, text in files.items()}
        status_reader, status_writer = os.pipe()
        status = os.fdopen(status_reader, "rb", buffering=0)
        stack.callback(os.close, status_writer)
        descriptors = [file.fileno() for file in (rules, *code_files.values())] + [status_writer]
        lease = None
        try:
            lease = _lease() if _is_root() else None
            command = _bubblewrap(code_files, limits, rules, status_writer)
            command += _python(f"{CODE}/{next(iter(files))}", limits, lease)
            process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=descriptors, env={}, cwd="/"
            )
        except OSError:
            for file in (status, lease):
                if file is not None:
                    file.close()
            raise
        return Box(process, status, lease=lease)


@functools.cache
def become_subreaper() -> None:
    """Make this process a subreaper, so that it can wait for a box's init process, which outlives bubblewrap briefly.

    Otherwise that process is inherited by init, which in a container may never reap it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def sealed(data: bytes) -> IO[bytes]:
    """Create a read-only file in memory (a sealed memfd), positioned at its start."""
    if not hasattr(os, "memfd_create"):  # not Linux, so there is no sandbox either
        file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        file.write(data)
        file.seek(0)
        return file
    file = os.fdopen(os.memfd_create("atomrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b", buffering=0)
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def _bubblewrap(code_files: Mapping[str, IO[bytes]], limits: Limits, rules: IO[bytes], status_writer: int) -> list[str]:
    """Build bubblewrap's command line up to the program to run."""
    private = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if _is_root():
        capabilities = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # setpriv needs them to drop all privileges
        private += ["--cap-drop", "ALL", *(word for name in capabilities for word in ("--cap-add", name))]
    else:
        private += ["--unshare-user", "--uid", str(_FIRST_USER), "--gid", str(_FIRST_USER)]
    files: list[str] = []
    for name, file in code_files.items():
        files += ["--perms", "0444", "--ro-bind-data", str(file.fileno()), f"{CODE}/{name}"]
    return [
        helper("bwrap"), *private, "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv",
        *(word for item in _ENVIRONMENT.items() for word in ("--setenv", *item)),
        *mounts(), "--dir", "/dev", *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
        "--dir", CODE, *files,
        "--perms", "1777", "--size", str(limits.files_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp",
        "--remount-ro", "/", "--seccomp", str(rules.fileno()), "--json-status-fd", str(status_writer), "--",
    ]  # fmt: skip


def _lease() -> IO[bytes]:
    """Lock the file of a user id that no other box on this machine uses. If all are in use, share one.

    Raises:
        OSError: the folder cannot be created, or belongs to another user.
    """
    LEASES.mkdir(mode=0o700, exist_ok=True)
    if LEASES.lstat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "belongs to another user; remove it", str(LEASES))
    for turn in itertools.islice(user_turns, _USERS):
        path = LEASES / str(_FIRST_USER + turn % _USERS)
        file = path.open("ab")
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        file.close()
    return path.open("ab")


def _python(file: str, limits: Limits, lease: IO[bytes] | None) -> list[str]:
    """Build the command that runs a file with limits; with a lease, as its user id."""
    command = [
        helper("prlimit"), f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", f"--as={limits.memory_mb << 20}",
        f"--nproc={limits.threads}", f"--fsize={limits.files_mb << 20}", "--nofile=128",
        "--core=1",  # no core dumps; with 0 a configured dump collector would still get one
        "--memlock=0", "--msgqueue=0", "--sigpending=128",
    ]  # fmt: skip
    if lease is not None:
        user = Path(lease.name).name
        command += [
            helper("setpriv"), "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all",
            "--bounding-set=-all", "--no-new-privs",
        ]  # fmt: skip
    return [*command, interpreter(), "-s", "-B", file]


def _start_without_sandbox(
    files: Mapping[str, str], limits: Limits, stdin: int | IO[bytes], stdout: int, stderr: int
) -> Box:
    """Run a program without a sandbox: with resource limits on Linux, and no other protection."""
    folder = tempfile.mkdtemp(prefix="atomrl-code-")
    for name, text in files.items():
        Path(folder, name).write_bytes(_bytes(text))
    command = [interpreter(), "-s", "-B", str(Path(folder, next(iter(files))))]
    if sys.platform == "linux":
        limited = [f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", f"--as={limits.memory_mb << 20}", "--core=1"]
        command = [helper("prlimit"), *limited, *command]
    environment = {**_ENVIRONMENT, "HOME": folder}
    process = subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, cwd=folder, start_new_session=True
    )
    return Box(process, folder=folder)


def _is_root() -> bool:
    return os.geteuid() == 0
