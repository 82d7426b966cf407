"""`Distributor`: sends requests to the replicas of an engine, and replaces replicas that fail.

A replica is whatever samples in another process: an engine in a Ray actor (`replicas.py`) or an HTTP server
(`servers.py`). They differ only in how they are called, the abstract methods.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from atomrl.common.event_loop import EventLoopThread
from atomrl.protocols import WeightHash
from atomrl.types import GenerationRequest

log = logging.getLogger(__name__)
RESTARTS = 3
"""Failures in a row after which a replica is given up."""
ABORT_S = 0.05
T = TypeVar("T")


class ReplicaFailure(Exception):
    """A call to a replica failed in a way that a restart may fix."""


@dataclass(eq=False, kw_only=True)
class Replica:
    """State of one replica."""

    held: dict[str, GenerationRequest] = field(default_factory=dict)
    """Its requests whose outputs the caller does not have yet."""
    retained: set[str] = field(default_factory=set)
    """Ids of finished requests whose KV cache it may still have."""
    restarts: int = 0
    """Failures since it last finished a request."""
    generation: int = 0
    """Number of repairs."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a repair and a change of state or weights, so that nothing else arrives in the middle."""

    @property
    def name(self) -> str:
        """Name for messages."""
        raise NotImplementedError

    @property
    def log_tail(self) -> str:
        """End of its output, for messages."""
        return ""

    @property
    def load(self) -> int:
        """Maximum number of tokens it may still have to sample."""
        return sum(request.sampling.max_completion_tokens for request in self.held.values())

    def holds(self, request: GenerationRequest) -> bool:
        """Return True if the request is assigned to this replica and was not aborted."""
        return self.held.get(request.request_id) is request

    def was_sent(self, request_id: str) -> bool:
        """Return True if an output of this request is in `Distributor.outputs`, or will be soon after an abort."""
        return True

    def release(self, request_id: str) -> None:
        """Called when the output of a request has been received."""


R = TypeVar("R", bound=Replica)


