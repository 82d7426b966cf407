"""What several ranks need to go on, in shards: each writes its own, and any number of them reads (PyTorch's DCP).

The files are safetensors, whose headers say where a shard lies in its tensor, so nothing is unpickled from a disk.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atomrl.config import ConfigError
from atomrl.hints import said_as
from atomrl.training.collective import Collective
from atomrl.training.optimizer import Optimizer
from atomrl.training.role_models import SHARDS, STATE_FOLDER, check_shards
from atomrl.training.roles import RoleName
from atomrl.training.writing import Job, kept, random_state

COUNTS = "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardReader(HuggingFaceStorageReader):
    """Reads the shards of a checkpoint, and the headers of all files once, however often it is asked."""

    _headers: Metadata | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / STATE_FOLDER / SHARDS))
        self.folder = folder

    def read_metadata(self) -> Metadata:
        """Name, shape and place of every shard."""
        if self._headers is None:
            self._headers = super().read_metadata()
        return self._headers


def shard_job(trained: Mapping[RoleName, Optimizer], ranks: Collective, updates: int, folder: Path) -> Job:
    """What this rank writes of weights and moments of every optimizer, random states and counts, as they are now."""
    tensors = kept(_tensors(trained))
    steps = {name: _steps(optimizer) for name, optimizer in trained.items()}
    beside = counts_job(trained, steps, ranks, updates, folder)

    def write() -> None:
        writer = HuggingFaceStorageWriter(str(folder / STATE_FOLDER / SHARDS), save_distributed=True)
        save(tensors, storage_writer=writer, process_group=ranks.writing)
        beside()

    return write


def counts_job(
    trained: Mapping[RoleName, Optimizer],
    steps: Mapping[RoleName, Mapping[str, int]],
    ranks: Collective,
    updates: int,
    folder: Path,
) -> Job:
    """What this rank writes beside tensors: random states, and on rank 0 counts, as they are now.

    Args:
        steps: how often each weight was stepped.
    """
    state, random = folder / STATE_FOLDER, random_state()
    skipped = {name: optimizer.skipped_in_a_row for name, optimizer in trained.items()}
    found = {"updates": updates, "ranks": ranks.world, "skipped_in_a_row": skipped, "steps": steps}
    (state / SHARDS).mkdir(parents=True, exist_ok=True)

    def write() -> None:
        save_file(random, state / f"random_{ranks.rank}.safetensors")
        if ranks.rank == 0:
            (state / COUNTS).write_text(json.dumps(found) + "\n", encoding="utf-8")

    return write


def load_shards(trained: Mapping[RoleName, Optimizer], ranks: Collective, folder: Path) -> int:
    """Read what `shard_job` wrote, on as many ranks as there are now.

    Returns:
        How many updates were done.

    Raises:
        ConfigError: there is none, or it is another model's.
    """
    saved = read_counts(trained, folder)
    for name, optimizer in trained.items():
        _make_moments(optimizer, saved["steps"][name])
    tensors, reader = _tensors(trained), ShardReader(folder)
    check_shapes({key: tuple(tensor.shape) for key, tensor in tensors.items()}, reader)
    _read(tensors, reader, alone=not dist.is_initialized())
    set_random_state(saved, ranks, folder)
    return int(saved["updates"])


def read_counts(trained: Mapping[RoleName, Optimizer], folder: Path) -> dict[str, Any]:
    """The counts of a checkpoint: updates, ranks, and how often each weight was stepped.

    Each optimizer has its count of updates that were left out.

    Raises:
        ConfigError: there is nothing, or it is of other optimizers.
    """
    state = folder / STATE_FOLDER
    if any(optimizer.train.optimizer != "adamw" for optimizer in trained.values()):
        raise ConfigError(f"train.optimizer: checkpoint {folder} of several ranks has the moments of adamw; take that")
    check_shards(folder)
    saved: dict[str, Any] = json.loads((state / COUNTS).read_text(encoding="utf-8"))
    if saved["skipped_in_a_row"].keys() != trained.keys():
        critic = "" if "critic" in saved["skipped_in_a_row"] else "out"
        raise ConfigError(f"checkpoint {folder} was written with{critic} a critic")
    for name, optimizer in trained.items():
        optimizer.skipped_in_a_row = saved["skipped_in_a_row"][name]
    return saved


def check_shapes(expected: Mapping[str, tuple[int, ...]], reader: ShardReader) -> None:
    """Raise ConfigError where a checkpoint has not these tensors, or others as well, or cannot be read."""
    with said_as(ConfigError, f"checkpoint {reader.folder} cannot be read", SafetensorError, OSError):
        there: Any = reader.read_metadata().state_dict_metadata
    known = {key: tuple(found.size) for key, found in there.items()}
    wrong = [key for key, shape in expected.items() if known.get(key) != shape]
    if wrong or len(known) != len(expected):
        example = wrong[0] if wrong else min(known.keys() - expected.keys())
        raise ConfigError(
            f"checkpoint {reader.folder} is of another model: {example} has shape {known.get(example)} there"
        )


def set_random_state(saved: Mapping[str, Any], ranks: Collective, folder: Path) -> None:
    """Set this rank's random states from a checkpoint of as many ranks; of another number there are none."""
    if saved["ranks"] == ranks.world:
        random = load_file(folder / STATE_FOLDER / f"random_{ranks.rank}.safetensors")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])


def read_whole(shapes: Mapping[str, tuple[int, ...]], reader: ShardReader) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint, in the CPU's memory of a rank that asks for itself."""
    found: dict[str, Any] = {key: torch.empty(shape) for key, shape in shapes.items()}
    _read(found, reader, alone=True)
    return found


def _read(tensors: dict[str, Any], reader: ShardReader, alone: bool) -> None:
    """Fill tensors, alone or at the same time as all ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant
        load(tensors, storage_reader=reader, no_dist=alone)


def _tensors(trained: Mapping[RoleName, Optimizer]) -> dict[str, Any]:
    """Weights, and the moments of those that were stepped."""
    found: dict[str, Tensor] = {}
    for role, optimizer in trained.items():
        for name, weight in optimizer.weights.items():
            found[f"{role}/weight/{name}"] = weight.detach()
            state: Mapping[str, Any] = optimizer.adamw.state.get(weight, {})
            found |= {f"{role}/{moment}/{name}": state[moment] for moment in MOMENTS if moment in state}
    return found


def _steps(optimizer: Optimizer) -> dict[str, int]:
    states = {name: optimizer.adamw.state.get(weight, {}) for name, weight in optimizer.weights.items()}
    return {name: int(state["step"]) for name, state in states.items() if state}


def _make_moments(optimizer: Optimizer, steps: Mapping[str, int]) -> None:
    """Room for the moments of the weights that were stepped."""
    optimizer.adamw.state.clear()
    for name, count in steps.items():
        if (weight := optimizer.weights.get(name)) is not None:
            state = optimizer.adamw.state[weight]
            state["step"] = torch.tensor(float(count), device=weight.device)
            state |= {moment: torch.zeros_like(weight).detach() for moment in MOMENTS}
