"""A run's newest weights as files, for the producers of a rollout pool.

A trainer writes its weights with `PublishedWeights`; each producer loads them with a `WeightFollower`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from atomrl.common.files import new_folder
from atomrl.protocols import RolloutEngine, TrainingBackend, WeightUpdate
from atomrl.tracking.checkpoints import disk_full_named
from atomrl.tracking.run_directory import PUBLISHED_WEIGHTS
from atomrl.weight_sync import ReadBack, checked_update
from atomrl.weight_sync.files import FileReference, write_update
from atomrl.weight_sync.hashes import device_hash, fetch_hashes
from atomrl.weight_sync.transfer import compare

ABOUT = "about.json"

ENGINE_DTYPES = ("float32", "bfloat16")
"""Dtypes in which an engine may hold weights."""

Hashes = dict[str, dict[str, int]]
"""Name of a weight -> dtype -> its hash after rounding to it (`weight_sync.transfer.tensor_hash`)."""


class PublishedWeights:
    """The newest weights of a run as files in its folder, with their version and hashes.

    For a policy with adapters only the adapters are written, but the hashes of the base weights too, because producers
    load the same base model.

    Each version has a folder of its own, which appears complete (by renaming); then the previous one is deleted.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / PUBLISHED_WEIGHTS
        self.base: Hashes = {}
        """Hashes of the base weights under the adapters; empty before the first `write`, and without adapters."""

    def _newest(self) -> int:
        """Return the number of the newest folder; 0 if there is none."""
        folders = self.folder.iterdir() if self.folder.exists() else ()
        return max((int(folder.name) for folder in folders if folder.name.isdigit()), default=0)

    def write(self, trainer: TrainingBackend, version: int, run: str) -> None:
        """Publish the trainer's present weights.

        Args:
            version: their version.
            run: the run's name in the pool (`RolloutPool.start_run`).

        Raises:
            OSError: the disk is full; the previous files stay.
        """
        update, names = trainer.weight_update(version, adapters_alone=bool(self.base)), dict[int, str]()
        # Tied weights are written once.
        tensors = [(name, t) for name, t in update.tensors if names.setdefault(t.data_ptr(), name) == name]
        update, hashes = replace(update, tensors=tensors), self.base.copy()
        # Start all hashes on the device, then fetch them at once.
        pending = {
            name: [device_hash(tensor, getattr(torch, dtype)) for dtype in ENGINE_DTYPES]
            for name, tensor in update.parts()
        }
        values = iter(fetch_hashes([value for by_dtype in pending.values() for value in by_dtype]))
        hashes |= {name: {dtype: next(values) for dtype in ENGINE_DTYPES} for name in pending}
        if update.adapters:
            update = replace(update, tensors=())
            self.base = {name: by_dtype for name, by_dtype in hashes.items() if ".lora_" not in name}
        new = self.folder / str(self._newest() + 1)
        with (
            disk_full_named(self.folder.parent, f"the weights of step {version} were not published"),
            new_folder(new) as partial,
        ):
            write_update(update, partial)
            about = {"run": run, "version": version, "hashes": hashes}
            (partial / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        for old in self.folder.iterdir():
            if old != new:
                shutil.rmtree(old.rename(self.folder / f".{old.name}"))  # renamed first: readers see that it is gone

    def read(self, current: tuple[str, int]) -> tuple[str, WeightUpdate, Hashes] | None:
        """Return the run's name in the pool, its weights and their hashes; None if nothing new is published.

        Args:
            current: (run, version) of the weights that the reader has.
        """
        while number := self._newest():
            folder = self.folder / str(number)
            try:
                about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
                if (about["run"], about["version"]) == current:
                    return None
                update = FileReference(about["version"], (folder,)).open()
            except FileNotFoundError:
                continue  # deleted meanwhile, so there is a newer one
            if folder.exists():
                return about["run"], update, about["hashes"]
        return None


class WeightFollower:
    """Keeps an engine at the newest published weights of a run, and verifies them by their hashes.

    Attributes:
        run: the run whose weights the engine has; empty for the initial model.
    """

    def __init__(self, engine: RolloutEngine, published: PublishedWeights) -> None:
        self.engine, self.published, self.run = engine, published, ""
        self.read_back = ReadBack(engine)

    def update(self) -> bool:
        """Load the newest weights into the engine; return False if it already has them.

        Raises:
            ValueError: names or shapes do not match the engine's.
            WeightMismatch: the engine has another version or other weights than the trainer; its rollouts must not be
                written to the pool.
        """
        published = self.published.read((self.run, self.engine.version))
        if published is None:
            return False
        run, update, hashes = published
        self.engine.update_weights(checked_update(update, self.engine.weight_shapes()))
        expected = {
            (name, getattr(torch, dtype)): value
            for name, by_dtype in hashes.items()
            for dtype, value in by_dtype.items()
        }
        compare(self.read_back(update.version), expected, update.version)
        self.run = run
        return True
