"""Files and folders that appear complete or not at all."""

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


def check_writable(path: Path) -> None:
    """That a file can be written, before the work that goes into it; its folder is made.

    Raises:
        ValueError: it cannot, and why.
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
    """Open a file of a run for reading. A link in its place is not followed: it may lead out of the folder.

    Raises:
        OSError: it is not there, or is a link.
    """
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def write_text(path: Path, text: str, flush: bool = False) -> None:
    """Written aside and renamed, so that a kill leaves the old file or the new one (`flush`: so does a power cut)."""
    write_bytes(path, text.encode("utf-8"), flush)


def write_bytes(path: Path, content: bytes, flush: bool = False) -> None:
    """Likewise, of bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_bytes(content)
    if flush:
        flush_to_disk(aside)
    aside.replace(path)


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: str | Path, lenient: bool = False) -> int:
    """Write rows one a line, in place of an existing file.

    Args:
        lenient: write a value that JSON has no form for as its text, and NaN as it is, in place of an error.

    Returns:
        How many rows were written.
    """
    form: dict[str, Any] = {"default": str} if lenient else {"allow_nan": False}
    lines = [json.dumps(row, ensure_ascii=False, **form) + "\n" for row in rows]
    write_text(Path(path), "".join(lines))
    return len(lines)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into. When the block ends without an error it becomes `path`; after an error it is removed.

    Raises:
        ValueError: `path` exists already, and is no empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists already; name a new folder, or remove it")
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def flush_to_disk(path: Path) -> None:
    """Return when a file's content, or the names in a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TemporaryFolder:
    """A folder for as long as a process needs it. Those of its kind that killed processes have left are removed.

    The folder itself is locked until it is closed, which no cleaner of `/tmp` undoes.

    Args:
        kind: in its name.
        short: in `/tmp` whatever `TMPDIR` says: sockets in it may have 107 letters.

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
        """Remove it, if that is not done."""
        self._folder.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """A descriptor that keeps a folder locked until it is closed; OSError where another does."""
    found = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(found)
        raise
    return found


# --------------------------------------------------------------------------------------------------------------------
# Whether a model is the one that it was.

BLOCKS, BLOCK_BYTES = 64, 2**16


def model_identity(folder: Path) -> str:
    """A hash of a model's config and weights. Of files over 4 MiB it reads 64 blocks, spread evenly, and the size."""
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
