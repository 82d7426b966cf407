"""The Ray cluster of a run: which roles have actors in it, what they ask of GPUs, and opening it."""

import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

from atomrl.cluster.places import Node, Wanted
from atomrl.cluster.ray_cluster import RayCluster, describe, planned
from atomrl.config import ClusterConfig, ClusterRole, ConfigError, ResourceConfig, RunConfig
from atomrl.protocols import Algorithm, needs_teacher
from atomrl.runs.build import chosen_class, device_name, in_actors, rank_total
from atomrl.runs.devices import describe_devices


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
