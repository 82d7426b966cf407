"""Sections of a dry run on the cluster: the placement of actors, and the memory of each device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch

from atomrl.cluster.placement import Node, Wanted
from atomrl.cluster.ray_cluster import describe, planned
from atomrl.common.memory import available_memory
from atomrl.config import RunConfig
from atomrl.protocols import Algorithm
from atomrl.trainer.auto import ENGINE_PARTS, engine_share, resident_bytes, role_parts
from atomrl.trainer.build import chosen_class, device_name, rank_total
from atomrl.trainer.cluster import check_gpus, cluster_roles, with_engine_gpus
from atomrl.trainer.memory import GIB, memory_estimate, peak_of


def describe_cluster(config: RunConfig, algorithm: Algorithm) -> list[str]:
    """Return the plan of a dry run: a line for each role with its nodes, then a line for each device with its memory.

    Raises:
        ConfigError: as in `open_cluster`.
    """
    wanted, places = planned(
        with_engine_gpus(config), cluster_roles(config, algorithm), config.model.device, rank_total(config)
    )
    check_gpus(config, wanted, places)
    lines = describe(wanted, places)
    if config.gpt is None:  # a fresh model has no memory estimate
        lines += describe_devices(config, algorithm, wanted, places)
    return lines


def describe_devices(
    config: RunConfig, algorithm: Algorithm, wanted: Mapping[str, Wanted], places: Mapping[tuple[str, int], Node]
) -> Iterator[str]:
    """Yield a line for each GPU in use, and for the host memory of each machine in use.

    Sizes are the parts of `memory_estimate`, which are upper bounds from shapes alone. vLLM and SGLang on a GPU count
    with the share that they reserve. If engine and trainer take turns on a GPU, the line has the larger of the two
    phases.

    Args:
        config: config of the run, with a `cluster`.
        wanted, places: resources and node of each actor (`ray_cluster.planned`).
    """
    # (address, GPU or None for the host) -> how many processes of each role
    users: dict[tuple[str, int | None], Counter[str]] = defaultdict(Counter)
    nodes = {node.address: node for node in places.values()}
    for (role, _), node in places.items():
        if not wanted[role].gpus:
            users[node.address, None][role] += 1
    for node in nodes.values():
        for (role, index), count in node.users.items():
            if wanted[role].gpus:
                users[node.address, index][role] += count
    here = next((address for address, node in nodes.items() if node.here), "this machine")
    ranks = rank_total(config)
    if "trainer" not in wanted:
        device = device_name(config.model.device)
        first = int(device.partition(":")[2] or 0)
        for rank in range(ranks):
            users[here, None if device == "cpu" else first + rank * (ranks > 1)]["trainer"] += 1
    parts = memory_estimate(config, algorithm, ranks)
    for (address, gpu), counts in sorted(users.items(), key=str):
        yield _device_line(config, parts, wanted, address, gpu, counts, _capacity(gpu) if address == here else None)


def _device_line(
    config: RunConfig,
    parts: Mapping[str, int],
    wanted: Mapping[str, Wanted],
    address: str,
    gpu: int | None,
    counts: Mapping[str, int],
    capacity: int | None,
) -> str:
    """Return the line of one device.

    Args:
        gpu: index of the GPU; None for the host memory.
        counts: number of processes on the device, by role.
        capacity: bytes of the device; None if unknown.
    """
    share = None
    if gpu is not None and "rollout" in counts and chosen_class(config.rollout).package:
        share = engine_share(config, parts, capacity, wanted)[0]
    sizes: dict[str, int | None] = {}  # bytes of one process of each role; None if unknown
    for role in counts:
        if role != "rollout":
            sizes[role] = None if role == "reward" else peak_of(role_parts(role, parts, wanted))
        elif share is None or config.rollout.server:
            sizes[role] = 0 if config.rollout.server else sum(parts[part] for part in ENGINE_PARTS)
        else:
            sizes[role] = None if capacity is None else int(share * capacity)
    shown = [f"{count} x " * (count > 1) + f"{role} {_size(sizes[role])}" for role, count in sorted(counts.items())]
    sums = {role: count * (sizes[role] or 0) for role, count in counts.items()}
    total, in_turns = sum(sums.values()), ""
    assert config.cluster is not None
    if config.cluster.placement == "colocated" and {"trainer", "rollout"} <= sums.keys():
        # Updates: all of the trainer, and the weights of a sleeping native engine (vLLM and SGLang give theirs back).
        # Rollouts: all of the engine, and what the trainer keeps.
        asleep = 0 if share is not None else counts["rollout"] * parts["engine weights"]
        resident = counts["trainer"] * resident_bytes(role_parts("trainer", parts, wanted))
        others = total - sums["trainer"] - sums["rollout"]
        total = others + max(sums["trainer"] + asleep, resident + sums["rollout"])
        in_turns = " in turns"
    least = "at least " if None in sizes.values() else ""
    device = "memory" if gpu is None else f"GPU {gpu}"
    line = f"{address}, {device}: {', '.join(shown)}: {least}{_size(total)}{in_turns}, of {_size(capacity)}"
    if capacity is None or (least and total <= capacity):
        return line
    return f"{line}: {'fits' if total <= capacity else 'DOES NOT FIT'}"


def _capacity(gpu: int | None) -> int | None:
    """Return the bytes of a GPU, or of the free host memory, of this machine; None if torch does not see the GPU."""
    if gpu is None:
        return available_memory()
    visible = gpu < torch.cuda.device_count()
    return int(torch.cuda.get_device_properties(gpu).total_memory) if visible else None


def _size(size: int | None) -> str:
    return "of unknown size" if size is None else f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
