"""The process group of ranks that train together: collective operations, and errors that name the rank at fault."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from atomrl.backends.base import OutOfMemory
from atomrl.backends.collective import Collective
from atomrl.common.metrics import Metrics, merge

Result = TypeVar("Result")
IDLE = timedelta(days=365)
"""Timeout of ranks that wait for the next command: rollouts have no limit."""
START_S = 600.0
"""Minimum timeout for imports, model loading and the first meeting of the ranks."""
GRACE_S = 5.0
"""Time within which ranks raise an error that all of them raise."""
BEAT_S, STOPPED_S = 0.5, 5.0
"""Interval of heartbeats, and the silence after which a rank counts as hung."""


class RankFailed(RuntimeError):
    """A rank died, hangs, or raised an error that the others did not; the group cannot continue."""


class RankLost(RankFailed):
    """A rank died or hangs; a new group can resume from a checkpoint."""


class RankOutOfMemory(RankFailed):
    """A micro-batch did not fit on a rank; a new group can resume from a checkpoint with smaller ones.

    Args:
        tokens: padded tokens per micro-batch for the new group; None: it should use `model.gradient_checkpointing`.
    """

    def __init__(self, message: str, tokens: int | None) -> None:
        super().__init__(message, tokens)
        self.tokens = tokens

    def __str__(self) -> str:
        return str(self.args[0])


class Ranks(Collective):
    """The process group as one rank sees it: collective operations by `torch.distributed`.

    Rank 0 sends commands to the others (`send`, `receive`). Every rank executes a command within `together`, which
    checks that all ranks succeeded. If one did not, the others raise `RankFailed` with its number.

    Args:
        store: store at which the ranks meet.
        rank, world: rank and world size, as for torchrun.
        device: device of this rank.
        timeout_s: timeout of collective operations.
        local: local rank and local world size; None: all ranks are on this machine. Ranks on one machine communicate
            through the loopback interface only.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        device: torch.device,
        timeout_s: float,
        local: tuple[int, int] | None = None,
    ) -> None:
        self.local_rank, self.local_world = local or (rank, world)
        self.rank, self.world, self.device, self.timeout_s, self.commands = rank, world, device, timeout_s, 0
        self.own_error = False
        """True once this rank raised an error that others did not."""
        self.exited: Callable[[], dict[int, str]] = dict
        """Returns how the processes of ranks ended, by rank; empty if this process did not start them."""
        self.abandoned: Callable[[], None] = lambda: None
        """Called if the process that hosts the store is gone: the run is over."""
        self.store = PrefixStore("atomrl", store.clone())
        self.store_answers = 0
        """Number of answers from the store, about two a second while the process that hosts it (rank 0 or a launcher)
        runs."""
        limit = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # `accelerate launch` sets it for an FSDP config; transformers then loads zeros wherever LOCAL_RANK is not 0.
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
        self._closed = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, args=(store.clone(),), name="heartbeat", daemon=True)
        self._heartbeat.start()
        try:
            with self._blaming(), _loopback(self.local_world == world):
                dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
                # Separate groups, because operations of one group run in order: a checkpoint thread, the agreement on
                # a result, and ranks that wait for a command must not delay each other.
                self.host, self.outcome, self.writing = (
                    dist.new_group(backend="gloo", timeout=limit) for _ in range(3)
                )
                self.waiting = dist.new_group(backend="gloo", timeout=IDLE)
        except BaseException:
            self.close()
            raise

    def barrier(self) -> None:
        """Barrier with a timeout of at least `START_S`, for imports and model loading."""
        dist.monitored_barrier(self.host, timedelta(seconds=max(START_S, self.timeout_s)))

    def max(self, number: int) -> int:
        """Return the maximum over ranks."""
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.host)
        return int(largest)

    def total(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place (all-reduce)."""
        dist.all_reduce(tensor)
        return tensor

    def creating_groups(self) -> AbstractContextManager[None]:
        """Context in which to create process groups of these ranks, for the right network interface."""
        return _loopback(self.local_world == self.world)

    def consecutive_group(self, size: int) -> Any:
        """Create groups of `size` consecutive ranks; return this rank's. Collective."""
        with self.creating_groups():
            group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=self.timeout_s))
        return group

    def in_turns(self, work: Callable[[], Result]) -> Result:
        """Run `work` on one rank per machine at a time, which limits its peak memory. Collective.

        Raises:
            Exception: the error of this rank's `work`, once all ranks are done.
        """
        results: list[Result] = []
        failure: Exception | None = None
        for turn in range(self.max(self.local_rank + 1)):
            if turn == self.local_rank:
                try:
                    results = [work()]
                except Exception as error:
                    failure = error
            self.barrier()
        if failure is not None:
            raise failure
        return results[0]

    def union(self, names: Iterable[str]) -> list[str]:
        """Return the names of all ranks, sorted, each once."""
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, list(names), group=self.host)
        return sorted({name for part in parts for name in part})

    def sum(self, metrics: Metrics) -> Metrics:
        """Merge the metrics of all ranks, on the CPU."""
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, on_cpu(metrics), group=self.host)
        return merge(parts)

    def send(self, command: Any) -> None:
        """Send a command to the other ranks; called on rank 0."""
        self.commands += 1
        with self._blaming():
            announced = dist.broadcast(torch.zeros(1), 0, group=self.waiting, async_op=True)
            assert announced is not None
            announced.wait(timedelta(seconds=self.timeout_s))  # the group's own timeout is IDLE
            dist.broadcast_object_list([command], 0, group=self.host)

    def receive(self) -> Any:
        """Wait for the next command of rank 0, without a timeout; called on the other ranks.

        Raises:
            RankFailed: it does not arrive: rank 0, or a rank that forwards it, is gone.
        """
        self.commands += 1
        command = [None]
        try:
            dist.broadcast(torch.zeros(1), 0, group=self.waiting)
            dist.broadcast_object_list(command, 0, group=self.host)
        except RuntimeError as error:
            with suppress(RuntimeError):  # the store may be gone too
                self._arrive()  # else rank 0 would blame this rank for its exit
            raise RankFailed(f"no command arrives: {error}") from error
        return command[0]

    def together(self, work: Callable[[], Result]) -> Result:
        """Run `work` on all ranks at the same time, and check that all of them succeeded.

        Raises:
            RankFailed: a rank died, hangs, or raised an error that others did not.
            Exception: the error of `work`, if all ranks raised one.
        """
        try:
            result = work()
        except Exception as error:
            if not _is_network_error(error):
                # An error of this rank itself: leave it in the store, where the others find it.
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if isinstance(error, OutOfMemory):
                    self.store.set(f"memory/{self.commands}/{self.rank}", json.dumps(error.tokens))
                self.store.set(f"error/{self.commands}/{self.rank}", reason)
                if self._all_reached_end() and not isinstance(error, OutOfMemory):
                    raise
                self.own_error = True
            raise self._blame(str(error)) from error
        with self._blaming():
            failed = torch.zeros(1)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.outcome)
        if failed.item():
            raise self._blame("an error")
        return result

    def _all_reached_end(self) -> bool:
        """Return True if all ranks reach the end of this command within `GRACE_S`."""
        with suppress(RuntimeError):
            failed = dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX, group=self.outcome, async_op=True)
            assert failed is not None
            return bool(failed.wait(timedelta(seconds=GRACE_S)))
        return False

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Turn the error of a collective operation into one that names the rank at fault."""
        try:
            yield
        except RuntimeError as error:
            raise self._blame(str(error)) from error

    def _blame(self, default: str) -> RankFailed:
        """Return an error that names the rank at fault for a failed collective operation, and its message.

        A rank whose operation fails marks its arrival in the store and exits soon after. So a rank that exited is at
        fault only if it had not arrived. A rank that runs is at fault if it sends no heartbeat, or if it alone has not
        arrived.

        Args:
            default: message if no rank is at fault.
        """
        began, answers = time.monotonic(), self.store_answers
        if not self.own_error:
            self._arrive()
        # First make sure that the store answers: any other request to it could block for ever.
        while self.store_answers == answers:
            if time.monotonic() > began + STOPPED_S:
                return self._lost([0], "does not respond")
            time.sleep(0.05)
        first_beats = self._beats()
        while True:
            if failed := [r for r in range(self.world) if self.store.check([f"error/{self.commands}/{r}"])]:
                return self._failed(failed)
            waited_s, exited = time.monotonic() - began, self.exited()
            absent = [r for r in range(self.world) if not self.store.check([f"came/{self.commands}/{r}"])]
            if dead := [rank for rank in absent if rank in exited]:
                return RankLost(", ".join(f"rank {rank} {exited[rank]}" for rank in dead))
            if waited_s > STOPPED_S:
                beats = self._beats()
                if silent := [rank for rank in absent if beats[rank] == first_beats[rank]]:
                    return self._lost(silent, "does not respond")
                if len(absent) == 1 or (absent and waited_s > self.timeout_s + STOPPED_S):
                    return self._lost(absent, "has not joined the others")
                if len(exited) == self.world - 1:
                    return self._lost([self.rank], "joined after the others had exited")
                if not absent:
                    return RankFailed(default.partition("\n")[0])
            time.sleep(0.05)

    def _arrive(self) -> None:
        """Mark in the store that an operation of this rank failed; needs no answer."""
        self.store.set(f"came/{self.commands}/{self.rank}", "")

    def _failed(self, ranks: Sequence[int]) -> RankFailed:
        """Return the error of the first of these ranks; after an out-of-memory, that with the smallest micro-batch."""
        keys = {rank: f"memory/{self.commands}/{rank}" for rank in ranks}
        tokens = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        rank = min(tokens, key=lambda rank: tokens[rank] or 0, default=ranks[0])
        message = f"rank {rank}: {self.store.get(f'error/{self.commands}/{rank}').decode()}"
        return RankOutOfMemory(message, tokens[rank]) if tokens else RankFailed(message)

    def _lost(self, ranks: list[int], how: str) -> RankLost:
        """Return the error that names these ranks; if rank 0 cannot report it, the lowest other rank prints it."""
        message = f"rank {', '.join(map(str, ranks))} {how} (backend.timeout_s={self.timeout_s:g})"
        if 0 in ranks and self.rank == min({*range(self.world)} - {*ranks}, default=0):
            print(f"error: {message}", file=sys.stderr, flush=True)
        return RankLost(message)

    def _beats(self) -> list[int]:
        """Return the number of heartbeats of each rank."""
        return [self.store.add(f"beat/{rank}", 0) for rank in range(self.world)]

    def _beat(self, store: Any) -> None:
        """Send heartbeats until the group is closed."""
        own = PrefixStore("atomrl", store)
        try:
            while not self._closed.wait(BEAT_S):
                own.add(f"beat/{self.rank}", 1)
                self.store_answers += 1
        except Exception:
            if not self._closed.wait(STOPPED_S):  # a failed operation has the better message
                self.abandoned()

    def close(self) -> None:
        """Leave the process group."""
        self._closed.set()
        self._heartbeat.join(STOPPED_S)
        if dist.is_initialized():
            dist.destroy_process_group()


def on_cpu(metrics: Metrics) -> Metrics:
    """Copy the tensors of metrics to the CPU, in one transfer.

    Example:
        >>> from atomrl.common.metrics import Sum
        >>> on_cpu({"a": Sum(torch.tensor(2.0)), "b": Sum(1.0)})
        {'a': Sum(total=tensor(2., dtype=torch.float64)), 'b': Sum(total=1.0)}
    """
    tensors = [part for metric in metrics.values() for part in vars(metric).values() if isinstance(part, Tensor)]
    if not tensors:
        return metrics
    device = next((part.device for part in tensors if part.device.type != "cpu"), tensors[0].device)
    fetched = iter(torch.stack([part.detach().to(device).double() for part in tensors]).cpu().unbind())
    return {
        name: type(metric)(*(next(fetched) if isinstance(p, Tensor) else p for p in vars(metric).values()))
        for name, metric in metrics.items()
    }


def _is_network_error(error: Exception) -> bool:
    """Return True if an error means that another rank is gone or late."""
    signs = ("gloo", "closed by peer", "connection reset", "timed out waiting", "nccl", "broken pipe")
    return isinstance(error, RankFailed | dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
    )


@contextmanager
def _loopback(local: bool) -> Iterator[None]:
    """Make gloo groups created inside the block use the loopback interface, if all ranks are on this machine.

    NCCL chooses its interface once for all groups of a process, including those with engines on other machines.
    """
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    if local:
        os.environ[name] = "lo" if sys.platform == "linux" else "lo0"
    try:
        yield
    finally:
        if local:
            os.environ.pop(name)
            os.environ.update({} if before is None else {name: before})
