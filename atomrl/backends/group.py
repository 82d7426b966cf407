"""A group of processes that train together: how they meet, what they agree through, and who is named when one fails."""

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

from atomrl.backends.base import Collective, OutOfMemory
from atomrl.common.metrics import Metrics, merge

Result = TypeVar("Result")
IDLE = timedelta(days=365)
"""How long ranks wait for a command: rollouts take what they take."""
START_S = 600.0
"""How long a process may take at least to import or load what it needs, and to come to the others."""
GRACE_S = 5.0
"""Within which all ranks have met an error that all meet."""
BEAT_S, STOPPED_S = 0.5, 5.0
"""How often a rank shows that it runs, and after what silence it stands still."""


class RankFailed(RuntimeError):
    """A rank died, stands still, or met an error that the others did not; the group cannot go on."""


class RankLost(RankFailed):
    """A rank died or stands still; a new group can go on from a checkpoint."""


class RankOutOfMemory(RankFailed):
    """A micro-batch did not fit on a rank; a new group can go on from a checkpoint, with smaller ones.

    Args:
        tokens: padded tokens of a micro-batch that the new group should try; None: it should try
            `model.gradient_checkpointing`.
    """

    def __init__(self, message: str, tokens: int | None) -> None:
        super().__init__(message, tokens)
        self.tokens = tokens

    def __str__(self) -> str:
        return str(self.args[0])


