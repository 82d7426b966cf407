"""Checkpoint folders that are complete or absent.

A checkpoint is written aside, every file is hashed into `MANIFEST.json`, and the folder is renamed last; so a run
that is killed while it saves leaves nothing that could be taken for a checkpoint. Reading checks the hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "MANIFEST.json"
_STEP = re.compile(r"step_(\d{6,})")


def step_folder(step: int) -> str:
    """The folder's name of a step: 10 -> `step_000010`."""
    return f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step of a folder named by `step_folder`; None for any other name."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """All step folders under `root`, oldest first."""
    if not root.is_dir():
        return []
    found = [(step_of(path), path) for path in root.iterdir() if path.is_dir()]
    return sorted((step, path) for step, path in found if step is not None)


@contextlib.contextmanager
def writing_checkpoint(root: Path, step: int, keep: int) -> Iterator[Path]:
    """A folder to save into. When the block ends without an error it becomes `root/step_NNNNNN`, and only the
    newest `keep` checkpoints stay; after an error it is removed and the older checkpoints are as they were.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> with writing_checkpoint(root, 10, keep=2) as folder:
        ...     _ = (folder / "weights").write_text("w")
        >>> checkpoint_fault(root / "step_000010") is None
        True
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    final, aside = root / step_folder(step), root / f".{step_folder(step)}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        _write_manifest(aside)
        old = root / f".{step_folder(step)}.old"
        if final.exists():  # the same step again, after a resume from an older one
            final.rename(old)
        aside.rename(final)
        _flush_to_disk(root)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for _, folder in step_folders(root)[:-keep]:
        shutil.rmtree(folder)


def checkpoint_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint (a file that is missing, or whose content is not what was written), or None."""
    try:
        manifest: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, digest in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _sha256(path) != digest:
            return f"{name} is not what was written (its hash differs)"
    return None


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise ValueError("nothing was saved into the checkpoint")
    digests = {str(path.relative_to(folder)): _sha256(path) for path in files}
    for path in files:
        _flush_to_disk(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"sha256": digests}, indent=1) + "\n", encoding="utf-8")
    _flush_to_disk(manifest)
    _flush_to_disk(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
