"""A back end on several ranks, called from one: `RankedBackend` on rank 0, and `follow` on the others.

Rank 0 is the process of the run. It starts the others itself, or torchrun has started all of them; either way they
join a group, get from rank 0 what builds their back end, and then carry out each call of it at the same time.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar, get_args

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from atomrl.backends.group import START_S, RankFailed, RankLost, Ranks
from atomrl.backends.roles import SOURCES, TRAINED, RoleName
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.cluster.ray_cluster import Actor, ActorDied, RayCluster
from atomrl.common.metrics import Metrics, merge
from atomrl.common.processes import WorkerProcess, launched, say
from atomrl.config import ConfigError, ModelConfig, RankedConfig
from atomrl.models.memory import Sizes, memory_metrics
from atomrl.protocols import Algorithm, ModelInput, TrainingBackend, WeightUpdate
from atomrl.weight_sync.channels import LOOPBACK, open_store

Build = Callable[[Ranks, torch.device], TrainingBackend]
Result = TypeVar("Result")
END_S, NOTICE_S, LOOK_S = 10.0, 1.0, 0.2


class RankedKind(Protocol):
    """The class of a rank's back end, and what is known of it before a run. Settings are of its own section."""

    def __call__(self, settings: Any, **named: Any) -> TrainingBackend:
        """The back end of this rank; `named` are as of `BaseBackend`."""

    def check(self, settings: Any, model: ModelConfig, shapes: Mapping[str, Any], device: str) -> None:
        """That it can train with these settings.

        Args:
            model: the section.
            shapes: transformers configs of the models that it will hold, by their path, or the key of a fresh one.
            device: as `model.device` is resolved.

        Raises:
            ConfigError: it cannot.
        """

    def memory(self, settings: Any, parts: Mapping[str, int], sizes: Sizes, ranks: int) -> dict[str, int]:
        """What of a run's memory is rank 0's, in bytes.

        Args:
            parts: of one device (`runs.memory.memory_estimate`).
            sizes: of the policy.
        """


def rank_count(settings: RankedConfig, device: str) -> int:
    """How many ranks a run has.

    Args:
        device: as `model.device` is resolved.

    Raises:
        ConfigError: a launcher started another number, or there are fewer GPUs.
    """
    given, started = settings.ranks, launched()
    if started is not None:
        if given not in (None, started.world):
            raise ConfigError(
                f"backend.ranks={given}, and the launcher started {started.world} (WORLD_SIZE); leave it out"
            )
        return started.world
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    if gpus and given is not None and given > gpus:
        raise ConfigError(f"backend.ranks={given}: torch sees {gpus} CUDA devices on this machine")
    if gpus and ":" in device and given != 1:
        raise ConfigError(f"model.device={device}: ranks have a GPU each; leave the number out")
    return given or gpus or 1


def rank_device(device: str, local_rank: int) -> torch.device:
    """Of a rank: its own GPU, of which its launcher may show it no other; or the CPU."""
    if not device.startswith("cuda"):
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))


