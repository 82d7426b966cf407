"""Back ends in other processes: ranks that train together, and Ray actors.

`DistributedBackend` is the back end in the process of the run, which is rank 0. It starts the other ranks as worker
processes, unless torchrun has started all of them. The other ranks receive a function that builds their back end, and
then execute every call at the same time as rank 0 (`follow_launcher`, `serve`).

`RemoteBackend` calls a back end in a Ray actor, and `RankActors` one whose ranks are Ray actors.
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
from typing import Any, Protocol, get_args

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from atomrl.backends.base import SOURCES, TRAINED, RoleName
from atomrl.backends.group import START_S, RankFailed, RankLost, Ranks
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.cluster.ray_cluster import Actor, ActorDied, RayCluster
from atomrl.common.metrics import Metrics, merge
from atomrl.common.processes import WorkerProcess, launched, send_answer
from atomrl.config import ConfigError, ModelConfig, RankedConfig
from atomrl.models.memory import Sizes, memory_metrics
from atomrl.protocols import Algorithm, ModelInput, TrainingBackend, WeightUpdate
from atomrl.weight_sync.channels import LOOPBACK, open_store

Build = Callable[[Ranks, torch.device], TrainingBackend]
EXIT_S, REPORT_S, POLL_S = 10.0, 1.0, 0.2
"""Seconds that a worker process gets to exit, that a failed collective gets to report a death before the watcher does,
and between two looks of the watcher."""


class RankedKind(Protocol):
    """Class of a back end that runs on each rank, with the checks and memory estimate that a dry run needs.

    `settings` is the config section of the back end.
    """

    def __call__(self, settings: Any, **named: Any) -> TrainingBackend:
        """Create the back end of this rank; `named` are arguments of `BaseBackend`."""

    def check(self, settings: Any, model: ModelConfig, shapes: Mapping[str, Any], device: str) -> None:
        """Raise ConfigError if it cannot train these models with these settings.

        Args:
            model: the config section `model`.
            shapes: transformers configs of the models to load, by path, or by config key for a model from scratch.
            device: `model.device` after `auto` is resolved.
        """

    def memory(self, settings: Any, parts: Mapping[str, int], sizes: Sizes, ranks: int) -> dict[str, int]:
        """Return the bytes of each part of the memory estimate on rank 0.

        Args:
            parts: bytes of each part on a single device.
            sizes: parameter counts of the policy.
        """


def rank_count(settings: RankedConfig, device: str) -> int:
    """Return the number of ranks: `backend.ranks`, else the launcher's, else one per GPU.

    Args:
        device: `model.device` after `auto` is resolved.

    Raises:
        ConfigError: a launcher started another number, or there are fewer GPUs.
    """
    count, started = settings.ranks, launched()
    if started is not None:
        if count not in (None, started.world):
            raise ConfigError(
                f"backend.ranks={count}, and the launcher started {started.world} (WORLD_SIZE); leave it out"
            )
        return started.world
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    if gpus and count is not None and count > gpus:
        raise ConfigError(f"backend.ranks={count}: torch sees {gpus} CUDA devices on this machine")
    if gpus and ":" in device and count != 1:
        raise ConfigError(f"model.device={device}: ranks have a GPU each; leave the number out")
    return count or gpus or 1


def rank_device(device: str, local_rank: int) -> torch.device:
    """Return the device of a rank: its GPU, or the CPU.

    The modulo is for launchers that show each rank only its own GPU.
    """
    if not device.startswith("cuda"):
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))


# --------------------------------------------------------------------------------------------------------------------
# Rank 0: the process of the run.


class DistributedBackend:
    """A `TrainingBackend` on several ranks; this process is rank 0.

    Args:
        build: creates the back end of a rank, called on each rank; must be picklable.
        settings: number of ranks and timeout of their collective operations.
        device: `model.device` after `auto` is resolved.
        tokenizer: saved with checkpoints.

    Raises:
        ConfigError: the ranks cannot be started, or `build` raised it on all of them.
        RankFailed: a rank did not start.
    """

    concurrent = False

    def __init__(self, build: Build, settings: RankedConfig, device: str, tokenizer: Any = None) -> None:
        self.processes: dict[int, WorkerProcess] = {}
        self.broken, self.busy, self.ranks, self.lock = False, True, None, threading.Lock()
        count = rank_count(settings, device)
        self.threads = max(1, torch.get_num_threads() // count)
        try:
            self.ranks = ranks = self._meet(count, device, settings.timeout_s)
            ranks.exited = self._exited
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
        # A rank that dies during rollouts interrupts them by a signal. Only the main thread can handle signals;
        # elsewhere (ValueError) the next call of the ranks fails instead.
        self._handler: Any = None
        with suppress(ValueError):
            self._handler = signal.signal(signal.SIGUSR1, self._on_death)
            threading.Thread(target=self._watch, name="watch ranks", daemon=True).start()

    def _meet(self, count: int, device: str, timeout_s: float) -> Ranks:
        """Start the other ranks, unless a launcher has, and join the process group."""
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

    def _exited(self) -> dict[int, str]:
        """Return how each worker process that is no longer running ended, by rank."""
        codes = {rank: worker.process.poll() for rank, worker in self.processes.items()}
        return {
            rank: f"(pid {self.processes[rank].process.pid}) died "
            + (f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")
            for rank, code in codes.items()
            if code is not None
        }

    def _watch(self) -> None:
        """Interrupt this process when a rank dies, so that a long rollout does not go on without its trainer."""
        while self.processes and not self._exited():
            time.sleep(POLL_S)
            if self.broken:
                return
        time.sleep(REPORT_S)  # a collective operation that fails by it has the better message
        with self.lock:
            if self.processes and not self.broken:
                os.kill(os.getpid(), signal.SIGUSR1)

    def _on_death(self, number: int, frame: FrameType | None) -> None:
        if not self.broken and not self.busy and (exited := self._exited()):
            self.broken = True
            raise RankLost(", ".join(f"rank {rank} {how}" for rank, how in exited.items()))

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of every rank's back end; return the result of rank 0."""
        if self.broken or self.ranks is None:
            raise RankFailed("the ranks are gone")
        self.busy = True
        try:
            self.ranks.send((method, arguments))
            with _threads(self.threads):
                return self.ranks.together(partial(getattr(self.backend, method), *arguments))
        except RankFailed as error:
            self.broken = True
            raise type(error)(f"{error}; {method} broke off", *error.args[1:]) from error
        except Exception:
            raise
        except BaseException:  # interrupted: the other ranks are stuck in the middle of the call
            self.broken = True
            raise
        finally:
            self.busy = False

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """Compute the needs without gradient and add them to the rows."""
        rows = self._call("forward_only", rows, frozenset(needs))
        return rows

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """Take one optimizer step on the whole batch."""
        metrics: Metrics = self._call("train_step", batch, algorithm)
        return metrics

    def token_numbers(self) -> dict[str, Tensor]:
        """Return the per-token values of the last update, gathered from all ranks."""
        values: dict[str, Tensor] = self.backend.token_numbers()
        return values

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """Return the policy's weights for an engine, on rank 0.

        If the back end has them in parts, each part is gathered when it is read.
        """
        update: WeightUpdate = self._call("weight_update", version, adapters_alone)
        if update.outline is None:
            return update
        parts = range(len(self.backend.parts))
        return replace(update, tensors=(pair for number in parts for pair in self._call("weight_part", number)))

    def free_memory(self) -> None:
        """Return the allocator's cached memory of all ranks to their GPUs."""
        self._call("free_memory")

    def save(self, folder: Path) -> Callable[[], None]:
        """Start writing a checkpoint in the background; return a function that waits until it is complete.

        Steps may be taken before that. The folder must be on a file system that all ranks share.
        """
        self._call("save", folder.resolve())
        return lambda: self._call("saved")

    def load(self, folder: Path) -> None:
        """Resume from `save`."""
        self._call("load", folder.resolve())

    def close(self) -> None:
        """Shut the other ranks down; kill those that do not exit."""
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
                    worker.process.wait(EXIT_S)
            worker.kill()
        if self.ranks is not None:
            if orderly or launched() is None:  # else destroying the group would wait for ranks that are gone
                self.ranks.close()
            self.ranks = None
        if getattr(self, "_handler", None) is not None:
            signal.signal(signal.SIGUSR1, self._handler)


