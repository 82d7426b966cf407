"""Checkpoints of several ranks, written while the next step is taken: each rank writes its share from copies."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from atomrl.models.loading import model_weights, own_memory, save_settings
from atomrl.models.scalar import ScalarModel, scalar_settings
from atomrl.training.base import BaseBackend
from atomrl.training.collective import Collective
from atomrl.training.optimizer import whole
from atomrl.training.role_models import role_prefix

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
