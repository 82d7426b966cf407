"""The lock of a run's folder: held by the process that writes it, asked after by those that read it."""

import fcntl
import logging
import os
import struct
import sys
from pathlib import Path

LOCK = ".lock"
FLOCK = "hhqqi4x"
LOCKS_ANSWER = sys.platform.startswith("linux")
"""Whether the kernel can be asked who holds a lock: `FLOCK` is Linux's."""
log = logging.getLogger(__name__)
_held: dict[Path, list[int]] = {}
"""Folders that this process holds, with their open files: to close one of them lets go of the lock (POSIX)."""


class Locked(Exception):
    """Another process writes the run; the message says which."""


def hold(folder: Path) -> None:
    """Hold the run's lock until `let_go`, or until this process ends, however it ends: the kernel lets go of it.

    A lock of the process (`lockf`), not of the open file: workers that it forks do not keep it.

    Raises:
        Locked: another process holds it.
        OSError: the file cannot be made.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(handle, 100).decode(errors="replace").strip()
        os.close(handle)
        raise Locked(holder or "unknown") from None
    except OSError as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s): see to it that no other process writes this run", folder, error.strerror)
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    _held.setdefault(folder.resolve(), []).append(handle)


def let_go(folder: Path) -> None:
    """Let go of the run's lock, where this process holds it."""
    for handle in _held.pop(folder.resolve(), ()):
        os.close(handle)


def is_held(folder: Path) -> bool:
    """Whether a process on this machine holds the run's lock."""
    return owner(folder) is not None


def owner(folder: Path) -> int | None:
    """The process on this machine that holds the run's lock, if one does; 0 where it is one that is not seen from here
    (of another container). The kernel is asked, the lock is not tried: that could make a run that is just starting
    fail."""
    if folder.resolve() in _held:
        return os.getpid()
    if not LOCKS_ANSWER:
        return None
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # type, whence, start, length, pid; the kernel puts F_UNLCK where no one's lock would stand in the way.
        question = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = struct.unpack(FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, question))
        return max(0, int(process)) if kind != fcntl.F_UNLCK else None
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)


def holder(folder: Path) -> tuple[int, str] | None:
    """Process id and machine of the last process that held the run's lock."""
    try:
        words = (folder / LOCK).read_text(errors="replace").split() if folder.resolve() not in _held else []
    except OSError:
        return None
    if len(words) == 4 and words[1].isdigit():
        return int(words[1]), words[3]
    return (os.getpid(), os.uname().nodename) if folder.resolve() in _held else None
