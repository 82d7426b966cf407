"""A Ray cluster for one run: who goes where in it, and processes that never outlive the run."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atomrl.config import ClusterConfig, ClusterRole, ConfigError, ResourceConfig

log = logging.getLogger(__name__)
START_S = 600.0
"""For loading a model in a new process; no part of `cluster.timeout_s`."""
_REACH_S = 5.0
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else it writes a token into the home folder
    "RAY_worker_niceness": "0",  # else whatever runs on the machine goes before trainer and engines
}
_PR_SET_PDEATHSIG = 1


class PlacementError(ConfigError):
    """The cluster has no room for what is wanted, or is not there; a run could only wait for ever."""


class ActorDied(RuntimeError):
    """A process that cannot be replaced has ended: the trainer's, or that of a model beside it."""


@dataclass(frozen=True)
class Wanted:
    """The actors of a role."""

    role: str
    count: int
    cpus: float
    gpus: float
    """Of each."""

    def __str__(self) -> str:
        return f"{self.role} x{self.count} ({self.cpus:g} CPUs, {self.gpus:g} GPUs each)"


@dataclass
class Node:
    """What a machine has left.

    Example:
        >>> node = Node("a", "10.0.0.1", cpus=2, gpus=[1.0])
        >>> [node.take(cpus=1, gpus=0.5), node.take(cpus=0.5, gpus=0.6), node.take(cpus=1, gpus=0.5), node.gpus]
        [True, False, True, [0.0]]
    """

    name: str
    address: str
    cpus: float
    gpus: list[float] = field(default_factory=list)
    """The free share of each GPU: a part of one is never put together from several."""

    def take(self, cpus: float, gpus: float) -> bool:
        """Set resources aside; whether there were enough."""
        fitting = sorted((free, index) for index, free in enumerate(self.gpus) if free >= min(gpus, 1) - 1e-9)
        count = math.ceil(gpus)
        if cpus > self.cpus + 1e-9 or len(fitting) < count:
            return False
        self.cpus -= cpus
        for _, index in fitting[:count]:
            self.gpus[index] = round(self.gpus[index] - min(gpus, 1), 6)
        return True

    def __str__(self) -> str:
        free = ", ".join(f"{share:g}" for share in self.gpus)
        return f"{self.address} with {self.cpus:g} CPUs and {len(self.gpus)} GPUs{f' ({free} free)' if free else ''}"


def wanted(config: ClusterConfig, roles: Sequence[ClusterRole], gpus: bool) -> list[Wanted]:
    """What the actors of a run take; the largest first, since that is how they find room.

    Args:
        config: of the cluster.
        roles: those that the run has in actors.
        gpus: whether `placement` gives any.

    Example:
        >>> for each in wanted(ClusterConfig(placement="colocated", replicas=2), ["trainer", "rollout"], gpus=True):
        ...     print(each)
        trainer x1 (1 CPUs, 0.5 GPUs each)
        rollout x2 (1 CPUs, 0.25 GPUs each)
    """
    shares: dict[str, float] = {}
    if gpus and config.placement == "colocated":
        shares = {"trainer": 0.5, "rollout": 0.5 / config.replicas}
    elif gpus and config.placement == "split":
        shares = dict.fromkeys(roles, 1.0)
    found = []
    for role in roles:
        own = config.resources.get(role, ResourceConfig())
        gpus_each = shares.get(role, 0.0) if own.num_gpus is None else own.num_gpus
        found.append(Wanted(role, config.replicas if role == "rollout" else 1, own.num_cpus, gpus_each))
    return sorted(found, key=lambda each: (-each.gpus, -each.cpus))


def places(actors: Sequence[Wanted], nodes: Sequence[Node]) -> dict[tuple[str, int], Node]:
    """Where every actor goes: the first machine with room.

    Raises:
        PlacementError: says for which there is none.

    Example:
        >>> places([Wanted("rollout", 3, 1, 0)], [Node("a", "this machine", cpus=2)])
        Traceback (most recent call last):
        ...
        atomrl.cluster.PlacementError: cluster: there is room for 2 of 3 rollout actors (1 CPUs, 0 GPUs each): this \
machine with 2 CPUs and 0 GPUs
    """
    machines = [Node(node.name, node.address, node.cpus, [*node.gpus]) for node in nodes]
    found: dict[tuple[str, int], Node] = {}
    for each in actors:
        for index in range(each.count):
            room = next((node for node in machines if node.take(each.cpus, each.gpus)), None)
            if room is None:
                others = ", ".join(str(other) for other in actors if other is not each)
                raise PlacementError(
                    f"cluster: there is room for {index} of {each.count} {each.role} actors ({each.cpus:g} CPUs, "
                    f"{each.gpus:g} GPUs each){f' beside {others}' if others else ''}: {'; '.join(map(str, nodes))}"
                )
            found[each.role, index] = room
    return found


