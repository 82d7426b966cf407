"""Atomic checkpoint folders: written aside, hashed into a manifest, renamed last."""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from atomrl.common.errors import reraise_as
from atomrl.common.files import flush_to_disk, new_folder, sha256
from atomrl.config import ConfigError
from atomrl.tracking.checkpoint_format import FORMAT, MANIFEST

STEP = re.compile(r"step_([0-9]{1,15})")


def step_folder(step: int) -> str:
    """Return the folder name of a step: 10 -> `step_000010`."""
    return f"step_{step:06d}"


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all step folders in `root`, oldest first; none if `root` does not exist.

    Raises:
        OSError: `root` cannot be read.
    """
    paths = root.iterdir() if root.exists() else ()
    return sorted((int(match[1]), path) for path in paths if (match := STEP.fullmatch(path.name)))


@contextlib.contextmanager
def writing_checkpoint(root: Path, step: int) -> Iterator[Path]:
    """Yield a temporary folder to save into. It becomes `root/step_NNNNNN` when the block ends, and is removed after an
    error; older checkpoints are not touched.

    Raises:
        OSError: the disk is full; the message names the folder and what to do. Or a file was not written in full.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> with writing_checkpoint(root, 10) as folder:
        ...     _ = (folder / "weights").write_text("w")
        >>> checkpoint_fault(root / "step_000010") is None
        True
    """
    with disk_full_named(root, f"the checkpoint of step {step} was not written; earlier checkpoints are intact"):
        with new_folder(root / step_folder(step)) as folder:
            yield folder
            for path in sorted(folder.rglob("*.safetensors")):
                _check_complete(path)
            manifest = manifest_text(_digests(folder))
            (folder / MANIFEST).write_text(manifest, encoding="utf-8")
            for path in [*sorted(folder.rglob("*")), folder]:  # files, and folders for the names in them
                flush_to_disk(path)
        flush_to_disk(root)


def _check_complete(path: Path) -> None:
    """Raise OSError if a safetensors file is shorter than its header says."""
    from safetensors import SafetensorError, safe_open

    with reraise_as(OSError, f"{path} was not written in full", SafetensorError), safe_open(path, "numpy"):
        pass  # opening it compares the header with the size


def keep_checkpoints(root: Path, newest: int, also: Collection[int | None] = ()) -> None:
    """Remove all checkpoints but the newest `newest` >= 1 and those of the steps in `also`."""
    for step, folder in step_folders(root)[:-newest]:
        if step not in also:  # renamed before it is deleted: a kill leaves the complete checkpoint or none
            removed = folder.with_name(f".{folder.name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            folder.rename(removed)
            shutil.rmtree(removed)


def set_damaged_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to `step_NNNNNN.damaged` (`.damaged-2`, ...), which is ignored from then on."""
    names = (f"{folder.name}.damaged{end}" for end in ("", *(f"-{count}" for count in range(2, 1000))))
    return folder.rename(next(aside for name in names if not (aside := folder.with_name(name)).exists()))


def clear_leftovers(root: Path) -> None:
    """Remove temporary folders of a killed save or removal."""
    for leftover in root.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def checkpoint_fault(folder: Path) -> str | None:
    """Return the defect of a checkpoint (a missing file, or one with another content), or None if it is intact.

    Raises:
        ConfigError: a newer version of the package wrote it.
        OSError: a file cannot be read (an I/O error, a missing permission), so its content is unknown.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        tree = json.loads(text)
        version, manifest = tree.get("format", 0), dict[str, str](tree["sha256"])
        if type(version) is int and version > FORMAT and text == manifest_text(manifest, version):
            raise ConfigError(
                f"{folder} is a checkpoint of format {version}, of a newer version of AtomRL; this version reads up to "
                f"{FORMAT}. Update AtomRL to continue the run"
            )
        digests = _digests(folder)
        if text != manifest_text(manifest, version):
            return f"{MANIFEST} has changed since it was written"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{MANIFEST} is missing"
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, digest in manifest.items():
        if digests.get(name) != digest:
            return f"{name} {'has changed since it was written' if name in digests else 'is missing'}"
    return None


@contextlib.contextmanager
def disk_full_named(folder: Path, what: str) -> Iterator[None]:
    """Convert the "no space left" errors of all libraries into an OSError that names the folder and the remedy."""
    try:
        yield
    except Exception as error:  # safetensors and tokenizers raise exceptions of their own
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and "(os error 28)" not in str(error) and "No space left on device" not in str(error):
            raise
        raise OSError(
            f"the disk is full: {folder}: {what}. Free space (checkpoint.keep=1 keeps fewer checkpoints, "
            "tracking.save_rollouts=false no completions), then continue with --resume"
        ) from error


def manifest_text(digests: dict[str, str], version: int = FORMAT) -> str:
    """Return the content of a manifest: the format's version, and the SHA-256 of each file, by relative path."""
    return json.dumps({**({"format": version} if version else {}), "sha256": digests}, indent=1) + "\n"


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file, by relative path. OSError if one, or a subfolder, cannot be read."""
    paths = sorted(Path(parent, name) for parent, _, names in os.walk(folder, onerror=_raise) for name in names)
    files = [path for path in paths if path.is_file() and path.name != MANIFEST]
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def _raise(error: OSError) -> None:
    raise error
