"""Back ends in other processes: groups of ranks that train together, and Ray actors.

`DistributedBackend` forwards each call to handles. `RankGroup` is the handle of a group whose rank 0 is this process;
rank 0 sends each call to the other ranks. `ActorHandle` is the handle of a Ray actor, which has a back end of one
process or rank 0 of a group.

Launchers create them: `start_ranks` for worker processes of this one or the processes of torchrun, `start_actors` and
`start_rank_actors` for Ray.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
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
from types import FrameType, SimpleNamespace
from typing import Any, Protocol, get_args

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from atomrl.backends.group import START_S, STOPPED_S, RankFailed, RankLost, Ranks
from atomrl.backends.roles import SOURCES, TRAINED, RoleName
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.cluster.ray_cluster import Actor, RayCluster, identity
from atomrl.common.errors import reraise_as
from atomrl.common.launchers import launched
from atomrl.common.metrics import Metrics, merge
from atomrl.common.threads import fixed_threads
from atomrl.common.workers import WorkerProcess, send_answer
from atomrl.config import ConfigError, ModelConfig, RankedConfig
from atomrl.models.memory import Sizes, memory_metrics
from atomrl.protocols import Algorithm, ModelInput, TrainingBackend, WeightUpdate
from atomrl.tracking.checkpoint_format import STATE_FOLDER
from atomrl.weight_sync.channels import LOOPBACK, open_store

Build = Callable[[Ranks, torch.device], TrainingBackend]
CONTENTS = "contents of "
"""Prefix of the keys of hashes in `given`, before a path."""
EXIT_S, REPORT_S, POLL_S = 10.0, 1.0, 0.2
"""Seconds that a worker process gets to exit, that a failed collective gets to report a death before the watcher does,
and between two looks of the watcher."""
PREPARE_S = 2400.0
"""Seconds for rank 0 of a launcher to read the data, before it meets the others."""
RANK_0_ERROR_S = 15.0
"""Seconds to wait for the error of rank 0 after another rank ended at the start."""


class RankedKind(Protocol):
    """Class of a back end that runs on each rank, with the checks and memory estimate that a dry run needs.

    `settings` is the config section of the back end.
    """

    supports_images: bool
    """True if rows may have pictures; if not, data with pictures are refused."""

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
                f"backend.ranks={count}, but the launcher started {started.world} (WORLD_SIZE); leave it out"
            )
        return started.world
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    if gpus and count is not None and count > gpus:
        raise ConfigError(f"backend.ranks={count}: torch sees {gpus} CUDA devices on this machine")
    if gpus and ":" in device and count != 1:
        raise ConfigError(f"model.device={device}: each rank has its own GPU; remove the number")
    return count or gpus or 1


def rank_device(device: str, local_rank: int) -> torch.device:
    """Return the device of a rank: its GPU, or the CPU.

    The modulo is for launchers that show each rank only its own GPU.
    """
    if not device.startswith("cuda"):
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))


# --------------------------------------------------------------------------------------------------------------------
# The back end that a run calls.


class Handle(Protocol):
    """Calls the methods of a back end elsewhere."""

    def share(self, value: Any) -> Any:
        """Return an argument for several calls of `start`, stored where all actors can read it."""

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Start a call; return a function that waits for its result.

        Raises:
            RankFailed: here or in the function: a process is gone or hangs, or a rank failed.
            Exception: likewise, the error of the method.
        """

    def close(self) -> None:
        """End the processes."""


