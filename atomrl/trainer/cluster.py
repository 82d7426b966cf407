"""The Ray cluster of a run: roles with actors, GPU placement, and starting it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

from atomrl.cluster.placement import Node, Wanted
from atomrl.cluster.ray_cluster import RayCluster, planned
from atomrl.config import ClusterConfig, ClusterRole, ConfigError, ResourceConfig, RunConfig
from atomrl.protocols import Algorithm, needs_teacher
from atomrl.trainer.build import chosen_class, device_name, in_actors, rank_total


def cluster_roles(config: RunConfig, algorithm: Algorithm) -> list[ClusterRole]:
    """Return the roles of a run that have actors of their own; empty without a `cluster`.

    Raises:
        ConfigError: Ray is not installed; or resources are given to a role that this run does not have, or that has to
            stay in the trainer's process.
    """
    if (cluster := config.cluster) is None:
        return []
    if find_spec("ray") is None:
        raise ConfigError("cluster: ray is not installed: pip install 'atomrl[ray]'")
    resources, has_rollouts, lora = cluster.resources, config.kind == "rl", config.model.lora is not None
    rewards = [*config.reward.functions, *config.reward.by_data_source.values()] if has_rollouts else []
    # Role -> why this run cannot place it in an actor of its own; None if it can.
    reasons: dict[ClusterRole, str | None] = {
        "reference": None if "ref_logprobs" in algorithm.needs else "has no reference",
        "critic": None if "values" in algorithm.needs else "has no critic",
        "teacher": None if needs_teacher(algorithm) else "has no teacher",
        "reward": None
        if any(use.function == "reward_model" for use in rewards)
        else "does not use the reward reward_model",
    }
    if lora and reasons["reference"] is None:
        reasons["reference"] = "uses the policy without its adapters (model.lora) as the reference"
    if "teacher_distributions" in algorithm.outputs:
        reasons["teacher"] = "needs the teacher's distributions, so the teacher runs with the trainer"
    roles: list[ClusterRole] = [role for role in reasons if role in resources]
    for role in roles:
        if reasons[role]:
            raise ConfigError(f"cluster.resources.{role}: this run ({algorithm.name}) {reasons[role]}; remove it")
    # The trainer has one if `in_actors`, the engines always.
    remote = in_actors(config)
    if not remote and set(roles) - {"reward"}:
        raise ConfigError(f"cluster.resources.{roles[0]}: needs cluster.resources.trainer too")
    roles += ["trainer"] if remote else []
    roles += ["rollout"] if has_rollouts else []
    if not roles:
        raise ConfigError("cluster: this run has no rollouts; set cluster.resources.trainer to train in the cluster")
    if cluster.weight_folder and cluster.weight_transfer == "files":
        _check_folder("cluster.weight_folder", Path(cluster.weight_folder).absolute())
    return roles


def _check_folder(key: str, folder: Path) -> None:
    """Check that a folder can be created and written, without creating it.

    Raises:
        ConfigError: it cannot.
    """
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot create the folder: {error}") from error


def with_engine_gpus(config: RunConfig) -> ClusterConfig:
    """Return the section `cluster`, with `rollout.tensor_parallel` GPUs for each engine if the placement is `split`."""
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
    """Start the Ray cluster of a run, until `stack` is closed; None if everything is in this process.

    Args:
        producer: the process only fills a rollout pool, so it starts engines and no trainer.

    Raises:
        ConfigError: as in `cluster_roles` and `check_gpus`, or the cluster has too few resources.
    """
    if not (roles := cluster_roles(config, algorithm)):
        return None
    assert config.cluster is not None, "cluster_roles is empty without a cluster"
    roles = [role for role in roles if role == "rollout" or not producer]
    folder = config.run_dir.resolve() / "weights"
    if config.cluster.weight_folder:  # shared by several runs, so the name has a hash of this run's folder
        suffix = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
        folder = Path(config.cluster.weight_folder) / f"{config.run_name}-{suffix}"
    settings = with_engine_gpus(config).model_copy(update={"weight_folder": str(folder)})
    device, ranks = config.model.device, rank_total(config)
    if settings.address is None:  # check a local cluster before starting it
        check_gpus(config, *planned(settings, roles, device, ranks), producer=producer)
    cluster = stack.enter_context(closing(RayCluster(settings, roles, device, ranks)))
    check_gpus(config, cluster.wanted, cluster.places, producer=producer)
    return cluster


def check_gpus(
    config: RunConfig, wanted: Mapping[str, Wanted], places: Mapping[tuple[str, int], Node], producer: bool = False
) -> None:
    """Check that engines in actors have GPUs, that these are not the trainer's, and that their memory shares add up.

    Args:
        wanted, places: resources and node of each actor (`ray_cluster.planned`).
        producer: as in `open_cluster`.

    Raises:
        ConfigError: names the key to set.
    """
    cluster, rollout, device = config.cluster, config.rollout, device_name(config.model.device)
    assert cluster is not None
    nodes = list({id(node): node for node in places.values()}.values())
    if device != "cpu" and "trainer" not in wanted and not producer:
        first = int(device.partition(":")[2] or 0)
        trainer_gpus = {first} if config.backend is None else set(range(rank_total(config)))
        _check_apart(wanted, next((node for node in nodes if node.here), None), trainer_gpus, config.model.device)
    needs_engine = producer or rollout.source == "engine" or config.data.eval is not None
    if "rollout" not in wanted or rollout.server or not needs_engine:  # no engine is started
        return
    resources = cluster.resources.get("rollout")
    unset = cluster.placement is None and (resources is None or resources.num_gpus is None)
    if unset and config.model.device != "cpu" and (device != "cpu" or any(node.gpus for node in nodes)):
        raise ConfigError(
            "cluster: engines in actors have no GPU and would sample on CPUs, although GPUs are available: set "
            "cluster.placement=split (trainer and each engine on their own GPU), cluster.placement=colocated (in "
            "turns on one), cluster.resources.rollout.num_gpus (0: on CPUs), or model.device=cpu"
        )
    per_gpu = [count for node in nodes for (role, _), count in node.users.items() if role == "rollout"]
    share, most = rollout.gpu_memory_utilization, max(per_gpu, default=0)
    if share != "auto" and chosen_class(rollout).package and most * share > 1 + 1e-9:
        raise ConfigError(
            f"rollout.gpu_memory_utilization={share:g}: {most} engines are on one GPU, and each reserves this fraction "
            f"of its memory: set at most {int(100 / most) / 100:g}, or less if a trainer is on it too"
        )


def _check_apart(wanted: Mapping[str, Wanted], here: Node | None, trainer_gpus: set[int], device: str) -> None:
    """Check that no actor gets a whole GPU on which this process trains. Ray does not know about this process.

    Raises:
        ConfigError: an actor does.
    """
    for role, gpu in here.users if here else ():
        if gpu in trainer_gpus and wanted[role].gpus >= 1:
            raise ConfigError(
                f"cluster.resources.{role}.num_gpus={wanted[role].gpus:g}: Ray, which only knows actors, would "
                f"give it GPU {gpu} of this machine, on which this process trains (model.device={device}): give the "
                "trainer one (cluster.resources.trainer.num_gpus=1), or set cluster.placement"
            )