# --------------------------------------------------------------------------------------------------------------------
# The other ranks.


def join_launched(device: str, timeout_s: float) -> Ranks:
    """Join the process group of torchrun, or of a launcher that sets the same environment variables."""
    started = launched()
    assert started is not None
    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))
    return Ranks(store, rank, world, rank_device(device, started.local_rank), timeout_s, started[2:])


def follow_launcher(settings: RankedConfig, device: str) -> None:
    """Run as a rank other than 0 of a launcher's group, until rank 0 closes the back end."""
    rank_count(settings, device)
    started = launched()
    assert started is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 finishes its step and then closes this rank
    _follow(join_launched(device, settings.timeout_s), rank_device(device, started.local_rank))


def serve(connection: Connection) -> None:
    """Run as a rank that rank 0 started (entry point of `WorkerProcess`)."""
    settings: Mapping[str, Any] = json.loads(connection.recv_bytes())
    torch.set_num_threads(settings["threads"])
    send_answer(connection, {"ready": True})
    limit, rank = timedelta(seconds=START_S), settings["rank"]
    store = TCPStore(LOOPBACK, settings["port"], is_master=False, wait_for_workers=False, timeout=limit)
    device = rank_device(settings["device"], rank)
    _follow(Ranks(store, rank, settings["world"], device, settings["timeout_s"]), device)


