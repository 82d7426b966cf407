"""Atomic writes of files and folders, temporary folders, and hashes of files."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_LEFT_S = 120.0
"""Age in seconds from which an unlocked folder counts as left behind; a new one may not be locked yet."""
BLOCKS, BLOCK_BYTES = 64, 2**16


def check_writable(path: Path) -> None:
    """Check that a file can be written, before long work; creates its folder.

    Raises:
        ValueError: it cannot be written; the message has the reason.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    probe = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.filename}: {error.strerror}") from error
    probe.unlink()


def open_file(path: Path) -> BinaryIO:
    """Open a file of a run for reading, without following a symbolic link, which may lead out of the folder.

    Raises:
        OSError: the file does not exist, or is a link.
    """
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def write_text(path: Path, text: str, flush: bool = False) -> None:
    """Write a text file atomically; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"), flush)


def write_bytes(path: Path, content: bytes, flush: bool = False) -> None:
    """Write a file atomically: to a temporary name, then renamed, so that a kill leaves the old or the new content.

    Args:
        flush: flush to disk before the rename, so that this also holds for a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_bytes(content)
    if flush:
        flush_to_disk(aside)
    aside.replace(path)


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: str | Path, lenient: bool = False) -> int:
    """Write rows as JSONL, replacing an existing file atomically.

    Args:
        lenient: write values that JSON does not have as text, and NaN as `NaN`, instead of raising an error.

    Returns:
        The number of rows.
    """
    form: dict[str, Any] = {"default": str} if lenient else {"allow_nan": False}
    lines = [json.dumps(row, ensure_ascii=False, **form) + "\n" for row in rows]
    write_text(Path(path), "".join(lines))
    return len(lines)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when the block ends, or removed after an error.

    Raises:
        ValueError: `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} already exists; name a new folder, or remove it")
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TemporaryFolder:
    """Temporary folder of a process. Also removes folders of the same kind that killed processes left behind.

    The folder is locked until it is closed, which marks it as in use. The lock is on the folder itself, because
    cleaners of `/tmp` would delete a lock file.

    Args:
        kind: part of the folder's name.
        short: use `/tmp` even if `TMPDIR` is set, because paths of sockets are limited to 107 characters.

    Example:
        >>> folder = TemporaryFolder("example")
        >>> folder.path.is_dir(), folder.close(), folder.path.exists()
        (True, None, False)
    """

    def __init__(self, kind: str, short: bool = False) -> None:
        parent = Path("/tmp" if short and os.path.isdir("/tmp") else tempfile.gettempdir())
        for path in parent.glob(f"atomrl-{kind}-*"):
            with suppress(OSError):  # in use, or of another user
                if path.stat().st_uid == os.getuid() and time.time() - path.stat().st_mtime > _LEFT_S:
                    lock = _locked(path)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)
        prefix = f"atomrl-{kind}-{os.getpid()}-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self._lock = _locked(self.path)

    def close(self) -> None:
        """Remove the folder; no effect if it is removed already."""
        self._folder.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """Lock a folder and return the descriptor that holds the lock; OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def model_identity(folder: Path) -> str:
    """Hash a model's config and weights, to notice a changed model.

    Large files are sampled: their size and 64 evenly spaced blocks of 64 KiB, which is all of a file up to 4 MiB.
    """
    digest = hashlib.sha256()
    for path in sorted(
        [*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    ):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
