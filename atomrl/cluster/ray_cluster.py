"""A Ray cluster for one run: start or join it, place actors, call them, and detect that Ray itself hangs.

The sections after `RayCluster` are the code inside each actor's process (`Hosted`) and the watch over Ray's own
processes (`Watch`).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from atomrl.common.files import TemporaryFolder
from atomrl.common.launchers import launcher_hidden
from atomrl.config import ClusterConfig, ClusterRole, ConfigError, ResourceConfig

# --------------------------------------------------------------------------------------------------------------------
# Placement: the resources of each role's actors, and the machine that each actor runs on.


class PlacementError(ConfigError):
    """The cluster lacks resources for the actors, or cannot be reached. Ray itself would wait forever."""


@dataclass(frozen=True)
class Wanted:
    """The actors of a role, with the resources of each."""

    role: str
    count: int
    cpus: float
    gpus: float
    custom: Mapping[str, float] = field(default_factory=dict)
    """Ray's custom resources: name -> amount."""

    @property
    def needs(self) -> str:
        """The resources of one actor, for messages."""
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs{_listed(self.custom)} each"

    def __str__(self) -> str:
        return f"{self.role} x{self.count} ({self.needs})"


@dataclass
class Node:
    """The free resources of a machine.

    Example:
        >>> node = Node("a", "10.0.0.1", cpus=2, gpus=[1.0])
        >>> [node.take(cpus=1, gpus=0.5), node.take(cpus=0.5, gpus=0.6), node.take(cpus=1, gpus=0.5), node.gpus]
        [True, False, True, [0.0]]
    """

    name: str
    address: str
    cpus: float
    gpus: list[float] = field(default_factory=list)
    """Free share of each GPU. A fraction is allocated from one GPU only."""
    here: bool = False
    """The machine of this process."""
    custom: dict[str, float] = field(default_factory=dict)
    """Ray's custom resources: name -> free amount."""
    users: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(role, GPU index) -> number of actors with a share of that GPU."""

    def take(self, cpus: float, gpus: float, role: str = "", custom: Mapping[str, float] | None = None) -> bool:
        """Allocate resources if they are free, and return True if they were.

        Fractions are packed into the GPU with the smallest sufficient share.
        """
        custom = custom or {}
        fitting = sorted((free, index) for index, free in enumerate(self.gpus) if free >= min(gpus, 1) - 1e-9)
        count = math.ceil(gpus)
        lacks = any(amount > self.custom.get(name, 0.0) + 1e-9 for name, amount in custom.items())
        if lacks or cpus > self.cpus + 1e-9 or len(fitting) < count:
            return False
        self.cpus -= cpus
        self.custom |= {name: self.custom[name] - amount for name, amount in custom.items()}
        for _, index in fitting[:count]:
            self.gpus[index] = round(self.gpus[index] - min(gpus, 1), 6)
            self.users[role, index] += 1
        return True

    def __str__(self) -> str:
        free = ", ".join(f"{share:g}" for share in self.gpus)
        gpus = f"{len(self.gpus)} GPUs{f' ({free} free)' if free else ''}"
        return f"{self.address} with {self.cpus:g} CPUs and {gpus}{_listed(self.custom)}"


def _listed(custom: Mapping[str, float]) -> str:
    """Format custom resources for appending to a list.

    Example:
        >>> _listed({"disk": 2.0})
        ', disk 2'
    """
    return "".join(f", {name} {amount:g}" for name, amount in custom.items())


def wanted(config: ClusterConfig, roles: Sequence[ClusterRole], gpus: bool, ranks: int = 1) -> list[Wanted]:
    """List the actors of a run and their resources, the largest first (first-fit decreasing).

    Args:
        config: the section `cluster`.
        roles: roles that run in actors.
        gpus: give actors the GPU shares of `cluster.placement`.
        ranks: number of trainer actors.

    Example:
        >>> for each in wanted(ClusterConfig(placement="colocated", replicas=2), ["trainer", "rollout"], gpus=True):
        ...     print(each)
        trainer x1 (1 CPUs, 0.5 GPUs each)
        rollout x2 (1 CPUs, 0.25 GPUs each)
    """
    shares: dict[str, float] = {}
    if gpus and config.placement == "colocated":
        shares = {"trainer": 0.5, "rollout": 5000 // config.replicas / 10_000}  # Ray knows four places, rounded up
    elif gpus and config.placement == "split":
        shares = dict.fromkeys(roles, 1.0)
    actors = []
    for role in roles:
        own = config.resources.get(role, ResourceConfig())
        gpus_each = shares.get(role, 0.0) if own.num_gpus is None else own.num_gpus
        count = {"rollout": config.replicas, "trainer": ranks}.get(role, 1)
        actors.append(Wanted(role, count, own.num_cpus, gpus_each, own.custom))
    return sorted(actors, key=lambda each: (-each.gpus, -each.cpus))


def places(actors: Sequence[Wanted], nodes: Sequence[Node]) -> dict[tuple[str, int], Node]:
    """Place each actor on the first machine with enough free resources.

    Returns:
        (role, index) -> machine.

    Raises:
        PlacementError: no machine has room; names the actor and the machines.

    Example:
        >>> places([Wanted("rollout", 3, 1, 0)], [Node("a", "a", cpus=2)])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        atomrl.cluster.ray_cluster.PlacementError: cluster: room for only 2 of 3 rollout actors (1 CPUs, 0 GPUs ...
    """
    machines = [replace(node, gpus=[*node.gpus], custom={**node.custom}, users=Counter()) for node in nodes]
    assignment: dict[tuple[str, int], Node] = {}
    for each in actors:
        for index in range(each.count):
            room = next((node for node in machines if node.take(each.cpus, each.gpus, each.role, each.custom)), None)
            if room is None:
                others = ", ".join(str(other) for other in actors if other is not each)
                raise PlacementError(
                    f"cluster: room for only {index} of {each.count} {each.role} actors ({each.needs})"
                    f"{f' besides {others}' if others else ''}: {'; '.join(map(str, nodes))}; "
                    f"cluster.replicas, cluster.placement and cluster.resources.{each.role} set what is requested"
                )
            assignment[each.role, index] = room
    return assignment


def plan(
    config: ClusterConfig, roles: Sequence[ClusterRole], device: str, nodes: Sequence[Node], ranks: int = 1
) -> tuple[dict[str, Wanted], dict[tuple[str, int], Node]]:
    """Compute the resources of each role and the machine of each actor. Arguments as of `RayCluster`."""
    gpus = device != "cpu" and (device != "auto" or any(node.gpus for node in nodes))
    actors = wanted(config, roles, gpus, ranks)
    return {each.role: each for each in actors}, places(actors, nodes)


def this_machine() -> Node:
    """Return the resources of a cluster that is started on this machine."""
    return Node("", "this machine", float(os.cpu_count() or 1), [1.0] * torch.cuda.device_count(), here=True)


START_S = 600.0
"""Time limit for starting an actor and loading its model. Not part of `cluster.timeout_s`."""
_REACH_S = 5.0
_CLOSE_S = 2.0
_STANDARD_RESOURCES = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
_HELPERS = ("monitor", "dashboard", "log_monitor")
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default Ray gives its workers a lower priority than other processes
}


class ActorDied(RuntimeError):
    """An actor that cannot be replaced has died: the trainer, or another model with a state."""


@dataclass(eq=False)
class Actor:
    """An actor of the run."""

    role: str
    index: int
    handle: Any
    """Ray's actor handle."""
    node: Node
    making: Any
    """Object reference to its process id, ready once the hosted object is built."""
    pid: int = 0
    """0 until `RayCluster.know` has returned."""

    def __str__(self) -> str:
        name = f"{self.role} {self.index}" if self.index or self.role == "rollout" else self.role
        return f"{name} (pid {self.pid} on {self.node.address})" if self.pid else name


class RayCluster:
    """A Ray cluster: joined at `cluster.address`, or started on this machine and stopped by `close`.

    Actors are placed by `places`, not by Ray, so a run uses the placement that its dry run printed. Actors end with
    this process, even if it is killed.

    Args:
        config: the section `cluster`.
        roles: roles that run in actors.
        device: `model.device`. On `cpu`, or on `auto` without GPUs, actors get no GPUs from `placement`.
        ranks: number of trainer actors.

    Raises:
        ImportError: Ray is not installed.
        PlacementError: resources are missing, or no cluster can be reached at the address.
    """

    def __init__(
        self, config: ClusterConfig, roles: Sequence[ClusterRole], device: str = "auto", ranks: int = 1
    ) -> None:
        self.config = config
        self.folder: TemporaryFolder | None = None
        """Ray's session folder, if the cluster is started here."""
        self.actors: list[Actor] = []
        if config.address is None:
            plan(config, roles, device, [this_machine()], ranks)  # fails before Ray is started
        # Ray replaces the handler of SIGTERM.
        handler = signal.getsignal(signal.SIGTERM)
        self.ray, self.owned = self._connect(config.address)
        with suppress(ValueError):  # outside the main thread, where Ray does not replace it
            signal.signal(signal.SIGTERM, handler)
        send_tensors_as_arrays()
        self.watch = Watch({}, config.timeout_s, self._kill)
        try:
            self.watch = self._watch()
            self.wanted, self.places = plan(config, roles, device, self.nodes(), ranks)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> tuple[Any, bool]:
        """Start or join the cluster. Return (the module `ray`, True if `close` must shut Ray down)."""
        # Any user of this machine can reach the ports of a local cluster and run code through them, so it requires a
        # token. With the token in the environment Ray does not write one to the home folder.
        needs_token = address is None and "RAY_AUTH_MODE" not in os.environ
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)} if needs_token else {}
        for name, value in (_SETTINGS | auth).items():
            os.environ.setdefault(name, value)
        import ray
        from ray._raylet import Config

        Config.initialize("")  # read the environment again, in case Ray was already imported

        if ray.is_initialized():
            return ray, False
        if address is not None:
            host_port = check_reachable(address)
            try:
                ray.init(address=host_port, logging_level=logging.WARNING, log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                ray.shutdown()
                raise PlacementError(f"cluster.address={address}: {' '.join(str(error).split())}") from error
            return ray, True
        folder = self.folder = TemporaryFolder("run", short=True)
        try:
            with _loopback_only(), launcher_hidden():
                options = {"include_dashboard": False, "logging_level": logging.WARNING, "_temp_dir": str(folder.path)}
                ray.init(address="local", **options)
            if (host := ray.nodes()[0]["NodeManagerAddress"]) != "127.0.0.1":
                ray.shutdown()
                raise RuntimeError(f"this version of Ray would listen on {host}, open to the whole network")
        except BaseException as error:
            ray.shutdown()
            folder.close()
            if type(error) is Exception:  # raised by Ray after its start-up limit of 30 s
                raise PlacementError(f"cluster: Ray did not start on this machine: {error}") from error
            raise
        return ray, True

    def _watch(self) -> Watch:
        """Start to watch Ray's GCS server, and the raylet of this machine."""
        context = self.ray.get_runtime_context()
        addresses = {"Ray's gcs_server": context.gcs_address}
        for node in self.ray.nodes():
            if node["NodeID"] == context.get_node_id():
                addresses["Ray's raylet"] = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        return Watch(addresses, self.config.timeout_s, self._kill)

    def nodes(self) -> list[Node]:
        """List the machines of the cluster and their free resources, this process's machine first.

        Ray reports the free GPUs of a machine as one number. If other jobs use the cluster, two free halves look like
        one free GPU. An actor that does not fit is then reported when it has not started in time.
        """
        from ray._private.state import available_resources_per_node

        with self.watch.inside():
            free, here = available_resources_per_node(), self.ray.get_runtime_context().get_node_id()
            nodes = self.ray.nodes()
        result = []
        for node in nodes:
            left = free.get(node["NodeID"])
            if node["Alive"] and left is not None:
                full, part = divmod(left.get("GPU", 0.0), 1)
                gpus = [1.0] * int(full) + ([part] if part else [])
                name, address = node["NodeID"], node["NodeManagerAddress"]
                names = [key for key in left if key not in _STANDARD_RESOURCES and not key.startswith("node:")]
                custom = {key: left[key] for key in names}
                result.append(Node(name, address, left.get("CPU", 0.0), gpus, name == here, custom))
        return sorted(result, key=lambda node: not node.here)

    def start(self, role: str, index: int, build: Callable[[], Any]) -> Actor:
        """Start an actor that hosts the object returned by `build`. Does not wait; `know` does.

        Args:
            role: a role of the cluster.
            index: number among the actors of the role.
            build: function called in the actor's process; must be picklable.

        Raises:
            PlacementError: the planned machine is gone, and no other has room.
        """
        need = self.wanted[role]
        nodes = self.nodes()
        if self.places[role, index].name not in {node.name for node in nodes}:
            self.places |= {(role, index): places([replace(need, count=1)], nodes)[role, 0]}
        place = self.places[role, index]
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(place.name, soft=False)
        kind = type(role, (Hosted,), {})  # `ps` and Ray show the class name
        options = {"num_cpus": need.cpus, "num_gpus": need.gpus, "max_restarts": 0, "scheduling_strategy": strategy}
        options["resources"] = dict(need.custom)
        hosted = self.ray.remote(**options)(kind)
        with self.watch.inside():
            handle = hosted.remote(max(1, int(need.cpus)), need.gpus > 0, identity(os.getpid()))
            actor = Actor(role, index, handle, place, handle.make.remote(build))
        self.actors.append(actor)
        return actor

    def know(self, actor: Actor) -> None:
        """Wait until an actor has built its object, and set its `pid`. Errors as in `get`, and those of `build`."""
        actor.pid = self.get(actor, actor.making, START_S)

    def call(self, actor: Actor, method: str, *args: Any) -> Any:
        """Call a method of an actor's object and return the result, within `cluster.timeout_s`. Errors as in `get`."""
        return self.get(actor, self.submit(actor, method, *args))

    def submit(self, actor: Actor, method: str, *args: Any) -> Any:
        """Call a method of an actor's object without waiting. Returns an object reference for `get`."""
        self.watch.check()
        with self.watch.inside():
            return actor.handle.call.remote(method, *args)

    def put(self, value: Any) -> Any:
        """Store an object in Ray's object store and return its reference. Actors on a machine share one copy."""
        with self.watch.inside():
            return self.ray.put(value)

    def get(self, actor: Actor, reference: Any, timeout_s: float | None = None) -> Any:
        """Wait for the result of `submit`.

        Args:
            actor: the actor, for messages.
            reference: object reference.
            timeout_s: time limit; None for `cluster.timeout_s`.

        Raises:
            TimeoutError: the actor did not answer in time.
            RayHangs: one of Ray's processes did not answer in time.
            Exception: raised by the method.
            ray.exceptions.RayError: the actor died; `died` lists these exceptions.
        """
        patience_s = timeout_s or self.config.timeout_s
        try:
            with self.watch.inside(patience_s):
                return self.ray.get(reference, timeout=patience_s)
        except self.ray.exceptions.GetTimeoutError:
            self.watch.check(0.5)
            raise TimeoutError(self.silent([actor], timeout_s)) from None
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    async def answer(self, actor: Actor, reference: Any) -> Any:
        """Await the result of `submit`, within `cluster.timeout_s`. Errors as in `get`."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), self.config.timeout_s)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except TimeoutError:
            self.watch.check(0.5)
            raise TimeoutError(self.silent([actor])) from None

    def wait(self, asked: Sequence[tuple[Actor, Any]]) -> None:
        """Wait until all requests are answered or their actors have died.

        Args:
            asked: (actor, object reference) pairs.

        Raises:
            TimeoutError: names the actors that did not answer within `cluster.timeout_s`.
        """
        references = [each for _, each in asked]
        limit_s = self.config.timeout_s
        with self.watch.inside(limit_s):
            _, late = self.ray.wait(references, num_returns=len(references), timeout=limit_s, fetch_local=False)
        if late:
            self.watch.check(0.5)
            raise TimeoutError(self.silent([actor for actor, each in asked if each in late]))

    @property
    def died(self) -> tuple[type[Exception], ...]:
        """The exceptions that mean that an actor, or its machine, is gone."""
        errors = self.ray.exceptions
        return errors.RayActorError, errors.OutOfMemoryError, errors.ActorUnschedulableError, errors.ObjectLostError

    def silent(self, actors: Sequence[Actor], timeout_s: float | None = None) -> str:
        """Format the error message for actors that do not answer."""
        limit = "while starting" if timeout_s else "cluster.timeout_s"
        names = ", ".join(map(str, actors))
        return f"{names} has not answered for {timeout_s or self.config.timeout_s:g} s ({limit})"

    def end(self, actor: Actor) -> None:
        """Kill an actor; no effect if it has been killed before."""
        if actor in self.actors:
            self.actors.remove(actor)
            with self.watch.inside():
                try:
                    self.ray.kill(actor.handle)
                except self.ray.exceptions.RaySystemError as error:
                    if "creation cancelled" not in str(error):  # killed before Ray had registered it
                        raise

    def _end_processes(self, *names: str) -> None:
        """Kill Ray's own processes of these kinds, if this process started them."""
        from ray._private import worker

        node = worker._global_node
        processes = node.all_processes if node else {}
        for name in names:
            for process_info in processes.get(name, ()):
                process_info.process.kill()

    def _kill(self) -> None:
        """Stop a cluster that was started here without calling Ray, which may hang. Actors end with this process."""
        self._end_processes(*_HELPERS, "raylet", "gcs_server")
        if self.folder:
            self.folder.close()

    def close(self) -> None:
        """Kill the actors, and stop the cluster if it was started here."""
        try:
            with self.watch.inside(_CLOSE_S):
                for actor in [*self.actors]:
                    self.end(actor)
                if self.owned:
                    self.owned = False
                    # They have no state, and Ray would wait a second or two for each.
                    self._end_processes(*_HELPERS)
                    self.ray.shutdown()
        finally:
            self.watch.close()
            if self.folder:
                self.folder.close()


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1 only, as on systems where it does not support clusters.

    Its ports accept any connection, and it refuses that address as an argument.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def check_reachable(address: str) -> str:
    """Check that a cluster listens at an address (Ray itself would retry for minutes), and return `host:port`.

    Raises:
        PlacementError: no cluster listens there, or the address is malformed.
    """
    from ray._private.utils import read_ray_address

    named, resolved = f"cluster.address={address}", address
    if address == "auto":  # the cluster of `ray start`; Ray's own search would also find private clusters of other runs
        resolved = os.environ.get("RAY_ADDRESS") or read_ray_address() or ""
        if not resolved:
            raise PlacementError(f"{named}: no cluster was started on this machine (`ray start`)")
        named += f" ({resolved})"
    host, _, port = resolved.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise PlacementError(f"{named}: must be auto, or HOST:PORT of a cluster (`ray start --head`)")
    try:
        is_ray = speaks_http2(resolved, _REACH_S)
    except (OSError, OverflowError) as error:
        raise PlacementError(f"{named}: cannot reach a cluster: {error}") from error
    if not is_ray:
        raise PlacementError(f"{named}: the server there is not a Ray cluster; Ray's default port is 6379")
    return resolved


def planned(
    config: ClusterConfig, roles: Sequence[ClusterRole], device: str = "auto", ranks: int = 1
) -> tuple[dict[str, Wanted], dict[tuple[str, int], Node]]:
    """Compute the placement for a dry run. Starts no actor; queries the cluster if there is an address.

    Returns:
        (role -> resources, (role, index) -> machine).

    Raises:
        PlacementError: resources are missing, or no cluster can be reached at the address.
    """
    if config.address is None:
        return plan(config, roles, device, [this_machine()], ranks)
    cluster = RayCluster(config, roles, device, ranks)
    cluster.close()
    return cluster.wanted, cluster.places


def describe(wanted: Mapping[str, Wanted], assignment: Mapping[tuple[str, int], Node]) -> list[str]:
    """Format the placement, one line per role."""
    lines = []
    for each in wanted.values():
        hosts = Counter(assignment[each.role, index].address for index in range(each.count))
        where = ", ".join(host if count == each.count else f"{host} (x{count})" for host, count in hosts.items())
        lines.append(f"{each.role:<10} x{each.count}  {each.needs}, on {where}")
    return lines


# --------------------------------------------------------------------------------------------------------------------
# Inside an actor's process, which never outlives the run.

_PR_SET_PDEATHSIG = 1


class Hosted:
    """The Ray actor class: hosts one object and calls its methods.

    Args:
        threads: number of torch threads.
        gpus: keep the GPUs that Ray made visible; False hides all.
        owner: `identity` of the process of the run. The actor ends when that process ends.
    """

    def __init__(self, threads: int, gpus: bool, owner: tuple[str, int]) -> None:
        end_with(owner)
        if not gpus:  # Ray hides no GPU from an actor that requested none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(threads)
        send_tensors_as_arrays()

    def make(self, build: Callable[[], Any]) -> int:
        """Build the hosted object and return the process id."""
        self.inner = build()
        return os.getpid()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the hosted object."""
        return getattr(self.inner, method)(*args)


def end_with(owner: tuple[str, int]) -> None:
    """Kill this process when the owner ends (if it is on this machine) or the raylet ends; ignore SIGINT and SIGHUP.

    If the owner is on another machine, Ray detects its end.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Ray's raylet is the parent
    machine, pid = owner
    if identity(pid)[0] != machine:
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


def identity(pid: int) -> tuple[str, int]:
    """Return (boot id and PID namespace, process id): it identifies a process across machines and containers."""
    if sys.platform != "linux":
        return "", pid
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}", pid


