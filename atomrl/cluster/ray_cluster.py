"""A Ray cluster for one run, and the actors in it."""

from __future__ import annotations

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
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from atomrl.cluster.places import Node, PlacementError, Wanted, places, plan, this_machine
from atomrl.common.files import TemporaryFolder
from atomrl.common.processes import launcher_hidden
from atomrl.config import ClusterConfig, ClusterRole

# --------------------------------------------------------------------------------------------------------------------
# What runs in the process of an actor, which never outlives the run.

_PR_SET_PDEATHSIG = 1


class Hosted:
    """A process of its own, with an object whose methods are called from outside.

    Args:
        threads: that it computes with.
        gpus: whether it may see those that Ray gave it, or none.
        owner: the process that it ends with, as `identity` names it.
    """

    def __init__(self, threads: int, gpus: bool, owner: tuple[str, int]) -> None:
        end_with(owner)
        if not gpus:  # Ray shows all of them to who asked for none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(threads)
        send_tensors_as_arrays()

    def make(self, build: Callable[[], Any]) -> int:
        """Build the object. Returns the id of this process."""
        self.inner = build()
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


# --------------------------------------------------------------------------------------------------------------------
# Whether Ray's own processes answer; its calls wait for ever for one that stands still.

# How HTTP/2, and so Ray, is greeted (RFC 9113), and the kind of frame that is the answer.
_HELLO, _SETTINGS_FRAME = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"\x04"
_EVERY_S = 2.0
_MISSES = 3
_GRACE_S = 5.0


class RayHangs(OSError):
    """A process of Ray's own does not answer."""


def speaks_http2(address: str, patience_s: float) -> bool:
    """Whether what listens at `HOST:PORT` answers as Ray does; with Ray's TLS any end of the greeting is an answer.

    Raises:
        OSError: nothing listens, or it does not answer in time.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), patience_s) as connection:
        connection.sendall(_HELLO)
        return connection.recv(4)[3:] == _SETTINGS_FRAME or os.environ.get("RAY_USE_TLS", "0") != "0"


class Watch:
    """Asks processes every two seconds, on a thread, so that a run does not wait for ever for a silent one.

    `check` raises for it, where a run looks at its actors. A run that is inside of Ray cannot look: where such a call
    does not come to an end, this process is ended, and leaves the checkpoints that a killed run leaves.

    Args:
        addresses: `HOST:PORT` of each process, by its name; without the first there is nothing to watch any more.
        timeout_s: how long one may be silent.
        give_up: called before this process is ended.
    """

    def __init__(self, addresses: Mapping[str, str], timeout_s: float, give_up: Callable[[], None]) -> None:
        self.addresses, self.timeout_s, self.give_up = addresses, timeout_s, give_up
        self.silent_s, self.misses = dict.fromkeys(addresses, 0.0), dict.fromkeys(addresses, 0)
        self._limits: dict[object, float] = {}
        """When each call of Ray that is under way should have come back."""
        self._closed = threading.Event()
        if addresses:
            threading.Thread(target=self._work, name="watch over Ray", daemon=True).start()

    @contextmanager
    def inside(self, patience_s: float = 0.0) -> Iterator[None]:
        """Around a call of Ray that may take so long by itself."""
        key = object()
        self._limits[key] = time.monotonic() + patience_s
        try:
            yield
        finally:
            del self._limits[key]

    def check(self, share: float = 1.0) -> None:
        """Raise `RayHangs` where a process has been silent for a share of `timeout_s`."""
        if message := self._silence(share * self.timeout_s):
            raise RayHangs(message)

    def close(self) -> None:
        """Ask no more, and do not end this process."""
        self._closed.set()

    def _silence(self, limit_s: float) -> str:
        names = [n for n, seconds in self.silent_s.items() if seconds > limit_s and self.misses[n] >= _MISSES]
        if not names:
            return ""
        places = ", ".join(f"{name} ({self.addresses[name]})" for name in names)
        return f"{places} has not answered for {max(self.silent_s[name] for name in names):.0f} s (cluster.timeout_s)"

    def _work(self) -> None:
        longest_s = _EVERY_S * (1 + len(self.addresses))  # more: this process itself stood still
        began = time.monotonic()
        while not self._closed.wait(_EVERY_S):
            try:
                answers = {name: self._answers(address) for name, address in self.addresses.items()}
            except ConnectionRefusedError:
                return
            passed, began = min(time.monotonic() - began, longest_s), time.monotonic()
            for name, answered in answers.items():
                self.silent_s[name] = 0.0 if answered else self.silent_s[name] + passed
                self.misses[name] = 0 if answered else self.misses[name] + 1
            message = self._silence(self.timeout_s)
            if message and time.monotonic() > min(list(self._limits.values()), default=math.inf) + _GRACE_S:
                self._end(message)

    def _end(self, message: str) -> None:
        try:
            with suppress(Exception):  # whoever reads it may be gone
                print(f"error: {message}", file=sys.stderr, flush=True)
            self.give_up()
        finally:
            os._exit(1)

    def _answers(self, address: str) -> bool:
        try:
            return speaks_http2(address, _EVERY_S)
        except TimeoutError:
            return False
        except ConnectionRefusedError:
            if address == next(iter(self.addresses.values())):
                raise
            return True
        except OSError:  # what else there is Ray itself notices
            return True


START_S = 600.0
"""For loading a model in a new process; no part of `cluster.timeout_s`."""
_REACH_S = 5.0
_CLOSE_S = 2.0
_OWN = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
_HELPERS = ("monitor", "dashboard", "log_monitor")
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else whatever runs on the machine goes before trainer and engines
}


class ActorDied(RuntimeError):
    """A process that cannot be replaced has ended: the trainer's, or that of a model beside it."""