class DistributedBackend:
    """A `TrainingBackend` whose models are in other processes.

    With the same number of threads, results equal those of a local back end bit for bit. Models with a handle of their
    own compute at the same time as those of the trainer.

    Args:
        trainer: has the policy, and all models that are not in `apart`.
        apart: handles of the models that have their own, by role.
    """

    def __init__(self, trainer: Handle, apart: Mapping[RoleName, Handle] | None = None) -> None:
        self.trainer, self.apart = trainer, dict(apart or {})
        self.concurrent = bool(self.apart)
        self._handles = [trainer, *self.apart.values()]
        self._trained = [trainer, *(handle for role, handle in self.apart.items() if role in TRAINED)]

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the trainer."""
        return self.trainer.start(method, *arguments)()

    def _call_each(self, handles: Sequence[Handle], method: str, *arguments: Any) -> list[Any]:
        """Call a method of several handles at the same time."""
        calls = [handle.start(method, *arguments) for handle in handles]
        return [wait() for wait in calls]

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """Compute the needs without gradient, each where its model is, and add them to the rows."""
        needs_of: dict[Handle, set[ModelInput]] = {}
        for name in needs:
            needs_of.setdefault(self.apart.get(SOURCES[name][0], self.trainer), set()).add(name)
        shared = self.trainer.share(rows)
        calls = {h: h.start("forward_only", shared, frozenset(names)) for h, names in needs_of.items()}
        for handle, wait in calls.items():
            computed = wait()
            rows = replace(rows, **{name: getattr(computed, name) for name in needs_of[handle]})
        return rows

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """Take one optimizer step on the whole batch; policy and critic step in parallel if they are apart."""
        return merge(self._call_each(self._trained, "train_step", self.trainer.share(batch), algorithm))

    def token_numbers(self) -> Mapping[str, Tensor]:
        """Return the per-token values of the trainer's last update."""
        values: Mapping[str, Tensor] = self._call("token_numbers")
        return values

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """Return the policy's weights for an engine.

        If the ranks have them in parts, each part is gathered when it is read. From an actor on this machine they are
        read without a copy.
        """
        update: WeightUpdate = self._call("weight_update", version, adapters_alone)
        return update if update.outline is None else replace(update, tensors=self._read_parts())

    def _read_parts(self) -> Iterator[tuple[str, Tensor]]:
        for number in itertools.count():
            if not (part := self._call("weight_part", number)):
                return
            yield from part
            del part  # before the next one is gathered

    def frozen_base(self) -> None:
        """Return None: the weights are in other processes."""

    def free_memory(self) -> None:
        """Return the allocators' cached memory to the GPUs."""
        self._call_each(self._handles, "free_memory")

    def save(self, folder: Path) -> Callable[[], None]:
        """Start writing a checkpoint in the layout of a local back end; return a function that waits for it.

        Steps may be taken before that. All processes must share the folder's file system.
        """
        self._call_each(self._trained, "save", folder.resolve())

        def wait() -> None:
            self._call_each(self._trained, "saved")
            if not (folder / STATE_FOLDER).exists():
                raise ConfigError(
                    f"{folder} is not shared with {self.trainer}: set output_dir to a folder that all machines share"
                )

        return wait

    def load(self, folder: Path) -> None:
        """Resume exactly from `save`."""
        self._call_each(self._trained, "load", folder.resolve())

    def close(self) -> None:
        """End the processes."""
        for handle in self._handles:
            handle.close()


# --------------------------------------------------------------------------------------------------------------------
# A group of ranks, of which this process is rank 0.


