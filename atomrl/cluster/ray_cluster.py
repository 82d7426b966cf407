"""A Ray cluster for one run: start or join it, place actors, call them, and detect that Ray itself hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from atomrl.cluster.hosted import Hosted, identity, send_tensors_as_arrays
from atomrl.cluster.placement import Node, PlacementError, Wanted, places, plan, this_machine
from atomrl.cluster.watch import Watch, speaks_http2
from atomrl.common.files import TemporaryFolder
from atomrl.common.launchers import launcher_hidden
from atomrl.config import ClusterConfig, ClusterRole

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
