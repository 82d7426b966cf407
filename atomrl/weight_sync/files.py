"""Weight updates as files, for any engine on any machine that shares the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from atomrl.common.files import new_folder
from atomrl.protocols import Adapter, WeightUpdate
from atomrl.weight_sync.object_store import adapters_of

WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_update(update: WeightUpdate, folder: Path) -> None:
    """Write an update in Hugging Face format: weights to `model.safetensors`, adapters as peft writes them.

    Args:
        update: weights, adapters or both.
        folder: an existing empty folder.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_update(WeightUpdate(1, [("model.norm.weight", torch.ones(3))]), Path(folder))
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['model.safetensors']
    """
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in update.tensors:
        # safetensors refuses tensors that share memory, such as a tied head.
        is_tied = tensor.data_ptr() in seen
        tensors[name] = tensor.detach().clone() if is_tied else tensor.detach().contiguous()
        seen.add(tensor.data_ptr())
    if tensors:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if update.adapters:
        write_adapters(update.adapters, folder)


def write_adapters(adapters: Mapping[str, Adapter], folder: Path) -> None:
    """Write adapters in peft's format; create the folder if needed.

    The scale is multiplied into B, because engines apply one scale (`lora_alpha / r`, here 1) to all layers.
    """
    folder.mkdir(exist_ok=True)
    (rank,) = {len(adapter.a) for adapter in adapters.values()}
    tensors = {
        f"{_PREFIX}{name.removesuffix('.weight')}.{part}.weight": tensor.detach().contiguous()
        for name, adapter in adapters.items()
        for part, tensor in (("lora_A", adapter.a), ("lora_B", adapter.b * adapter.scale))
    }
    save_file(tensors, folder / ADAPTERS, metadata={"format": "pt"})
    targets = sorted({name.split(".")[-2] for name in adapters})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none"}), encoding="utf-8")


class FileChannel:
    """Weights as safetensors files. They are written to a temporary folder and renamed, so readers never see partial
    files. Older updates are deleted.

    Args:
        folder: shared by all engines. Updates of an earlier channel in it are deleted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.version = folder, 0, 0
        self.published: tuple[Path, ...] = ()
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_others()

    def _remove_others(self) -> None:
        for path in [*self.folder.glob("weights-*"), *self.folder.glob(".weights-*")]:
            if path not in self.published:
                shutil.rmtree(path)

    def publish(self, update: WeightUpdate, readers: int) -> FileReference:
        """Write the update."""
        tensors = list(update.tensors)
        self.count += 1
        new = self.folder / f"weights-{update.version}-{self.count}"
        with new_folder(new) as aside:
            write_update(replace(update, tensors=tensors), aside)
        self.version, self.published = update.version, (new,) if tensors else (*self.published[:1], new)
        self._remove_others()
        return FileReference(self.version, (new,))

    def republish(self) -> FileReference:
        """Return a reference to the same files."""
        return FileReference(self.version, self.published)

    def close(self) -> None:
        """Delete the files."""
        self.published = ()
        self._remove_others()


@dataclass(frozen=True)
class FileReference:
    """Folders written by `write_update`, oldest first."""

    version: int
    folders: tuple[Path, ...]

    def open(self) -> WeightUpdate:
        """Load the weights of the oldest folder and the adapters of the newest."""
        weights, adapters = self.folders[0] / WEIGHTS, self.folders[-1] / ADAPTERS
        parts = load_file(adapters) if adapters.exists() else {}
        named = {}
        for name, tensor in parts.items():
            layer, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            named[f"{layer}.weight.{part}"] = tensor
        tensors = load_file(weights).items() if weights.exists() else ()
        return WeightUpdate(self.version, tensors, adapters_of(named))