class RankedBackend:
    """A `TrainingBackend` on several ranks, of which this process is rank 0.

    Args:
        build: makes a rank's back end, on each of them; must be picklable.
        settings: how many ranks, and how long they wait for each other.
        device: as `model.device` is resolved.
        tokenizer: that checkpoints are written with.

    Raises:
        ConfigError: they cannot be started, or what `build` raises on all of them.
        RankFailed: one did not start.
    """

    concurrent = False

    def __init__(self, build: Build, settings: RankedConfig, device: str, tokenizer: Any = None) -> None:
        self.processes: dict[int, WorkerProcess] = {}
        self.broken, self.busy, self.ranks, self.lock = False, True, None, threading.Lock()
        count = rank_count(settings, device)
        self.threads = max(1, torch.get_num_threads() // count)
        try:
            self.ranks = ranks = self._meet(count, device, settings.timeout_s)
            ranks.gone = self._gone
            own = rank_device(device, int(os.environ.get("LOCAL_RANK", 0)) if launched() else 0)
            ranks.send(build)
            with _threads(self.threads):
                backend: Any = ranks.together(partial(_build, ranks, build, own))
            self.backend, backend.tokenizer = backend, tokenizer
        except BaseException:
            self.broken = True
            self.close()
            raise
        self.busy = False
        self._handler: Any = None
        with suppress(ValueError):  # not the main thread: a death is noticed when the ranks are called
            self._handler = signal.signal(signal.SIGUSR1, self._on_death)
            threading.Thread(target=self._watch, name="watch over ranks", daemon=True).start()

    def _meet(self, count: int, device: str, timeout_s: float) -> Ranks:
        """Start the other ranks, unless a launcher has, and join their group."""
        if launched() is not None:
            return join_launched(device, timeout_s)
        store, port = open_store(LOOPBACK, timedelta(seconds=START_S))
        settings = {"port": port, "world": count, "device": device, "timeout_s": timeout_s, "threads": self.threads}
        for rank in range(1, count):
            self.processes[rank] = WorkerProcess.start(__name__)
            self.processes[rank].connection.send_bytes(json.dumps(settings | {"rank": rank}).encode())
        for rank, process in self.processes.items():
            try:
                process.answer()
            except (EOFError, OSError, ValueError) as error:
                raise RankFailed(f"rank {rank} did not start") from error
        return Ranks(store, 0, count, rank_device(device, 0), timeout_s)

    def _gone(self) -> dict[int, str]:
        ended = {rank: worker.process.poll() for rank, worker in self.processes.items()}
        return {
            rank: f"(pid {self.processes[rank].process.pid}) died "
            + (f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")
            for rank, code in ended.items()
            if code is not None
        }

    def _watch(self) -> None:
        """Interrupt what this process does where a rank dies meanwhile: rollouts would go on for long."""
        while self.processes and not self._gone():
            time.sleep(LOOK_S)
            if self.broken:
                return
        time.sleep(NOTICE_S)  # an operation that fails by it says more
        with self.lock:
            if self.processes and not self.broken:
                os.kill(os.getpid(), signal.SIGUSR1)

    def _on_death(self, number: int, frame: FrameType | None) -> None:
        if not self.broken and not self.busy and (gone := self._gone()):
            self.broken = True
            raise RankLost(", ".join(f"rank {rank} {how}" for rank, how in gone.items()))

    def _call(self, method: str, *arguments: Any) -> Any:
        """A method of every rank's back end; what rank 0's gives."""
        if self.broken or self.ranks is None:
            raise RankFailed("the ranks are gone")
        self.busy = True
        try:
            self.ranks.send((method, arguments))
            with _threads(self.threads):
                return self.ranks.together(lambda: getattr(self.backend, method)(*arguments))
        except RankFailed as error:
            self.broken = True
            raise type(error)(f"{error}; {method} broke off", *error.args[1:]) from error
        except Exception:
            raise
        except BaseException:  # interrupted: the others wait somewhere in the middle
            self.broken = True
            raise
        finally:
            self.busy = False

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """The rows with what is asked for."""
        found: RowBatch = self._call("forward_only", rows, frozenset(needs))
        return found

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """One optimizer step on the whole batch."""
        found: Metrics = self._call("train_step", batch, algorithm)
        return found

    def token_numbers(self) -> dict[str, torch.Tensor]:
        """Of the last update, of all ranks' rows."""
        found: dict[str, torch.Tensor] = self.backend.token_numbers()
        return found

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine, gathered here; as they are read, where the back end has them in parts."""
        found: WeightUpdate = self._call("weight_update", version, adapters_alone)
        if found.outline is None:
            return found
        parts = range(len(self.backend.parts))
        return replace(found, tensors=(pair for number in parts for pair in self._call("weight_part", number)))

    def free_memory(self) -> None:
        """Give all devices what the ranks keep for later."""
        self._call("free_memory")

    def save(self, folder: Path) -> Callable[[], None]:
        """Begin to write models for transformers, and the shards of all ranks; all must see the folder. What is
        returned waits until all is written; steps may be taken before."""
        self._call("save", folder.resolve())
        return lambda: self._call("saved")

    def load(self, folder: Path) -> None:
        """Continue from `save`."""
        self._call("load", folder.resolve())

    def close(self) -> None:
        """End the other ranks, in order where they still answer."""
        self.busy = True
        if not self.broken and self.ranks is not None:
            with suppress(RankFailed):
                self.ranks.send(None)
                self.backend.close()
        with self.lock:
            orderly, self.broken = not self.broken, True
        for worker in self.processes.values():
            if orderly:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(END_S)
            worker.kill()
        if self.ranks is not None:
            if orderly or launched() is None:  # else it would wait for ranks that are no more
                self.ranks.close()
            self.ranks = None
        if getattr(self, "_handler", None) is not None:
            signal.signal(signal.SIGUSR1, self._handler)


def join_launched(device: str, timeout_s: float) -> Ranks:
    """The group of the processes that torchrun, or a launcher that sets the same variables, has started."""
    started = launched()
    assert started is not None
    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))
    return Ranks(store, rank, world, rank_device(device, started.local_rank), timeout_s, started[2:])


def follow_launcher(settings: RankedConfig, device: str) -> None:
    """Be a rank other than 0 of those that a launcher started, until rank 0 ends it."""
    rank_count(settings, device)
    started = launched()
    assert started is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends its step, and then this
    _follow(join_launched(device, settings.timeout_s), rank_device(device, started.local_rank))


def serve(connection: Connection) -> None:
    """Be a rank that rank 0 started (`worker_process`)."""
    given: Mapping[str, Any] = json.loads(connection.recv_bytes())
    torch.set_num_threads(given["threads"])
    say(connection, {"ready": True})
    limit, rank = timedelta(seconds=START_S), given["rank"]
    store = TCPStore(LOOPBACK, given["port"], is_master=False, wait_for_workers=False, timeout=limit)
    device = rank_device(given["device"], rank)
    _follow(Ranks(store, rank, given["world"], device, given["timeout_s"]), device)


def _follow(ranks: Ranks, device: torch.device) -> None:
    """Do what rank 0 says, at the same time as all."""
    logging.disable(logging.WARNING)  # rank 0 says it
    try:
        build = ranks.receive()
        backend: Any = None
        with suppress(_MetByAll):  # rank 0 then ends the others: one that went by itself might be taken for the reason
            backend = _together(ranks, partial(_build, ranks, build, device))
        while (command := ranks.receive()) is not None:
            with suppress(_MetByAll):
                _together(ranks, partial(_call, backend, *command))
        backend.close()
        ranks.close()
    except Exception as error:
        if not isinstance(error, RankFailed) or ranks.own_error:
            traceback.print_exc()
        os._exit(1)  # the others' collective operations fail at once


class _MetByAll(Exception):
    """An error that rank 0 raises as well."""


def _build(ranks: Ranks, build: Build, device: torch.device) -> TrainingBackend:
    ranks.all_here()  # to receive `build` is to import what it needs
    return build(ranks, device)


def _call(backend: Any, method: str, arguments: Sequence[Any]) -> Any:
    return getattr(backend, method)(*arguments)


def _together(ranks: Ranks, work: Callable[[], Result]) -> Result:
    try:
        return ranks.together(work)
    except RankFailed:
        raise
    except Exception as error:
        raise _MetByAll from error


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------------------------
# `RemoteBackend`: a training back end in Ray actors.


class ServedBackend:
    """A back end in a process of its own, as `RemoteBackend` calls it.

    Args:
        build: makes it, there.
    """

    def __init__(self, build: Callable[[], TrainingBackend]) -> None:
        self.backend = build()
        self.load, self.free_memory = self.backend.load, self.backend.free_memory
        self.token_numbers = self.backend.token_numbers

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """With the memory of this process, which the run's own does not show."""
        return merge([self.backend.train_step(batch, algorithm), memory_metrics()])

    def save(self, folder: Path) -> None:
        """All is written when this returns."""
        if (written := self.backend.save(folder)) is not None:
            written()

    def forward_only(self, rows: RowBatch, needs: frozenset[ModelInput]) -> dict[str, Tensor]:
        """What was asked for alone."""
        found = self.backend.forward_only(rows, needs)
        return {name: getattr(found, name) for name in needs}

    def weight_update(self, version: int, adapters_alone: bool) -> WeightUpdate:
        """With names of one tensor as names of one object, so that they still are where it arrives."""
        update, seen = self.backend.weight_update(version, adapters_alone), dict[int, Tensor]()
        tensors = [(name, seen.setdefault(t.data_ptr(), t)) for name, t in update.tensors]
        return replace(update, tensors=tensors, outline=None)


class RemoteBackend:
    """A `TrainingBackend` in a Ray actor, with some of the models beside the policy in actors of their own.

    It is the same back end there as here would be, so the numbers are the same to the last bit where it has the same
    number of threads. Models apart compute at the same time as those of the trainer. A process that dies ends the run
    (`ActorDied`), which goes on from its checkpoint.

    Args:
        build: makes a back end with the models of some roles, in the actor; must be picklable.
        cluster: where the actors of the role `trainer` and of those in `apart` run.
        apart: the roles with an actor of their own.
    """

    concurrent = True

    def __init__(
        self,
        build: Callable[[Collection[RoleName]], TrainingBackend],
        cluster: RayCluster,
        apart: Sequence[RoleName] = (),
    ) -> None:
        self.cluster = cluster
        rest = [role for role in get_args(RoleName) if role not in apart]
        self.trainer = cluster.start("trainer", 0, partial(ServedBackend, partial(build, rest)))
        self.apart: dict[RoleName, Actor] = {
            role: cluster.start(role, 0, partial(ServedBackend, partial(build, [role]))) for role in apart
        }
        for actor in (self.trainer, *self.apart.values()):
            with self._named(actor):
                cluster.know(actor)

    @contextmanager
    def _named(self, actor: Actor) -> Iterator[None]:
        """Raise `ActorDied` where its process is gone."""
        try:
            yield
        except self.cluster.died as error:
            reason = str(error).strip().partition("\n")[0]
            raise ActorDied(f"{actor} died, with what it learned since the last checkpoint: {reason}") from error

    def _at_once(self, method: str, arguments: Mapping[RoleName | None, Sequence[Any]]) -> list[Any]:
        """A method of the actors of some roles (None: the trainer's), which work at the same time."""
        asked = []
        for role, given in arguments.items():
            actor = self.apart[role] if role else self.trainer
            asked.append((actor, self.cluster.submit(actor, method, *given)))
        self.cluster.wait(asked)
        answers = []
        for actor, found in asked:
            with self._named(actor):
                answers.append(self.cluster.get(actor, found))
        return answers

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """The rows with what is asked for, each by the actor that has the model; all at the same time."""
        shares: dict[RoleName | None, set[ModelInput]] = {}
        for name in needs:
            role = SOURCES[name][0]
            shares.setdefault(role if role in self.apart else None, set()).add(name)
        shared = self.cluster.put(rows)
        found = self._at_once("forward_only", {role: (shared, frozenset(names)) for role, names in shares.items()})
        return replace(rows, **{name: tensor for part in found for name, tensor in part.items()})

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """One optimizer step on the whole batch, of policy and critic at the same time where they are apart."""
        shared = self.cluster.put(batch)
        return merge(self._at_once("train_step", dict.fromkeys(self._trained, (shared, algorithm))))

    def token_numbers(self) -> dict[str, Tensor]:
        """Of the trainer's last update."""
        (found,) = self._at_once("token_numbers", {None: ()})
        assert isinstance(found, dict)
        return found

    @property
    def _trained(self) -> list[RoleName | None]:
        return [None, *(role for role in self.apart if role in TRAINED)]

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine; this process sees those of its machine without a copy."""
        (update,) = self._at_once("weight_update", {None: (version, adapters_alone)})
        assert isinstance(update, WeightUpdate)
        return update

    def free_memory(self) -> None:
        """Give all devices what the actors keep for later."""
        self._at_once("free_memory", dict.fromkeys([None, *self.apart], ()))

    def save(self, folder: Path) -> None:
        """Model, optimizer, schedule and random state, as one back end writes them.

        Raises:
            ConfigError: the folder is not there for the actors too.
        """
        self._at_once("save", dict.fromkeys(self._trained, (folder.resolve(),)))
        if not any(folder.iterdir()):
            raise ConfigError(f"{folder} is not shared with {self.trainer}: put output_dir where all machines see it")

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`."""
        self._at_once("load", dict.fromkeys(self._trained, (folder.resolve(),)))

    def close(self) -> None:
        """End the actors."""
        for actor in (self.trainer, *self.apart.values()):
            self.cluster.end(actor)


# --------------------------------------------------------------------------------------------------------------------
# The ranks of a trainer in Ray actors, called from the process of the run.

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
