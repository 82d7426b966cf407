"""The seccomp filter: system calls that a program may make. All others fail with ENOSYS."""

from __future__ import annotations

import errno
import functools
import tempfile

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
    "setpgid getuid geteuid getgid getegid getresuid getresgid getgroups getrlimit setrlimit getrusage times pause "
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall"
)
TIME = (
    "nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time alarm setitimer getitimer getrandom uname "
    "sysinfo getcpu"
)
BECOMING_NOBODY = "setresuid setresgid setuid setgid setgroups capget capset prctl"
"""Needed by `setpriv`. Harmless afterwards, when the program has no capabilities left."""
PAIRS = "sendto recvfrom sendmsg recvmsg shutdown getsockname getpeername getsockopt setsockopt"
"""For socket pairs, which event loops use as wake-up pipes. No other sockets exist, since `socket` is blocked."""
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # user, process, network and all other namespaces
_AF_UNIX = 1
_UNKNOWN = -1
"""libseccomp's result for a system call that it does not know. Such a call stays blocked."""
_TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS and TIOCGWINSZ (is it a terminal, and how wide), FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""


@functools.cache
def program(fork: bool) -> bytes:
    """Compile the seccomp filter to BPF for bubblewrap.

    Args:
        fork: allow new processes. Threads are always allowed.

    Raises:
        ImportError, RuntimeError: pyseccomp or libseccomp is not installed.
    """
    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))  # with ENOSYS libraries fall back to older calls
    for names in (FILES, MEMORY, THREADS, PROCESSES, TIME, BECOMING_NOBODY, PAIRS):
        for name in names.split():
            if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) != _UNKNOWN:
                rules.add_rule(seccomp.ALLOW, name)
    for request in _TERMINAL_QUESTIONS:
        rules.add_rule(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.EQ, request))
    rules.add_rule(seccomp.ALLOW, "prlimit64", seccomp.Arg(0, seccomp.EQ, 0))  # its own limits only
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