@dataclass(eq=False)
class Actor:
    """A process of the run, known by its role."""

    role: str
    index: int
    handle: Any
    node: Node
    making: Any
    """Its process id, once it holds what it was started for."""
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
        ranks: actors of the role `trainer`.

    Raises:
        ImportError: Ray is not installed.
        PlacementError: there is no room for the actors, or no cluster at the address.
    """

    def __init__(
        self, config: ClusterConfig, roles: Sequence[ClusterRole], device: str = "auto", ranks: int = 1
    ) -> None:
        self.config = config
        self.folder: TemporaryFolder | None = None
        """Of Ray's session, where it is started here."""
        self.actors: list[Actor] = []
        if config.address is None:
            plan(config, roles, device, [this_machine()], ranks)  # before anything is started
        handler = signal.getsignal(signal.SIGTERM)
        self.ray, self.owned = self._connect(config.address)
        with suppress(ValueError):  # not the main thread, where Ray leaves it alone
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
        """Ray, and whether this process is its only user."""
        # Every user of the machine can reach the ports of a cluster that is started here, and would have it run code.
        # With a token in the environment Ray writes none into the home folder.
        locked = address is None and "RAY_AUTH_MODE" not in os.environ
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)} if locked else {}
        for name, value in (_SETTINGS | own).items():
            os.environ.setdefault(name, value)
        import ray
        from ray._raylet import Config

        Config.initialize("")  # it has read them already where Ray was imported before

        if ray.is_initialized():
            return ray, False
        if address is not None:
            found = check_reachable(address)
            try:
                ray.init(address=found, logging_level=logging.WARNING, log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                ray.shutdown()
                raise PlacementError(f"cluster.address={address}: {' '.join(str(error).split())}") from error
            return ray, True
        folder = self.folder = TemporaryFolder("run", short=True)
        try:
            with _on_loopback(), launcher_hidden():
                options = {"include_dashboard": False, "logging_level": logging.WARNING, "_temp_dir": str(folder.path)}
                ray.init(address="local", **options)
            if (host := ray.nodes()[0]["NodeManagerAddress"]) != "127.0.0.1":
                ray.shutdown()
                raise RuntimeError(f"this version of Ray would listen on {host}, for the whole network")
        except BaseException as error:
            ray.shutdown()
            folder.close()
            if type(error) is Exception:  # Ray's own, after its limit of 30 s
                raise PlacementError(f"cluster: Ray did not start on this machine: {error}") from error
            raise
        return ray, True

    def _watch(self) -> Watch:
        context = self.ray.get_runtime_context()
        addresses = {"Ray's gcs_server": context.gcs_address}
        for node in self.ray.nodes():
            if node["NodeID"] == context.get_node_id():
                addresses["Ray's raylet"] = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        return Watch(addresses, self.config.timeout_s, self._kill)

    def nodes(self) -> list[Node]:
        """The machines of the cluster and what they have free, the one of this process first. Ray tells the free GPUs
        of a machine as one sum, so where others use the cluster two free halves pass for a whole one; an actor that
        finds no room then ends the run by name, when it has not started in time."""
        from ray._private.state import available_resources_per_node

        with self.watch.inside():
            free, here = available_resources_per_node(), self.ray.get_runtime_context().get_node_id()
            nodes = self.ray.nodes()
        found = []
        for node in nodes:
            left = free.get(node["NodeID"])
            if node["Alive"] and left is not None:
                whole, part = divmod(left.get("GPU", 0.0), 1)
                gpus = [1.0] * int(whole) + ([part] if part else [])
                name, address = node["NodeID"], node["NodeManagerAddress"]
                custom = {key: amount for key, amount in left.items() if key not in _OWN and key[:5] != "node:"}
                found.append(Node(name, address, left.get("CPU", 0.0), gpus, name == here, custom))
        return sorted(found, key=lambda node: not node.here)

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
            self.places |= {(role, index): places([replace(need, count=1)], nodes)[role, 0]}
        place = self.places[role, index]
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(place.name, soft=False)
        kind = type(role, (Hosted,), {})  # the name that `ps` and Ray show
        options = {"num_cpus": need.cpus, "num_gpus": need.gpus, "max_restarts": 0, "scheduling_strategy": strategy}
        options["resources"] = dict(need.custom)
        hosted = self.ray.remote(**options)(kind)
        with self.watch.inside():
            handle = hosted.remote(max(1, int(need.cpus)), need.gpus > 0, identity(os.getpid()))
            actor = Actor(role, index, handle, place, handle.make.remote(build))
        self.actors.append(actor)
        return actor

    def know(self, actor: Actor) -> None:
        """Wait until it is there, with what it holds; errors as in `get`, and those of `build`."""
        actor.pid = self.get(actor, actor.making, START_S)

    def call(self, actor: Actor, method: str, *args: Any) -> Any:
        """The result of a method of what an actor holds, within `cluster.timeout_s`; errors as in `get`."""
        return self.get(actor, self.submit(actor, method, *args))

    def submit(self, actor: Actor, method: str, *args: Any) -> Any:
        """The same without waiting: for `get`."""
        self.watch.check()
        with self.watch.inside():
            return actor.handle.call.remote(method, *args)

    def put(self, value: Any) -> Any:
        """Into Ray's object store, which all actors of a machine read."""
        with self.watch.inside():
            return self.ray.put(value)

    def get(self, actor: Actor, found: Any, timeout_s: float | None = None) -> Any:
        """What an actor answers.

        Raises:
            TimeoutError: it did not answer in time; names it.
            Exception: what the method raised.
            ray.exceptions.RayError: it died (`died` says which are meant).
        """
        patience_s = timeout_s or self.config.timeout_s
        try:
            with self.watch.inside(patience_s):
                return self.ray.get(found, timeout=patience_s)
        except self.ray.exceptions.GetTimeoutError:
            self.watch.check(0.5)
            raise TimeoutError(self.silent([actor], timeout_s)) from None
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def wait(self, asked: Sequence[tuple[Actor, Any]]) -> None:
        """Until all have answered, or died.

        Raises:
            TimeoutError: some did not answer within `cluster.timeout_s`; names them.
        """
        found = [each for _, each in asked]
        limit_s = self.config.timeout_s
        with self.watch.inside(limit_s):
            _, late = self.ray.wait(found, num_returns=len(found), timeout=limit_s, fetch_local=False)
        if late:
            self.watch.check(0.5)
            raise TimeoutError(self.silent([actor for actor, each in asked if each in late]))

    @property
    def died(self) -> tuple[type[Exception], ...]:
        """The errors of a process, or its machine, that is gone."""
        errors = self.ray.exceptions
        return errors.RayActorError, errors.OutOfMemoryError, errors.ActorUnschedulableError, errors.ObjectLostError

    def silent(self, actors: Sequence[Actor], timeout_s: float | None = None) -> str:
        """That actors do not answer, for an error."""
        limit = "while starting" if timeout_s else "cluster.timeout_s"
        names = ", ".join(map(str, actors))
        return f"{names} has not answered for {timeout_s or self.config.timeout_s:g} s ({limit})"

    def end(self, actor: Actor) -> None:
        """Kill its process, if that is not done."""
        if actor in self.actors:
            self.actors.remove(actor)
            with self.watch.inside():
                self.ray.kill(actor.handle)

    def _end_processes(self, *names: str) -> None:
        """Kill those of Ray's processes that were started here."""
        from ray._private import worker

        node = worker._global_node
        processes = node.all_processes if node else {}
        for name in names:
            for process_info in processes.get(name, ()):
                process_info.process.kill()

    def _kill(self) -> None:
        """End what was started here, without a word to Ray; actors end with this process."""
        self._end_processes(*_HELPERS, "raylet", "gcs_server")
        if self.folder:
            self.folder.close()

    def close(self) -> None:
        """End the actors, and the cluster where it was started here."""
        try:
            with self.watch.inside(_CLOSE_S):
                for actor in [*self.actors]:
                    self.end(actor)
                if self.owned:
                    self.owned = False
                    # They hold nothing, and Ray would wait a second or two for each in turn.
                    self._end_processes(*_HELPERS)
                    self.ray.shutdown()
        finally:
            self.watch.close()
            if self.folder:
                self.folder.close()


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


def check_reachable(address: str) -> str:
    """That a cluster listens at an address; Ray itself would try for minutes. Returns it as `host:port`.

    Raises:
        PlacementError: none does, or it is no such address.
    """
    from ray._private.utils import read_ray_address

    named, found = f"cluster.address={address}", address
    if address == "auto":  # of `ray start`; Ray's own search also finds what other runs have started for themselves
        found = os.environ.get("RAY_ADDRESS") or read_ray_address() or ""
        if not found:
            raise PlacementError(f"{named}: no cluster was started on this machine (`ray start`)")
        named += f" ({found})"
    host, _, port = found.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise PlacementError(f"{named}: must be auto, or HOST:PORT of a cluster (`ray start --head`)")
    try:
        is_ray = speaks_http2(found, _REACH_S)
    except (OSError, OverflowError) as error:
        raise PlacementError(f"{named}: no cluster can be reached there: {error}") from error
    if not is_ray:
        raise PlacementError(f"{named}: what listens there is no Ray cluster; its port is 6379 unless it was given one")
    return found


def planned(
    config: ClusterConfig, roles: Sequence[ClusterRole], device: str = "auto", ranks: int = 1
) -> tuple[dict[str, Wanted], dict[tuple[str, int], Node]]:
    """What each role's actors take, and where each goes; of a dry run. Nothing is started; a cluster at an address is
    asked.

    Raises:
        PlacementError: there is no room, or no cluster at the address.
    """
    if config.address is None:
        return plan(config, roles, device, [this_machine()], ranks)
    cluster = RayCluster(config, roles, device, ranks)
    cluster.close()
    return cluster.wanted, cluster.places


def describe(wanted: Mapping[str, Wanted], found: Mapping[tuple[str, int], Node]) -> list[str]:
    """Who goes where, a line for each role."""
    lines = []
    for each in wanted.values():
        hosts = Counter(found[each.role, index].address for index in range(each.count))
        where = ", ".join(host if count == each.count else f"{host} (x{count})" for host, count in hosts.items())
        lines.append(f"{each.role:<10} x{each.count}  {each.needs}, on {where}")
    return lines
