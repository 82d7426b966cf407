"""Training state in shards: weights, moments, random states and counts. Any number of ranks can load them."""

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

from atomrl.backends.checkpoints import Job, failing_together
from atomrl.backends.collective import Collective
from atomrl.backends.optimizer import Optimizer
from atomrl.backends.roles import RoleName
from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError
from atomrl.tracking.checkpoint_format import SHARDS, STATE_FOLDER, Counts, check_sharded, random_file, read_counts

MOMENTS = ("exp_avg", "exp_avg_sq")


def copies_on_cpu(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors to the CPU; DTensors stay DTensors."""
    return {name: t.detach().clone() if t.device.type == "cpu" else t.detach().cpu() for name, t in tensors.items()}


def random_state() -> dict[str, Tensor]:
    """Return the random states of this process: `cpu`, and `cuda` if it uses a GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


class ShardReader(HuggingFaceStorageReader):
    """Reads the shards of a checkpoint; caches the headers of its files."""

    _headers: Metadata | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / STATE_FOLDER / SHARDS))
        self.folder = folder

    def read_metadata(self) -> Metadata:
        """Return name, shape and offsets of every shard."""
        if self._headers is None:
            self._headers = super().read_metadata()
        return self._headers


def shard_job(trained: Mapping[RoleName, Optimizer], ranks: Collective, updates: int, folder: Path) -> Job:
    """Copy this rank's shards of weights and moments, random states and counts; return the job that writes them."""
    tensors = copies_on_cpu(_tensors(trained))
    steps = {name: _steps(optimizer) for name, optimizer in trained.items()}
    write_counts = counts_job(trained, steps, ranks, updates, folder)

    def write() -> None:
        writer = HuggingFaceStorageWriter(str(folder / STATE_FOLDER / SHARDS), save_distributed=True)
        save(tensors, storage_writer=writer, process_group=ranks.writing)
        write_counts()

    return write


def counts_job(
    trained: Mapping[RoleName, Optimizer],
    steps: Mapping[RoleName, Mapping[str, int]],
    ranks: Collective,
    updates: int,
    folder: Path,
) -> Job:
    """Copy this rank's random states, and on rank 0 the counts; return the job that writes them.

    Args:
        steps: number of optimizer steps of each weight, by role and name.
    """
    state, random = folder / STATE_FOLDER, random_state()
    skipped = {name: optimizer.skipped_in_a_row for name, optimizer in trained.items()}
    counts = Counts(updates, skipped, ranks.world, steps)
    (state / SHARDS).mkdir(parents=True, exist_ok=True)

    def write() -> None:
        save_file(random, random_file(folder, ranks.rank))
        if ranks.rank == 0:
            counts.write(state)

    return write


def load_shards(trained: Mapping[RoleName, Optimizer], ranks: Collective, folder: Path) -> int:
    """Load what `shard_job` wrote, on any number of ranks.

    Returns:
        The number of updates done.

    Raises:
        ConfigError: there is no such state, or it is that of another model.
    """
    saved = load_counts(trained, folder)
    for name, optimizer in trained.items():
        _make_moments(optimizer, saved.steps[name])
    tensors, reader = _tensors(trained), ShardReader(folder)
    check_shapes({key: tuple(tensor.shape) for key, tensor in tensors.items()}, reader)
    _read(tensors, reader, ranks if dist.is_initialized() else None)
    set_random_state(saved, ranks, folder)
    return saved.updates


def load_counts(trained: Mapping[RoleName, Optimizer], folder: Path) -> Counts:
    """Read the counts of a checkpoint, and set those of skipped updates in the optimizers.

    Raises:
        ConfigError: the folder has no such state, or that of other optimizers.
    """
    if any(optimizer.train.optimizer != "adamw" for optimizer in trained.values()):
        raise ConfigError(f"train.optimizer: checkpoint {folder} of several ranks has the moments of adamw; use adamw")
    check_sharded(folder)
    saved = read_counts(folder)
    if saved.skipped_in_a_row.keys() != trained.keys():
        critic = "" if "critic" in saved.skipped_in_a_row else "out"
        raise ConfigError(f"checkpoint {folder} was written with{critic} a critic")
    for name, optimizer in trained.items():
        optimizer.skipped_in_a_row = saved.skipped_in_a_row[name]
    return saved


def check_shapes(expected: Mapping[str, tuple[int, ...]], reader: ShardReader) -> None:
    """Raise ConfigError if a checkpoint does not have exactly these tensors, or cannot be read."""
    with reraise_as(ConfigError, f"checkpoint {reader.folder} cannot be read", SafetensorError, OSError):
        metadata: Any = reader.read_metadata().state_dict_metadata
    stored = {key: tuple(tensor.size) for key, tensor in metadata.items()}
    wrong = [key for key, shape in expected.items() if stored.get(key) != shape]
    if wrong or len(stored) != len(expected):
        example = wrong[0] if wrong else min(stored.keys() - expected.keys())
        raise ConfigError(
            f"checkpoint {reader.folder} is of another model: {example} has shape {stored.get(example)} there"
        )


def set_random_state(saved: Counts, ranks: Collective, folder: Path) -> None:
    """Restore this rank's random states, if the checkpoint was written by the same number of ranks."""
    if saved.ranks == ranks.world:
        random = load_file(random_file(folder, ranks.rank))
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])


def read_whole(shapes: Mapping[str, tuple[int, ...]], reader: ShardReader) -> dict[str, Tensor]:
    """Read full tensors of a checkpoint into this rank's CPU memory; not collective."""
    tensors: dict[str, Any] = {key: torch.empty(shape) for key, shape in shapes.items()}
    _read(tensors, reader, None)
    return tensors


def _read(tensors: dict[str, Any], reader: ShardReader, ranks: Collective | None) -> None:
    """Read into tensors in place, collectively; None: on this rank alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended
        with failing_together(ranks or Collective()):
            load(tensors, storage_reader=reader, no_dist=ranks is None)


def _tensors(trained: Mapping[RoleName, Optimizer]) -> dict[str, Any]:
    """Return weights and moments by ROLE/weight/NAME, ROLE/exp_avg/NAME, ...; moments of stepped weights only."""
    tensors: dict[str, Tensor] = {}
    for role, optimizer in trained.items():
        for name, weight in optimizer.weights.items():
            tensors[f"{role}/weight/{name}"] = weight.detach()
            state: Mapping[str, Any] = optimizer.adamw.state.get(weight, {})
            tensors |= {f"{role}/{moment}/{name}": state[moment] for moment in MOMENTS if moment in state}
    return tensors


def _steps(optimizer: Optimizer) -> dict[str, int]:
    states = {name: optimizer.adamw.state.get(weight, {}) for name, weight in optimizer.weights.items()}
    return {name: int(state["step"]) for name, state in states.items() if state}


def _make_moments(optimizer: Optimizer, steps: Mapping[str, int]) -> None:
    """Allocate the moments of the weights that were stepped."""
    optimizer.adamw.state.clear()
    for name, count in steps.items():
        if (weight := optimizer.weights.get(name)) is not None:
            state = optimizer.adamw.state[weight]
            state["step"] = torch.tensor(float(count), device=weight.device)
            state |= {moment: torch.zeros_like(weight).detach() for moment in MOMENTS}