def _follow(ranks: Ranks, device: torch.device) -> None:
    """Build the back end and execute the commands of rank 0, until it sends None."""
    logging.disable(logging.WARNING)  # rank 0 logs the same
    try:
        build = ranks.receive()
        backend: Any = None
        with _errors_left_to_rank_0():
            backend = ranks.together(partial(_build, ranks, build, device))
        while (command := ranks.receive()) is not None:
            method, arguments = command
            with _errors_left_to_rank_0():
                ranks.together(partial(getattr(backend, method), *arguments))
        backend.close()
        ranks.close()
    except Exception as error:
        if not isinstance(error, RankFailed) or ranks.own_error:
            traceback.print_exc()
        os._exit(1)  # so that the other ranks' collective operations fail at once


@contextmanager
def _errors_left_to_rank_0() -> Iterator[None]:
    """Ignore errors that all ranks raised: rank 0 handles them, and closes this rank if it has to.

    A rank that exited by itself could be taken for the cause.
    """
    try:
        yield
    except RankFailed:
        raise
    except Exception:
        return


def _build(ranks: Ranks, build: Build, device: torch.device) -> TrainingBackend:
    ranks.barrier()  # unpickling `build` imported what it needs, at different speeds
    return build(ranks, device)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with this many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------------------------
# Back ends in Ray actors.


class ActorMethods:
    """Methods that `RemoteBackend` calls in an actor that holds a back end."""

    backend: TrainingBackend

    def forward_only(self, rows: RowBatch, needs: frozenset[ModelInput]) -> dict[str, Tensor]:
        """Return the computed fields only; the caller has the rest of the rows."""
        computed = self.backend.forward_only(rows, needs)
        return {name: getattr(computed, name) for name in needs}

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """Take one optimizer step; add the memory metrics of this process."""
        return merge([self.backend.train_step(batch, algorithm), memory_metrics()])

    def token_numbers(self) -> dict[str, Tensor]:
        """Return the per-token values of the last update."""
        return dict(self.backend.token_numbers())

    def weight_update(self, version: int, adapters_alone: bool) -> WeightUpdate:
        """Return the weights for an engine; tied weights are one object, so that pickling keeps them tied."""
        update, by_address = self.backend.weight_update(version, adapters_alone), dict[int, Tensor]()
        tensors = [(name, by_address.setdefault(t.data_ptr(), t)) for name, t in update.tensors]
        return replace(update, tensors=tensors, outline=None)

    def free_memory(self) -> None:
        """Return the allocator's cached memory to the GPU."""
        self.backend.free_memory()

    def save(self, folder: Path) -> None:
        """Write a checkpoint; it is complete on return."""
        if (wait := self.backend.save(folder)) is not None:
            wait()

    def load(self, folder: Path) -> None:
        """Resume from `save`."""
        self.backend.load(folder)


class BackendActor(ActorMethods):
    """An actor with a back end of one process.

    Args:
        build: creates the back end, in the actor.
    """

    def __init__(self, build: Callable[[], TrainingBackend]) -> None:
        self.backend = build()