class RankGroup:
    """Handle of a group of ranks; this process is rank 0.

    Args:
        join: joins the process group. It may start other ranks; it adds them to its argument, rank -> process.
        build: creates the back end of a rank, called on each rank; must be picklable.
        tokenizer: saved with checkpoints.
        threads: CPU threads of rank 0 in a call; None: those of this process.

    Raises:
        ConfigError: `build` raised it on all ranks.
        RankFailed: a rank did not start.
    """

    def __init__(
        self,
        join: Callable[[dict[int, WorkerProcess]], Ranks],
        build: Build,
        tokenizer: Any = None,
        threads: int | None = None,
    ) -> None:
        self.processes: dict[int, WorkerProcess] = {}
        self.broken, self.busy, self.lock = False, False, threading.Lock()
        self.threads = threads
        self.ranks: Ranks | None = None
        self._handler: Any = None
        try:
            self.ranks = join(self.processes)
            self.ranks.exited = self._exited
            self.own = _OwnRank(self.ranks)
            self.start("build", build)
            self.own.backend.tokenizer = tokenizer
        except BaseException:
            self.broken = True
            self.close()
            raise
        # A rank that dies during rollouts interrupts them by a signal. Only the main thread can handle signals;
        # elsewhere (ValueError) the next call of the ranks fails instead.
        if self.processes:
            with suppress(ValueError):
                self._handler = signal.signal(signal.SIGUSR1, self._on_death)
                threading.Thread(target=self._watch, name="watch ranks", daemon=True).start()

    def share(self, value: Any) -> Any:
        """Return the value: rank 0 sends it with each call."""
        return value

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method on every rank; return a function that returns the result of rank 0."""
        if self.broken or self.ranks is None:
            raise RankFailed("the ranks have ended")
        self.busy = True
        try:
            self.ranks.send((method, arguments))
            with fixed_threads(self.threads):
                result = self.own.run(method, *arguments)
        except RankFailed as error:
            self.broken = True
            raise type(error)(f"{error}; {method} was interrupted", *error.args[1:]) from error
        except Exception:
            raise
        except BaseException:  # interrupted: the other ranks are stuck in the middle of the call
            self.broken = True
            raise
        finally:
            self.busy = False
        return lambda: result

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
        """Interrupt this process when a rank dies, so that a long rollout does not continue without its trainer."""
        while not self._exited():
            time.sleep(POLL_S)
            if self.broken:
                return
        time.sleep(REPORT_S)  # a collective operation that fails by it has the better message
        with self.lock:
            if not self.broken:
                os.kill(os.getpid(), signal.SIGUSR1)

    def _on_death(self, number: int, frame: FrameType | None) -> None:
        if not self.broken and not self.busy and (exited := self._exited()):
            self.broken = True
            raise RankLost(", ".join(f"rank {rank} {how}" for rank, how in exited.items()))

    def close(self) -> None:
        """Shut the other ranks down; kill those that do not exit."""
        self.busy = True
        if not self.broken and self.ranks is not None:
            with suppress(RankFailed):
                self.ranks.send(None)
                self.own.backend.close()
        with self.lock:
            orderly, self.broken = not self.broken, True
        for worker in self.processes.values():
            if orderly:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(EXIT_S)
            worker.kill()
        if self.ranks is not None:
            if orderly or len(self.processes) == self.ranks.world - 1:  # else it would wait for ranks that are gone
                self.ranks.close()
            self.ranks = None
        if self._handler is not None:
            signal.signal(signal.SIGUSR1, self._handler)


def start_ranks(
    build: Build, settings: RankedConfig, device: str, tokenizer: Any = None, given: Mapping[str, Any] | None = None
) -> DistributedBackend:
    """Create a back end on several ranks, of which this process is rank 0.

    The others are worker processes of this one, or the processes that torchrun has started.

    Args:
        build, tokenizer: arguments of `RankGroup`.
        settings: number of ranks and timeout of their collective operations.
        device: `model.device` after `auto` is resolved.
        given: see `join_launched`.

    Raises:
        ConfigError: the ranks cannot be started, or were given different configs, or `build` raised it on all of them.
        RankFailed: a rank did not start.
    """
    count = rank_count(settings, device)
    if launched() is not None:
        join_all = partial(join_launched, device, settings.timeout_s, given or {})
        return DistributedBackend(RankGroup(lambda _: join_all(), build, tokenizer))
    threads = max(1, torch.get_num_threads() // count)

    def join(processes: dict[int, WorkerProcess]) -> Ranks:
        store, port = open_store(LOOPBACK, timedelta(seconds=START_S))
        shared = {"port": port, "world": count, "device": device, "timeout_s": settings.timeout_s, "threads": threads}
        for rank in range(1, count):
            processes[rank] = WorkerProcess.start(__name__)
            processes[rank].connection.send_bytes(json.dumps(shared | {"rank": rank}).encode())
        end = time.monotonic() + START_S
        for rank, worker in processes.items():
            if not worker.connection.poll(max(0.0, end - time.monotonic())):
                raise RankLost(f"rank {rank} (pid {worker.process.pid}) has not started within {START_S:g} s")
            try:
                worker.answer()
            except (EOFError, OSError, ValueError) as error:
                raise RankFailed(f"rank {rank} did not start") from error
        return Ranks(store, 0, count, rank_device(device, 0), settings.timeout_s)

    return DistributedBackend(RankGroup(join, build, tokenizer, threads))


# --------------------------------------------------------------------------------------------------------------------
# The other ranks.


def join_launched(device: str, timeout_s: float, given: Mapping[str, Any] | None) -> Ranks:
    """Join the process group of torchrun, or of a launcher that sets the same environment variables.

    Args:
        given: the config that this rank was started with, by dotted keys. The run is that of rank 0's, so another one
            would be ignored. With `CONTENTS` before a path: a hash of what is there, compared by the ranks that have
            it. None: this rank has none, and is not compared.

    Raises:
        ConfigError: on rank 0, if those of another rank differ.
        RankLost: a rank has not started.
    """
    started = launched()
    assert started is not None
    rank, world = started.rank, started.world
    store = _launcher_store(rank)
    configs = PrefixStore("config", store)
    configs.set(str(rank), json.dumps(given))
    _wait_for_all(configs, rank, world)
    ranks = Ranks(store, rank, world, rank_device(device, started.local_rank), timeout_s, started[2:])
    if rank == 0:
        try:
            check_same_configs(configs, world)
        except ConfigError:
            ranks.close()
            raise
    return ranks


def _launcher_store(rank: int) -> Any:
    """Return the store at which the ranks of a launcher meet: torchrun's, else one that rank 0 hosts.

    Raises:
        RankLost: it is not there within `PREPARE_S`.
    """
    host, port, end = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), time.monotonic() + PREPARE_S
    if host is None or port is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(rendezvous("env://", timeout=timedelta(seconds=START_S)))[0]
    while rank:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=START_S):
            return _reach(host, int(port))
        if time.monotonic() > end:
            raise RankLost(f"rank 0 does not answer at {host}:{port} (MASTER_ADDR, MASTER_PORT) after {PREPARE_S:g} s")
        time.sleep(POLL_S)
    # Rank 0 waits for the others later, where it can name those that are missing.
    return TCPStore(host, int(port), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S))


def _wait_for_all(configs: Any, rank: int, world: int) -> None:
    """Wait until all ranks have left their config.

    Raises:
        RankLost: some have not `START_S` after rank 0 has.
        RankFailed: rank 0 has ended, which hosts the store.
    """
    begun, prepared = time.monotonic(), False
    end = begun + PREPARE_S
    with reraise_as(RankFailed, "rank 0 has ended before all ranks were there", DistError):
        while absent := [other for other in range(world) if not configs.check([str(other)])]:
            if not prepared and 0 not in absent:  # rank 0, which takes the store with it, goes last
                prepared, end = True, time.monotonic() + START_S + (0.0 if rank else STOPPED_S)
            if time.monotonic() > end:
                names = ", ".join(map(str, absent))
                raise RankLost(f"rank {names} has not started within {end - begun:.0f} s")
            time.sleep(POLL_S)


def check_same_configs(configs: Any, world: int) -> None:
    """Raise ConfigError if ranks were given other configs than rank 0, with the keys.

    Args:
        configs: store with the config of each rank.
    """
    first, *others = (json.loads(configs.get(str(rank))) for rank in range(world))
    for rank, other in enumerate(others, 1):
        if not other:
            continue
        keys = [key for key in first | other if not key.startswith(CONTENTS) or {key} <= first.keys() & other.keys()]
        different = [key for key in keys if first.get(key) != other.get(key)]
        if different:
            lines = [f"{key}: {other.get(key)!r} on rank {rank}, {first.get(key)!r} on rank 0" for key in different]
            raise ConfigError("the ranks were started with different configs or files: " + "; ".join(lines))


def follow_launcher(settings: RankedConfig, device: str, given: Mapping[str, Any] | None) -> None:
    """Run as a rank other than 0 of a launcher's group, until rank 0 closes the back end.

    Args:
        given: see `join_launched`.
    """
    rank_count(settings, device)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 finishes its step and then closes this rank
    _follow(join_launched(device, settings.timeout_s, given))


def serve(connection: Connection) -> None:
    """Run as a rank that rank 0 started (entry point of `WorkerProcess`)."""
    settings: Mapping[str, Any] = json.loads(connection.recv_bytes())
    torch.set_num_threads(settings["threads"])
    send_answer(connection, {"ready": True})
    rank = settings["rank"]
    device = rank_device(settings["device"], rank)
    _follow(Ranks(_reach(LOOPBACK, settings["port"]), rank, settings["world"], device, settings["timeout_s"]))


def _reach(host: str, port: int) -> TCPStore:
    """Connect to the store at which the ranks join their group."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=START_S))


