"""Checkpoints of several ranks, by PyTorch's distributed checkpoint (DCP).

Each rank writes its shards, in the background, and any number of ranks can load them. The files are safetensors whose
headers have each shard's offsets, so nothing is unpickled.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atomrl.backends.base import BaseBackend
from atomrl.backends.collective import Collective
from atomrl.backends.optimizer import Optimizer, full_tensor
from atomrl.backends.roles import RoleName, role_prefix
from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError
from atomrl.models.loading import model_weights, own_memory, save_settings
from atomrl.models.reward_model import ScalarModel, scalar_settings
from atomrl.tracking.checkpoint_format import SHARDS, STATE_FOLDER, Counts, check_sharded, random_file, read_counts

PART_BYTES = 2 * 10**9
"""Maximum size of a model file; a rank gathers this much of a model at a time."""
MOMENTS = ("exp_avg", "exp_avg_sq")
Job = Callable[[], None]

# --------------------------------------------------------------------------------------------------------------------
# Writing in the background: each rank copies its share, and a thread writes the copies during the next step.


class BackgroundWriter:
    """Runs jobs one after the other on a thread."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(jobs,), name="checkpoint writer", daemon=True)
        self._thread.start()

    def _run(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                job()
        except BaseException as error:  # DCP's CheckpointException is not an Exception
            self._error = error

    def wait(self) -> None:
        """Wait until all jobs are done.

        Raises:
            Exception, CheckpointException: the error of a job.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


class BackgroundCheckpoints(BaseBackend):
    """Base class of back ends that write checkpoints during the next step."""

    _pending: tuple[Path, BackgroundWriter] | None = None

    def write_in_background(self, folder: Path, jobs: Sequence[Job]) -> Callable[[], None]:
        """Start writing a checkpoint; return a function that waits until it is complete."""
        self._pending = folder, BackgroundWriter(jobs)
        return self.saved

    def saved(self) -> None:
        """Wait until all ranks have written what `save` started.

        Raises:
            OSError: on all ranks, if one could not write its part; names the rank.
        """
        if self._pending is None:
            return
        (folder, writer), self._pending = self._pending, None
        with failing_together(self.collective):
            writer.wait()
        files = [random_file(folder, rank) for rank in range(self.collective.world)]
        if absent := self.collective.union(path.name for path in files if not path.exists()):
            raise OSError(
                f"{folder} lacks {', '.join(absent)}: set output_dir to a folder that the machines of all ranks share"
            )
        for name in self.trained if self.collective.rank == 0 else ():
            write_index(folder / role_prefix(name))


@contextmanager
def failing_together(ranks: Collective) -> Iterator[None]:
    """Raise OSError on all ranks if the block raised an error on one; names each rank at fault. Collective."""
    failed: dict[int, BaseException] = {}
    try:
        yield
    except CheckpointException as error:
        failed = {rank: cause for rank, (cause, _) in error.failures.items()} or {ranks.rank: error}
    except Exception as error:
        failed = {ranks.rank: error}
    reasons = ranks.union(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in failed.items())
    if reasons:
        raise OSError("; ".join(reasons)) from next(iter(failed.values()), None)


def split_by_size(weights: Sequence[tuple[str, Tensor]], part_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Split weights into parts of at most `part_bytes`, or of a single larger weight; tied weights stay together.

    Example:
        >>> one, other = torch.zeros(3), torch.zeros(3)
        >>> [[name for name, _ in part] for part in split_by_size([("a", one), ("b", other), ("c", one)], 12)]
        [['a', 'c'], ['b']]
    """
    names: dict[int, list[tuple[str, Tensor]]] = {}
    for name, weight in weights:
        names.setdefault(id(weight), []).append((name, weight))
    parts: list[list[tuple[str, Tensor]]] = []
    size = 0
    for tied in names.values():
        weight_bytes = tied[0][1].numel() * tied[0][1].element_size()
        if not parts or size + weight_bytes > part_bytes:
            parts.append([])
            size = 0
        parts[-1] += tied
        size += weight_bytes
    return parts


def gather_weights(part: Sequence[tuple[str, Tensor]], here: bool) -> dict[str, Tensor]:
    """Gather sharded weights to the CPU of ranks that pass `here=True`; {} on the others. Collective."""
    full: dict[int, Tensor] = {}
    for _, weight in part:
        if id(weight) not in full:
            tensor = full_tensor(weight.detach())
            full[id(weight)] = tensor.cpu() if here else tensor.new_empty(0)
    return {name: full[id(weight)] for name, weight in part} if here else {}


def model_jobs(
    model: Any, skeleton: Any, tokenizer: Any, ranks: Collective, folder: Path, part_bytes: int = PART_BYTES
) -> Iterator[Job]:
    """Yield the jobs that write this rank's files of a model in Hugging Face layout; collective.

    Files go to the ranks in turn. All ranks gather each weight together, and the rank that writes its file copies it to
    the CPU. So no rank holds more than its own files.

    Args:
        model: the sharded model.
        skeleton: the same model on the meta device.
        tokenizer: None: not saved.
    """
    parts = split_by_size(list(model.named_parameters(remove_duplicate=False)), part_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        weights, writes = dict[str, Tensor](), number % ranks.world == ranks.rank
        for name, weight in part:
            first = next(other for other, tied in part if tied is weight)
            if name == first:
                full = full_tensor(weight.detach())
                if writes:
                    weights[name] = full.cpu() if full.device.type != "cpu" else full.clone()
            elif writes:
                weights[name] = weights[first]
        if writes:
            yield _write_part(skeleton, weights, folder, file_name(number, len(parts)))
    if ranks.rank == 0:
        first = next(iter(skeleton.parameters()))
        settings = scalar_settings(skeleton, tokenizer) if isinstance(skeleton, ScalarModel) else {}
        yield lambda: save_settings(skeleton, tokenizer, folder, first.dtype, **settings)


def file_name(number: int, count: int) -> str:
    """Return the name that transformers gives to a file of a model.

    Example:
        >>> file_name(0, 1), file_name(0, 2)
        ('model.safetensors', 'model-00001-of-00002.safetensors')
    """
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_part(skeleton: nn.Module, weights: dict[str, Tensor], folder: Path, name: str) -> Job:
    def write() -> None:
        from huggingface_hub import save_torch_state_dict

        model = copy.deepcopy(skeleton)
        model.load_state_dict(weights, assign=True, strict=False)
        state = own_memory({name: weight for name, weight in model_weights(model) if not weight.is_meta})
        pattern = name.replace(".safetensors", "{suffix}.safetensors")
        save_torch_state_dict(state, folder, filename_pattern=pattern, max_shard_size=2**62, metadata={"format": "pt"})

    return write


def write_index(folder: Path) -> None:
    """Write model.safetensors.index.json for a model in several files, once all are written."""
    from safetensors import safe_open

    files: dict[str, str] = {}
    size = 0
    for path in sorted(folder.glob("model-*-of-*.safetensors")):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), path.name)
        size += path.stat().st_size
    if files:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------------
# Training state in shards: weights, moments, random states and counts.


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