class Ranks(Collective):
    """This process's place in a group, and the collective operations of `torch.distributed`.

    What rank 0 has the others do (`send`, `receive`) is done within `together`, which makes sure that all came to the
    same end. Where one did not, the others raise `RankFailed` with its name.

    Args:
        store: where the ranks meet.
        rank, world: as torchrun counts them.
        device: of this rank.
        timeout_s: within which all ranks must come to the same collective operation.
        here: this rank's number among those of its machine, and how many these are; None: all are on this one. Ranks
            that are all on one machine talk through nothing but its loopback.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        device: torch.device,
        timeout_s: float,
        here: tuple[int, int] | None = None,
    ) -> None:
        self.here = here or (rank, world)
        self.rank, self.world, self.timeout_s, self.commands = rank, world, timeout_s, 0
        self.own_error = False
        """Whether this rank met an error that others did not."""
        self.gone: Callable[[], dict[int, str]] = dict
        """Which ranks' processes have ended, and how, where this process started them."""
        self.store = PrefixStore("atomrl", store.clone())
        self.heard = 0
        """How often the store has answered this rank, which it does several times a second. It is in rank 0's process,
        or in a launcher's."""
        limit = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # `accelerate launch` sets it for an FSDP file; transformers then loads zeros wherever LOCAL_RANK is not 0.
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
        with _loopback(self.here[1] == world):
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
            self.host, self.outcome, self.writing = (dist.new_group(backend="gloo", timeout=limit) for _ in range(3))
            self.waiting = dist.new_group(backend="gloo", timeout=IDLE)
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(store.clone(),), name="heart of this rank", daemon=True)
        self._heart.start()

    def all_here(self) -> None:
        """Wait until all ranks have imported or loaded what they need, which may take longer than `timeout_s`."""
        dist.monitored_barrier(self.host, timedelta(seconds=max(START_S, self.timeout_s)))

    def max(self, number: int) -> int:
        """The largest number that a rank gave."""
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.host)
        return int(found)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def making_groups(self) -> AbstractContextManager[None]:
        """Within it groups of these ranks are made."""
        return _loopback(self.here[1] == self.world)

    def neighbours(self, size: int) -> Any:
        """The group of this rank and those beside it, of so many; all ranks call it."""
        with self.making_groups():
            group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=self.timeout_s))
        return group

    def in_turns(self, work: Callable[[], Result]) -> Result:
        """What the ranks of a machine do one after the other, for its memory; errors come when all are done."""
        found: list[Result] = []
        failed: Exception | None = None
        for turn in range(self.max(self.here[0] + 1)):
            if turn == self.here[0]:
                try:
                    found = [work()]
                except Exception as error:
                    failed = error
            self.all_here()
        if failed is not None:
            raise failed
        return found[0]

    def union(self, names: Iterable[str]) -> list[str]:
        """The names that a rank gave, sorted."""
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, list(names), group=self.host)
        return sorted({name for part in parts for name in part})

    def sum(self, metrics: Metrics) -> Metrics:
        """Metrics of all ranks merged, on the CPU."""
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, on_cpu(metrics), group=self.host)
        return merge(parts)

    def send(self, command: Any) -> None:
        """On rank 0: have the others receive it."""
        with self._named():
            heard = dist.broadcast(torch.zeros(1), 0, group=self.waiting, async_op=True)
            assert heard is not None
            heard.wait(timedelta(seconds=self.timeout_s))  # the group's own time-out is that of ranks without work
            dist.broadcast_object_list([command], 0, group=self.host)

    def receive(self) -> Any:
        """On the other ranks: what is sent next, however long it takes."""
        found = [None]
        dist.broadcast(torch.zeros(1), 0, group=self.waiting)
        dist.broadcast_object_list(found, 0, group=self.host)
        return found[0]

    def together(self, work: Callable[[], Result]) -> Result:
        """What all ranks do at the same time.

        Raises:
            RankFailed: a rank met an error that others did not, died, or stands still.
            Exception: what `work` raised on all ranks alike.
        """
        self.commands += 1
        try:
            result = work()
        except Exception as error:
            if not _of_network(error):
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if isinstance(error, OutOfMemory):
                    self.store.set(f"memory/{self.commands}/{self.rank}", json.dumps(error.tokens))
                self.store.set(f"error/{self.commands}/{self.rank}", reason)
                if self._all_ended() and not isinstance(error, OutOfMemory):
                    raise
                self.own_error = True
            raise self._blame(str(error)) from error
        with self._named():
            failed = torch.zeros(1)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.outcome)
        if failed.item():
            raise self._blame("an error")
        return result

    def _all_ended(self) -> bool:
        """Whether all ranks come to the end of this command, within the time by which ranks differ."""
        with suppress(RuntimeError):
            failed = dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX, group=self.outcome, async_op=True)
            assert failed is not None
            return bool(failed.wait(timedelta(seconds=GRACE_S)))
        return False

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of a collective operation, with the rank that is the reason."""
        try:
            yield
        except RuntimeError as error:
            raise self._blame(str(error)) from error

    def _blame(self, otherwise: str) -> RankFailed:
        """An error with the rank that is the reason that a collective operation failed, and what it said.

        A rank whose operation fails says that it has come to it, and ends a little later. So one that has ended is the
        reason only where it had not come, and one that lives where it shows no sign of life, or is the last to come.
        """
        began, before = time.monotonic(), self.heard
        if not self.own_error:
            self.store.set(f"came/{self.commands}/{self.rank}", "")  # waits for no answer
        while self.heard == before:
            if time.monotonic() > began + STOPPED_S:  # what else is asked of the store would wait for ever
                return self._lost([0], "stands still, or is gone")
            time.sleep(0.05)
        start = self._beats()
        while True:
            if failed := [r for r in range(self.world) if self.store.check([f"error/{self.commands}/{r}"])]:
                return self._failed(failed)
            waited_s, ended = time.monotonic() - began, self.gone()
            absent = [r for r in range(self.world) if not self.store.check([f"came/{self.commands}/{r}"])]
            if gone := [rank for rank in absent if rank in ended]:
                return RankLost(", ".join(f"rank {rank} {ended[rank]}" for rank in gone))
            if waited_s > STOPPED_S:
                beats = self._beats()
                if silent := [rank for rank in absent if beats[rank] == start[rank]]:
                    return self._lost(silent, "stands still, or is gone")
                if len(absent) == 1 or (absent and waited_s > self.timeout_s + STOPPED_S):
                    return self._lost(absent, "has not come to the others")
                if len(ended) == self.world - 1:
                    return self._lost([self.rank], "came when the others had left")
                if not absent:
                    return RankFailed(otherwise.partition("\n")[0])
            time.sleep(0.05)

    def _failed(self, ranks: Sequence[int]) -> RankFailed:
        """The error of the first of these ranks; where memory ran out on some, that of the one that asks for least."""
        keys = {rank: f"memory/{self.commands}/{rank}" for rank in ranks}
        asked = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        rank = min(asked, key=lambda rank: asked[rank] or 0, default=ranks[0])
        said = f"rank {rank}: {self.store.get(f'error/{self.commands}/{rank}').decode()}"
        return RankOutOfMemory(said, asked[rank]) if asked else RankFailed(said)

    def _lost(self, ranks: list[int], how: str) -> RankLost:
        """The error that names ranks. Rank 0 says what goes wrong in a run; where it is the one, another does."""
        message = f"rank {', '.join(map(str, ranks))} {how} (backend.timeout_s={self.timeout_s:g})"
        if 0 in ranks and self.rank == min({*range(self.world)} - {*ranks}, default=0):
            print(f"error: {message}", file=sys.stderr, flush=True)
        return RankLost(message)

    def _beats(self) -> list[int]:
        return [self.store.add(f"beat/{rank}", 0) for rank in range(self.world)]

    def _beat(self, store: Any) -> None:
        """Show that this process runs."""
        own = PrefixStore("atomrl", store)
        with suppress(Exception):  # the store is gone, and with it the run
            while not self._closed.wait(BEAT_S):
                own.add(f"beat/{self.rank}", 1)
                self.heard += 1

    def close(self) -> None:
        """Leave the group."""
        self._closed.set()
        self._heart.join(STOPPED_S)
        if dist.is_initialized():
            dist.destroy_process_group()


def on_cpu(metrics: Metrics) -> Metrics:
    """Metrics whose tensors are on the CPU, fetched at once.

    Example:
        >>> from atomrl.common.metrics import Sum
        >>> on_cpu({"a": Sum(torch.tensor(2.0)), "b": Sum(1.0)})
        {'a': Sum(total=tensor(2., dtype=torch.float64)), 'b': Sum(total=1.0)}
    """
    waiting = [part for metric in metrics.values() for part in vars(metric).values() if isinstance(part, Tensor)]
    if not waiting:
        return metrics
    device = next((part.device for part in waiting if part.device.type != "cpu"), waiting[0].device)
    fetched = iter(torch.stack([part.detach().to(device).double() for part in waiting]).cpu().unbind())
    return {
        name: type(metric)(*(next(fetched) if isinstance(p, Tensor) else p for p in vars(metric).values()))
        for name, metric in metrics.items()
    }


def _of_network(error: Exception) -> bool:
    """Whether an error says that another rank is gone or late."""
    signs = ("gloo", "closed by peer", "connection reset", "timed out waiting", "nccl", "broken pipe")
    return isinstance(error, RankFailed | dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
    )


@contextmanager
def _loopback(local: bool) -> Iterator[None]:
    """Groups of gloo that are made within it talk through the loopback alone, where all ranks are on this machine.

    Those of NCCL are made when they are first used, by an interface that it chooses once for all groups of a process,
    those with engines on other machines included."""
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
