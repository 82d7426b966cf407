"""`ReplicatedEngine`: data-parallel rollout over engines in Ray actors."""

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
class _Replica:
    actor: Actor
    held: dict[str, GenerationRequest] = field(default_factory=dict)
    retained: set[str] = field(default_factory=set)
    """Ids of finished requests whose KV cache it may still have."""
    polling: Any = None
    """Reference to the answer of its running `poll` call."""
    polled_at: float = 0.0
    """Time of that call."""
    restarts: int = 0
    """Restarts since it last finished a request."""

    def finish(self, outputs: Iterable[GenerationOutput]) -> list[GenerationOutput]:
        """Remove finished requests from `held`; outputs of unknown ones are dropped."""
        known = []
        for output in outputs:
            if request := self.held.pop(output.request_id, None):
                known.append(output)
                if request.keep_cache:
                    self.retained.add(output.request_id)
        self.restarts = 0 if known else self.restarts
        return known


class ReplicatedEngine:
    """A `RolloutEngine` over replicas in Ray actors.

    A group goes to one replica, the one with the fewest tokens left to sample; a continuation goes to the replica that
    has its cache. A replica that dies is restarted with the current weights, and its requests are repeated with the
    same seeds.

    Args:
        build: creates an engine in the actor; must be picklable.
        cluster: starts the actors of the role `rollout`.
    """

    def __init__(self, build: Callable[[], RolloutEngine], cluster: RayCluster) -> None:
        self.build, self.cluster, self.ray = partial(ServedEngine, build), cluster, cluster.ray
        self.channel = open_channel(cluster)
        self.version, self.restarts = 0, 0
        self.published = False
        self.confirmed: dict[tuple[str, torch.dtype], int] | None = None
        """Hashes of the published weights, once they were verified; a restarted replica is compared with them."""
        self.paused = self.asleep = False
        self.finished: list[GenerationOutput] = []
        """Outputs that arrived during another call; the next `poll` returns them."""
        self.replicas = [_Replica(self._start(index)) for index in range(cluster.wanted["rollout"].count)]
        for replica in self.replicas:
            try:
                self._wait_ready(replica)
            except cluster.died as error:
                self._revive(replica, error)

    def _start(self, index: int) -> Actor:
        return self.cluster.start("rollout", index, self.build)

    def _wait_ready(self, replica: _Replica) -> None:
        """Wait until the engine is loaded, and read its properties."""
        self.cluster.know(replica.actor)
        kind, shapes = self.cluster.call(replica.actor, "about")
        self.seeded, self.exact, self.returns_candidates = kind
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def _call(self, replica: _Replica, method: str, *args: Any) -> Any:
        """Call an actor's method and return the result; if the actor dies, restart it and repeat the call."""
        return self._result(replica, method, args, self.cluster.submit(replica.actor, method, *args))

    def _result(self, replica: _Replica, method: str, args: Sequence[Any], answer: Any) -> Any:
        while True:
            try:
                return self.cluster.get(replica.actor, answer)
            except self.cluster.died as error:
                self._revive(replica, error)
                answer = self.cluster.submit(replica.actor, method, *args)

    def _revive(self, replica: _Replica, error: Exception) -> None:
        """Restart a replica with the current weights and its unfinished requests."""
        replica.restarts += 1
        self.restarts += 1
        reason = str(error).strip().partition("\n")[0]
        if replica.restarts > _RESTARTS:
            raise ActorDied(f"{replica.actor} died {replica.restarts} times in a row: {reason}") from error
        log.warning("%s died and is started again: %s", replica.actor, reason)
        began = time.monotonic()
        self.cluster.end(replica.actor)
        try:
            replica.actor, replica.polling, replica.retained = self._start(replica.actor.index), None, set()
            self._wait_ready(replica)
            if self.published:
                self._await_version(replica, self._load_again(replica))
            if self.confirmed is not None:
                hashes = self.cluster.call(replica.actor, "weight_hashes")
                compare(self._hashes_of(replica, hashes), self.confirmed, self.version)
            for state, name in ((self.paused, "pause"), (self.asleep, "sleep")):
                if state:
                    self.cluster.call(replica.actor, "set_state", name)
            self.cluster.call(replica.actor, "submit", list(replica.held.values()))
            log.warning("%s is back after %.1f s", replica.actor, time.monotonic() - began)
        except self.cluster.died as again:
            self._revive(replica, again)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Send requests to replicas, a group to one of them.

        Raises:
            ValueError: as for every engine. None of the requests is then held.
        """
        by_group = {request.group_id: replica for replica in self.replicas for request in replica.held.values()}
        by_turn = {name: replica for replica in self.replicas for name in replica.retained}
        names = {name for replica in self.replicas for name in replica.held}
        load = {
            id(replica): sum(request.sampling.max_completion_tokens for request in replica.held.values())
            for replica in self.replicas
        }
        parts: dict[int, list[GenerationRequest]] = {id(replica): [] for replica in self.replicas}
        for request in requests:
            if request.request_id in names:
                raise ValueError(f"request {request.request_id!r} is there already")
            owner = by_turn.get(request.continues or "") or by_group.get(request.group_id)
            owner = owner or min(self.replicas, key=lambda replica: load[id(replica)])
            by_group[request.group_id] = owner
            names.add(request.request_id)
            load[id(owner)] += request.sampling.max_completion_tokens
            parts[id(owner)].append(request)
        submitted: list[str] = []
        try:
            for replica in self.replicas:
                if part := parts[id(replica)]:
                    self._call(replica, "submit", part)
                    replica.held |= {request.request_id: request for request in part}
                    replica.retained -= {request.continues for request in part}
                    submitted += [request.request_id for request in part]
        except ValueError:
            self.abort(submitted)
            raise

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Wait up to `wait_s` seconds until at least one replica has finished requests; return their outputs.

        Raises:
            ValueError: the model's logits are not finite.
            TimeoutError: a replica does not answer in time.
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
                    replica.polling, replica.polled_at = self.cluster.submit(replica.actor, "poll"), time.monotonic()
            oldest = min(replica.polled_at for replica in working) + self.cluster.config.timeout_s
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
                answer = self.cluster.get(replica.actor, ready[0])
            except self.cluster.died as error:
                self._revive(replica, error)
                continue
            progress()
            if (outputs := replica.finish(answer)) or time.monotonic() >= end:
                return outputs
        return []

    def _check_silent(self, working: Sequence[_Replica]) -> None:
        """Raise TimeoutError if a replica has not answered in time, even if others have."""
        late = time.monotonic() - self.cluster.config.timeout_s
        overdue = [replica for replica in working if replica.polled_at <= late]
        if overdue:
            asked = [replica.polling for replica in overdue]
            _, silent = self.ray.wait(asked, num_returns=len(asked), timeout=0)
            if silent:
                raise TimeoutError(self.cluster.silent([r.actor for r in overdue if r.polling in silent]))

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Abort requests (None: all) and return their partial outputs; also drop caches retained for these ids."""
        names = None if request_ids is None else set(request_ids)
        outputs: list[GenerationOutput] = []
        for replica in self.replicas:
            running = [name for name in replica.held if names is None or name in names]
            if retained := [name for name in replica.retained if names is None or name in names]:
                replica.retained.difference_update(retained)
                self.cluster.submit(replica.actor, "abort", retained)  # no need to wait
            if running:
                outputs += self._abort(replica, running)
        outputs += [output for output in self.finished if names is None or output.request_id in names]
        self.finished = [output for output in self.finished if names is not None and output.request_id not in names]
        return outputs

    def _abort(self, replica: _Replica, names: Sequence[str]) -> list[GenerationOutput]:
        """Abort requests of one replica; what it had finished before goes to `finished`."""
        outputs: list[GenerationOutput] = self._call(replica, "abort", names)
        for output in outputs:
            replica.held.pop(output.request_id, None)
        if replica.polling is not None:  # it ended before the actor took the next call
            try:
                self.finished += replica.finish(self.cluster.get(replica.actor, replica.polling))
                replica.polling = None
            except self.cluster.died as error:
                self._revive(replica, error)
                outputs += self._call(replica, "abort", [name for name in names if name in replica.held])
        for name in names:
            replica.held.pop(name, None)
        return outputs

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all replicas concurrently and return the results."""
        asked = [(replica.actor, self.cluster.submit(replica.actor, method, *args)) for replica in self.replicas]
        self.cluster.wait(asked)
        pairs = zip(self.replicas, asked, strict=True)
        return [self._result(replica, method, args, answer) for replica, (_, answer) in pairs]

    def pause(self) -> None:
        """Stop sampling until `resume`; requests stay."""
        self._all("set_state", "pause")
        self.paused = True

    def resume(self) -> None:
        """Continue sampling."""
        self._all("set_state", "resume")
        self.paused = False

    def sleep(self) -> None:
        """Free the KV cache of every replica. Raises RuntimeError if requests are unfinished."""
        if held := sum(len(replica.held) for replica in self.replicas):  # or some replicas would sleep
            raise RuntimeError(f"the engine holds {held} requests; let them finish or abort them first")
        self._all("set_state", "sleep")
        self.asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        self._all("set_state", "wake")
        self.asleep = False

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the published weights."""
        return self.shapes

    def update_weights(self, update: WeightUpdate) -> None:
        """Publish new weights once (`cluster.weight_transfer`), in the replicas' dtypes, and load them everywhere.

        Raises:
            WeightMismatch: a replica reports another version afterwards.
        """
        self._all("about")  # restarts a replica that has died before the others wait for it
        dtypes = dict((self.confirmed or {}).keys())
        tensors = [(name, tensor.to(dtypes.get(name, tensor.dtype))) for name, tensor in update.tensors]
        self.version, self.confirmed = update.version, None
        reference = self.channel.publish(replace(update, tensors=tensors), len(self.replicas))
        self.published = True
        asked = [self.cluster.submit(each.actor, "update_weights", reference) for each in self.replicas]
        for replica, answer in zip(self.replicas, asked, strict=True):
            try:
                try:
                    self._await_version(replica, answer)
                except TransferBroken:  # another one has died
                    self._await_version(replica, self._load_again(replica))
            except self.cluster.died as error:
                self._revive(replica, error)

    def _load_again(self, replica: _Replica) -> Any:
        """Have one replica load the last published weights."""
        return self.cluster.submit(replica.actor, "update_weights", self.channel.republish())

    def _await_version(self, replica: _Replica, answer: Any) -> None:
        if (version := self.cluster.get(replica.actor, answer)) != self.version:
            raise WeightMismatch(f"{replica.actor} has weights of version {version}, not {self.version}")

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of the weights in every replica."""
        answers = self._all("weight_hashes")
        self.confirmed = {(f.name, f.dtype): f.value for f in answers[0] if f.value is not None}
        pairs = zip(self.replicas, answers, strict=True)
        return [each for replica, answer in pairs for each in self._hashes_of(replica, answer)]

    def _hashes_of(self, replica: _Replica, hashes: Iterable[WeightHash]) -> list[WeightHash]:
        return [hashed._replace(holder=str(replica.actor)) for hashed in hashes]

    def close(self) -> None:
        """Close the engines (they remove files and servers), end the actors, and remove published weights."""
        with suppress(RayHangs):
            asked = [self.cluster.submit(replica.actor, "close") for replica in self.replicas]
            with self.cluster.watch.inside(_CLOSE_S):
                self.ray.wait(asked, num_returns=len(asked), timeout=_CLOSE_S)
        for replica in self.replicas:
            self.cluster.end(replica.actor)
        self.channel.close()
