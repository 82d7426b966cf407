"""The Ray cluster of a run: which roles have actors in it, what they ask of GPUs, and opening it."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

import torch

from atomrl.cluster.places import Node, Wanted
from atomrl.cluster.ray_cluster import RayCluster, describe, planned
from atomrl.config import ClusterConfig, ClusterRole, ConfigError, ResourceConfig, RunConfig
from atomrl.protocols import Algorithm, needs_teacher
from atomrl.trainer.build import chosen_class, device_name, in_actors, rank_total
from atomrl.trainer.engine_choice import ENGINE, engine_share, kept, parts_of
from atomrl.trainer.memory import at_once, memory_estimate
from atomrl.trainer.probe import available_memory

# --------------------------------------------------------------------------------------------------------------------
# Who is on which device of a cluster, what each takes of its memory, and whether that fits; of a dry run.

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


def cluster_roles(config: RunConfig, algorithm: Algorithm) -> list[ClusterRole]:
    """The roles of a run that have actors of their own; none without a `cluster`.

    Raises:
        ConfigError: Ray is not installed, or a role is given resources that the run does not have, or cannot have apart
            from the trainer.
    """
    if (cluster := config.cluster) is None:
        return []
    if find_spec("ray") is None:
        raise ConfigError("cluster: ray is not installed: pip install 'atomrl[ray]'")
    resources, drawn, lora = cluster.resources, config.kind == "rl", config.model.lora is not None
    judges = [*config.reward.functions, *config.reward.by_data_source.values()] if drawn else []
    reasons: dict[ClusterRole, str | None] = {
        "reference": None if "ref_logprobs" in algorithm.needs else "has no reference",
        "critic": None if "values" in algorithm.needs else "has no critic",
        "teacher": None if needs_teacher(algorithm) else "has no teacher",
        "reward": None if any(use.function == "reward_model" for use in judges) else "has no reward_model as a reward",
    }
    if lora and reasons["reference"] is None:
        reasons["reference"] = "has the policy without its adapters (model.lora) as its reference"
    if "teacher_distributions" in algorithm.outputs:
        reasons["teacher"] = "compares whole distributions with the teacher, which stays with the trainer"
    roles: list[ClusterRole] = [role for role in reasons if role in resources]
    for role in roles:
        if reasons[role]:
            raise ConfigError(f"cluster.resources.{role}: this run ({algorithm.name}) {reasons[role]}; remove it")
    remote = in_actors(config)
    if not remote and set(roles) - {"reward"}:
        raise ConfigError(f"cluster.resources.{roles[0]}: give cluster.resources.trainer too, which calls it")
    roles += ["trainer"] if remote else []
    roles += ["rollout"] if drawn else []
    if not roles:
        raise ConfigError("cluster: this run draws no rollouts; cluster.resources.trainer puts its trainer there")
    if cluster.weight_folder and cluster.weight_transfer == "files":
        _check_folder("cluster.weight_folder", Path(cluster.weight_folder).absolute())
    return roles


def _check_folder(key: str, folder: Path) -> None:
    """That a folder can be made and written; nothing is left there."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ConfigError(f"{key}={folder}: no folder can be written there: {error}") from error


def with_engine_gpus(config: RunConfig) -> ClusterConfig:
    """The section `cluster` in which an engine that cuts its model over several GPUs is given them by `split`."""
    cluster, cut = config.cluster, config.rollout.tensor_parallel
    assert cluster is not None
    own = cluster.resources.get("rollout", ResourceConfig())
    if cut == 1 or cluster.placement != "split" or own.num_gpus is not None:
        return cluster
    resources = {**cluster.resources, "rollout": own.model_copy(update={"num_gpus": float(cut)})}
    return cluster.model_copy(update={"resources": resources})


