"""Weights by files: any engine, on any machine that sees the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from atomrl.files import new_folder
from atomrl.protocols import Adapter, WeightUpdate
from atomrl.weights.channels import adapters_of

WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_update(update: WeightUpdate, folder: Path) -> None:
    """Write an update as engines read it: `model.safetensors` under the published names, where it brings weights, and
    adapters as peft writes them, where it brings some.

    Args:
        update: to write.
        folder: is there, and empty.

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
        # A file may not have one memory under two names, as those of a tied head.
        again = tensor.data_ptr() in seen
        tensors[name] = tensor.detach().clone() if again else tensor.detach().contiguous()
        seen.add(tensor.data_ptr())
    if tensors:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if update.adapters:
        write_adapters(update.adapters, folder)


def write_adapters(adapters: Mapping[str, Adapter], folder: Path) -> None:
    """Write adapters as peft does, into a folder that is there or not. Their scale is in B, since engines know one
    scale for all."""
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
    """Safetensors files in a folder: written aside and renamed, so that what is there is whole, and removed when the
    next are there.

    Args:
        folder: that all engines see; what an earlier channel left there is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.version = folder, 0, 0
        self.kept: tuple[Path, ...] = ()
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_others()

    def _remove_others(self) -> None:
        for found in [*self.folder.glob("weights-*"), *self.folder.glob(".weights-*")]:
            if found not in self.kept:
                shutil.rmtree(found)

    def publish(self, update: WeightUpdate, readers: int) -> FileReference:
        """Write the update."""
        tensors = list(update.tensors)
        self.count += 1
        new = self.folder / f"weights-{update.version}-{self.count}"
        with new_folder(new) as aside:
            write_update(replace(update, tensors=tensors), aside)
        self.version, self.kept = update.version, (new,) if tensors else (*self.kept[:1], new)
        self._remove_others()
        return FileReference(self.version, (new,))

    def again(self) -> FileReference:
        """The same files."""
        return FileReference(self.version, self.kept)

    def close(self) -> None:
        """Remove the files."""
        self.kept = ()
        self._remove_others()


@dataclass(frozen=True)
class FileReference:
    """Folders that `write_update` has filled, oldest first."""

    version: int
    folders: tuple[Path, ...]

    def open(self) -> WeightUpdate:
        """The weights that the oldest folder has, and the adapters of the newest."""
        weights, adapters = self.folders[0] / WEIGHTS, self.folders[-1] / ADAPTERS
        parts = load_file(adapters) if adapters.exists() else {}
        named = {}
        for name, tensor in parts.items():
            layer, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            named[f"{layer}.weight.{part}"] = tensor
        tensors = load_file(weights).items() if weights.exists() else ()
        return WeightUpdate(self.version, tensors, adapters_of(named))
