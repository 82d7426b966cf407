"""Atomic checkpoint folders, and the config changes with which a run may be resumed.

A checkpoint is written into a temporary folder, its files are hashed into `MANIFEST.json`, and the folder is renamed
last, so a kill leaves no partial checkpoint. Reading verifies the hashes. Removal renames first, for the same reason.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.common.files import flush_to_disk, new_folder, sha256
from atomrl.config import ConfigError, RunConfig, load_config
from atomrl.tracking.checkpoint_format import FORMAT, MANIFEST
from atomrl.tracking.reading.lines import flat_tree

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


# --------------------------------------------------------------------------------------------------------------------
# Resuming: which changes of the config, the data and the tokenizer are allowed.

HARMLESS = (
    "run_name", "output_dir", "checkpoint", "tracking", "eval.every_steps", "eval.before", "eval.after",
    # The files behind these paths are compared by content (`identity`), so they may be moved.
    "model.path", "model.tokenizer", "data.train",
    # Speed and memory: the same objective, up to rounding.
    "model.device", "model.gradient_checkpointing", "model.activation_offload", "model.compile", "model.pack_rows",
    "rollout.max_concurrent_completions",
    "train.tokens_per_micro_batch", "train.rows_per_micro_batch", "backend",
    # Timeouts and capacities.
    "pool.timeout_s", "pool.lease_s", "pool.capacity", "pool.ttl_s",
    "train.timeout_s", "asynchronous.timeout_s", "cluster.timeout_s", "rollout.server_timeout_s",
    "reward.wait_s", "environment.wait_s",
)  # fmt: skip
"""Keys and sections that may change when a run is resumed. Any other change is refused."""


def config_changes(before: Mapping[str, Any], now: RunConfig) -> list[str]:
    """List the differences between a stored config tree and a config: `train.steps: 100 -> 200`.

    A key that the stored tree lacks (it was written by an older version) counts as its default.
    """
    with contextlib.suppress(ConfigError):  # a key that no longer exists stays in the tree, as a difference
        before = load_config(before).to_tree()
    old, new = flat_tree(before), flat_tree(now.to_tree())
    keys = [*old, *(key for key in new if key not in old)]
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def stopping_changes(changes: list[str], now: RunConfig) -> list[str]:
    """Return the lines of `config_changes` with which a run must not be resumed.

    `train.steps` may change if the learning rate does not depend on it (constant, no warm-up).
    """
    allowed: tuple[str, ...] = HARMLESS
    if now.train.schedule == "constant" and not now.train.warmup_ratio:
        allowed = (*HARMLESS, "train.steps")
    prefixes = tuple(f"{key}." for key in allowed)
    return [line for line in changes if not f"{line.partition(':')[0]}.".startswith(prefixes)]


def tokenizer_identity(tokenizer: Any) -> str:
    """Hash everything that determines the token ids of a prompt: vocabulary, rules, chat template, special tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    # Truncation and padding are settings of the last call.
    rules = {**json.loads(fast.to_str()), "truncation": None, "padding": None} if fast else tokenizer.get_vocab()
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    content = [rules, tokenizer.chat_template, ids]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