def send_tensors_as_arrays() -> None:
    """Serialize tensors as NumPy arrays, whose memory Ray shares; the default serialization copies them twice."""
    from ray.util import register_serializer

    # Received tensors are never written to.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    for kind in (Tensor, torch.nn.Parameter):
        register_serializer(kind, serializer=_tensor_to_array, deserializer=_tensor_from_array)


def _tensor_to_array(tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    """Return (bytes, dtype, shape). NumPy has no bfloat16."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def _tensor_from_array(sent: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    array, dtype, shape = sent
    return torch.from_numpy(array).view(dtype).reshape(shape)


# --------------------------------------------------------------------------------------------------------------------
# Watch over Ray's own processes: Ray's calls wait forever for one that hangs.

# The HTTP/2 connection preface (RFC 9113), and the type of the frame that a server replies with.
_HTTP2_PREFACE, _SETTINGS_FRAME = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"\x04"
CHECK_EVERY_S = 2.0
"""Seconds between two health checks."""
_MISSES = 3
CALL_GRACE_S = 5.0
"""Seconds after the deadline of a Ray call at which a `Watch` ends this process, if Ray does not answer."""


class RayHangs(OSError):
    """One of Ray's own processes does not answer."""


def speaks_http2(address: str, patience_s: float) -> bool:
    """Return True if the server at `HOST:PORT` speaks HTTP/2, as Ray does. With Ray's TLS any reply counts.

    Raises:
        OSError: nothing listens there, or it does not reply in time.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), patience_s) as connection:
        connection.sendall(_HTTP2_PREFACE)
        return connection.recv(4)[3:] == _SETTINGS_FRAME or os.environ.get("RAY_USE_TLS", "0") != "0"


class Watch:
    """Health checks of Ray's processes on a thread, every two seconds, so that a run never waits forever for them.

    `check` raises if a process does not answer; the run calls it before and after requests. A thread that is blocked in
    a Ray call cannot be interrupted. If such a call exceeds its time limit while a process does not answer, this
    process exits, with the checkpoints that any killed run has.

    Args:
        addresses: name -> `HOST:PORT`. If the first one refuses connections, the cluster has ended and so do checks.
        timeout_s: seconds without an answer after which a process counts as hanging.
        give_up: called before this process exits.
    """

    def __init__(self, addresses: Mapping[str, str], timeout_s: float, give_up: Callable[[], None]) -> None:
        self.addresses, self.timeout_s, self.give_up = addresses, timeout_s, give_up
        self.silent_s, self.misses = dict.fromkeys(addresses, 0.0), dict.fromkeys(addresses, 0)
        """Seconds without an answer, and consecutive failed checks, of each process."""
        self._limits: dict[object, float] = {}
        """Deadline of each Ray call in progress."""
        self._closed = threading.Event()
        if addresses:
            threading.Thread(target=self._work, name="watch over Ray", daemon=True).start()

    @contextmanager
    def inside(self, patience_s: float = 0.0) -> Iterator[None]:
        """Enclose a Ray call that may take up to `patience_s` even if Ray is healthy."""
        key = object()
        self._limits[key] = time.monotonic() + patience_s
        try:
            yield
        finally:
            del self._limits[key]

    def check(self, share: float = 1.0) -> None:
        """Raise RayHangs if a process has not answered for this share of `timeout_s`."""
        if message := self._silent_message(share * self.timeout_s):
            raise RayHangs(message)

    def close(self) -> None:
        """Stop the checks."""
        self._closed.set()

    def _silent_message(self, limit_s: float) -> str:
        """Return an error message if processes have not answered for `limit_s`, else ""."""
        names = [n for n, seconds in self.silent_s.items() if seconds > limit_s and self.misses[n] >= _MISSES]
        if not names:
            return ""
        places = ", ".join(f"{name} ({self.addresses[name]})" for name in names)
        return f"{places} has not answered for {max(self.silent_s[name] for name in names):.0f} s (cluster.timeout_s)"

    def _work(self) -> None:
        longest_s = CHECK_EVERY_S * (1 + len(self.addresses))  # a longer gap means that this process was stopped
        began = time.monotonic()
        while not self._closed.wait(CHECK_EVERY_S):
            try:
                answers = {name: self._answers(address) for name, address in self.addresses.items()}
            except ConnectionRefusedError:
                return
            passed, began = min(time.monotonic() - began, longest_s), time.monotonic()
            for name, answered in answers.items():
                self.silent_s[name] = 0.0 if answered else self.silent_s[name] + passed
                self.misses[name] = 0 if answered else self.misses[name] + 1
            message = self._silent_message(self.timeout_s)
            if message and time.monotonic() > min(list(self._limits.values()), default=math.inf) + CALL_GRACE_S:
                self._end(message)

    def _end(self, message: str) -> None:
        try:
            with suppress(Exception):  # stderr may be closed
                print(f"error: {message}", file=sys.stderr, flush=True)
            self.give_up()
        finally:
            os._exit(1)

    def _answers(self, address: str) -> bool:
        try:
            return speaks_http2(address, CHECK_EVERY_S)
        except TimeoutError:
            return False
        except ConnectionRefusedError:
            if address == next(iter(self.addresses.values())):
                raise
            return True
        except OSError:  # Ray itself detects other failures
            return True
