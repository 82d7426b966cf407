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
import re
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

# --------------------------------------------------------------------------------------------------------------------
# What a program in the sandbox sees of this machine: a Python and the libraries that it is linked with, read-only.

_LIBRARY = re.compile(r"(/\S+) \(0x")
_HELPERS = ("prlimit", "setpriv")


def interpreter() -> str:
    """The Python that runs this program; of a virtual environment, the one that it was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def helper(name: str) -> str:
    """Where a program is that the sandbox is made with.

    Raises:
        FileNotFoundError: it is not installed.
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin:/sbin")
    if found is None:
        package = "bubblewrap" if name == "bwrap" else "util-linux"
        raise FileNotFoundError(f"{name} is not installed, of the package {package} (`apt install {package}`)")
    return os.path.realpath(found)


@functools.cache
def mounts() -> tuple[str, ...]:
    """The part of bubblewrap's command line that shows Python, and hides the packages that are installed for it.

    Raises:
        FileNotFoundError: a program that is needed is not installed.
    """
    prefix, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    programs = [interpreter(), *map(helper, _HELPERS)]
    shown = {*map(Path, programs), *_libraries(programs)}
    # The libraries of Python's own modules are beside its standard library where it does not take the system's.
    shown |= {Path(os.__file__).parent} if prefix == Path("/usr") else {prefix / "lib"}
    outer = sorted(path for path in shown if path.exists() and not shown & {*path.parents})
    command: list[str] = []
    for folder in sorted({parent for path in outer for parent in path.parents if parent != Path("/")}):
        command += ["--dir", str(folder)]
    for path in outer:
        command += ["--ro-bind", str(path), str(path)]
    for name in ("site-packages", "dist-packages"):
        for place in ("lib/python3", f"lib/{version}", f"lib64/{version}"):
            folder = prefix / place / name
            if folder.is_dir() and {*folder.parents} & {*outer}:
                command += ["--size", "4096", "--tmpfs", str(folder), "--remount-ro", str(folder)]
    return tuple(command)


def _libraries(programs: list[str]) -> set[Path]:
    """The folders of the libraries that programs are linked with, and the loader itself."""
    listed = subprocess.run([helper("ldd"), *programs], capture_output=True, text=True, check=False).stdout
    paths = [Path(path) for path in _LIBRARY.findall(listed)]
    return {path if path.name.startswith("ld-") else path.parent for path in paths}


# --------------------------------------------------------------------------------------------------------------------
# The system calls that a program in the sandbox may make; all others do not exist for it.

FILES = (
    "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek open openat creat close "
    "close_range stat fstat lstat newfstatat statx access faccessat faccessat2 getdents getdents64 readlink readlinkat "
    "rename renameat renameat2 unlink unlinkat mkdir mkdirat rmdir link linkat symlink symlinkat chmod fchmod fchmodat "
    "utimensat utime utimes truncate ftruncate fallocate fsync fdatasync umask getcwd chdir fchdir dup dup2 dup3 fcntl "
    "flock pipe pipe2 select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait "
    "eventfd eventfd2 sendfile copy_file_range statfs fstatfs"
)
MEMORY = "mmap munmap mremap mprotect madvise brk msync mincore"
THREADS = (
    "futex futex_waitv set_robust_list get_robust_list set_tid_address rseq membarrier arch_prctl sched_yield "
    "sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min getpriority "
    "gettid"
)
PROCESSES = (
    "execve execveat exit exit_group wait4 waitid kill tkill tgkill getpid getppid getpgrp getpgid getsid setsid "
    "setpgid getuid geteuid getgid getegid getresuid getresgid getgroups getrlimit setrlimit getrusage times "
    "pause rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack "
    "restart_syscall"
)
TIME = (
    "nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time alarm setitimer getitimer getrandom uname "
    "sysinfo getcpu"
)
BECOMING_NOBODY = "setresuid setresgid setuid setgid setgroups capget capset prctl"
"""What `setpriv` needs, after which nobody has a right to use them for more."""
PAIRS = "sendto recvfrom sendmsg recvmsg shutdown getsockname getpeername getsockopt setsockopt"
"""On pairs of sockets, which event loops wake themselves with: there is no `socket` to make any other."""

_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # user, process, network and all other namespaces
_AF_UNIX = 1
_UNKNOWN = -1
"""What a libseccomp older than a call says of it, which the call then fails on too."""
_TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS and TIOCGWINSZ (is it a terminal, and how wide), FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""


@functools.cache
def program(fork: bool) -> bytes:
    """The filter as bubblewrap takes it.

    Args:
        fork: whether it may start processes; threads it always may.

    Raises:
        ImportError, RuntimeError: pyseccomp, or the libseccomp that it calls, is not there.
    """
    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))  # by which libraries try an older call
    for names in (FILES, MEMORY, THREADS, PROCESSES, TIME, BECOMING_NOBODY, PAIRS):
        for name in names.split():
            if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) != _UNKNOWN:
                rules.add_rule(seccomp.ALLOW, name)
    for request in _TERMINAL_QUESTIONS:
        rules.add_rule(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.EQ, request))
    rules.add_rule(seccomp.ALLOW, "prlimit64", seccomp.Arg(0, seccomp.EQ, 0))  # its own alone
    rules.add_rule(seccomp.ALLOW, "socketpair", seccomp.Arg(0, seccomp.EQ, _AF_UNIX))
    rules.add_rule(seccomp.ERRNO(errno.EPERM), "socket")
    if fork:
        rules.add_rule(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_NEW, 0))
        rules.add_rule(seccomp.ALLOW, "fork")
        rules.add_rule(seccomp.ALLOW, "vfork")
    else:
        threads = seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_NEW | _CLONE_THREAD, _CLONE_THREAD)
        rules.add_rule(seccomp.ALLOW, "clone", threads)
        refused = seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, 0)
        rules.add_rule(seccomp.ERRNO(errno.EPERM), "clone", refused)
        rules.add_rule(seccomp.ERRNO(errno.EPERM), "fork")
        rules.add_rule(seccomp.ERRNO(errno.EPERM), "vfork")
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


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
