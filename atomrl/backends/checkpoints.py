"""What several ranks need to go on, in shards: each writes its own, and any number of them reads (PyTorch's DCP).

The files are safetensors, whose headers say where a shard lies in its tensor, so nothing is unpickled from a disk.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atomrl.backends.base import BaseBackend, Collective
from atomrl.backends.optimizer import Optimizer, whole
from atomrl.backends.roles import SHARDS, STATE_FOLDER, RoleName, check_shards, role_prefix
from atomrl.common.errors import said_as
from atomrl.config import ConfigError
from atomrl.models.loading import model_weights, own_memory, save_settings
from atomrl.models.reward_model import ScalarModel, scalar_settings

# --------------------------------------------------------------------------------------------------------------------
# Checkpoints of several ranks, written while the next step is taken: each rank writes its share from copies.

PART_BYTES = 2 * 10**9
"""Of a file of a model, which is as much of it as a rank gathers at a time."""
Job = Callable[[], None]


class Writing:
    """Jobs on a thread of their own, one after the other."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, args=(jobs,), name="writes a checkpoint", daemon=True)
        self._thread.start()

    def _run(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                job()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Until all are done.

        Raises:
            Exception: what a job raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


class WritesBeside(BaseBackend):
    """A back end whose checkpoints are written while the next step is taken."""

    _writing: tuple[Path, Writing] | None = None

    def write_beside(self, folder: Path, jobs: Sequence[Job]) -> Callable[[], None]:
        """Begin a checkpoint; what is returned waits until it is written."""
        self._writing = folder, Writing(jobs)
        return self.saved

    def saved(self) -> None:
        """Wait until all ranks have written what `save` began.

        Raises:
            OSError: the disk is full, or another of a file.
        """
        if self._writing is None:
            return
        (folder, writing), self._writing = self._writing, None
        writing.wait()
        self.collective.max(0)
        for name in self.trained if self.collective.rank == 0 else ():
            write_index(folder / role_prefix(name))


def parts_of(weights: Sequence[tuple[str, Tensor]], part_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Weights in parts of at most so many bytes, or of one weight; the names of one weight stay together.

    Example:
        >>> one, other = torch.zeros(3), torch.zeros(3)
        >>> [[name for name, _ in part] for part in parts_of([("a", one), ("b", other), ("c", one)], 12)]
        [['a', 'c'], ['b']]
    """
    names: dict[int, list[tuple[str, Tensor]]] = {}
    for name, weight in weights:
        names.setdefault(id(weight), []).append((name, weight))
    parts: list[list[tuple[str, Tensor]]] = []
    size = 0
    for same in names.values():
        added = same[0][1].numel() * same[0][1].element_size()
        if not parts or size + added > part_bytes:
            parts.append([])
            size = 0
        parts[-1] += same
        size += added
    return parts


def gathered(part: Sequence[tuple[str, Tensor]], here: bool) -> dict[str, Tensor]:
    """Weights in shards, gathered by all ranks, in the CPU's memory of those that want them `here`; {} on others."""
    found: dict[int, Tensor] = {}
    for _, weight in part:
        if id(weight) not in found:
            full = whole(weight.detach())
            found[id(weight)] = full.cpu() if here else full.new_empty(0)
    return {name: found[id(weight)] for name, weight in part} if here else {}


def model_jobs(
    model: Any, skeleton: Any, tokenizer: Any, ranks: Collective, folder: Path, part_bytes: int = PART_BYTES
) -> Iterator[Job]:
    """What this rank has to write of a model in Hugging Face layout, of which no rank ever holds more than its files.

    All ranks gather each weight together, in the order of the files; the rank whose file it is keeps it in the CPU's
    memory.

    Args:
        model: in shards.
        skeleton: the same without weights.
        tokenizer: None leaves it out.
    """
    parts = parts_of(list(model.named_parameters(remove_duplicate=False)), part_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        found, mine = dict[str, Tensor](), number % ranks.world == ranks.rank
        for name, weight in part:
            same = next((found[other] for other, seen in part if seen is weight and other in found), None)
            if same is not None:
                found[name] = same
            elif name == next(other for other, seen in part if seen is weight):
                full = whole(weight.detach())
                if mine:
                    found[name] = full.cpu() if full.device.type != "cpu" else full.clone()
        if mine:
            yield _write_part(skeleton, found, folder, file_name(number, len(parts)))
    if ranks.rank == 0:
        first = next(iter(skeleton.parameters()))
        settings = scalar_settings(skeleton, tokenizer) if isinstance(skeleton, ScalarModel) else {}
        yield lambda: save_settings(skeleton, tokenizer, folder, first.dtype, **settings)


def file_name(number: int, count: int) -> str:
    """As transformers names the files of a model.

    Example:
        >>> file_name(0, 1), file_name(0, 2)
        ('model.safetensors', 'model-00001-of-00002.safetensors')
    """
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_part(skeleton: nn.Module, found: dict[str, Tensor], folder: Path, name: str) -> Job:
    def write() -> None:
        from huggingface_hub import save_torch_state_dict

        model = copy.deepcopy(skeleton)
        model.load_state_dict(found, assign=True, strict=False)
        state = own_memory({name: weight for name, weight in model_weights(model) if not weight.is_meta})
        pattern = name.replace(".safetensors", "{suffix}.safetensors")
        save_torch_state_dict(state, folder, filename_pattern=pattern, max_shard_size=2**62, metadata={"format": "pt"})

    return write


def write_index(folder: Path) -> None:
    """Say which file of a model has which weight, once all are there; of one file nothing has to be said."""
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


def kept(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copies in the CPU's memory, shards as shards."""
    return {name: t.detach().clone() if t.device.type == "cpu" else t.detach().cpu() for name, t in tensors.items()}


def random_state() -> dict[str, Tensor]:
    """Of this process."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


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
