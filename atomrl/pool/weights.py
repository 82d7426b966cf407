"""A run's newest weights as files, which producers in other processes read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from atomrl.files import new_folder
from atomrl.protocols import RolloutEngine, TrainingBackend, WeightUpdate
from atomrl.tracking.checkpoints import disk_full_named
from atomrl.tracking.run_directory import PUBLISHED_WEIGHTS
from atomrl.weights import ReadBack, checked_update
from atomrl.weights.files import FileReference, write_update
from atomrl.weights.hashing import device_hash, fetch_hashes
from atomrl.weights.transfer import compare

ABOUT = "about.json"
ROUNDED_TO = ("float32", "bfloat16")
"""What an engine may hold weights in."""
Hashes = dict[str, dict[str, int]]
"""Name -> dtype -> what `tensor_hash` says."""


class PublishedWeights:
    """The weights of a run in pool mode, as files in its folder (`weights.files.write_update`), with their version, the
    run's name in the pool, and the hash of every weight. Of a policy with adapters they are the adapters alone, and the
    hashes of what is beneath them too: producers start from the same base.

    Each version is a folder of its own, whole from the moment that it is there; the one before then goes.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / PUBLISHED_WEIGHTS
        self.base: Hashes = {}
        """Of the weights beneath the adapters."""

    def _newest(self) -> int:
        found = self.folder.iterdir() if self.folder.exists() else ()
        return max((int(each.name) for each in found if each.name.isdigit()), default=0)

    def write(self, trainer: TrainingBackend, version: int, run: str) -> None:
        """Publish the trainer's weights as they are now.

        Raises:
            OSError: the disk is full; the files from before stay.
        """
        update, names = trainer.weight_update(version, adapters_alone=bool(self.base)), dict[int, str]()
        # Of a tied weight one name is enough.
        tensors = [(name, t) for name, t in update.tensors if names.setdefault(t.data_ptr(), name) == name]
        update, hashes = replace(update, tensors=tensors), self.base.copy()
        there = {
            name: [device_hash(tensor, getattr(torch, dtype)) for dtype in ROUNDED_TO]
            for name, tensor in update.parts()
        }
        values = iter(fetch_hashes([each for found in there.values() for each in found]))
        hashes |= {name: {dtype: next(values) for dtype in ROUNDED_TO} for name in there}
        if update.adapters:
            update = replace(update, tensors=())
            self.base = {name: found for name, found in hashes.items() if ".lora_" not in name}
        new = self.folder / str(self._newest() + 1)
        with (
            disk_full_named(self.folder.parent, f"the weights of step {version} were not published"),
            new_folder(new) as aside,
        ):
            write_update(update, aside)
            about = {"run": run, "version": version, "hashes": hashes}
            (aside / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        for old in self.folder.iterdir():
            if old != new:
                shutil.rmtree(old.rename(self.folder / f".{old.name}"))  # who reads it sees at once that it has gone

    def read(self, current: tuple[str, int]) -> tuple[str, WeightUpdate, Hashes] | None:
        """The run's name in the pool, the weights, and their hashes; None where they are `current`, (name, version), or
        there are none."""
        while number := self._newest():
            folder = self.folder / str(number)
            try:
                about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
                if (about["run"], about["version"]) == current:
                    return None
                update = FileReference(about["version"], (folder,)).open()
            except FileNotFoundError:
                continue  # newer ones are there
            if folder.exists():
                return about["run"], update, about["hashes"]
        return None


class WeightFollower:
    """Brings the weights that a run publishes to an engine, and makes sure that they are there.

    Attributes:
        run: whose weights the engine has; empty as long as they are those it started with.
    """

    def __init__(self, engine: RolloutEngine, published: PublishedWeights) -> None:
        self.engine, self.published, self.run = engine, published, ""
        self.read_back = ReadBack(engine)

    def update(self) -> bool:
        """Give the engine what is new; whether there was something.

        Raises:
            ValueError: names or shapes do not fit the engine.
            WeightMismatch: the engine has another version or other weights than the trainer had; nothing that it draws
                may go into the pool.
        """
        found = self.published.read((self.run, self.engine.version))
        if found is None:
            return False
        run, update, hashes = found
        self.engine.update_weights(checked_update(update, self.engine.weight_shapes()))
        expected = {(n, getattr(torch, dtype)): value for n, each in hashes.items() for dtype, value in each.items()}
        compare(self.read_back(update.version), expected, update.version)
        self.run = run
        return True