def plan(
    config: ClusterConfig, roles: Sequence[ClusterRole], device: str, nodes: Sequence[Node]
) -> tuple[dict[str, Wanted], dict[tuple[str, int], Node]]:
    """What each role's actors take, and where each goes; arguments as of `RayCluster`."""
    gpus = device != "cpu" and (device != "auto" or any(node.gpus for node in nodes))
    actors = wanted(config, roles, gpus)
    return {each.role: each for each in actors}, places(actors, nodes)


def this_machine() -> Node:
    """What a cluster has that is started here."""
    return Node("", "this machine", float(os.cpu_count() or 1), [1.0] * torch.cuda.device_count())


@dataclass(eq=False)
class Actor:
    """A process of the run, known by its role."""

    role: str
    index: int
    handle: Any
    node: Node
    pid: int = 0

    def __str__(self) -> str:
        name = f"{self.role} {self.index}" if self.role == "rollout" else self.role
        return f"{name} (pid {self.pid} on {self.node.address})" if self.pid else name


class RayCluster:
    """A Ray cluster that is joined, or started on this machine and ended by `close`.

    Every actor is put where `places` says, so that what a dry run prints is what happens. An actor ends with this
    process, however that ends.

    Args:
        config: of the cluster.
        roles: that will have actors.
        device: `model.device`: on `cpu`, or where `auto` finds no GPU, `placement` gives none.

    Raises:
        ImportError: Ray is not installed.
        PlacementError: there is no room for the actors, or no cluster at the address.
    """

    def __init__(self, config: ClusterConfig, roles: Sequence[ClusterRole], device: str = "auto") -> None:
        self.config = config
        self.folder: str | None = None
        self.actors: list[Actor] = []
        if config.address is None:
            plan(config, roles, device, [this_machine()])  # before anything is started
        handler = signal.getsignal(signal.SIGTERM)
        self.ray, self.owned = self._connect(config.address)
        with suppress(ValueError):  # not the main thread, where Ray leaves it alone
            signal.signal(signal.SIGTERM, handler)
        send_tensors_as_arrays()
        try:
            self.wanted, self.places = plan(config, roles, device, self.nodes())
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> tuple[Any, bool]:
        """Ray, and whether this process is its only user."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import ray

        if ray.is_initialized():
            return ray, False
        if address is not None:
            check_reachable(address)
            try:
                ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise PlacementError(f"cluster.address={address}: {str(error).partition(chr(10))[0]}") from error
            return ray, True
        # Two runs share no folder; a short name, since sockets in it may have 107 letters.
        self.folder = tempfile.mkdtemp(prefix="atomrl-ray-", dir="/tmp" if os.path.isdir("/tmp") else None)
        try:
            with _on_loopback():
                ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING, _temp_dir=self.folder)
            if (host := ray.nodes()[0]["NodeManagerAddress"]) != "127.0.0.1":
                ray.shutdown()
                raise RuntimeError(f"this version of Ray would listen on {host}, for the whole network")
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return ray, True

    def nodes(self) -> list[Node]:
        """The machines of the cluster and what they have free, the one of this process first."""
        from ray._private.state import available_resources_per_node

        free, here = available_resources_per_node(), self.ray.get_runtime_context().get_node_id()
        found = []
        for node in self.ray.nodes():
            left = free.get(node["NodeID"])
            if node["Alive"] and left is not None:
                whole, part = divmod(left.get("GPU", 0.0), 1)
                gpus = [1.0] * int(whole) + ([part] if part else [])
                found.append(Node(node["NodeID"], node["NodeManagerAddress"], left.get("CPU", 0.0), gpus))
        return sorted(found, key=lambda node: node.name != here)

    def start(self, role: str, index: int, build: Callable[[], Any]) -> Actor:
        """Start a process that holds what `build` makes there; `know` waits for it.

        Args:
            role: one of those wanted.
            index: among the actors of the role.
            build: must be picklable.

        Raises:
            PlacementError: its machine is gone, and no other has room.
        """
        need = self.wanted[role]
        nodes = self.nodes()
        if self.places[role, index].name not in {node.name for node in nodes}:
            self.places |= {(role, index): places([Wanted(role, 1, need.cpus, need.gpus)], nodes)[role, 0]}
        place = self.places[role, index]
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(place.name, soft=False)
        hosted = self.ray.remote(num_cpus=need.cpus, num_gpus=need.gpus, max_restarts=0, scheduling_strategy=strategy)(
            Hosted
        )
        actor = Actor(role, index, hosted.remote(build, max(1, int(need.cpus)), _identity(os.getpid())), place)
        self.actors.append(actor)
        return actor

    def know(self, actor: Actor) -> None:
        """Wait until it is there, with what it holds."""
        actor.pid = self.get(actor, actor.handle.pid.remote(), START_S)

    def call(self, actor: Actor, method: str, *args: Any) -> Any:
        """The result of a method of what an actor holds, within `cluster.timeout_s`; errors as in `get`."""
        return self.get(actor, self.submit(actor, method, *args))

    def submit(self, actor: Actor, method: str, *args: Any) -> Any:
        """The same without waiting: for `get`."""
        return actor.handle.call.remote(method, *args)

    def get(self, actor: Actor, found: Any, timeout_s: float | None = None) -> Any:
        """What an actor answers.

        Raises:
            TimeoutError: it did not answer in time; names it.
            Exception: what the method raised.
            ray.exceptions.RayError: it died (`died` says which are meant).
        """
        try:
            return self.ray.get(found, timeout=timeout_s or self.config.timeout_s)
        except self.ray.exceptions.GetTimeoutError:
            raise TimeoutError(self.silent([actor], timeout_s)) from None
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def wait(self, asked: Sequence[tuple[Actor, Any]]) -> None:
        """Until all have answered, or died.

        Raises:
            TimeoutError: some did not answer within `cluster.timeout_s`; names them.
        """
        found = [each for _, each in asked]
        _, late = self.ray.wait(found, num_returns=len(found), timeout=self.config.timeout_s, fetch_local=False)
        if late:
            raise TimeoutError(self.silent([actor for actor, each in asked if each in late]))

    @property
    def died(self) -> tuple[type[Exception], ...]:
        """The errors of a process, or its machine, that is gone."""
        errors = self.ray.exceptions
        return errors.RayActorError, errors.ActorUnschedulableError, errors.ObjectLostError

    def silent(self, actors: Sequence[Actor], timeout_s: float | None = None) -> str:
        """That actors do not answer, for an error."""
        limit = "while starting" if timeout_s else "cluster.timeout_s"
        names = ", ".join(map(str, actors))
        return f"{names} has not answered for {timeout_s or self.config.timeout_s:g} s ({limit})"

    def end(self, actor: Actor) -> None:
        """Kill its process, if that is not done."""
        if actor in self.actors:
            self.actors.remove(actor)
            self.ray.kill(actor.handle)

    def close(self) -> None:
        """End the actors, and the cluster where it was started here."""
        for actor in [*self.actors]:
            self.end(actor)
        if self.owned:
            self.owned = False
            self.ray.shutdown()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray take this machine for 127.0.0.1, as it does on systems where it has no clusters: its ports take whatever
    asks, and it refuses that address as an argument."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class Hosted:
    """A process of its own, with an object whose methods are called from outside.

    Args:
        build: makes the object.
        threads: that it computes with.
        owner: the process that it ends with, as `_identity` names it.
    """

    def __init__(self, build: Callable[[], Any], threads: int, owner: tuple[str, int]) -> None:
        end_with(owner)
        torch.set_num_threads(threads)
        send_tensors_as_arrays()
        self.inner = build()

    def pid(self) -> int:
        return os.getpid()

    def call(self, method: str, *args: Any) -> Any:
        """The result of a method of the object."""
        return getattr(self.inner, method)(*args)


def end_with(owner: tuple[str, int]) -> None:
    """Be killed when a process of this machine ends, and when Ray's on it does; leave signals of the terminal to it.

    Ray's processes see for themselves when the owner is on another machine.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Ray's raylet is the parent
    machine, pid = owner
    if _identity(pid)[0] != machine:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _identity(pid: int) -> tuple[str, int]:
    """Where a process id means something, and the id."""
    if sys.platform != "linux":
        return "", pid
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}", pid


