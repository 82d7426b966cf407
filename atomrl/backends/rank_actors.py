"""Back ends in Ray actors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from atomrl.backends.distributed import DistributedBackend
from atomrl.backends.group import START_S, RankLost, Ranks
from atomrl.backends.rank_group import RankGroup
from atomrl.backends.rank_worker import follow, reach_store
from atomrl.backends.ranks import Build, rank_device
from atomrl.backends.roles import RoleName
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.cluster.hosted import identity
from atomrl.cluster.ray_cluster import Actor, RayCluster
from atomrl.common.metrics import Metrics, merge
from atomrl.config import RankedConfig
from atomrl.models.process_memory import memory_metrics
from atomrl.protocols import Algorithm, ModelInput, TrainingBackend, WeightUpdate
from atomrl.weight_sync.broadcast import LOOPBACK, open_store

RANK_0_ERROR_S = 15.0
"""Seconds to wait for the error of rank 0 after another rank ended at the start."""


class ActorHandle:
    """Handle of a Ray actor with a `BackendInActor`.

    The death of an actor ends the run (`RankLost`), which can be resumed from its checkpoint.

    Args:
        cluster: the cluster of the actors.
        actors: the actor that is called, and those of the other ranks that follow it.
        store: store at which these ranks meet; open as long as this handle.
    """

    def __init__(self, cluster: RayCluster, actors: Sequence[Actor], store: Any = None) -> None:
        self.cluster, self.actors, self.store = cluster, actors, store

    def __str__(self) -> str:
        return str(self.actors[0])

    def wait_until_started(self) -> None:
        """Wait until the back end is built.

        Raises:
            RankLost: an actor died.
            TimeoutError: no actor has finished in time.
            Exception: the error of building it.
        """
        building, ready = [actor.making for actor in self.actors], list[Any]()
        # If another rank ended first, wait a little for rank 0: once the ranks have met, its error says more.
        for waiting, timeout_s in ((building, START_S), (building[:1], RANK_0_ERROR_S)):
            if building[0] not in ready:
                with self.cluster.watch.inside(timeout_s):
                    ready = self.cluster.ray.wait(waiting, timeout=timeout_s)[0] or ready
        if not ready:
            raise TimeoutError(self.cluster.silent(self.actors, START_S))
        first = self.actors[building.index(ready[0])]
        with self._naming(first):
            self.cluster.know(first)

    @contextmanager
    def _naming(self, actor: Actor) -> Iterator[None]:
        """Raise `RankLost` with the actor's name if its process has died."""
        try:
            yield
        except self.cluster.died as error:
            reason = str(error).strip().partition("\n")[0]
            raise RankLost(f"{actor} died, the updates since the last checkpoint are lost: {reason}") from error

    def share(self, value: Any) -> Any:
        """Put the value into Ray's object store."""
        return self.cluster.put(value)

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of the actor's back end."""
        called = self.actors[0]
        answer = self.cluster.submit(called, method, *arguments)

        def wait() -> Any:
            with self._naming(called):
                return self.cluster.get(called, answer)

        return wait

    def close(self) -> None:
        """End the actors, rank 0 first, because the others wait for it."""
        for actor in self.actors:
            self.cluster.end(actor)


class BackendInActor:
    """A back end in an actor: its methods, with results that are sent to the process of the run.

    Args:
        build: creates the back end, in the actor.
    """

    def __init__(self, build: Callable[[], TrainingBackend]) -> None:
        self.backend = build()
        self.saved: Callable[[], None] = lambda: None
        """Waits until the last checkpoint is written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forward_only(self, rows: RowBatch, needs: frozenset[ModelInput]) -> SimpleNamespace:
        """Return the computed fields only; the caller has the rest of the rows."""
        computed = self.backend.forward_only(rows, needs)
        return SimpleNamespace(**{name: getattr(computed, name) for name in needs})

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """Take one optimizer step; add the memory metrics of this process."""
        return merge([self.backend.train_step(batch, algorithm), memory_metrics()])

    def weight_update(self, version: int, adapters_alone: bool) -> WeightUpdate:
        """Return the weights for an engine; tied weights are one object, so that pickling keeps them tied."""
        update, by_address = self.backend.weight_update(version, adapters_alone), dict[int, Tensor]()
        tensors = [(name, by_address.setdefault(t.data_ptr(), t)) for name, t in update.tensors]
        return replace(update, tensors=tensors, outline=None)

    def save(self, folder: Path) -> None:
        """Start writing a checkpoint; `saved` waits for it."""
        self.saved = self.backend.save(folder) or (lambda: None)


def start_actors(
    build: Callable[..., TrainingBackend], cluster: RayCluster, apart: Sequence[RoleName] = ()
) -> DistributedBackend:
    """Create a back end in a Ray actor, and models of some roles in actors of their own.

    Args:
        build: creates a back end of one process with the models of `roles`, in the actor; must be picklable.
        cluster: starts the actors.
        apart: roles with their own actor.
    """
    others = [role for role in get_args(RoleName) if role not in apart]

    def start(name: Any, roles: Sequence[RoleName]) -> ActorHandle:
        return ActorHandle(cluster, [cluster.start(name, 0, partial(BackendInActor, partial(build, roles=roles)))])

    trainer = start("trainer", others)
    handles = {role: start(role, [role]) for role in apart}
    for handle in (trainer, *handles.values()):
        handle.wait_until_started()
    return DistributedBackend(trainer, handles)


def start_rank_actors(
    build: Build, settings: RankedConfig, device: str, tokenizer: Any, cluster: RayCluster
) -> DistributedBackend:
    """Create a back end on several ranks, each a Ray actor of the role `trainer`.

    The group is the same as that of `start_ranks`, with the same results. If a rank is lost (`RankLost`), a new group
    can resume from a checkpoint.

    Args:
        build, settings, tokenizer: arguments of `start_ranks`.
        device: `model.device`, may be `auto`.
        cluster: starts the actors.
    """
    assert settings.ranks is not None, "the cluster needs a number of ranks"
    nodes = cluster.nodes()
    host = LOOPBACK if len(nodes) == 1 else nodes[0].address
    store, port = open_store(host, timedelta(seconds=START_S))
    make = partial(_rank_in_actor, host, port, settings.ranks, device, settings.timeout_s, build, tokenizer)
    actors = [cluster.start("trainer", rank, partial(make, rank)) for rank in range(settings.ranks)]
    handle = ActorHandle(cluster, actors, store)
    handle.wait_until_started()
    return DistributedBackend(handle)


def _rank_in_actor(
    host: str, port: int, world: int, device: str, timeout_s: float, build: Build, tokenizer: Any, rank: int
) -> BackendInActor | None:
    """Join the group of ranks in an actor: rank 0 returns its back end, the others follow it until it ends."""
    store = reach_store(host, port)
    store.set(f"machine/{rank}", identity(os.getpid())[0])
    machines = [store.get(f"machine/{other}") for other in range(world)]  # waits for all
    local = machines[:rank].count(machines[rank]), machines.count(machines[rank])
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = Ranks(store, rank, world, rank_device(device, local[0]), timeout_s, local)
    if rank:
        follow(ranks)
        return None
    return BackendInActor(lambda: DistributedBackend(RankGroup(lambda _: ranks, build, tokenizer)))
