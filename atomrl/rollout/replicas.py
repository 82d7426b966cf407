"""`ReplicatedEngine`: rollout engines in Ray actors, each with its share of the requests."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from atomrl.config import ClusterConfig
from atomrl.protocols import RolloutEngine, WeightHash, WeightUpdate
from atomrl.types import GenerationOutput, GenerationRequest
from atomrl.weights import WeightMismatch
from atomrl.weights.channels import TransferBroken, WeightReference
from atomrl.weights.transfer import compare
from atomrl.weights.ways import open_channel

log = logging.getLogger(__name__)
_GATHER_S = 0.02
_RESTARTS = 3
_START_S = 600.0


class EngineActor:
    """An engine in a process of its own, as a Ray actor.

    Args:
        build: makes the engine, there.
        threads: that it computes with.
    """

    def __init__(self, build: Callable[[], RolloutEngine], threads: int) -> None:
        torch.set_num_threads(threads)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # weights are only read
        self.engine = build()

    def about(self) -> tuple[int, tuple[bool, bool, bool], dict[str, tuple[int, ...]]]:
        """The process's id; the engine's `seeded`, `exact` and `returns_candidates`; its weights' shapes."""
        engine = self.engine
        return os.getpid(), (engine.seeded, engine.exact, engine.returns_candidates), dict(engine.weight_shapes())

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.engine.submit(requests)

    def poll(self) -> list[GenerationOutput]:
        """What finishes until some have, and a little longer: an answer costs more than a token."""
        outputs, end = self.engine.poll(), time.monotonic() + _GATHER_S
        while outputs and time.monotonic() < end and (more := self.engine.poll()):
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


@dataclass(eq=False)
class _Replica:
    index: int
    actor: Any
    pid: int = 0
    held: dict[str, GenerationRequest] = field(default_factory=dict)
    polling: Any = None
    restarts: int = 0
    """Since it last finished a request."""

    @property
    def name(self) -> str:
        return f"rollout replica {self.index} (pid {self.pid})"

    def own(self, hashes: Iterable[WeightHash]) -> list[WeightHash]:
        """Hashes with its name."""
        return [found._replace(holder=self.name) for found in hashes]

    def finish(self, outputs: Iterable[GenerationOutput]) -> list[GenerationOutput]:
        """The outputs of requests that it held."""
        found = [output for output in outputs if self.held.pop(output.request_id, None)]
        self.restarts = 0 if found else self.restarts
        return found


