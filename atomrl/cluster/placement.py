"""Placement: the resources of each role's actors, and the machine that each actor runs on."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from atomrl.config import ClusterConfig, ClusterRole, ConfigError, ResourceConfig


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
        atomrl.cluster.placement.PlacementError: cluster: room for only 2 of 3 rollout actors (1 CPUs, 0 GPUs ...
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
