"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def write_text(path: Path, text: str, flush: bool = False) -> None:
    """Written aside and renamed, so that a kill leaves the old file or the new one (`flush`: so does a power cut)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
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
