"""`ReplicatedEngine`: data-parallel rollout over engines in Ray actors."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from atomrl.cluster.ray_cluster import Actor, ActorDied, RayCluster
from atomrl.cluster.watch import RayHangs
from atomrl.common.hangs import progress
from atomrl.engines.distributor import Distributor, Replica, ReplicaFailure
from atomrl.protocols import RolloutEngine, WeightHash, WeightUpdate
from atomrl.types import GenerationOutput, GenerationRequest
from atomrl.weight_sync import WeightMismatch
from atomrl.weight_sync.channel import TransferBroken, WeightReference
from atomrl.weight_sync.channels import open_channel
from atomrl.weight_sync.transfer import compare

_GATHER_S = 0.02
_TURN_S = 0.1
_CLOSE_S = 5.0


class ServedEngine:
    """The engine inside a Ray actor, as `ReplicatedEngine` calls it.

    Args:
        build: creates the engine; called in the actor.
    """

    def __init__(self, build: Callable[[], RolloutEngine]) -> None:
        self.engine = build()

    def about(self) -> tuple[tuple[bool, bool, bool], dict[str, tuple[int, ...]]]:
        """Return the engine's `seeded`, `exact` and `returns_candidates`, and the shapes of its weights."""
        engine = self.engine
        return (engine.seeded, engine.exact, engine.returns_candidates), dict(engine.weight_shapes())

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.engine.submit(requests)

    def poll(self) -> list[GenerationOutput]:
        """Return requests that finish within `_TURN_S`; then wait `_GATHER_S` for more, since an answer costs more than
        a token. The short turn lets other calls to the actor in between."""
        outputs, end = self.engine.poll(_TURN_S), time.monotonic() + _GATHER_S
        while outputs and (left_s := end - time.monotonic()) > 0 and (more := self.engine.poll(left_s)):
            outputs += more
        return outputs

    def abort(self, request_ids: Sequence[str]) -> list[GenerationOutput]:
        return self.engine.abort(request_ids)

    def set_state(self, name: str) -> None:
        """Call `pause`, `resume`, `sleep` or `wake`."""
        {
            "pause": self.engine.pause,
            "resume": self.engine.resume,
            "sleep": self.engine.sleep,
            "wake": self.engine.wake,
        }[name]()

    def update_weights(self, reference: WeightReference) -> int:
        """Load a published update and return the engine's version."""
        self.engine.update_weights(reference.open())
        return self.engine.version

    def weight_hashes(self) -> list[WeightHash]:
        return self.engine.weight_hashes()

    def close(self) -> None:
        self.engine.close()


@dataclass(eq=False)
class _Replica(Replica):
    """A Ray actor with an engine."""

    actor: Actor
    computing: dict[str, GenerationRequest] = field(default_factory=dict)
    """Requests that it has been sent and has not answered."""
    polling: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return str(self.actor)


