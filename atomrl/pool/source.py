"""Groups for training out of a pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from atomrl.loop.groups import MAX_ROUNDS, Groups, is_accepted
from atomrl.loop.report import Stopwatch
from atomrl.pool.errors import PoolEmpty
from atomrl.pool.store import Held, RolloutPool
from atomrl.protocols import Algorithm
from atomrl.tracking.checkpoints import step_folders
from atomrl.types import Segment, Trajectory

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
