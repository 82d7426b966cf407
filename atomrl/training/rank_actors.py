"""The ranks of a trainer in Ray actors, called from the process of the run."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from atomrl.cluster.ray_cluster import START_S, Actor, ActorDied, RayCluster
from atomrl.config import RankedConfig
from atomrl.training.group import RankLost
from atomrl.training.ranks import Build, RankedBackend, follow_launcher
from atomrl.training.remote import RemoteBackend, ServedBackend
from atomrl.weights.collective import open_store

_LAST_WORDS_S = 15.0


class RankHost(ServedBackend):
    """What the actor of a rank holds: rank 0's has the back end that the run calls, the others follow it."""

    def __init__(self) -> None:
        """Nothing is built before the ranks know each other."""

    def meet_at(self, host: str) -> int:
        """Open the store where the ranks meet. Returns its port."""
        self.store, port = open_store(host, timedelta(seconds=START_S))
        return port

    def begin(self, place: dict[str, str], build: Build, settings: RankedConfig, device: str, tokenizer: Any) -> None:
        """Be a rank: of rank 0 until its back end is built, of the others until rank 0 ends them.

        Args:
            place: environment variables that torchrun would set.
            build, settings, device, tokenizer: as of `RankedBackend`; the device may be `auto`.
        """
        os.environ.update(place)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if place["RANK"] == "0":
            super().__init__(partial(RankedBackend, build, settings, device, tokenizer))
        else:
            follow_launcher(settings, device)


class RankActors(RemoteBackend):
    """A `TrainingBackend` on several ranks, each a Ray actor of the role `trainer`.

    They are the ranks that a launcher would start: same group, same numbers. Where one is lost, a new group goes on
    from a checkpoint (`RankLost`).

    Args:
        build, settings, device, tokenizer: as of `RankedBackend`.
        cluster: where they run.
    """

    def __init__(self, build: Build, settings: RankedConfig, device: str, tokenizer: Any, cluster: RayCluster) -> None:
        assert settings.ranks is not None, "the cluster has so many places"
        self.cluster, self.apart = cluster, {}
        self.actors = [cluster.start("trainer", rank, RankHost) for rank in range(settings.ranks)]
        self.trainer = self.actors[0]
        for actor in self.actors:
            with self._named(actor):
                cluster.know(actor)
        places = self._places()
        asked = [
            cluster.submit(actor, "begin", place, build, settings, device, tokenizer)
            for actor, place in zip(self.actors, places, strict=True)
        ]
        first = self._first_to_end(asked)
        with self._named(self.actors[first]):
            cluster.get(self.actors[first], asked[first], START_S)

    def _first_to_end(self, asked: Sequence[Any]) -> int:
        """The rank that has begun, which is rank 0, or with whose error it ends: ranks would wait for one that is gone.

        Raises:
            TimeoutError: there is none.
        """
        ready: list[Any] = []
        # Rank 0 says more of why another ended, where they have met.
        for waiting, patience_s in ((asked, START_S), (asked[:1], _LAST_WORDS_S)):
            if asked[0] not in ready:
                with self.cluster.watch.inside(patience_s):
                    ready = self.cluster.ray.wait(waiting, timeout=patience_s)[0] or ready
        if not ready:
            raise TimeoutError(self.cluster.silent(self.actors, START_S))
        return asked.index(ready[0])

    def _places(self) -> Sequence[dict[str, str]]:
        """What a launcher would tell each rank."""
        machines = [actor.node.name for actor in self.actors]
        host = "127.0.0.1" if len(set(machines)) == 1 else self.trainer.node.address
        port = self.cluster.call(self.trainer, "meet_at", host)
        return [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(machines)),
                "LOCAL_RANK": str(machines[:rank].count(machine)),
                "LOCAL_WORLD_SIZE": str(machines.count(machine)),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
            }
            for rank, machine in enumerate(machines)
        ]

    @contextmanager
    def _named(self, actor: Actor) -> Iterator[None]:
        """Raise `RankLost` where a rank's process is gone."""
        try:
            with super()._named(actor):
                yield
        except ActorDied as error:
            raise RankLost(str(error)) from error

    def close(self) -> None:
        """End the ranks, rank 0 first: the others wait for it."""
        for actor in self.actors:
            self.cluster.end(actor)
