"""Trainer and models in Ray actors: the same run as in one process, who goes where, and who dies with whom."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from atomrl.cli.main import main
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig
from benchmarks.faults import TrainingRun, prepare
from tests.arithmetic import trained_weights
from tests.distributed.test_replicas import config
from tests.tiny import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
TRAINER = "cluster.resources.trainer={num_cpus: 0.2}"
APART = [TRAINER, "cluster.resources.rollout.num_cpus=0.2", "cluster.timeout_s=60"]
PPO = ["train.steps=2", "train.rows_per_update=8", "algorithm.name=ppo", "algorithm.kl={type: k3, coefficient: 0.05}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.2)


def run_of(folder: Path, name: str) -> Path:
    return folder.parent / "runs" / name


def metrics(folder: Path, name: str) -> list[dict]:
    """All that does not depend on time."""
    rows = [json.loads(line) for line in (run_of(folder, name) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows]


def train(folder: Path, name: str, *more: str) -> None:
    assert main(["train", *config(folder, name), *more]) == 0


def test_a_trainer_in_an_actor_trains_the_same(folder):
    """Also where engines sleep while it works, and where it goes on from a checkpoint."""
    train(folder, "here")
    train(folder, "there", *APART, "cluster.placement=colocated", "cluster.replicas=2")
    assert trained_weights(folder, "there") == trained_weights(folder, "here")
    assert metrics(folder, "there") == metrics(folder, "here")


def test_models_apart_train_the_same(folder):
    """A critic with its own optimizer, and a reference."""
    models = ["cluster.resources.critic={num_cpus: 0.2}", "cluster.resources.reference={num_cpus: 0.2}"]
    train(folder, "ppo", *PPO)
    train(folder, "ppo-apart", *PPO, *APART, *models)
    assert trained_weights(folder, "ppo-apart") == trained_weights(folder, "ppo")
    assert metrics(folder, "ppo-apart") == metrics(folder, "ppo")
    for name in ("critic/model.safetensors", "training_state/critic_optimizer.safetensors"):
        places = [run_of(folder, run) / "checkpoints" / "step_000002" / name for run in ("ppo-apart", "ppo")]
        assert places[0].read_bytes() == places[1].read_bytes()


def descendants(pid: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> list[str]:
    """The addresses at which processes listen."""
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[3] for line in lines if pids & set(map(int, re.findall(r"pid=(\d+)", line)))]


class Nothing:
    """What an actor may hold."""


def test_nothing_listens_beyond_this_machine_and_nothing_is_left():
    """Two clusters of one machine would have other folders and ports."""
    with closing(RayCluster(ClusterConfig(resources={"rollout": {"num_cpus": 0.1}}), ["rollout"])) as cluster:
        actor = cluster.start("rollout", 0, Nothing)
        cluster.know(actor)
        pids, folder = descendants(os.getpid()), Path(cluster.folder)
        assert actor.pid in pids and folder.is_dir()
        addresses = listening(pids)
        assert len(addresses) > 4
        assert all(address.rpartition(":")[0] in ("127.0.0.1", "[::ffff:127.0.0.1]") for address in addresses), (
            addresses
        )
    assert not folder.exists()
    assert not [pid for pid in pids - {os.getpid()} if Path(f"/proc/{pid}/exe").exists()]


def test_a_dry_run_says_who_goes_where(folder, capsys):
    assert main(["train", *config(folder, "dry"), *APART, "cluster.replicas=2", "--dry-run"]) == 0
    found = capsys.readouterr().out
    assert re.search(r"rollout +x2  0.2 CPUs, 0 GPUs each, on this machine", found)
    assert re.search(r"trainer +x1  0.2 CPUs, 0 GPUs each, on this machine", found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cluster.replicas=100000"], "cluster: there is room for"),
        (["cluster.placement=split", "model.device=cuda"], "model.device=cuda"),
        (["cluster.resources.rollout.num_gpus=1"], "there is room for 0 of 1 rollout actors (1 CPUs, 1 GPUs each)"),
        (["cluster.resources.rollout.num_gpus=1.5"], "num_gpus=1.5: an actor has a share of one GPU, or whole ones"),
        (["cluster.resources.critic={}", TRAINER], "cluster.resources.critic: this run (grpo) has no critic"),
        (["cluster.resources.reward={}"], "cluster.resources.reward: this run (grpo) has no reward_model"),
        ([*PPO, "cluster.resources.critic={}"], "give cluster.resources.trainer too"),
        (["cluster.address=127.0.0.1:1"], "cluster.address=127.0.0.1:1: no cluster can be reached there"),
        (["cluster.address=ray"], "cluster.address=ray: must be auto, or HOST:PORT"),
    ],
)
def test_what_could_only_hang_is_refused_at_once(folder, capsys, settings, message):
    assert main(["train", *config(folder, "refused"), *settings, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
    assert main(["train", *config(folder, "refused"), *settings]) == 2
    assert not run_of(folder, "refused").exists()


def test_a_trainer_that_dies_ends_the_run_which_goes_on(tmp_path):
    prepare(tmp_path)
    run, whole = TrainingRun(tmp_path, "run"), TrainingRun(tmp_path, "whole")
    try:
        run.until_step(5)
        (pid,) = run.actors("trainer")
        os.kill(pid, signal.SIGKILL)
        assert run.process.wait(120) == 2
        assert f"trainer (pid {pid} on 127.0.0.1) died" in run.log.read_text()
        assert "--resume goes on from the newest checkpoint" in run.log.read_text()
        assert run.gone_after("ours", 10) < 3
        again = TrainingRun(tmp_path, "run", "--resume")
        assert again.process.wait(300) == 0 == whole.process.wait(300)
        assert again.weights() == whole.weights()
    finally:
        run.end()
        whole.end()


@pytest.fixture
def nodes(tmp_path):
    """A cluster of two machines, of which one alone has no room for all."""
    from ray.cluster_utils import Cluster

    prepare(tmp_path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        yield cluster, [f"cluster.address={cluster.address}", "cluster.resources.rollout.num_cpus=1.5"]
    finally:
        cluster.shutdown()


def test_a_node_goes_and_its_engine_is_started_on_another(tmp_path, nodes):
    cluster, arguments = nodes
    going = cluster.add_node(num_cpus=2)
    run = TrainingRun(tmp_path, "run", *arguments)
    try:
        run.until_step(2)
        cluster.add_node(num_cpus=2)
        cluster.remove_node(going)
        assert run.process.wait(300) == 0
        assert "is back after" in run.log.read_text()
    finally:
        run.end()


def test_a_node_goes_and_the_run_ends_and_goes_on(tmp_path, nodes):
    cluster, arguments = nodes
    going = cluster.add_node(num_cpus=2)
    run = TrainingRun(tmp_path, "run", *arguments)
    try:
        run.until_step(2)
        cluster.remove_node(going)
        assert run.process.wait(300) == 2
        assert "there is room for 0 of 1 rollout actors" in run.log.read_text()
        cluster.add_node(num_cpus=2)
        run = TrainingRun(tmp_path, "run", *arguments, "--resume")
        assert run.process.wait(300) == 0
    finally:
        run.end()


def test_faults_by_chance(tmp_path):
    """One of each of `benchmarks/faults.py`, which has them all."""
    script = Path(__file__).parents[2] / "benchmarks" / "faults.py"
    given = ["--kills", "1", "--freezes", "4", "--signals", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True)
    results = json.loads((tmp_path / "results.json").read_text())
    counts = {what: len(found) for what, found in results.items()}
    assert counts == {"kills": 1, "freezes": 4, "SIGINT": 1, "SIGTERM": 1, "SIGKILL": 1}, done.stderr
    assert all(each["good"] for found in results.values() for each in found), done.stdout
