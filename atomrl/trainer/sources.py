"""Sources of the groups of a step: what every source has, and `EngineSource`, which samples between updates."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar, Protocol

from atomrl.data.curriculum import Curriculum, Draw
from atomrl.data.processor import DataProcessor
from atomrl.data.rows import by_group
from atomrl.engines.generation import generate
from atomrl.protocols import Algorithm, RewardComputer, RolloutEngine
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.types import SamplingParams, Trajectory

log = logging.getLogger(__name__)

Groups = list[list[Trajectory]]
MAX_ROUNDS = 20
"""Maximum number of rollout rounds in a step. Each samples as many groups as are still missing."""


def is_exhausted(wanted: int, judged: int, rounds: int | None = None) -> bool:
    """Return True if a step stops replacing the groups that the algorithm rejects: after `MAX_ROUNDS` rounds.

    Args:
        wanted: groups of the step.
        judged: groups that were accepted or rejected.
        rounds: of sampling; None for a source without rounds, where `wanted` judged groups count as one.
    """
    return (judged // wanted if rounds is None else rounds) >= MAX_ROUNDS


class GroupSource(Protocol):
    """Source of the groups of a step. A group is the scored trajectories of one prompt."""

    algorithm: Algorithm
    curriculum: Curriculum
    """Chooses the prompts, and the groups to train on. Its state is saved with each checkpoint."""

    def collect(self, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
        """Collect the groups of a step.

        Args:
            groups: number of groups to collect; the result may have fewer, or none.
            step: number of the step, from 1.
            watch: measures the time of each phase.

        Returns:
            The groups to train on, and the groups that the curriculum rejected.
        """

    def accepts(self, group: Sequence[Trajectory]) -> bool:
        """Return whether a group is trained on."""
        return self.curriculum.accepts(group)

    def warn_if_short(self, step: int, accepted: int, rejected: int, wanted: int) -> None:
        """Warn if a step continues with fewer groups than wanted."""
        if accepted < wanted:
            text = "step %d: %s accepted %d of %d groups, but %d were requested%s: the step continues with fewer"
            why = " and the curriculum has no prompt left" if self.curriculum.is_empty else ""
            log.warning(text, step, self.algorithm.name, accepted, accepted + rejected, wanted, why)

    def quiet(self) -> AbstractContextManager[None]:
        """Context for evaluations: the engine, if there is one, samples nothing for the source."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the last `collect`."""
        return {}

    def close(self) -> None:
        """Stop threads that the source started."""


class RefillingSource(GroupSource):
    """Base class of sources that replace the groups which the curriculum rejects."""

    in_rounds: ClassVar[bool] = True
    """True: `draw` returns as many groups as requested, and each call is a round (`is_exhausted`)."""

    @abstractmethod
    def draw(self, count: int, step: int, watch: Stopwatch) -> Iterable[list[Trajectory]]:
        """Return up to `count` scored groups; none if the curriculum has no prompt left."""

    def collect(self, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
        """Draw groups until the curriculum accepts `groups` of them, or `is_exhausted`, with a warning.

        Returns:
            Accepted and rejected groups.
        """
        accepted, rejected, rounds = Groups(), Groups(), 0
        while len(accepted) < groups:
            if is_exhausted(groups, len(accepted) + len(rejected), rounds if self.in_rounds else None):
                break
            for group in self.draw(groups - len(accepted), step, watch):
                (accepted if self.accepts(group) else rejected).append(group)
                self.curriculum.observe(group)
            rounds += 1
            if self.curriculum.is_empty:
                break
        self.warn_if_short(step, len(accepted), len(rejected), groups)
        return accepted, rejected


@dataclass(frozen=True, kw_only=True)
class EngineSource(RefillingSource):
    """Groups that an engine samples while the trainer waits: all requests of a step, then all rewards."""

    engine: RolloutEngine
    algorithm: Algorithm
    curriculum: Curriculum
    processor: DataProcessor
    rewards: RewardComputer
    sampling: SamplingParams

    def draw(self, count: int, step: int, watch: Stopwatch) -> Groups:
        """Sample and score completions of the next prompts."""
        return self.sample(self.curriculum.take(count, step), step, watch)

    def sample(self, draws: Sequence[Draw], step: int, watch: Stopwatch) -> Groups:
        """Sample and score completions of prompts; with `extra_rollouts`, also their baseline rewards."""
        if not draws:
            return []
        batch = self.processor.to_prompts([(draw.prompt_id, draw.problem) for draw in draws])

        def scored(**changes: Any) -> list[Trajectory]:
            with watch("gen"):
                drawn = generate(self.engine, batch, replace(self.sampling, step=step, **changes))
            with watch("reward"):
                return list(self.rewards(drawn))

        trajectories = scored()
        if self.algorithm.extra_rollouts is not None:
            trajectories = with_baselines(trajectories, scored(**self.algorithm.extra_rollouts))
        return list(by_group(trajectories).values())

    def quiet(self) -> AbstractContextManager[None]:
        """The engine has no requests between two calls of `collect`."""
        return nullcontext()

    def close(self) -> None:
        """There is nothing to stop."""


def with_baselines(trajectories: Sequence[Trajectory], extra: Sequence[Trajectory]) -> list[Trajectory]:
    """Set each trajectory's `baseline_reward` to the mean reward of the extra completions of its prompt."""
    groups = by_group([item for item in extra if item.total_reward is not None])
    baselines = {prompt_id: fmean(item.total_reward or 0.0 for item in group) for prompt_id, group in groups.items()}
    # NaN, not None: extra completions were sampled, but none of them has a reward.
    return [replace(item, baseline_reward=baselines.get(item.prompt_id, math.nan)) for item in trajectories]