class Distributor(Generic[R]):
    """The part of a rollout engine that is the same for all kinds of replicas.

    A group goes to one replica, the one with the fewest tokens left to sample; a continuation goes to the replica that
    has its cache. A replica that fails is restarted, gets the current weights and state, and computes its requests
    again, with the same seeds.

    All calls to replicas are coroutines on one event loop. The caller's thread assigns requests and reads `outputs`.

    Args:
        timeout_s: time limit for an abort.
    """

    given_up: ClassVar[type[RuntimeError]] = RuntimeError
    """Raised if a replica fails again and again."""
    _paused: bool
    _asleep: bool

    # ---- Calls to a replica. They raise ReplicaFailure where a restart may help. ----

    @abstractmethod
    async def _restart(self, replica: R) -> None:
        """End what is left of a replica and start it again, or check that one that is not ours is back. Wait for it."""

    @abstractmethod
    async def _load(self, replica: R) -> None:
        """Load the current weights into a restarted replica, and check them."""

    @abstractmethod
    async def _set_paused(self, replica: R, paused: bool) -> None:
        """Stop sampling, or continue. No effect if that is its state."""

    @abstractmethod
    async def _set_asleep(self, replica: R, asleep: bool) -> None:
        """Free memory for others, or take it again."""

    @abstractmethod
    async def _abort_requests(self, replica: R, request_ids: Sequence[str]) -> None:
        """Abort requests. Their outputs then come into `outputs`."""

    @abstractmethod
    async def _hashes(self, replica: R) -> list[WeightHash]:
        """Hashes of its weights."""

    async def _resume_requests(self, replica: R) -> None:
        """Send a restarted replica its requests, if nothing else does."""

    # ---- Calls and repairs ----

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.replicas: list[R] = []
        self.restarts = 0
        """Failures of all replicas."""
        self.updated = False
        """True after the first `update_weights`: replicas then need more than the weights they start with."""
        self.outputs: queue.SimpleQueue[tuple[GenerationRequest | None, Any]] = queue.SimpleQueue()
        """(request, its output or an error); (None, error) ends the next `poll`."""
        self.loop = EventLoopThread("replicas")

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop and return its result."""
        return self.loop.start(task).result()

    def _on_all(self, action: Callable[[R], Coroutine[Any, Any, T]], restored: bool = False) -> list[T | None]:
        """Call all replicas concurrently; arguments and errors as for `_call`."""

        async def all_replicas() -> list[T | None]:
            return await asyncio.gather(*(self._call(replica, action, restored) for replica in self.replicas))

        return self.run(all_replicas())

    async def _call(
        self, replica: R, action: Callable[[R], Coroutine[Any, Any, T]], restored: bool = False
    ) -> T | None:
        """Call a replica, and repair it if the call fails.

        Args:
            restored: a repair does what the call would have done. Otherwise the call is repeated.
        """
        while True:
            generation = replica.generation
            try:
                async with replica.lock:
                    return await action(replica)
            except ReplicaFailure as error:
                await self._repair(replica, generation, error)
                if restored:
                    return None

    async def _repair(self, replica: R, generation: int, error: ReplicaFailure) -> None:
        """Bring a replica back with the current weights, state and requests, once for all tasks that saw it fail.

        Args:
            generation: `replica.generation` when the failed call began; if it has changed, another task repaired it.
        """
        async with replica.lock:
            while replica.generation == generation:
                await self._count_failure(replica, error)
                began = time.monotonic()
                try:
                    await self._restart(replica)
                    if self.updated:
                        await self._load(replica)
                    await self._set_paused(replica, self._paused)
                    if self._asleep:
                        await self._set_asleep(replica, True)
                    await self._resume_requests(replica)
                    replica.generation += 1
                    log.warning("%s is back after %.1f s", replica.name, time.monotonic() - began)
                except ReplicaFailure as next_error:
                    error = next_error

    async def _count_failure(self, replica: R, error: ReplicaFailure) -> None:
        """Raise if a replica has failed too often in a row."""
        replica.restarts += 1
        self.restarts += 1
        if replica.restarts > RESTARTS:
            times = f"failed {replica.restarts} times in a row"
            raise self.given_up(f"{replica.name} {times}: {error}{replica.log_tail}") from error
        log.warning("%s failed; repeating its requests: %s%s", replica.name, error, replica.log_tail)

    # ---- Requests ----

    def _assign(self, requests: Iterable[GenerationRequest]) -> dict[R, list[GenerationRequest]]:
        """Choose the replica of each request, and record that it holds it."""
        by_group = {request.group_id: replica for replica in self.replicas for request in replica.held.values()}
        by_turn = {name: replica for replica in self.replicas for name in replica.retained}
        load = {replica: replica.load for replica in self.replicas}
        parts: dict[R, list[GenerationRequest]] = {}
        for request in requests:
            before = request.continues or ""
            replica = by_turn.get(before) or by_group.get(request.group_id) or min(load, key=load.__getitem__)
            by_group[request.group_id] = replica
            load[replica] += request.sampling.max_completion_tokens
            replica.retained.discard(before)
            replica.held[request.request_id] = request
            parts.setdefault(replica, []).append(request)
        return parts

    def _receive(self, end: float) -> list[tuple[GenerationRequest, Any]]:
        """Wait until a request has finished or `time.monotonic()` passes `end`; return all that have, with outputs."""
        finished: list[tuple[GenerationRequest, Any]] = []
        with suppress(queue.Empty):
            while not finished or not self.outputs.empty():
                wait_s = None if end == math.inf else max(0.0, end - time.monotonic())
                request, output = self.outputs.get(timeout=wait_s)
                if request is None:
                    raise output
                for replica in self.replicas:
                    if replica.holds(request):  # else it was aborted meanwhile
                        del replica.held[request.request_id]
                        replica.release(request.request_id)
                        if request.keep_cache:
                            replica.retained.add(request.request_id)
                        finished.append((request, output))
        return finished

    def _give_up(self, request_ids: Iterable[str]) -> list[tuple[GenerationRequest, Any]]:
        """Abort requests and wait for their outputs. A request that was not sent yet has none.

        Raises:
            TimeoutError: a replica does not give them up in time.
        """
        running = self.run(self._forget(list(request_ids)))
        missing = {id(request): (replica, request) for replica, request in running}
        outputs: list[tuple[GenerationRequest, Any]] = []
        others: list[tuple[GenerationRequest, Any]] = []
        end = time.monotonic() + self.timeout_s
        while missing:
            if time.monotonic() > end:
                raise TimeoutError(f"{running[0][0].name} did not release a request in time")
            # Repeated, since an abort may reach a server before its request, and replicas may restart.
            self.run(self._abort_all([*missing.values()]))
            with suppress(queue.Empty):
                while missing:
                    request, output = self.outputs.get(timeout=ABORT_S)
                    if request is None:
                        raise output
                    if pair := missing.pop(id(request), None):
                        pair[0].release(request.request_id)
                        outputs.append((request, output))
                    else:
                        others.append((request, output))
        for item in others:
            self.outputs.put(item)
        return outputs

    async def _forget(self, request_ids: Sequence[str]) -> list[tuple[R, GenerationRequest]]:
        """Forget requests, and return those that were sent.

        On the event loop's thread: on the caller's, a request could reach its replica between two of these steps.
        """
        pairs = [(replica, name) for replica in self.replicas for name in request_ids if name in replica.held]
        forgotten = [(replica, replica.held.pop(name)) for replica, name in pairs]
        return [(replica, request) for replica, request in forgotten if replica.was_sent(request.request_id)]

    async def _abort_all(self, requests: Sequence[tuple[R, GenerationRequest]]) -> None:
        by_replica: dict[R, list[str]] = {}
        for replica, request in requests:
            by_replica.setdefault(replica, []).append(request.request_id)
        await asyncio.gather(*(self._abort_requests(replica, names) for replica, names in by_replica.items()))

    # ---- State and weights ----

    def pause(self) -> None:
        """Stop sampling until `resume`; requests stay."""
        self._paused = True
        self._on_all(lambda replica: self._set_paused(replica, True), restored=True)

    def resume(self) -> None:
        """Continue; running requests continue with the current weights."""
        if self._paused:
            self._paused = False
            self._on_all(lambda replica: self._set_paused(replica, False), restored=True)

    def sleep(self) -> None:
        """Free the memory of every replica.

        Raises:
            RuntimeError: the engine has unfinished requests.
        """
        if held := sum(len(replica.held) for replica in self.replicas):  # or some replicas would sleep
            raise RuntimeError(f"the engine has {held} unfinished requests; let them finish or abort them first")
        self._asleep = True
        self._on_all(lambda replica: self._set_asleep(replica, True), restored=True)

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._asleep:
            self._asleep = False
            self._on_all(lambda replica: self._set_asleep(replica, False), restored=True)

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of the weights in every replica."""
        pairs = zip(self.replicas, self._on_all(self._hashes), strict=True)
        return [each._replace(holder=replica.name) for replica, hashes in pairs for each in hashes or ()]
