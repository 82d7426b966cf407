"""Where the groups of a step come from."""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

from atomrl.data.processor import DataProcessor
from atomrl.data.stream import PromptStream
from atomrl.loop.report import Stopwatch
from atomrl.protocols import Algorithm, RewardComputer, RolloutEngine
from atomrl.rollout.generate import generate
from atomrl.types import SamplingParams, Trajectory, by_group

log = logging.getLogger(__name__)
Groups = list[list[Trajectory]]
MAX_ROUNDS = 20
"""Of a step's rollouts: each draws as many groups as are still missing."""


class GroupSource(Protocol):
    """Where the groups of a step come from: scored trajectories, those of a prompt together."""

    def collect(self, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
        """The groups of a step.

        Args:
            groups: how many are wanted; there may be fewer, also none.
            step: number of the step, from 1.
            watch: takes the time of each phase.

        Returns:
            Those that are trained on, and those that the algorithm refused on the way.
        """

    def quiet(self) -> AbstractContextManager[None]:
        """A time in which the engine, if there is one, draws nothing for the source: for evaluation."""

    def state(self) -> tuple[int, list[tuple[int, int]]]:
        """What a checkpoint has to remember: the position in the stream of prompts; and position and step of each group
        before it that is still to be trained on."""

    def metrics(self) -> dict[str, float]:
        """What there is to say of the last `collect` beside the groups themselves."""
        return {}

    def close(self) -> None:
        """End what the source started by itself."""


@dataclass(frozen=True, kw_only=True)
class EngineSource(GroupSource):
    """Groups that an engine draws while the trainer waits: all requests of a step, then all rewards."""

    engine: RolloutEngine
    algorithm: Algorithm
    stream: PromptStream
    processor: DataProcessor
    rewards: RewardComputer
    sampling: SamplingParams

    def collect(self, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
        """Rollouts and rewards of `groups` prompts; where the algorithm refuses groups, of as many others in their
        place.

        After `MAX_ROUNDS` the step goes on with what was found, with a warning (dynamic sampling: DAPO,
        arXiv:2503.14476, section 3.2).
        """
        accepted: Groups = []
        refused: Groups = []
        for _ in range(MAX_ROUNDS):
            for group in by_group(self.draw(groups - len(accepted), step, watch)).values():
                (accepted if is_accepted(self.algorithm, group) else refused).append(group)
            if len(accepted) >= groups:
                break
        else:
            log.warning(
                "step %d: %s accepted %d of %d groups, and %d were wanted: the step goes on with those",
                step, self.algorithm.name, len(accepted), len(accepted) + len(refused), groups,
            )  # fmt: skip
        return accepted, refused

    def draw(self, prompts: int, step: int, watch: Stopwatch) -> list[Trajectory]:
        """Trajectories of the next prompts, with their rewards and those of the algorithm's `extra_rollouts`."""
        batch = self.processor.to_prompts(self.stream.take(prompts))

        def scored(**changes: Any) -> list[Trajectory]:
            with watch("gen"):
                drawn = generate(self.engine, batch, replace(self.sampling, step=step, **changes))
            with watch("reward"):
                return list(self.rewards(drawn))

        trajectories = scored()
        if self.algorithm.extra_rollouts is None:
            return trajectories
        return with_baselines(trajectories, scored(**self.algorithm.extra_rollouts))

    def quiet(self) -> AbstractContextManager[None]:
        """The engine holds no request between two calls of `collect`."""
        return nullcontext()

    def state(self) -> tuple[int, list[tuple[int, int]]]:
        """The position of the stream; nothing is under way."""
        return self.stream.position, []

    def close(self) -> None:
        """Nothing was started."""


def with_baselines(trajectories: Sequence[Trajectory], extra: Sequence[Trajectory]) -> list[Trajectory]:
    """Each trajectory with the mean reward of the extra ones of its prompt."""
    groups = by_group([item for item in extra if item.earned is not None])
    baselines = {prompt_id: fmean(item.earned or 0.0 for item in group) for prompt_id, group in groups.items()}
    # NaN, not None: it was drawn, also where it earned nothing that counts.
    return [replace(item, baseline_reward=baselines.get(item.prompt_id, math.nan)) for item in trajectories]


def is_accepted(algorithm: Algorithm, group: Sequence[Trajectory]) -> bool:
    """Whether a group is trained on. What the model wrote no token of becomes no row: its reward is no signal."""
    written = [item for item in group if any(part.origin == "model" and part.token_ids for part in item.segments)]
    rewards = [item.earned for item in written if item.earned is not None]
    return algorithm.keeps_group is None or algorithm.keeps_group(rewards)