class RemoteBackend:
    """A `TrainingBackend` in a Ray actor; models of some roles can have their own actors.

    With the same number of threads the results equal those of a local back end bit for bit. Models in actors of their
    own compute at the same time as those of the trainer. The death of an actor ends the run (`ActorDied`), which can
    be resumed from its checkpoint.

    Args:
        build: creates a back end with the models of the given roles, in the actor; must be picklable.
        cluster: starts the actors.
        apart: roles with their own actor.
    """

    concurrent = True

    def __init__(
        self,
        build: Callable[[Collection[RoleName]], TrainingBackend],
        cluster: RayCluster,
        apart: Sequence[RoleName] = (),
    ) -> None:
        self.cluster = cluster
        others = [role for role in get_args(RoleName) if role not in apart]
        self.trainer = cluster.start("trainer", 0, partial(BackendActor, partial(build, others)))
        self.apart: dict[RoleName, Actor] = {
            role: cluster.start(role, 0, partial(BackendActor, partial(build, [role]))) for role in apart
        }
        self._wait_for_start([self.trainer, *self.apart.values()])

    def _wait_for_start(self, actors: Sequence[Actor]) -> None:
        for actor in actors:
            with self._naming(actor):
                self.cluster.know(actor)

    @contextmanager
    def _naming(self, actor: Actor) -> Iterator[None]:
        """Raise `ActorDied` with the actor's name if its process has died."""
        try:
            yield
        except self.cluster.died as error:
            reason = str(error).strip().partition("\n")[0]
            raise ActorDied(f"{actor} died, with what it learned since the last checkpoint: {reason}") from error

    def _call_in_parallel(self, method: str, arguments: Mapping[RoleName | None, Sequence[Any]]) -> list[Any]:
        """Call a method of several actors at the same time; return their results.

        Args:
            arguments: of each call, by the role whose actor is called; None is the trainer.
        """
        calls = []
        for role, values in arguments.items():
            actor = self.apart[role] if role else self.trainer
            calls.append((actor, self.cluster.submit(actor, method, *values)))
        self.cluster.wait(calls)
        results = []
        for actor, call in calls:
            with self._naming(actor):
                results.append(self.cluster.get(actor, call))
        return results

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """Compute the needs without gradient, each in the actor that has the model, and add them to the rows."""
        needs_of: dict[RoleName | None, set[ModelInput]] = {}
        for name in needs:
            role = SOURCES[name][0]
            needs_of.setdefault(role if role in self.apart else None, set()).add(name)
        shared = self.cluster.put(rows)
        arguments = {role: (shared, frozenset(names)) for role, names in needs_of.items()}
        parts = self._call_in_parallel("forward_only", arguments)
        return replace(rows, **{name: tensor for part in parts for name, tensor in part.items()})

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """Take one optimizer step on the whole batch; policy and critic step in parallel if they are apart."""
        shared = self.cluster.put(batch)
        return merge(self._call_in_parallel("train_step", dict.fromkeys(self._trained, (shared, algorithm))))

    def token_numbers(self) -> dict[str, Tensor]:
        """Return the per-token values of the trainer's last update."""
        (values,) = self._call_in_parallel("token_numbers", {None: ()})
        assert isinstance(values, dict)
        return values

    @property
    def _trained(self) -> list[RoleName | None]:
        return [None, *(role for role in self.apart if role in TRAINED)]

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """Return the policy's weights for an engine; on the trainer's machine they are read without a copy."""
        (update,) = self._call_in_parallel("weight_update", {None: (version, adapters_alone)})
        assert isinstance(update, WeightUpdate)
        return update

    def free_memory(self) -> None:
        """Return the allocator's cached memory of all actors to their GPUs."""
        self._call_in_parallel("free_memory", dict.fromkeys([None, *self.apart], ()))

    def save(self, folder: Path) -> None:
        """Write a checkpoint in the layout of a local back end.

        Raises:
            ConfigError: the actors do not share the folder's file system.
        """
        self._call_in_parallel("save", dict.fromkeys(self._trained, (folder.resolve(),)))
        if not any(folder.iterdir()):
            raise ConfigError(f"{folder} is not shared with {self.trainer}: put output_dir where all machines see it")

    def load(self, folder: Path) -> None:
        """Resume exactly from `save`."""
        self._call_in_parallel("load", dict.fromkeys(self._trained, (folder.resolve(),)))

    def close(self) -> None:
        """End the actors."""
        for actor in (self.trainer, *self.apart.values()):
            self.cluster.end(actor)


