"""Source of groups that claims them from a rollout pool."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from atomrl.data.curriculum import Curriculum
from atomrl.pool.errors import PoolEmpty
from atomrl.pool.store import Held, RolloutPool
from atomrl.protocols import Algorithm
from atomrl.tracking.checkpoints import step_folders
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.sources import Groups, RefillingSource
from atomrl.types import Segment, Trajectory

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
        algorithm: of the run.
        curriculum: accepts groups; others are claimed instead of those that it rejects.
        checkpoints: folder of the run's checkpoints.
        done: number of steps in the checkpoint that the run resumes from.
    """

    in_rounds = False

    def __init__(
        self,
        pool: RolloutPool,
        reader: str,
        algorithm: Algorithm,
        curriculum: Curriculum,
        checkpoints: Path,
        done: int,
    ) -> None:
        self.pool, self.reader, self.algorithm, self.curriculum = pool, reader, algorithm, curriculum
        self.checkpoints = checkpoints
        self._claimed: dict[int, int] = {}
        """Step -> number of claimed groups, for steps that are not finished."""
        self._drawn: list[Held] = []
        """Claimed groups of the step that is being collected, and their prompt ids."""
        self._names: set[str] = set()
        self._metrics: dict[str, float] = {}
        pool.finish(reader, done)

    def collect(self, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
        """Claim groups until the curriculum accepts `groups` of them, or `MAX_ROUNDS` times as many were claimed.

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