class ReplicatedEngine(Distributor[_Replica]):
    """A `RolloutEngine` over replicas in Ray actors; `Distributor` says how requests are distributed.

    Args:
        build: creates an engine in the actor; must be picklable.
        cluster: starts the actors of the role `rollout`.
    """

    given_up = ActorDied

    def __init__(self, build: Callable[[], RolloutEngine], cluster: RayCluster) -> None:
        super().__init__(cluster.config.timeout_s)
        self.build, self.cluster = partial(ServedEngine, build), cluster
        self.channel = open_channel(cluster)
        self.version, self._paused, self._asleep = 0, False, False
        self.confirmed: dict[tuple[str, torch.dtype], int] | None = None
        """Hashes of the published weights, once they were verified; a restarted replica is compared with them."""
        self.replicas = [_Replica(self._start(index)) for index in range(cluster.wanted["rollout"].count)]
        self._on_all(self._wait_ready, restored=True)

    def _start(self, index: int) -> Actor:
        return self.cluster.start("rollout", index, self.build)

    async def _wait_ready(self, replica: _Replica) -> None:
        """Wait until the engine is loaded, and read its properties."""
        with self._failures():
            await asyncio.to_thread(self.cluster.know, replica.actor)
        kind, shapes = await self._ask(replica, "about")
        self.seeded, self.exact, self.returns_candidates = kind
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    async def _ask(self, replica: _Replica, method: str, *args: Any) -> Any:
        """Call a method of the actor's `ServedEngine`."""
        with self._failures():
            return await self.cluster.answer(replica.actor, self.cluster.submit(replica.actor, method, *args))

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except self.cluster.died as error:
            raise ReplicaFailure(str(error).strip().partition("\n")[0]) from error

    async def _restart(self, replica: _Replica) -> None:
        self.cluster.end(replica.actor)
        replica.actor = self._start(replica.actor.index)
        replica.retained = set()
        await self._wait_ready(replica)

    # ---- Requests ----

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Send requests to replicas, a group to one of them.

        Raises:
            ValueError: as for every engine. None of the requests is then held.
        """
        names = {name for replica in self.replicas for name in replica.held}
        for request in requests:
            if request.request_id in names:
                raise ValueError(f"request {request.request_id!r} already exists")
            names.add(request.request_id)
        parts = self._assign(requests)

        async def send_all() -> list[BaseException | None]:
            sends = [self._call(replica, partial(self._send, requests=part)) for replica, part in parts.items()]
            return await asyncio.gather(*sends, return_exceptions=True)

        results = self.run(send_all())
        if errors := [error for error in results if error is not None]:
            for (replica, part), error in zip(parts.items(), results, strict=True):
                for request in part if error is not None else ():
                    del replica.held[request.request_id]
            if all(isinstance(error, ValueError) for error in errors):  # else an abort may wait once more
                self.abort(request.request_id for request in requests)
            raise errors[0]

    async def _send(self, replica: _Replica, requests: Sequence[GenerationRequest]) -> None:
        await self._ask(replica, "submit", requests)
        replica.computing |= {request.request_id: request for request in requests}

    async def _resume_requests(self, replica: _Replica) -> None:
        await self._ask(replica, "submit", list(replica.computing.values()))

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Wait up to `wait_s` seconds until at least one replica has finished requests; return their outputs.

        Raises:
            ValueError: the model's logits are not finite.
            TimeoutError: a replica does not answer in time.
        """
        if self._paused or self._asleep or not any(replica.held for replica in self.replicas):
            return []
        self.run(self._start_polls())
        return [output for _, output in self._receive(time.monotonic() + wait_s)]

    async def _start_polls(self) -> None:
        for replica in self.replicas:
            if replica.computing and (replica.polling is None or replica.polling.done()):
                replica.polling = asyncio.create_task(self._poll(replica))

    async def _poll(self, replica: _Replica) -> None:
        """Fetch what a replica finishes, until it has finished all requests."""
        try:
            while replica.computing and not self._paused:
                generation = replica.generation
                try:
                    outputs = await self._ask(replica, "poll")
                except ReplicaFailure as error:
                    await self._repair(replica, generation, error)
                    continue
                progress()
                self._deliver(replica, outputs)
        except Exception as error:
            self.outputs.put((None, error))

    def _deliver(self, replica: _Replica, outputs: Iterable[GenerationOutput] | None) -> None:
        for output in outputs or ():
            if request := replica.computing.pop(output.request_id, None):
                replica.restarts = 0
                self.outputs.put((request, output))

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Abort requests (None: all) and return their partial outputs; also drop caches retained for these ids."""
        names = None if request_ids is None else set(request_ids)
        for replica in self.replicas:
            if retained := [name for name in replica.retained if names is None or name in names]:
                replica.retained.difference_update(retained)
                self.cluster.submit(replica.actor, "abort", retained)  # no need to wait
        held = [name for replica in self.replicas for name in replica.held if names is None or name in names]
        return [output for _, output in self._give_up(held)]

    async def _abort_requests(self, replica: _Replica, request_ids: Sequence[str]) -> None:
        self._deliver(replica, await self._call(replica, lambda each: self._ask(each, "abort", request_ids)))

    # ---- State and weights ----

    async def _set_paused(self, replica: _Replica, paused: bool) -> None:
        await self._ask(replica, "set_state", "pause" if paused else "resume")

    async def _set_asleep(self, replica: _Replica, asleep: bool) -> None:
        await self._ask(replica, "set_state", "sleep" if asleep else "wake")

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the published weights."""
        return self.shapes

    def update_weights(self, update: WeightUpdate) -> None:
        """Publish new weights once (`cluster.weight_transfer`), in the replicas' dtypes, and load them everywhere.

        Raises:
            WeightMismatch: a replica reports another version afterwards.
        """
        # Restarts a replica that has died before the others wait for it.
        self._on_all(lambda replica: self._ask(replica, "about"))
        dtypes = dict((self.confirmed or {}).keys())
        tensors = [(name, tensor.to(dtypes.get(name, tensor.dtype))) for name, tensor in update.tensors]
        self.version, self.confirmed = update.version, None
        reference = self.channel.publish(replace(update, tensors=tensors), len(self.replicas))
        self.updated = True

        async def load(replica: _Replica) -> None:
            try:
                await self._open(replica, reference)
            except TransferBroken:  # another one has died
                await self._open(replica, self.channel.republish())

        self._on_all(load, restored=True)

    async def _open(self, replica: _Replica, reference: WeightReference) -> None:
        """Have a replica load published weights."""
        if (version := await self._ask(replica, "update_weights", reference)) != self.version:
            raise WeightMismatch(f"{replica.name} has weights of version {version}, not {self.version}")

    async def _load(self, replica: _Replica) -> None:
        await self._open(replica, self.channel.republish())
        if self.confirmed is not None:
            hashes = await self._hashes(replica)
            compare([each._replace(holder=replica.name) for each in hashes], self.confirmed, self.version)

    async def _hashes(self, replica: _Replica) -> list[WeightHash]:
        hashes: list[WeightHash] = await self._ask(replica, "weight_hashes")
        return hashes

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of the weights in every replica."""
        hashes = super().weight_hashes()
        first = [each for each in hashes if each.holder == self.replicas[0].name]
        self.confirmed = {(each.name, each.dtype): each.value for each in first if each.value is not None}
        return hashes

    def close(self) -> None:
        """Close the engines (they remove files and servers), end the actors, and remove published weights."""
        self.loop.close(asyncio.sleep(0))  # first, or its tasks would restart the actors that end
        with suppress(RayHangs):
            asked = [self.cluster.submit(replica.actor, "close") for replica in self.replicas]
            with self.cluster.watch.inside(_CLOSE_S):
                self.cluster.ray.wait(asked, num_returns=len(asked), timeout=_CLOSE_S)
        for replica in self.replicas:
            self.cluster.end(replica.actor)
        self.channel.close()
