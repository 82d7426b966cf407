"""Trainer and models in Ray actors: the same run as in one process, who goes where, and who dies with whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atomrl.cli.main import main
from tests.distributed.test_replicas import config, weights
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
    assert weights(folder, "there") == weights(folder, "here")
    assert metrics(folder, "there") == metrics(folder, "here")


def test_models_apart_train_the_same(folder):
    """A critic with its own optimizer, and a reference."""
    models = ["cluster.resources.critic={num_cpus: 0.2}", "cluster.resources.reference={num_cpus: 0.2}"]
    train(folder, "ppo", *PPO)
    train(folder, "ppo-apart", *PPO, *APART, *models)
    assert weights(folder, "ppo-apart") == weights(folder, "ppo")
    assert metrics(folder, "ppo-apart") == metrics(folder, "ppo")
    for name in ("critic/model.safetensors", "training_state/critic_optimizer.safetensors"):
        places = [run_of(folder, run) / "checkpoints" / "step_000002" / name for run in ("ppo-apart", "ppo")]
        assert places[0].read_bytes() == places[1].read_bytes()
