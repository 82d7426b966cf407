"""Ranks in Ray actors make the run of ranks that are processes of this one, and are started again where one is lost."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from atomrl.backends.group import RankLost
from atomrl.backends.rank_actors import start_rank_actors
from atomrl.cli.main import main
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig, FSDPConfig
from benchmarks.faults import TrainingRun, prepare
from benchmarks.rank_faults import distance
from tests.tiny import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")

from tests.distributed.test_placement import metrics, train
from tests.distributed.test_replicas import config

RANKS = ["backend.type=fsdp", "backend.ranks=2", "algorithm.name=grpo", "train.steps=2", "tracking.tokens=2"]
ACTORS = ["cluster.resources.trainer.num_cpus=0.2", "cluster.resources.rollout.num_cpus=0.2", "cluster.timeout_s=120"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ranks") / "model", scale=0.2)


def test_ranks_in_actors_train_the_same(folder):
    """To the last bit, and from each other's checkpoints."""
    train(folder, "here", *RANKS)
    train(folder, "there", *RANKS, *ACTORS)
    assert metrics(folder, "there") == metrics(folder, "here")
    one, other = (
        load_file(folder.parent / "runs" / name / "model" / "model.safetensors") for name in ("here", "there")
    )
    assert distance(one, other) == 0


def of_rank(run: TrainingRun, rank: int) -> int:
    """Its process. That of rank 0 is idle between two calls, the other follows it from first to last."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        names = {pid: name.split()[0] for pid, name in run.ours().items() if name.startswith("ray::trainer")}
        first = [pid for pid, name in names.items() if name == "ray::trainer"]
        if first and len(names) == 2:
            return next(pid for pid in names if (pid == first[0]) == (rank == 0))
    raise AssertionError(f"no rank was idle: {names}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_new_group_continues_after_an_actor_is_killed(tmp_path, rank):
    prepare(tmp_path)
    given = yaml.safe_load((tmp_path / "c.yaml").read_text())
    del given["cluster"]["resources"]["reference"]
    given |= {"backend": {"type": "fsdp", "ranks": 2}, "train": given["train"] | {"steps": 12}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(given))
    whole = TrainingRun(tmp_path, "whole")
    try:
        assert whole.process.wait(900) == 0, whole.log.read_text()[-2000:]
    finally:
        whole.end()
    run = TrainingRun(tmp_path, "run")
    try:
        run.until_step(6)
        pid = of_rank(run, rank)
        os.kill(pid, signal.SIGKILL)
        assert run.process.wait(900) == 0, run.log.read_text()[-2000:]
        said = run.log.read_text()
        assert "new ranks continue from the newest checkpoint (1 of backend.restarts=2)" in said
        assert ("rank 1 does not respond" if rank else f"trainer (pid {pid} on 127.0.0.1) died") in said
        assert run.weights() == whole.weights()
        assert run.gone_after("ours", 30) < 10
    finally:
        run.end()


class Killing(RayCluster):
    """A cluster that kills the actor of one rank before the ranks meet."""

    rank = 0

    def start(self, role, index, build):
        actor = super().start(role, index, build)
        if index == self.rank:
            self.ray.kill(actor.handle)
        return actor


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_do_not_wait_for_one_that_was_killed_before_they_met(rank, monkeypatch):
    monkeypatch.setattr(Killing, "rank", rank)
    settings = ClusterConfig(resources={"trainer": {"num_cpus": 0.2}}, timeout_s=60)
    with closing(Killing(settings, ["trainer"], "cpu", ranks=2)) as cluster:
        began = time.monotonic()
        with pytest.raises(RankLost, match="^trainer died" if rank == 0 else "^trainer 1 died"):
            start_rank_actors(build_none, FSDPConfig(type="fsdp", ranks=2), "cpu", None, cluster)
        assert time.monotonic() - began < 60


def build_none(ranks, device):
    """It does not come to this."""


def test_how_many_actors_has_to_be_said(folder, capsys):
    assert main(["train", *config(folder, "none"), "backend.type=fsdp", *ACTORS, "--dry-run"]) == 2
    assert "backend.ranks: is required" in capsys.readouterr().err