# --------------------------------------------------------------------------------------------------------------------
# Ranks in Ray actors: the group that a launcher would start, in actors that the run calls.

RANK_0_ERROR_S = 15.0
"""Seconds to wait for the error of rank 0 after another rank ended."""


class RankActor(ActorMethods):
    """An actor with one rank; that of rank 0 has the `DistributedBackend` that the run calls."""

    def open_store(self, host: str) -> int:
        """Open the store at which the ranks join their group; return its port."""
        self.store, port = open_store(host, timedelta(seconds=START_S))
        return port

    def run_rank(
        self, environment: dict[str, str], build: Build, settings: RankedConfig, device: str, tokenizer: Any
    ) -> None:
        """Join the group: rank 0 returns once its back end is built, the others once rank 0 has closed it.

        Args:
            environment: environment variables that torchrun would set.
            build, settings, device, tokenizer: arguments of `DistributedBackend`; the device may be `auto`.
        """
        os.environ.update(environment)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if environment["RANK"] == "0":
            self.backend = DistributedBackend(build, settings, device, tokenizer)
        else:
            follow_launcher(settings, device)


class RankActors(RemoteBackend):
    """A `TrainingBackend` on several ranks, each a Ray actor of the role `trainer`.

    The ranks form the same group as with a launcher, with the same results. If one is lost (`RankLost`), a new group
    can resume from a checkpoint.

    Args:
        build, settings, device, tokenizer: arguments of `DistributedBackend`.
        cluster: starts the actors.
    """

    def __init__(self, build: Build, settings: RankedConfig, device: str, tokenizer: Any, cluster: RayCluster) -> None:
        assert settings.ranks is not None, "the cluster has so many places"
        self.cluster, self.apart = cluster, {}
        self.actors = [cluster.start("trainer", rank, RankActor) for rank in range(settings.ranks)]
        self.trainer = self.actors[0]
        self._wait_for_start(self.actors)
        calls = [
            cluster.submit(actor, "run_rank", environment, build, settings, device, tokenizer)
            for actor, environment in zip(self.actors, self._environments(), strict=True)
        ]
        first = self._first_to_return(calls)
        with self._naming(self.actors[first]):
            cluster.get(self.actors[first], calls[first], START_S)

    def _first_to_return(self, calls: Sequence[Any]) -> int:
        """Return rank 0 once it is built, or the rank whose error has to be raised.

        Raises:
            TimeoutError: no rank has returned.
        """
        ready: list[Any] = []
        # If another rank ended first, wait a little for rank 0: once the ranks have met, its error says more.
        for waiting, timeout_s in ((calls, START_S), (calls[:1], RANK_0_ERROR_S)):
            if calls[0] not in ready:
                with self.cluster.watch.inside(timeout_s):
                    ready = self.cluster.ray.wait(waiting, timeout=timeout_s)[0] or ready
        if not ready:
            raise TimeoutError(self.cluster.silent(self.actors, START_S))
        return calls.index(ready[0])

    def _environments(self) -> Sequence[dict[str, str]]:
        """Return the environment variables that torchrun would set on each rank."""
        machines = [actor.node.name for actor in self.actors]
        host = "127.0.0.1" if len(set(machines)) == 1 else self.trainer.node.address
        port = self.cluster.call(self.trainer, "open_store", host)
        return [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(machines)),
                "LOCAL_RANK": str(machines[:rank].count(machine)),
                "LOCAL_WORLD_SIZE": str(machines.count(machine)),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 must not open another store
            }
            for rank, machine in enumerate(machines)
        ]

    @contextmanager
    def _naming(self, actor: Actor) -> Iterator[None]:
        """Raise `RankLost` with the actor's name if its process has died."""
        try:
            with super()._naming(actor):
                yield
        except ActorDied as error:
            raise RankLost(str(error)) from error

    def close(self) -> None:
        """End the actors, rank 0 first, because the others wait for it."""
        for actor in self.actors:
            self.cluster.end(actor)
