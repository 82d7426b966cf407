"""Checkpoints of several ranks, written in the background by PyTorch's distributed checkpoint (DCP).

Each rank copies its share, and a thread writes the copies during the next step. The files are safetensors whose headers
have each shard's offsets, so nothing is unpickled.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from atomrl.backends.base import BaseBackend
from atomrl.backends.collective import Collective
from atomrl.backends.optimizer import full_tensor
from atomrl.backends.roles import role_prefix
from atomrl.models.loading import model_weights, own_memory, save_settings
from atomrl.models.scalar import ScalarModel, scalar_settings
from atomrl.tracking.checkpoint_format import random_file

PART_BYTES = 2 * 10**9
"""Maximum size of a model file; a rank gathers this much of a model at a time."""
Job = Callable[[], None]


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
