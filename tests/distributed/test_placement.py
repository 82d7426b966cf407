"""Trainer and models in Ray actors: the same run as in one process, who goes where, and who dies with whom."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
import torch

from atomrl.cli.main import main
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig
from atomrl.tracking.reading import load_run
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
    return make_tiny_model(tmp_path_factory.mktemp("placement") / "model", scale=0.2)


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
    here, there = metrics(folder, "here"), metrics(folder, "there")
    for one, other in zip(here, there, strict=True):  # two engines draw in smaller batches, which may round otherwise
        for name in [name for name in one if "rollout_probs_diff" in name]:
            assert one.pop(name) == pytest.approx(other.pop(name, None), abs=1e-6)
    assert there == here


def test_a_trainer_in_an_actor_takes_groups_from_a_pool(folder):
    """There is no engine then that could sleep."""
    no_room = "cluster.resources.trainer.num_cpus=100000"  # for a trainer, which those who only draw do not have
    assert main(["pool", "fill", *config(folder, "pooled"), *APART, no_room, "--groups", "16"]) == 0
    train(folder, "pooled", *APART, "cluster.placement=colocated", "rollout.source=pool", "pool.max_staleness=9")
    assert json.loads((run_of(folder, "pooled") / "summary.json").read_text())["finished"]


def test_models_apart_train_the_same(folder):
    """A critic with its own optimizer, and a reference."""
    models = ["cluster.resources.critic={num_cpus: 0.2}", "cluster.resources.reference={num_cpus: 0.2}"]
    train(folder, "ppo", *PPO, "tracking.tokens=2")
    train(folder, "ppo-apart", *PPO, *APART, *models, "tracking.tokens=2")
    assert trained_weights(folder, "ppo-apart") == trained_weights(folder, "ppo")
    assert metrics(folder, "ppo-apart") == metrics(folder, "ppo")
    for name in ("critic/model.safetensors", "training_state/critic_optimizer.safetensors"):
        places = [run_of(folder, run) / "checkpoints" / "step_000002" / name for run in ("ppo-apart", "ppo")]
        assert places[0].read_bytes() == places[1].read_bytes()
    here, there = (load_run(run_of(folder, run)).tokens(2) for run in ("ppo", "ppo-apart"))
    for name in (
        "tokens",
        "logprobs",
        "gradient",
        "log_ratio",
        "clipped",
        "values",
        "ref_logprobs",
    ):  # loss: no critic's
        assert here.tokens[name].tolist() == there.tokens[name].tolist(), name


def descendants(pid: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids = {pid}
    while more := {child for child, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


def listening(pids: set[int]) -> list[str]:
    """The addresses at which processes listen."""
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[3] for line in lines if pids & set(map(int, re.findall(r"pid=(\d+)", line)))]


class Nothing:
    """Object that an actor holds."""

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()


def test_nothing_listens_beyond_this_machine_and_nothing_is_left():
    """Two clusters of one machine would have other folders and ports."""
    with closing(RayCluster(ClusterConfig(resources={"rollout": {"num_cpus": 0.1}}), ["rollout"])) as cluster:
        actor = cluster.start("rollout", 0, Nothing)
        cluster.know(actor)
        pids, folder = descendants(os.getpid()), cluster.folder.path
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
    printed = capsys.readouterr().out
    assert re.search(r"rollout +x2  0.2 CPUs, 0 GPUs each, on this machine", printed)
    assert re.search(r"trainer +x1  0.2 CPUs, 0 GPUs each, on this machine", printed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cluster.replicas=100000"], "cluster: room for only"),
        (["cluster.placement=split", "model.device=cuda"], "model.device=cuda"),
        (["cluster.resources.rollout.num_gpus=1"], "room for only 0 of 1 rollout actors (1 CPUs, 1 GPUs each)"),
        (
            ["cluster.resources.rollout.num_gpus=1.5"],
            "num_gpus=1.5: an actor gets a fraction of one GPU, or whole ones",
        ),
        (["cluster.resources.critic={}", TRAINER], "cluster.resources.critic: this run (grpo) has no critic"),
        (
            ["cluster.resources.reward={}"],
            "cluster.resources.reward: this run (grpo) does not use the reward reward_model",
        ),
        ([*PPO, "cluster.resources.critic={}"], "needs cluster.resources.trainer too"),
        (["cluster.address=127.0.0.1:1"], "cluster.address=127.0.0.1:1: cannot reach a cluster"),
        (["cluster.address=ray"], "cluster.address=ray: must be auto, or HOST:PORT"),
        (["cluster.address=local"], "cluster.address=local: must be auto, or HOST:PORT"),
        (["cluster.address=ray://a:10001"], "cluster.address=ray://a:10001: must be auto, or HOST:PORT"),
        (["cluster.address=127.0.0.1:99999"], "cluster.address=127.0.0.1:99999: cannot reach a cluster"),
        (["cluster.resources.judge={}"], "cluster.resources.judge"),
        (["cluster.resources.rollout.num_cpus=-1"], "cluster.resources.rollout.num_cpus"),
        (["cluster.resources.rollout=2"], "cluster.resources.rollout"),
        (["cluster.timeout_s=0"], "cluster.timeout_s"),
        (["cluster.gpus=2"], "cluster.gpus"),
        (
            ["cluster.replicas=1", "cluster.weight_transfer=files", "cluster.weight_folder=/proc/none"],
            "cluster.weight_folder=/proc/none: cannot create the folder",
        ),
    ],
)
def test_placements_that_could_only_hang_are_refused_at_once(folder, capsys, settings, message):
    assert main(["train", *config(folder, "refused"), *settings, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
    assert main(["train", *config(folder, "refused"), *settings]) == 2
    assert not run_of(folder, "refused").exists()


@pytest.mark.parametrize("settings", [["cluster.replicas=2"], ["cluster.placement=colocated"]])
def test_shares_beyond_a_gpu_are_refused(folder, capsys, monkeypatch, settings):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shares = ["cluster.resources.trainer.num_gpus=0.6", "cluster.resources.rollout.num_gpus=0.5"]
    assert main(["train", *config(folder, "refused"), *settings, *shares, "--dry-run"]) == 2
    printed = capsys.readouterr().err
    assert "room for only 0 of" in printed and "cluster.resources.rollout set what is requested" in printed


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_addresses_without_a_ray_cluster_are_refused(folder, capsys, answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        Thread(target=serve, daemon=True).start()
        address = f"cluster.address=127.0.0.1:{server.getsockname()[1]}"
        assert main(["train", *config(folder, "refused"), address, "--dry-run"]) == 2
        assert f"{address}: the server there is not a Ray cluster" in capsys.readouterr().err


@pytest.fixture
def head(monkeypatch):
    """The head of a cluster."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_a_role_with_a_custom_resource_starts_where_that_is(folder, capsys, head):
    """The head is first and has room, and not the resource; the other machine has it twice."""
    other = head.add_node(num_cpus=2, resources={"engines": 2})
    given = {"rollout": {"num_cpus": 0.1, "custom": {"engines": 1}}}
    with closing(RayCluster(ClusterConfig(address=head.address, resources=given, replicas=2), ["rollout"])) as cluster:
        actors = [cluster.start("rollout", index, Nothing) for index in range(2)]
        for actor in actors:
            cluster.know(actor)
            assert cluster.call(actor, "node") == other.node_id
    run = [*config(folder, "engines"), f"cluster.address={head.address}", f"cluster.resources={json.dumps(given)}"]
    assert main(["train", *run, "cluster.replicas=3", "--dry-run"]) == 2
    assert "room for only 2 of 3 rollout actors" in capsys.readouterr().err
    assert main(["train", *run, "cluster.replicas=2", "train.steps=1"]) == 0