def send_tensors_as_arrays() -> None:
    """Let Ray share the memory of tensors, as it does of numpy arrays; torch's own way copies them twice."""
    from ray.util import register_serializer

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # what came is only read
    for kind in (Tensor, torch.nn.Parameter):
        register_serializer(kind, serializer=_to_array, deserializer=_from_array)


def _to_array(tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    """As bytes, since numpy knows no bfloat16."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def _from_array(sent: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    array, dtype, shape = sent
    return torch.from_numpy(array).view(dtype).reshape(shape)


def check_reachable(address: str) -> None:
    """That something listens at `host:port`; Ray itself would try for a minute.

    Raises:
        PlacementError: nothing does, or it is no such address.
    """
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PlacementError(f"cluster.address={address}: must be auto, or HOST:PORT of a cluster (`ray start --head`)")
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except OSError as error:
        raise PlacementError(f"cluster.address={address}: no cluster can be reached there: {error}") from error


def describe(config: ClusterConfig, roles: Sequence[ClusterRole], device: str = "auto") -> list[str]:
    """Who goes where, a line for each role; of a dry run. Nothing is started; a cluster at an address is asked.

    Raises:
        PlacementError: there is no room, or no cluster at the address.
    """
    if config.address is None:
        found = plan(config, roles, device, [this_machine()])
    else:
        cluster = RayCluster(config, roles, device)
        found = cluster.wanted, cluster.places
        cluster.close()
    lines = []
    for each in found[0].values():
        hosts = Counter(found[1][each.role, index].address for index in range(each.count))
        where = ", ".join(host if count == each.count else f"{host} (x{count})" for host, count in hosts.items())
        lines.append(f"{each.role:<10} x{each.count}  {each.cpus:g} CPUs, {each.gpus:g} GPUs each, on {where}")
    return lines
