"""Groups for training out of a pool."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from atomrl.common.files import new_folder
from atomrl.protocols import Algorithm, RolloutEngine, TrainingBackend, WeightUpdate
from atomrl.tracking.checkpoints import disk_full_named, step_folders
from atomrl.tracking.run_directory import PUBLISHED_WEIGHTS
from atomrl.trainer.pool_codec import PoolEmpty
from atomrl.trainer.pool_store import Held, RolloutPool
from atomrl.trainer.report import Stopwatch
from atomrl.trainer.sources import MAX_ROUNDS, Groups, is_accepted
from atomrl.types import Segment, Trajectory
from atomrl.weight_sync import ReadBack, checked_update
from atomrl.weight_sync.channels import FileReference, write_update
from atomrl.weight_sync.transfer import compare, device_hash, fetch_hashes

# --------------------------------------------------------------------------------------------------------------------
# A run's newest weights as files, which producers in other processes read.

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


log = logging.getLogger(__name__)
FIRST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.5
"""Between two looks into a pool that has nothing for this step."""
REPORTED = ("groups", "duplicates", "evicted", "expired", "stale", "returned")
"""Counts of a pool that are metrics."""


class PoolSource:
    """A `GroupSource` that takes from a pool, and waits where it has too little.

    What a step was trained on is finished when a checkpoint has the step. A run that goes on from a checkpoint gets the
    same groups for the same steps again.

    Args:
        pool: the pool, which is closed with the source.
        reader: the run's name in it (`RolloutPool.start_run`).
        algorithm: refuses groups, in whose place others are taken.
        checkpoints: the folder of the run's checkpoints.
        done: steps that the run has done, as the checkpoint that it goes on from has them.
    """

    def __init__(self, pool: RolloutPool, reader: str, algorithm: Algorithm, checkpoints: Path, done: int) -> None:
        self.pool, self.reader, self.algorithm, self.checkpoints = pool, reader, algorithm, checkpoints
        self._taken: dict[int, int] = {}
        """Step -> how many groups, of steps that are not finished."""
        self._metrics: dict[str, float] = {}
        pool.finish(reader, done)

    def collect(self, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
        """`groups` groups that the algorithm accepts, as far as they can be had; those of the pool that this step was
        given before a restart first.

        Raises:
            PoolEmpty: no group that fits came within `pool.timeout_s`.
            LeaseLost: groups that were trained on have gone to another trainer.
        """
        with watch("pool"):
            self._finish()
            held, accepted, refused = self.pool.held(self.reader, step), Groups(), Groups()
            names: set[str] = set()
            taken = list[Held]()
            while True:
                for item in held:
                    group = item.group
                    if group[0].prompt_id in names:  # a group of its own: drawn again, or by another run
                        group = [replace(one, prompt_id=f"{one.prompt_id}#{item.group_id}") for one in group]
                    names.add(group[0].prompt_id)
                    # Nothing is learned from a group without a token of the model: its episodes failed at their start.
                    kept = bool(written(group)) and is_accepted(self.algorithm, group)
                    (accepted if kept else refused).append(group)
                taken += held
                if len(accepted) >= groups or len(taken) >= MAX_ROUNDS * groups:
                    break
                held = self._wait_for(groups - len(accepted), step)
        self._taken[step] = len(taken)
        if len(accepted) < groups:
            log.warning(
                "step %d: %s accepted %d of %d groups, and %d were wanted: the step goes on with those",
                step, self.algorithm.name, len(accepted), len(taken), groups,
            )  # fmt: skip
        self._note(taken, step)
        return accepted, refused

    def _wait_for(self, count: int, step: int) -> list[Held]:
        """Up to `count` groups, at least one."""
        limit, wait, started = self.pool.settings.timeout_s, FIRST_WAIT_S, time.monotonic()
        while not (held := self.pool.claim(self.reader, step, count, version=step - 1)):
            if time.monotonic() - started > limit:
                there = self.pool.counts()["groups"]
                reasons = self.pool.why_not(self.reader, step, step - 1)
                said = "; ".join(f"{number} {reason}" for reason, number in reasons.items())
                raise PoolEmpty(
                    f"step {step} waited for pool.timeout_s={limit:g} seconds, and the rollout pool {self.pool.path} "
                    f"has nothing for it: {there} groups{f' ({said})' if said else ''}. Fill it with `atomrl pool fill "
                    "CONFIG`, and go on with --resume"
                )
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
        return held

    def _finish(self) -> None:
        """Let go of what the newest checkpoint has."""
        saved = max((step for step, _ in step_folders(self.checkpoints)), default=0)
        done = [step for step in self._taken if step <= saved]
        if done:
            self.pool.finish(self.reader, saved, expected=sum(self._taken.pop(step) for step in done))

    def _note(self, taken: list[Held], step: int) -> None:
        drawn = [[part.policy_version for part in written(held.group)] for held in taken]
        known = [[version for version in versions if version is not None] for versions in drawn]
        behind = [step - 1 - min(versions) for versions in known if versions] or [0]
        counts = self.pool.counts()
        self._metrics = {f"pool/{name}": float(counts[name]) for name in REPORTED} | {
            "pool/staleness_mean": fmean(behind),
            "pool/staleness_max": float(max(behind)),
            "pool/reused": sum(held.uses > 0 for held in taken) / max(1, len(taken)),
        }

    def quiet(self) -> AbstractContextManager[None]:
        """Others draw, by engines of their own."""
        return nullcontext()

    def state(self) -> tuple[int, list[tuple[int, int]]]:
        """Nothing: the pool itself knows which groups a step was given."""
        return 0, []

    def metrics(self) -> dict[str, float]:
        """How stale the groups of the last step were, which share was trained on before, how many groups the pool has,
        and how many were lost on which way since it was made."""
        return self._metrics

    def close(self) -> None:
        """Let go of what the last checkpoint has, and of the pool."""
        self._finish()
        self.pool.close()


def written(group: Sequence[Trajectory]) -> list[Segment]:
    """The parts of a group that the model wrote."""
    return [part for one in group for part in one.segments if part.origin == "model" and part.token_ids]