class ReplicatedEngine:
    """A `RolloutEngine` whose requests are drawn by several engines in Ray actors.

    A group goes whole to the replica that holds the fewest tokens to draw. A replica that dies is started again with
    the current weights, and what it held is drawn again, from the same seeds.

    Args:
        build: makes an engine, in the actor; must be picklable.
        cluster: the replicas, what each has of the cluster, and within which time it must answer once it has started.
            A cluster without an address is started on this machine, and ends with `close`.

    Raises:
        ImportError: Ray is not installed.
        PlacementError: the cluster has not the resources.
    """

    def __init__(self, build: Callable[[], RolloutEngine], cluster: ClusterConfig) -> None:
        self.ray, self.owns_cluster = connect(cluster.address)
        self.build, self.cluster, self.timeout_s = build, cluster, cluster.timeout_s
        self.version, self.restarts = 0, 0
        self.published = False
        self.confirmed: dict[tuple[str, torch.dtype], int] | None = None
        """Hashes of the weights that were published last, once they have been read back."""
        self.paused = self.asleep = False
        self.finished: list[GenerationOutput] = []
        """Outputs that came beside another answer; the next `poll` gives them."""
        try:
            self.channel = open_channel(cluster, self.ray)
            check_resources(cluster, [node["Resources"] for node in self.ray.nodes() if node["Alive"]])
            self.replicas = [_Replica(index, self._start()) for index in range(cluster.replicas)]
            for replica in self.replicas:
                self._know(replica)
        except BaseException:
            self.close()
            raise

    def _know(self, replica: _Replica) -> None:
        """Wait until its engine is there, and ask what it is."""
        replica.pid, kind, shapes = self._answer(replica, replica.actor.about.remote(), _START_S)
        self.seeded, self.exact, self.returns_candidates = kind
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def _start(self) -> Any:
        cpus, gpus = self.cluster.num_cpus, self.cluster.num_gpus
        actor = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(EngineActor)
        return actor.remote(self.build, max(1, int(cpus)))

    def _answer(self, replica: _Replica, found: Any, timeout_s: float | None = None) -> Any:
        """The result of an actor's method; `timeout_s` in place of the engine's.

        Raises:
            TimeoutError: it did not answer in time.
            Exception: what the method raised.
        """
        try:
            return self.ray.get(found, timeout=timeout_s or self.timeout_s)
        except self.ray.exceptions.GetTimeoutError:
            raise TimeoutError(self._silent([replica], timeout_s)) from None
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def _silent(self, replicas: Sequence[_Replica], timeout_s: float | None = None) -> str:
        limit, names = "while it started" if timeout_s else "cluster.timeout_s", ", ".join(r.name for r in replicas)
        return f"{names} has not answered for {timeout_s or self.timeout_s:g} s ({limit})"

    def _call(self, replica: _Replica, method: str, *args: Any) -> Any:
        """An actor's method; done again by a new actor where it has died."""
        while True:
            try:
                return self._answer(replica, getattr(replica.actor, method).remote(*args))
            except self.ray.exceptions.RayActorError as error:
                self._revive(replica, error)

    def _revive(self, replica: _Replica, error: Exception) -> None:
        """Start a replica again, with the current weights and the requests that it held."""
        replica.restarts += 1
        self.restarts += 1
        if replica.restarts > _RESTARTS:
            raise RuntimeError(f"rollout replica {replica.index} died {replica.restarts} times in a row") from error
        reason = str(error).strip().partition("\n")[0]
        log.warning("%s died and is started again: %s", replica.name, reason)
        self.ray.kill(replica.actor)
        replica.actor, replica.polling = self._start(), None
        try:
            self._know(replica)
            if self.published:
                self._take(replica, replica.actor.update_weights.remote(self.channel.again()))
            if self.confirmed is not None:
                compare(
                    replica.own(self._answer(replica, replica.actor.weight_hashes.remote())),
                    self.confirmed,
                    self.version,
                )
            for state, name in ((self.paused, "pause"), (self.asleep, "sleep")):
                if state:
                    self._answer(replica, replica.actor.set_state.remote(name))
            self._answer(replica, replica.actor.submit.remote(list(replica.held.values())))
        except self.ray.exceptions.RayActorError as again:
            self._revive(replica, again)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests in, each group by one replica.

        Raises:
            ValueError: as in every engine. None of the requests is then taken in.
        """
        owners = {request.group_id: replica for replica in self.replicas for request in replica.held.values()}
        load = {
            id(replica): sum(request.sampling.max_completion_tokens for request in replica.held.values())
            for replica in self.replicas
        }
        parts: dict[int, list[GenerationRequest]] = {replica.index: [] for replica in self.replicas}
        for request in requests:
            if any(request.request_id in replica.held for replica in self.replicas):
                raise ValueError(f"request {request.request_id!r} is there already")
            owner = owners.get(request.group_id) or min(self.replicas, key=lambda replica: load[id(replica)])
            owners[request.group_id] = owner
            load[id(owner)] += request.sampling.max_completion_tokens
            parts[owner.index].append(request)
        taken: list[str] = []
        try:
            for replica in self.replicas:
                if part := parts[replica.index]:
                    self._call(replica, "submit", part)
                    replica.held |= {request.request_id: request for request in part}
                    taken += [request.request_id for request in part]
        except ValueError:
            self.abort(taken)
            raise

    def poll(self) -> list[GenerationOutput]:
        """Wait until at least one replica has finished requests; those that have.

        Raises:
            ValueError: the model's logits are not finite.
            TimeoutError: no replica has answered in time.
        """
        if self.paused or self.asleep:
            return []
        if self.finished:
            outputs, self.finished = self.finished, []
            return outputs
        while working := [replica for replica in self.replicas if replica.held]:
            for replica in working:
                replica.polling = replica.polling or replica.actor.poll.remote()
            ready, _ = self.ray.wait([replica.polling for replica in working], timeout=self.timeout_s)
            if not ready:
                raise TimeoutError(self._silent(working))
            (replica,) = [replica for replica in working if replica.polling == ready[0]]
            replica.polling = None
            try:
                found = self._answer(replica, ready[0])
            except self.ray.exceptions.RayActorError as error:
                self._revive(replica, error)
                continue
            if outputs := replica.finish(found):
                return outputs
        return []

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Give up requests (None: all), and return what they have so far."""
        names = None if request_ids is None else set(request_ids)
        found: list[GenerationOutput] = []
        for replica in self.replicas:
            gone = [name for name in replica.held if names is None or name in names]
            if gone:
                found += self._call(replica, "abort", gone)
                if replica.polling is not None:  # it ended before the actor took the next call
                    self.finished += replica.finish(self._answer(replica, replica.polling))
                    replica.polling = None
                for name in gone:
                    replica.held.pop(name, None)
        found += [output for output in self.finished if names is None or output.request_id in names]
        self.finished = [output for output in self.finished if names is not None and output.request_id not in names]
        return found

    def _all(self, method: str, *args: Any) -> list[Any]:
        """A method of all actors at once; done again by those that were started again."""
        started = [(replica, getattr(replica.actor, method).remote(*args)) for replica in self.replicas]
        found = []
        for replica, answer in started:
            try:
                found.append(self._answer(replica, answer))
            except self.ray.exceptions.RayActorError as error:
                self._revive(replica, error)
                found.append(self._call(replica, method, *args))
        return found

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
        dtypes = dict(self.confirmed or ())
        tensors = [(name, tensor.to(dtypes.get(name, tensor.dtype))) for name, tensor in update.tensors]
        self.version, self.confirmed = update.version, None
        reference = self.channel.publish(replace(update, tensors=tensors), len(self.replicas))
        self.published = True
        for replica, answer in [(replica, replica.actor.update_weights.remote(reference)) for replica in self.replicas]:
            try:
                with suppress(TransferBroken):
                    self._take(replica, answer)
                    continue
                # Another one has died.
                self._take(replica, replica.actor.update_weights.remote(self.channel.again()))
            except self.ray.exceptions.RayActorError as error:
                self._revive(replica, error)

    def _take(self, replica: _Replica, answer: Any) -> None:
        if (version := self._answer(replica, answer)) != self.version:
            raise WeightMismatch(f"{replica.name} has weights of version {version}, not {self.version}")

    def weight_hashes(self) -> list[WeightHash]:
        """Of every replica."""
        answers = self._all("weight_hashes")
        self.confirmed = {(f.name, f.dtype): f.value for f in answers[0] if f.value is not None}
        return [found for replica, answer in zip(self.replicas, answers, strict=True) for found in replica.own(answer)]

    def close(self) -> None:
        """End the actors, and the cluster where it was started here."""
        for replica in getattr(self, "replicas", []):
            self.ray.kill(replica.actor)
        if hasattr(self, "channel"):
            self.channel.close()
        if self.owns_cluster:
            self.ray.shutdown()


