"""A box: bubblewrap's command line, and the process in it. Each program gets a fresh one.

As root there is no user namespace: the program becomes a user without any rights, which limits on processes hold for.
Anybody else gets a user namespace of their own, where the kernel allows it.
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

from atomrl.sandbox.layout import helper, interpreter, mounts
from atomrl.sandbox.seccomp import program

Sandbox = Literal["bubblewrap", "none"]
CODE = "/code"
"""Where the files of a program are."""
_DEVICES = ("/dev/null", "/dev/urandom")
_FIRST_USER, _USERS = 60_578, 600
"""User ids that neither Linux distributions nor systemd give to anybody. Each box has one to itself, since limits on
processes are for all that a user has."""
_LEASES = Path("/run" if os.access("/run", os.W_OK) else "/tmp", "atomrl-sandbox-users")
"""Files by user id; that of a box is locked until it has ended, or its process has."""
_PR_SET_CHILD_SUBREAPER = 36
_turns = itertools.count(os.getpid() * 7)
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # the same order of sets in every run
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    Memory in all is at most `processes * memory_mb + files_mb`.
    """

    wall_s: float = 10.0
    """Then it is killed."""
    cpu_s: int = 5
    """Of each process; then it is killed."""
    memory_mb: int = 512
    """Of each process: its address space."""
    processes: int = 1
    """With 1 it can start none, which makes the other limits those of all that it does; threads it can."""
    threads: int = 32
    """And processes, together."""
    files_mb: int = 32
    """In `/tmp`, which is all that it can write to, and in a single file."""
    output_bytes: int = 1 << 20
    """On stdout, and on stderr; then it is killed."""


@dataclass(eq=False)
class Box:
    """A program that runs, until `end`."""

    process: subprocess.Popen[bytes]
    status: IO[bytes] | None = None
    """What bubblewrap says of it; closed when it has ended."""
    folder: str | None = None
    """Of its files, where there is no sandbox."""
    said: bytearray = field(default_factory=bytearray)
    """On `status`."""
    lease: IO[bytes] | None = None
    """Of its user id, where it has one of this machine."""

    def end(self) -> None:
        """Kill it and all that it started, and leave nothing."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        first = None
        if self.status is not None and self.process.poll() is None:
            readable(self.status, 1.0)  # until it has told whom to kill: at once, or it never will
            if (first := self._told("child-pid")) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first, signal.SIGKILL)  # the first process of the box, and with it the kernel kills all
        self.process.kill()
        self.process.wait()
        if (first := first or self._told("child-pid")) is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(first, 0)  # it ends when all others in the box have
        for stream in (self.process.stdout, self.process.stderr, self.status, self.lease):
            if stream is not None:
                stream.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def exit_code(self) -> int | None:
        """Of a program that has ended, 128 and more by a signal; None where it never ran."""
        if self.status is None:
            code = self.process.returncode
            return code if code >= 0 else 128 - code
        return self._told("exit-code")

    def _told(self, key: str) -> int | None:
        """By bubblewrap, up to its end where that has come."""
        while self.status is not None and readable(self.status, 0.0):
            if not (data := os.read(self.status.fileno(), 1 << 12)):
                break
            self.said.extend(data)
        told = [json.loads(line) for line in self.said.splitlines() if line.endswith(b"}")]
        return next((int(line[key]) for line in told if key in line), None)


def readable(stream: IO[Any], wait_s: float) -> bool:
    """Whether there is something to read, or the end, within so many seconds.

    `select` refuses descriptors from 1,024 on, which a trainer with many connections has.
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
    """Run the first of some Python files in a fresh box, with the others beside it.

    Args:
        files: texts by name.
        stdin, stdout, stderr: as for `subprocess.Popen`.

    Raises:
        FileNotFoundError: a program that is needed is not installed.
        ImportError, RuntimeError: of `seccomp.program`.
    """
    if sandbox == "none":
        return _bare(files, limits, stdin, stdout, stderr)
    with contextlib.ExitStack() as stack:
        rules = stack.enter_context(sealed(program(fork=limits.processes > 1)))
        given = {name: stack.enter_context(sealed(_bytes(text))) for name, text in files.items()}
        told, tell = os.pipe()
        status = os.fdopen(told, "rb", buffering=0)
        stack.callback(os.close, tell)
        descriptors = [file.fileno() for file in (rules, *given.values())] + [tell]
        lease = None
        try:
            lease = _lease() if _is_root() else None
            command = _bubblewrap(given, limits, rules, tell) + _python(f"{CODE}/{next(iter(files))}", limits, lease)
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
def adopt() -> None:
    """Become the parent of what outlives bubblewrap, to see its end: the first process of a box does by a moment, and
    where this runs in a container the next in line may be one that never looks after those it is given."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def sealed(data: bytes) -> IO[bytes]:
    """A file in memory, to be read from its start, which nobody can change."""
    if not hasattr(os, "memfd_create"):  # no Linux, and so no sandbox
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


def _bubblewrap(given: Mapping[str, IO[bytes]], limits: Limits, rules: IO[bytes], tell: int) -> list[str]:
    """The command up to what is run."""
    private = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if _is_root():
        rights = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # to give up all rights
        private += ["--cap-drop", "ALL", *(word for right in rights for word in ("--cap-add", right))]
    else:
        private += ["--unshare-user", "--uid", str(_FIRST_USER), "--gid", str(_FIRST_USER)]
    files: list[str] = []
    for name, file in given.items():
        files += ["--perms", "0444", "--ro-bind-data", str(file.fileno()), f"{CODE}/{name}"]
    return [
        helper("bwrap"), *private, "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv",
        *(word for item in _ENVIRONMENT.items() for word in ("--setenv", *item)),
        *mounts(), "--dir", "/dev", *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
        "--dir", CODE, *files,
        "--perms", "1777", "--size", str(limits.files_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp",
        "--remount-ro", "/", "--seccomp", str(rules.fileno()), "--json-status-fd", str(tell), "--",
    ]  # fmt: skip


def _lease() -> IO[bytes]:
    """The locked file of a user id that no other box on this machine has; with all in use, that of any.

    Raises:
        OSError: the folder cannot be made, or another user has made it.
    """
    _LEASES.mkdir(mode=0o700, exist_ok=True)
    if _LEASES.lstat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "belongs to another user; remove it", str(_LEASES))
    for turn in itertools.islice(_turns, _USERS):
        path = _LEASES / str(_FIRST_USER + turn % _USERS)
        file = path.open("ab")
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        file.close()
    return path.open("ab")


def _python(file: str, limits: Limits, lease: IO[bytes] | None) -> list[str]:
    """Python on a file, with limits; as root, as the user of a lease."""
    command = [
        helper("prlimit"), f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", f"--as={limits.memory_mb << 20}",
        f"--nproc={limits.threads}", f"--fsize={limits.files_mb << 20}", "--nofile=128",
        "--core=1",  # not even to a program that collects dumps, which would get one in spite of 0
        "--memlock=0", "--msgqueue=0", "--sigpending=128",
    ]  # fmt: skip
    if lease is not None:
        user = Path(lease.name).name
        command += [
            helper("setpriv"), "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all",
            "--bounding-set=-all", "--no-new-privs",
        ]  # fmt: skip
    return [*command, interpreter(), "-s", "-B", file]


def _bare(files: Mapping[str, str], limits: Limits, stdin: int | IO[bytes], stdout: int, stderr: int) -> Box:
    """Without a sandbox: limits of the process, where Linux has them, and nothing else."""
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