def test_a_cluster_of_another_version_is_refused(folder, capsys, head):
    from ray._raylet import GcsClient

    client = GcsClient(address=head.address)
    told = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster"))
    client.internal_kv_put(b"CLUSTER_METADATA", json.dumps(told | {"ray_version": "2.0.0"}).encode(), True, b"cluster")
    for more in (["--dry-run"], []):
        assert main(["train", *config(folder, "refused"), f"cluster.address={head.address}", *more]) == 2
        printed = capsys.readouterr().err
        assert f"cluster.address={head.address}: Version mismatch" in printed and "Ray: 2.0.0" in printed


def test_auto_is_never_the_cluster_of_another_run(folder, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("ray._private.utils.get_ray_address_file", lambda _: str(tmp_path / "none"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    own = RayCluster(ClusterConfig(resources={"rollout": {"num_cpus": 0.1}}), ["rollout"])
    with closing(own), monkeypatch.context() as patch:
        patch.setattr(own.ray, "is_initialized", lambda: False)  # as in another process
        assert main(["train", *config(folder, "refused"), "cluster.address=auto", "--dry-run"]) == 2
    assert "cluster.address=auto: no cluster was started on this machine" in capsys.readouterr().err


def test_a_trainer_that_dies_ends_the_run_which_continues(tmp_path):
    prepare(tmp_path)
    run, whole = TrainingRun(tmp_path, "run"), TrainingRun(tmp_path, "whole")
    try:
        run.until_step(5)
        (pid,) = run.actors("trainer")
        os.kill(pid, signal.SIGKILL)
        assert run.process.wait(120) == 2
        assert f"trainer (pid {pid} on 127.0.0.1) died" in run.log.read_text()
        assert "--resume continues from the newest checkpoint" in run.log.read_text()
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


def test_a_node_goes_and_the_run_ends_and_continues(tmp_path, nodes):
    cluster, arguments = nodes
    going = cluster.add_node(num_cpus=2)
    run = TrainingRun(tmp_path, "run", *arguments)
    try:
        run.until_step(2)
        cluster.remove_node(going)
        assert run.process.wait(300) == 2
        assert "room for only 0 of 1 rollout actors" in run.log.read_text()
        cluster.add_node(num_cpus=2)
        run = TrainingRun(tmp_path, "run", *arguments, "--resume")
        assert run.process.wait(300) == 0
    finally:
        run.end()


def test_an_actor_killed_for_the_memory_of_its_machine_is_named(tmp_path, monkeypatch):
    prepare(tmp_path)
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    run = TrainingRun(tmp_path, "run")
    try:
        assert run.process.wait(300) == 2
        assert re.search(r"error: .* died.*low on memory", run.log.read_text()), run.log.read_text()[-2000:]
    finally:
        run.end()


def test_who_has_not_its_token_has_a_cluster_of_a_run_do_nothing(tmp_path):
    """Any user of the machine can reach its ports."""
    with closing(RayCluster(ClusterConfig(replicas=1), ["rollout"], "cpu")) as cluster:
        address = cluster.ray.get_runtime_context().gcs_address
        code = f"from ray._raylet import GcsClient; GcsClient(address={address!r}).internal_kv_keys(b'', b'fun')"
        theirs = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=theirs, capture_output=True, text=True)
        assert done.returncode == 1 and "Authentication token is missing" in done.stderr
        cluster.know(actor := cluster.start("rollout", 0, Nothing))
        assert cluster.call(actor, "node")
