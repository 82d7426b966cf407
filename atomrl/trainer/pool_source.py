"""Training from a rollout pool: published weights for producers, and the source of groups for the trainer.

A trainer writes its weights with `PublishedWeights`; each producer loads them with a `WeightFollower`, and fills the
pool; the trainer's `PoolSource` claims groups from it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
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
from atomrl.trainer.sources import Groups, RefillingSource
from atomrl.types import Segment, Trajectory
from atomrl.weight_sync import ReadBack, checked_update
from atomrl.weight_sync.channels import FileReference, write_update
from atomrl.weight_sync.transfer import compare, device_hash, fetch_hashes

# --------------------------------------------------------------------------------------------------------------------
# A run's newest weights as files, for producers in other processes.

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


# --------------------------------------------------------------------------------------------------------------------
# The source of groups.

FIRST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.5
"""Seconds between two queries of a pool that has no groups for this step; doubled each time."""
REPORTED = ("groups", "duplicates", "evicted", "expired", "stale", "returned")
"""Counts of a pool that are metrics."""


class PoolSource(RefillingSource):
    """A `GroupSource` that claims groups from a pool, and waits for producers if it has too few.

    Groups are finished (released) when a checkpoint has their step. A run resumed from a checkpoint gets the same
    groups for the same steps again.

    Args:
        pool: the pool; closed with the source.
        reader: the run's name in the pool (`RolloutPool.start_run`).
        algorithm: filters groups; others are claimed instead of those it rejects.
        checkpoints: folder of the run's checkpoints.
        done: number of steps in the checkpoint that the run resumes from.
    """

    in_rounds = False

    def __init__(self, pool: RolloutPool, reader: str, algorithm: Algorithm, checkpoints: Path, done: int) -> None:
        self.pool, self.reader, self.algorithm, self.checkpoints = pool, reader, algorithm, checkpoints
        self._claimed: dict[int, int] = {}
        """Step -> number of claimed groups, for steps that are not finished."""
        self._drawn: list[Held] = []
        """Claimed groups of the step that is being collected, and their prompt ids."""
        self._names: set[str] = set()
        self._metrics: dict[str, float] = {}
        pool.finish(reader, done)

    def collect(self, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
        """Claim groups until the algorithm accepts `groups` of them, or `MAX_ROUNDS` times as many were claimed.

        Groups that this step had claimed before a restart come first.

        Returns:
            Accepted and rejected groups.

        Raises:
            PoolEmpty: the pool had no suitable group for `pool.timeout_s`.
            LeaseLost: groups that were trained on have gone to another trainer.
        """
        with watch("pool"):
            self._finish()
            self._drawn, self._names = [], set()
            result = super().collect(groups, step, watch)
        self._claimed[step] = len(self._drawn)
        self._set_metrics(self._drawn, step)
        return result

    def draw(self, count: int, step: int, watch: Stopwatch) -> Iterator[list[Trajectory]]:
        """Claim up to `count` groups; those that this step had claimed before a restart come first."""
        held = ([] if self._drawn else self.pool.held(self.reader, step)) or self._wait_for(count, step)
        self._drawn.extend(held)
        for item in held:
            group = item.group
            if group[0].prompt_id in self._names:  # the same prompt sampled twice is another group
                group = [replace(one, prompt_id=f"{one.prompt_id}#{item.group_id}") for one in group]
            self._names.add(group[0].prompt_id)
            yield group

    def accepts(self, group: Sequence[Trajectory]) -> bool:
        """Return also False for a group without model tokens, all of whose episodes failed at the start."""
        return bool(model_segments(group)) and super().accepts(group)

    def _wait_for(self, count: int, step: int) -> list[Held]:
        """Claim up to `count` groups; wait until there is at least one."""
        limit, wait, started = self.pool.settings.timeout_s, FIRST_WAIT_S, time.monotonic()
        while not (held := self.pool.claim(self.reader, step, count, version=step - 1)):
            if time.monotonic() - started > limit:
                total = self.pool.counts()["groups"]
                numbers = self.pool.why_not(self.reader, step, step - 1)
                reasons = "; ".join(f"{number} {reason}" for reason, number in numbers.items())
                raise PoolEmpty(
                    f"step {step} waited for pool.timeout_s={limit:g} seconds, but rollout pool {self.pool.path} "
                    f"has no usable group: {total} groups{f' ({reasons})' if reasons else ''}. Fill it with `atomrl "
                    "pool fill CONFIG`, and continue with --resume"
                )
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
        return held

    def _finish(self) -> None:
        """Finish the steps that the newest checkpoint has."""
        saved = max((step for step, _ in step_folders(self.checkpoints)), default=0)
        done = [step for step in self._claimed if step <= saved]
        if done:
            self.pool.finish(self.reader, saved, expected=sum(self._claimed.pop(step) for step in done))

    def _set_metrics(self, claimed: list[Held], step: int) -> None:
        versions = [
            [part.policy_version for part in model_segments(held.group) if part.policy_version is not None]
            for held in claimed
        ]
        staleness = [step - 1 - min(group) for group in versions if group] or [0]
        counts = self.pool.counts()
        self._metrics = {f"pool/{name}": float(counts[name]) for name in REPORTED} | {
            "pool/staleness_mean": fmean(staleness),
            "pool/staleness_max": float(max(staleness)),
            "pool/reused": sum(held.uses > 0 for held in claimed) / max(1, len(claimed)),
        }

    def quiet(self) -> AbstractContextManager[None]:
        """Return a null context: producers sample with engines of their own."""
        return nullcontext()

    def state(self) -> tuple[int, list[tuple[int, int]]]:
        """Return an empty state: the pool itself stores which groups a step has claimed."""
        return 0, []

    def metrics(self) -> dict[str, float]:
        """Return `pool/...`: staleness and reuse of the last step's groups, size of the pool, and groups lost."""
        return self._metrics

    def close(self) -> None:
        """Finish the steps of the newest checkpoint, and close the pool."""
        self._finish()
        self.pool.close()


def model_segments(group: Sequence[Trajectory]) -> list[Segment]:
    """Return the segments of a group that the model generated, without empty ones."""
    return [part for one in group for part in one.segments if part.origin == "model" and part.token_ids]