def open_cluster(
    config: RunConfig, algorithm: Algorithm, stack: ExitStack, producer: bool = False
) -> RayCluster | None:
    """The Ray cluster of a run, until the stack is closed; None where everything is in this process.

    Args:
        producer: only draws, for a pool: who trains is another run's business.

    Raises:
        ConfigError: as in `cluster_roles` and `check_gpus`, or there is no room.
    """
    if not (roles := cluster_roles(config, algorithm)):
        return None
    assert config.cluster is not None, "roles are a cluster's"
    roles = [role for role in roles if role == "rollout" or not producer]
    folder = config.run_dir.resolve() / "weights"
    if config.cluster.weight_folder:  # in which other runs may have theirs
        own = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
        folder = Path(config.cluster.weight_folder) / f"{config.run_name}-{own}"
    cluster = with_engine_gpus(config).model_copy(update={"weight_folder": str(folder)})
    device, ranks = config.model.device, rank_total(config)
    if cluster.address is None:  # before anything is started
        check_gpus(config, *planned(cluster, roles, device, ranks), producer=producer)
    found = stack.enter_context(closing(RayCluster(cluster, roles, device, ranks)))
    check_gpus(config, found.wanted, found.places, producer=producer)
    return found


def describe_cluster(config: RunConfig, algorithm: Algorithm) -> list[str]:
    """Who goes where, a line for each role, and what each device then holds; of a dry run.

    Raises:
        ConfigError: as in `open_cluster`.
    """
    found = planned(with_engine_gpus(config), cluster_roles(config, algorithm), config.model.device, rank_total(config))
    check_gpus(config, *found)
    lines = describe(*found)
    if config.gpt is None:  # of a fresh model there is no estimate
        lines += describe_devices(config, algorithm, *found)
    return lines


def check_gpus(
    config: RunConfig, wanted: Mapping[str, Wanted], places: Mapping[tuple[str, int], Node], producer: bool = False
) -> None:
    """That engines in actors have GPUs where the config means them to, beside the trainer's, and room on them.

    Raises:
        ConfigError: says which key to set.
    """
    cluster, rollout, device = config.cluster, config.rollout, device_name(config.model.device)
    assert cluster is not None
    nodes = list({id(node): node for node in places.values()}.values())
    if device != "cpu" and "trainer" not in wanted and not producer:
        first = int(device.partition(":")[2] or 0)
        own = {first} if config.backend is None else set(range(rank_total(config)))
        _check_apart(wanted, next((node for node in nodes if node.here), None), own, config.model.device)
    draws = producer or rollout.source == "engine" or config.data.eval is not None
    if "rollout" not in wanted or rollout.server or not draws:  # no engine is started
        return
    said = cluster.resources.get("rollout")
    unsaid = cluster.placement is None and (said is None or said.num_gpus is None)
    if unsaid and config.model.device != "cpu" and (device != "cpu" or any(node.gpus for node in nodes)):
        raise ConfigError(
            "cluster: engines in actors are given no GPU, so they would draw on CPUs, and there are GPUs: set "
            "cluster.placement=split (trainer and each engine on one of their own), cluster.placement=colocated (in "
            "turns on one), cluster.resources.rollout.num_gpus (0: on CPUs all the same), or model.device=cpu"
        )
    share, most = rollout.gpu_memory_utilization, max(_engines_of_gpus(nodes), default=0)
    if share != "auto" and chosen_class(rollout).package and most * share > 1 + 1e-9:
        raise ConfigError(
            f"rollout.gpu_memory_utilization={share:g}: {most} engines are on one GPU, and each takes that share of "
            f"its memory: set at most {int(100 / most) / 100:g}, and less where a trainer is on it too"
        )


def _engines_of_gpus(nodes: list[Node]) -> list[int]:
    """How many engines each GPU has that has any."""
    return [count for node in nodes for (role, _), count in node.users.items() if role == "rollout"]


def _check_apart(wanted: Mapping[str, Wanted], here: Node | None, own: set[int], device: str) -> None:
    """That no actor is given a whole GPU on which this process trains: Ray does not know of it."""
    for role, gpu in here.users if here else ():
        if gpu in own and wanted[role].gpus >= 1:
            raise ConfigError(
                f"cluster.resources.{role}.num_gpus={wanted[role].gpus:g}: Ray, which knows of actors alone, would "
                f"give it GPU {gpu} of this machine, on which this process trains (model.device={device}): give the "
                "trainer one (cluster.resources.trainer.num_gpus=1), or set cluster.placement"
            )