def _follow(ranks: Ranks) -> None:
    """Execute the commands of rank 0, until it sends None."""
    logging.disable(logging.WARNING)  # rank 0 logs the same
    own = _OwnRank(ranks)
    # A rank that waits for a command, which a frozen rank should forward, does not notice that rank 0 has ended.
    ranks.abandoned = lambda: os._exit(1)
    try:
        while (command := ranks.receive()) is not None:
            method, arguments = command
            try:
                own.run(method, *arguments)
            except RankFailed:
                raise
            except Exception:  # raised on all ranks: rank 0 handles it, and closes this rank if it has to
                continue
        own.backend.close()
        ranks.close()
    except Exception as error:
        if not isinstance(error, RankFailed) or ranks.own_error:
            traceback.print_exc()
        os._exit(1)  # so that the other ranks' collective operations fail at once


class _OwnRank:
    """The back end of one rank; the first command builds it."""

    backend: Any = None

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def run(self, method: str, *arguments: Any) -> Any:
        """Execute a command together with the other ranks: `build`, or a method of the back end."""
        call = self._build if method == "build" else getattr(self.backend, method)
        return self.ranks.together(partial(call, *arguments))

    def _build(self, build: Build) -> None:
        self.ranks.barrier()  # unpickling `build` imported what it needs, at different speeds
        self.backend = build(self.ranks, self.ranks.device)


# --------------------------------------------------------------------------------------------------------------------
# Back ends in Ray actors.


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
    store = _reach(host, port)
    store.set(f"machine/{rank}", identity(os.getpid())[0])
    machines = [store.get(f"machine/{other}") for other in range(world)]  # waits for all
    local = machines[:rank].count(machines[rank]), machines.count(machines[rank])
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = Ranks(store, rank, world, rank_device(device, local[0]), timeout_s, local)
    if rank:
        _follow(ranks)
        return None
    return BackendInActor(lambda: DistributedBackend(RankGroup(lambda _: ranks, build, tokenizer)))
