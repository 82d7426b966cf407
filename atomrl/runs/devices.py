"""Who is on which device of a cluster, what each takes of its memory, and whether that fits; of a dry run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch

from atomrl.cluster.places import Node, Wanted
from atomrl.config import RunConfig
from atomrl.protocols import Algorithm
from atomrl.runs.build import chosen_class, device_name, rank_total
from atomrl.runs.engines import ENGINE, engine_share, kept, parts_of
from atomrl.runs.memory import at_once, memory_estimate
from atomrl.runs.probe import available_memory

GIB = 2**30


def describe_devices(
    config: RunConfig, algorithm: Algorithm, wanted: Mapping[str, Wanted], places: Mapping[tuple[str, int], Node]
) -> Iterator[str]:
    """A line for each GPU, and each machine's own memory, that somebody is on.

    The estimate's parts are shared out (`memory_estimate`: upper bounds, from shapes alone). Where engines sleep while
    the trainer works, what is there at once is the larger of the two times. Of vLLM and SGLang on a GPU it is the share
    that they are given.

    Args:
        config: of the run, with a `cluster`.
        wanted, places: of the plan.
    """
    users: dict[tuple[str, int | None], Counter[str]] = defaultdict(Counter)
    nodes = {node.address: node for node in places.values()}
    for (role, _), node in places.items():
        if not wanted[role].gpus:
            users[node.address, None][role] += 1
    for node in nodes.values():
        for (role, gpu), count in node.users.items():
            if wanted[role].gpus:
                users[node.address, gpu][role] += count
    own = [name for name, node in nodes.items() if node.here] or ["this machine"]
    if "trainer" not in wanted:
        device = device_name(config.model.device)
        ranks = range(rank_total(config))
        first = int(device.partition(":")[2] or 0)
        for rank in ranks:
            users[own[0], None if device == "cpu" else first + rank * (len(ranks) > 1)]["trainer"] += 1
    parts = memory_estimate(config, algorithm, rank_total(config))
    for (address, index), found in sorted(users.items(), key=str):
        yield _line(config, parts, wanted, address, index, found, _capacity(index) if address == own[0] else None)


def _line(
    config: RunConfig,
    parts: Mapping[str, int],
    wanted: Mapping[str, Wanted],
    address: str,
    gpu: int | None,
    found: Mapping[str, int],
    capacity: int | None,
) -> str:
    """Of one device."""
    device = f"{address}, {'memory' if gpu is None else f'GPU {gpu}'}: "
    share = None
    if gpu is not None and "rollout" in found and chosen_class(config.rollout).package:
        share = engine_share(config, parts, capacity, wanted)[0]
    needs: dict[str, int | None] = {}
    for role in found:
        if role != "rollout":
            needs[role] = None if role == "reward" else at_once(parts_of(role, parts, wanted))
        elif share is None or config.rollout.server:
            needs[role] = 0 if config.rollout.server else sum(parts[part] for part in ENGINE)
        else:
            needs[role] = None if capacity is None else int(share * capacity)
    said = [f"{count} x " * (count > 1) + f"{role} {_size(needs[role])}" for role, count in sorted(found.items())]
    sums = {role: count * (needs[role] or 0) for role, count in found.items()}
    total, in_turns = sum(sums.values()), ""
    assert config.cluster is not None
    if config.cluster.placement == "colocated" and {"trainer", "rollout"} <= sums.keys():
        mine = parts_of("trainer", parts, wanted)
        stays = kept(mine)
        asleep = 0 if share is not None else found["rollout"] * parts["engine weights"]
        others = total - sums["trainer"] - sums["rollout"]
        total = others + max(sums["trainer"] + asleep, found["trainer"] * stays + sums["rollout"])
        in_turns = " in turns"
    least = "at least " if None in needs.values() else ""
    line = f"{device}{', '.join(said)}: {least}{_size(total)}{in_turns}, of {_size(capacity)}"
    if capacity is None or (least and total <= capacity):
        return line
    return f"{line}: {'fits' if total <= capacity else 'DOES NOT FIT'}"


def _capacity(gpu: int | None) -> int | None:
    """Bytes of a device of this machine; None where it is not to be seen from here."""
    if gpu is None:
        return available_memory()
    seen = gpu < torch.cuda.device_count()
    return int(torch.cuda.get_device_properties(gpu).total_memory) if seen else None


def _size(size: int | None) -> str:
    return "of unknown size" if size is None else f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
