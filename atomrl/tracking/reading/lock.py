"""The lock of a run's folder, held by the process that writes the run."""

import fcntl
import logging
import os
import struct
import sys
from pathlib import Path

log = logging.getLogger(__name__)


LOCK = ".lock"
FLOCK = "hhqqi4x"
LOCKS_ANSWER = sys.platform.startswith("linux")
"""True if the kernel can report who holds a lock; `FLOCK` is Linux's struct."""
_held: dict[Path, list[int]] = {}
"""Folders locked by this process, with their open files: closing any of them releases the lock (POSIX)."""


class Locked(Exception):
    """Another process writes the run; the message names it."""


def acquire_lock(folder: Path) -> tuple[int, int]:
    """Acquire the run's lock, until `release_lock` or the end of this process; the kernel releases it after a kill too.

    The lock belongs to the process (`lockf`), not to the open file, so forked workers do not keep it.

    Returns:
        Device and inode of the lock file, for `same_folder`.

    Raises:
        Locked: another process holds it.
        OSError: the lock file cannot be created.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(handle, 100).decode(errors="replace").strip()
        os.close(handle)
        raise Locked(owner or "unknown") from None
    except OSError as error:  # some network file systems have no locks
        log.warning("cannot lock %s (%s): make sure that no other process writes this run", folder, error.strerror)
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    _held.setdefault(folder.resolve(), []).append(handle)
    status = os.fstat(handle)
    return status.st_dev, status.st_ino


def same_folder(folder: Path, lock: tuple[int, int]) -> bool:
    """Return whether a path still names the folder whose lock was acquired: it was not renamed, deleted or replaced.

    Args:
        lock: the result of `acquire_lock`.
    """
    try:
        status = os.stat(folder / LOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (status.st_dev, status.st_ino) == lock


def release_lock(folder: Path) -> None:
    """Release the run's lock, if this process holds it."""
    for handle in _held.pop(folder.resolve(), ()):
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Return whether a process on this machine holds the run's lock."""
    return lock_owner(folder) is not None


def lock_owner(folder: Path) -> int | None:
    """Return the id of the process on this machine that holds the run's lock, or None; 0 if it runs in another
    container. Queries the kernel and does not try the lock, which could make a run fail that is just starting."""
    if folder.resolve() in _held:
        return os.getpid()
    if not LOCKS_ANSWER:
        return None
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # struct flock: type, whence, start, length, pid. The kernel sets the type to F_UNLCK if nobody holds the lock.
        query = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = struct.unpack(FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, query))
        return max(0, int(process)) if kind != fcntl.F_UNLCK else None
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)


def last_lock_owner(folder: Path) -> tuple[int, str] | None:
    """Return process id and machine of the last process that held the run's lock, or None."""
    try:
        words = (folder / LOCK).read_text(errors="replace").split() if folder.resolve() not in _held else []
    except OSError:
        return None
    if len(words) == 4 and words[1].isdigit():
        return int(words[1]), words[3]
    return (os.getpid(), os.uname().nodename) if folder.resolve() in _held else None
