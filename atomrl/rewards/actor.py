"""Reward models in a process of their own, with its share of a GPU."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from atomrl.cluster.ray_cluster import Actor, RayCluster
from atomrl.cluster.watch import RayHangs
from atomrl.rewards.compute import Rewards
from atomrl.rewards.errors import NoScore, RewardStop
from atomrl.rewards.table import LOADING, AnyReward
from atomrl.types import Trajectory

log = logging.getLogger(__name__)
_DEATHS = 4
"""In a row, after which the run ends."""


class ServedRewards:
    """Rewards in a process of their own, as `RewardActor` calls them."""

    def __init__(self, rewards: Sequence[AnyReward]) -> None:
        self.rewards = rewards

    def score(self, index: int, trajectories: Sequence[Trajectory]) -> Any:
        return self.rewards[index](trajectories)


class RewardActor:
    """Rewards in the Ray actor of the role `reward`.

    When it dies it is started again and asked again. When it does not answer within `cluster.timeout_s`, what it was
    asked for has no score (`timeout`), and another takes its place.

    Args:
        rewards: that are called with trajectories; must be picklable.
        cluster: where it runs, and whose end is its end.
    """

    def __init__(self, rewards: Sequence[AnyReward], cluster: RayCluster) -> None:
        self.cluster, self.build = cluster, partial(ServedRewards, list(rewards))
        self._actor: Actor | None = None
        self._turn = threading.Lock()
        try:
            self.current()
        except cluster.died as error:
            reason = str(error).strip().partition("\n")[0]
            raise RewardStop(f"the actor of the reward model died while it started: {reason}") from error

    def current(self) -> Actor:
        """The actor, started where there is none."""
        if self._actor is None:
            actor = self.cluster.start("reward", 0, self.build)
            try:
                self.cluster.know(actor)
            except BaseException:
                self.cluster.end(actor)
                raise
            self._actor = actor
        return self._actor

    def score(self, index: int, trajectories: Sequence[Trajectory]) -> list[Any]:
        """What the reward of this index gives. One call at a time, so that none's time passes while others compute.

        Raises:
            RewardStop: the actor died again and again.
            Exception: what the reward raised.
        """
        with self._turn:
            return self._score(index, trajectories)

    def _score(self, index: int, trajectories: Sequence[Trajectory]) -> list[Any]:
        for _ in range(_DEATHS):
            actor = None
            try:
                actor = self.current()
                return cast(list[Any], self.cluster.call(actor, "score", index, trajectories))
            except RayHangs as error:
                raise RewardStop(str(error)) from error
            except TimeoutError as error:
                self._give_up(actor, str(error))
                return [NoScore("timeout", str(error))] * len(trajectories)
            except self.cluster.died as error:
                reason = str(error).strip().partition("\n")[0]
                self._give_up(actor, f"{actor or 'reward'} died: {reason}")
        raise RewardStop(f"the actor of the reward model died {_DEATHS} times in a row: {reason}")

    def _give_up(self, actor: Actor | None, reason: str) -> None:
        log.warning("%s; another one is started", reason)
        if actor is not None:
            self.cluster.end(actor)
            self._actor = None


def move_models(rewards: Rewards, cluster: RayCluster) -> None:
    """Let the rewards with weights of their own compute in the actor of the role `reward`. Their weights are not loaded
    yet."""
    places = [(part.scorers, source) for part in rewards.parts for source in part.scorers]
    models = [(scorers, source) for scorers, source in places if scorers[source].name in LOADING]
    actor = RewardActor([scorers[source].function for scorers, source in models], cluster)
    for index, (scorers, source) in enumerate(models):
        scorers[source] = replace(scorers[source], function=partial(actor.score, index))