def connect(address: str | None) -> tuple[Any, bool]:
    """Ray, and whether a cluster was started for it here."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_AUTH_MODE", "disabled")):
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return ray, False
    if address is None:
        # Its ports take whatever asks, so they are this machine's alone.
        ray.init(address="local", _node_ip_address="127.0.0.1", include_dashboard=False, logging_level=logging.WARNING)
    else:
        ray.init(address=address, logging_level=logging.WARNING)
    return ray, address is None


class PlacementError(ValueError):
    """The cluster has no room for what is wanted; it could only wait for ever."""


def check_resources(wanted: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """That every replica finds a place.

    Raises:
        PlacementError: says what is missing.

    Example:
        >>> check_resources(ClusterConfig(replicas=3), [{"CPU": 2.0}])
        Traceback (most recent call last):
        ...
        atomrl.rollout.replicas.PlacementError: there is room for 2 of 3 replicas (1 CPUs, 0 GPUs each): [{'CPU': 2.0}]
    """
    needs = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus}
    places = sum(
        min((int(node.get(name, 0.0) / need + 1e-9) for name, need in needs.items() if need), default=wanted.replicas)
        for node in nodes
    )
    if places < wanted.replicas:
        shown = [{name: node.get(name, 0.0) for name in needs if name in node} for node in nodes]
        raise PlacementError(
            f"there is room for {places} of {wanted.replicas} replicas ({wanted.num_cpus:g} CPUs, "
            f"{wanted.num_gpus:g} GPUs each): {shown}"
        )
