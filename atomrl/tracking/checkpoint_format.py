"""Files of a checkpoint, their names and their version. `docs/reference/run_folder.md` says who writes and reads each.

    step_000020/
      MANIFEST.json                   version of the format, and the SHA-256 of each file (tracking/checkpoints.py)
      progress.json                   step, position in the data, evaluations (trainer/loop.py, `Progress`)
      config.json, model.safetensors, tokenizer.json, ...    the policy in Hugging Face layout, or its adapters
      critic/                         the critic, likewise
      training_state/                 of one process (backends/local.py):
        trainer.json                  `Counts`
        optimizer.safetensors         Adam's moments; critic_optimizer.safetensors
        random.safetensors            random states
      training_state/                 of several ranks (backends/shards.py, backends/megatron):
        trainer.json                  `Counts`, with the number of ranks and the steps of each weight
        shards/                       weights and moments, a file per rank
        random_0.safetensors, ...     random states, a file per rank

A critic in a back end of its own adds `critic_trainer.json` and `critic_random.safetensors`. The state is in a
subfolder, so that a server that loads every *.safetensors of the checkpoint does not load the optimizer's.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from atomrl.common.errors import ConfigError

FORMAT = 1
"""Version of a checkpoint's layout, in its manifest. Raise it when an earlier version of the package could not continue
from what this one writes. A manifest without a version is of version 0, which has the same files as 1."""
MANIFEST, PROGRESS = "MANIFEST.json", "progress.json"
STATE_FOLDER, SHARDS = "training_state", "shards"
COUNTS, OPTIMIZER, RANDOM = "trainer.json", "optimizer.safetensors", "random.safetensors"
CRITIC = "critic_"
"""Prefix of the critic's files in `training_state`."""
Record = TypeVar("Record")


@dataclass(frozen=True)
class Counts:
    """Counters of a back end at a checkpoint.

    Args:
        updates: optimizer steps done.
        skipped_in_a_row: updates that were skipped since the last one that was not, by trained role.
        ranks: number of ranks that wrote the checkpoint; 1 for one process.
        steps: optimizer steps of each weight, by role and name; with one process they are in the optimizer's file.
    """

    updates: int
    skipped_in_a_row: Mapping[Any, int]
    ranks: int = 1
    steps: Mapping[Any, Mapping[str, int]] = field(default_factory=dict)

    def write(self, state: Path, prefix: str = "") -> None:
        """Write the counts into the folder `training_state`."""
        (state / f"{prefix}{COUNTS}").write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_counts(folder: Path) -> Counts:
    """Read the counts of a checkpoint, those of a critic in a back end of its own included.

    Raises:
        ConfigError: the checkpoint has no training state, or that of another version.
    """
    state = folder / STATE_FOLDER
    if not (state / COUNTS).is_file():
        raise ConfigError(
            f"{folder} is not a checkpoint from which a run can be resumed: it has no {STATE_FOLDER}/{COUNTS}"
        )
    counts = _read(state / COUNTS)
    if (separate := state / f"{CRITIC}{COUNTS}").is_file():
        critic = _read(separate).skipped_in_a_row
        counts = replace(counts, skipped_in_a_row={**counts.skipped_in_a_row, **critic})
    return counts


def is_sharded(folder: Path) -> bool:
    """Return True if several ranks wrote the checkpoint."""
    return (folder / STATE_FOLDER / SHARDS).is_dir()


def check_sharded(folder: Path) -> None:
    """Raise ConfigError if the checkpoint was not written by several ranks."""
    if not is_sharded(folder):
        raise ConfigError(
            f"{folder} has no {STATE_FOLDER}/{SHARDS}: it is not a checkpoint of several ranks; resume without the "
            "section backend, or start a new run from its model"
        )


def random_file(folder: Path, rank: int) -> Path:
    """Return the file with the random states of a rank."""
    return folder / STATE_FOLDER / f"random_{rank}.safetensors"


def record_from(kind: type[Record], stored: Mapping[str, Any], path: Path) -> Record:
    """Return what a file of a checkpoint stores. A field that an older version did not write has its default.

    Raises:
        ConfigError: it has a field that this version does not know, or lacks one.
    """
    try:
        return kind(**stored)
    except TypeError as error:
        raise ConfigError(
            f"{path} is of another version of AtomRL, which this one does not know ({error}). Update AtomRL to "
            "continue the run"
        ) from None


def _read(path: Path) -> Counts:
    return record_from(Counts, json.loads(path.read_text(encoding="utf-8")), path)
