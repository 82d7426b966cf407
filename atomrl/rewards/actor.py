"""Reward models in a Ray actor with its own share of a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from atomrl.rewards.compute import Rewards
from atomrl.rewards.errors import NoScore, RewardStop
from atomrl.rewards.table import LOADING, AnyReward
from atomrl.types import Trajectory

if TYPE_CHECKING:
    from atomrl.cluster.ray_cluster import Actor, RayCluster

log = logging.getLogger(__name__)


_MAX_DEATHS = 4
"""Consecutive deaths of the actor after which the run ends."""


class ServedRewards:
    """Reward models inside the actor process."""

    def __init__(self, rewards: Sequence[AnyReward]) -> None:
        self.rewards = rewards

    def score(self, index: int, trajectories: Sequence[Trajectory]) -> Any:
        """Call the reward with this index."""
        return self.rewards[index](trajectories)


class RewardActor:
    """Client of the Ray actor of the role `reward`.

    An actor that dies is restarted and the request is repeated. If it does not answer within `cluster.timeout_s`, the
    completions of the request get no score (failure `timeout`) and the actor is replaced.

    Args:
        rewards: reward classes' instances or functions that take trajectories; must be picklable.
        cluster: the Ray cluster that the actor runs in.
    """

    def __init__(self, rewards: Sequence[AnyReward], cluster: RayCluster) -> None:
        self.cluster, self.build = cluster, partial(ServedRewards, list(rewards))
        self._actor: Actor | None = None
        self._lock = threading.Lock()
        try:
            self.current()
        except cluster.died as error:
            reason = str(error).strip().partition("\n")[0]
            raise RewardStop(f"the actor of the reward model died while it started: {reason}") from error

    def current(self) -> Actor:
        """Return the actor; start it if there is none."""
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
        """Score trajectories with the reward of this index.

        Calls are serialized, so that the time limit of one does not include the computation of another.

        Raises:
            RewardStop: the actor died `_MAX_DEATHS` times in a row.
            Exception: raised by the reward itself.
        """
        with self._lock:
            return self._score(index, trajectories)

    def _score(self, index: int, trajectories: Sequence[Trajectory]) -> list[Any]:
        from atomrl.cluster.watch import RayHangs  # imports PyTorch, which rewards alone do not need

        for _ in range(_MAX_DEATHS):
            actor = None
            try:
                actor = self.current()
                return cast(list[Any], self.cluster.call(actor, "score", index, trajectories))
            except RayHangs as error:
                raise RewardStop(str(error)) from error
            except TimeoutError as error:
                self._discard(actor, str(error))
                return [NoScore("timeout", str(error))] * len(trajectories)
            except self.cluster.died as error:
                reason = str(error).strip().partition("\n")[0]
                self._discard(actor, f"{actor or 'reward'} died: {reason}")
        raise RewardStop(f"the actor of the reward model died {_MAX_DEATHS} times in a row: {reason}")

    def _discard(self, actor: Actor | None, reason: str) -> None:
        """Kill the actor; the next call starts another one."""
        log.warning("%s; starting another one", reason)
        if actor is not None:
            self.cluster.end(actor)
            self._actor = None


def move_models(rewards: Rewards, cluster: RayCluster) -> None:
    """Run the reward models in the actor of the role `reward`. Call it before their weights are loaded."""
    places = [(part.scorers, source) for part in rewards.parts for source in part.scorers]
    models = [(scorers, source) for scorers, source in places if scorers[source].name in LOADING]
    actor = RewardActor([scorers[source].function for scorers, source in models], cluster)
    for index, (scorers, source) in enumerate(models):
        scorers[source] = replace(scorers[source], function=partial(actor.score, index), lock=nullcontext())
