"""`ReplicatedEngine`: rollout engines in Ray actors, each with its share of the requests."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from atomrl.cluster.ray_cluster import Actor, ActorDied, RayCluster, RayHangs
from atomrl.common.processes import progress
from atomrl.protocols import RolloutEngine, WeightHash, WeightUpdate
from atomrl.types import GenerationOutput, GenerationRequest
from atomrl.weight_sync import WeightMismatch
from atomrl.weight_sync.channels import TransferBroken, WeightReference, open_channel
from atomrl.weight_sync.transfer import compare

log = logging.getLogger(__name__)
_GATHER_S = 0.02
_TURN_S = 0.1
_RESTARTS = 3
_CLOSE_S = 5.0


class ServedEngine:
    """An engine in a process of its own, as `ReplicatedEngine` calls it.

    Args:
        build: makes the engine, there.
    """

    def __init__(self, build: Callable[[], RolloutEngine]) -> None:
        self.engine = build()

    def about(self) -> tuple[tuple[bool, bool, bool], dict[str, tuple[int, ...]]]:
        """The engine's `seeded`, `exact` and `returns_candidates`; its weights' shapes."""
        engine = self.engine
        return (engine.seeded, engine.exact, engine.returns_candidates), dict(engine.weight_shapes())

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.engine.submit(requests)

    def poll(self) -> list[GenerationOutput]:
        """What finishes until some have, and a little longer: an answer costs more than a token. Nothing where that
        takes so long that another call would have to wait."""
        outputs, end = self.engine.poll(_TURN_S), time.monotonic() + _GATHER_S
        while outputs and (left_s := end - time.monotonic()) > 0 and (more := self.engine.poll(left_s)):
            outputs += more
        return outputs

    def abort(self, request_ids: Sequence[str]) -> list[GenerationOutput]:
        return self.engine.abort(request_ids)

    def set_state(self, name: str) -> None:
        """`pause`, `resume`, `sleep` or `wake`."""
        {
            "pause": self.engine.pause,
            "resume": self.engine.resume,
            "sleep": self.engine.sleep,
            "wake": self.engine.wake,
        }[name]()

    def update_weights(self, reference: WeightReference) -> int:
        """Take the update that lies there; the version that the engine then has."""
        self.engine.update_weights(reference.open())
        return self.engine.version

    def weight_hashes(self) -> list[WeightHash]:
        return self.engine.weight_hashes()

    def close(self) -> None:
        self.engine.close()


@dataclass(eq=False)
class _Replica:
    actor: Actor
    held: dict[str, GenerationRequest] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    """Ids of finished requests whose cache it may have kept."""
    polling: Any = None
    """What it was last asked to draw, until it answers."""
    asked: float = 0.0
    """When that was."""
    restarts: int = 0
    """Since it last finished a request."""

    def finish(self, outputs: Iterable[GenerationOutput]) -> list[GenerationOutput]:
        """The outputs of requests that it held."""
        found = []
        for output in outputs:
            if request := self.held.pop(output.request_id, None):
                found.append(output)
                if request.keep_cache:
                    self.kept.add(output.request_id)
        self.restarts = 0 if found else self.restarts
        return found


class ReplicatedEngine:
    """A `RolloutEngine` whose requests are drawn by several engines in Ray actors.

    A group goes whole to the replica that holds the fewest tokens to draw, and a request that continues another to the
    one that has drawn that. A replica that dies is started again with the current weights, and what it held is drawn
    again, from the same seeds.

    Args:
        build: makes an engine, in the actor; must be picklable.
        cluster: where the actors of the role `rollout` run.
    """

    def __init__(self, build: Callable[[], RolloutEngine], cluster: RayCluster) -> None:
        self.build, self.cluster, self.ray = partial(ServedEngine, build), cluster, cluster.ray
        self.channel = open_channel(cluster)
        self.version, self.restarts = 0, 0
        self.published = False
        self.confirmed: dict[tuple[str, torch.dtype], int] | None = None
        """Hashes of the weights that were published last, once they have been read back."""
        self.paused = self.asleep = False
        self.finished: list[GenerationOutput] = []
        """Outputs that came beside another answer; the next `poll` gives them."""
        self.replicas = [_Replica(self._start(index)) for index in range(cluster.wanted["rollout"].count)]
        for replica in self.replicas:
            try:
                self._know(replica)
            except cluster.died as error:
                self._revive(replica, error)

    def _start(self, index: int) -> Actor:
        return self.cluster.start("rollout", index, self.build)

    def _know(self, replica: _Replica) -> None:
        """Wait until its engine is there, and ask what it is."""
        self.cluster.know(replica.actor)
        kind, shapes = self.cluster.call(replica.actor, "about")
        self.seeded, self.exact, self.returns_candidates = kind
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def _call(self, replica: _Replica, method: str, *args: Any) -> Any:
        """An actor's method; done again by a new actor where it has died."""
        return self._answer(replica, method, args, self.cluster.submit(replica.actor, method, *args))

    def _answer(self, replica: _Replica, method: str, args: Sequence[Any], found: Any) -> Any:
        while True:
            try:
                return self.cluster.get(replica.actor, found)
            except self.cluster.died as error:
                self._revive(replica, error)
                found = self.cluster.submit(replica.actor, method, *args)

    def _revive(self, replica: _Replica, error: Exception) -> None:
        """Start a replica again, with the current weights and the requests that it held."""
        replica.restarts += 1
        self.restarts += 1
        reason = str(error).strip().partition("\n")[0]
        if replica.restarts > _RESTARTS:
            raise ActorDied(f"{replica.actor} died {replica.restarts} times in a row: {reason}") from error
        log.warning("%s died and is started again: %s", replica.actor, reason)
        began = time.monotonic()
        self.cluster.end(replica.actor)
        try:
            replica.actor, replica.polling, replica.kept = self._start(replica.actor.index), None, set()
            self._know(replica)
            if self.published:
                self._take(replica, self.cluster.submit(replica.actor, "update_weights", self.channel.again()))
            if self.confirmed is not None:
                found = self.cluster.call(replica.actor, "weight_hashes")
                compare(self._hashes_of(replica, found), self.confirmed, self.version)
            for state, name in ((self.paused, "pause"), (self.asleep, "sleep")):
                if state:
                    self.cluster.call(replica.actor, "set_state", name)
            self.cluster.call(replica.actor, "submit", list(replica.held.values()))
            log.warning("%s is back after %.1f s", replica.actor, time.monotonic() - began)
        except self.cluster.died as again:
            self._revive(replica, again)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests in, each group by one replica.

        Raises:
            ValueError: as in every engine. None of the requests is then taken in.
        """
        owners = {request.group_id: replica for replica in self.replicas for request in replica.held.values()}
        homes = {name: replica for replica in self.replicas for name in replica.kept}
        names = {name for replica in self.replicas for name in replica.held}
        load = {
            id(replica): sum(request.sampling.max_completion_tokens for request in replica.held.values())
            for replica in self.replicas
        }
        parts: dict[int, list[GenerationRequest]] = {id(replica): [] for replica in self.replicas}
        for request in requests:
            if request.request_id in names:
                raise ValueError(f"request {request.request_id!r} is there already")
            owner = homes.get(request.continues or "") or owners.get(request.group_id)
            owner = owner or min(self.replicas, key=lambda replica: load[id(replica)])
            owners[request.group_id] = owner
            names.add(request.request_id)
            load[id(owner)] += request.sampling.max_completion_tokens
            parts[id(owner)].append(request)
        taken: list[str] = []
        try:
            for replica in self.replicas:
                if part := parts[id(replica)]:
                    self._call(replica, "submit", part)
                    replica.held |= {request.request_id: request for request in part}
                    replica.kept -= {request.continues for request in part}
                    taken += [request.request_id for request in part]
        except ValueError:
            self.abort(taken)
            raise

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Wait until at least one replica has finished requests, at most `wait_s` seconds; those that have.

        Raises:
            ValueError: the model's logits are not finite.
            TimeoutError: no replica has answered in time.
        """
        if self.paused or self.asleep:
            return []
        if self.finished:
            outputs, self.finished = self.finished, []
            return outputs
        end = time.monotonic() + wait_s
        while working := [replica for replica in self.replicas if replica.held]:
            for replica in working:
                if replica.polling is None:
                    replica.polling, replica.asked = self.cluster.submit(replica.actor, "poll"), time.monotonic()
            oldest = min(replica.asked for replica in working) + self.cluster.config.timeout_s
            patience = max(0.0, min(oldest, end) - time.monotonic())
            with self.cluster.watch.inside(patience):
                ready, _ = self.ray.wait([replica.polling for replica in working], timeout=patience)
            self._check_silent(working)
            if not ready:
                if time.monotonic() >= end:
                    break
                continue
            (replica,) = [replica for replica in working if replica.polling == ready[0]]
            replica.polling = None
            try:
                found = self.cluster.get(replica.actor, ready[0])
            except self.cluster.died as error:
                self._revive(replica, error)
                continue
            progress()
            if (outputs := replica.finish(found)) or time.monotonic() >= end:
                return outputs
        return []

    def _check_silent(self, working: Sequence[_Replica]) -> None:
        """Raise TimeoutError of replicas that have not answered in time, whatever others do."""
        late = time.monotonic() - self.cluster.config.timeout_s
        overdue = [replica for replica in working if replica.asked <= late]
        if overdue:
            asked = [replica.polling for replica in overdue]
            _, silent = self.ray.wait(asked, num_returns=len(asked), timeout=0)
            if silent:
                raise TimeoutError(self.cluster.silent([r.actor for r in overdue if r.polling in silent]))

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Give up requests (None: all), and return what they have so far; forget what is kept of finished ones."""
        names = None if request_ids is None else set(request_ids)
        found: list[GenerationOutput] = []
        for replica in self.replicas:
            gone = [name for name in replica.held if names is None or name in names]
            if kept := [name for name in replica.kept if names is None or name in names]:
                replica.kept.difference_update(kept)
                self.cluster.submit(replica.actor, "abort", kept)  # nobody has to wait for it
            if gone:
                found += self._abort(replica, gone)
        found += [output for output in self.finished if names is None or output.request_id in names]
        self.finished = [output for output in self.finished if names is not None and output.request_id not in names]
        return found

    def _abort(self, replica: _Replica, names: Sequence[str]) -> list[GenerationOutput]:
        """Have a replica give up requests that it holds; what it finished before goes to `finished`."""
        found: list[GenerationOutput] = self._call(replica, "abort", names)
        for output in found:
            replica.held.pop(output.request_id, None)
        if replica.polling is not None:  # it ended before the actor took the next call
            try:
                self.finished += replica.finish(self.cluster.get(replica.actor, replica.polling))
                replica.polling = None
            except self.cluster.died as error:
                self._revive(replica, error)
                found += self._call(replica, "abort", [name for name in names if name in replica.held])
        for name in names:
            replica.held.pop(name, None)
        return found

    def _all(self, method: str, *args: Any) -> list[Any]:
        """A method of all replicas, which work at it at the same time."""
        asked = [(replica.actor, self.cluster.submit(replica.actor, method, *args)) for replica in self.replicas]
        self.cluster.wait(asked)
        return [
            self._answer(replica, method, args, found) for replica, (_, found) in zip(self.replicas, asked, strict=True)
        ]

    def pause(self) -> None:
        """Draw no token until `resume`; requests stay."""
        self._all("set_state", "pause")
        self.paused = True

    def resume(self) -> None:
        """Go on."""
        self._all("set_state", "resume")
        self.paused = False

    def sleep(self) -> None:
        """Free what can be made again, in every replica, or raise RuntimeError where there are requests."""
        if held := sum(len(replica.held) for replica in self.replicas):  # else those that hold none would sleep
            raise RuntimeError(f"the engine holds {held} requests; let them finish or abort them first")
        self._all("set_state", "sleep")
        self.asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        self._all("set_state", "wake")
        self.asleep = False

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every weight that an update may bring."""
        return self.shapes

    def update_weights(self, update: WeightUpdate) -> None:
        """Bring new weights to all replicas, by the way of `cluster.weight_transfer`, rounded as they round them.

        Raises:
            WeightMismatch: a replica has another version afterwards.
        """
        self._all("about")  # one that has died meanwhile starts again before the others wait for it
        dtypes = dict((self.confirmed or {}).keys())
        tensors = [(name, tensor.to(dtypes.get(name, tensor.dtype))) for name, tensor in update.tensors]
        self.version, self.confirmed = update.version, None
        reference = self.channel.publish(replace(update, tensors=tensors), len(self.replicas))
        self.published = True
        asked = [self.cluster.submit(each.actor, "update_weights", reference) for each in self.replicas]
        for replica, found in zip(self.replicas, asked, strict=True):
            try:
                try:
                    self._take(replica, found)
                except TransferBroken:  # another one has died
                    self._take(replica, self.cluster.submit(replica.actor, "update_weights", self.channel.again()))
            except self.cluster.died as error:
                self._revive(replica, error)

    def _take(self, replica: _Replica, found: Any) -> None:
        if (version := self.cluster.get(replica.actor, found)) != self.version:
            raise WeightMismatch(f"{replica.actor} has weights of version {version}, not {self.version}")

    def weight_hashes(self) -> list[WeightHash]:
        """Of every replica."""
        answers = self._all("weight_hashes")
        self.confirmed = {(f.name, f.dtype): f.value for f in answers[0] if f.value is not None}
        pairs = zip(self.replicas, answers, strict=True)
        return [found for replica, answer in pairs for found in self._hashes_of(replica, answer)]

    def _hashes_of(self, replica: _Replica, found: Iterable[WeightHash]) -> list[WeightHash]:
        return [hashed._replace(holder=str(replica.actor)) for hashed in found]

    def close(self) -> None:
        """Have the engines free what they hold, such as files and servers; end the actors, and remove the weights on
        their way to them."""
        with suppress(RayHangs):
            asked = [self.cluster.submit(replica.actor, "close") for replica in self.replicas]
            with self.cluster.watch.inside(_CLOSE_S):
                self.ray.wait(asked, num_returns=len(asked), timeout=_CLOSE_S)
        for replica in self.replicas:
            self.cluster.end(replica.actor)
        self.channel.close()
