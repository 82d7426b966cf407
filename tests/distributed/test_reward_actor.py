"""A reward model in a Ray actor: the same scores as in this process; actors that die, hang or find no room."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from atomrl.cli.main import main
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig, RewardConfig
from atomrl.models.loading import load_tokenizer
from atomrl.models.scalar import load_scalar, save_scalar
from atomrl.rewards.actor import RewardActor, move_models
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.errors import RewardError
from tests.arithmetic import arithmetic_run, trained_weights
from tests.rewards.batches import rollouts, values
from tests.tiny import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
BATCH = {"a": ["one", "two", "a longer answer"], "b": ["", "x"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = make_tiny_model(tmp_path_factory.mktemp("actor") / "model", scale=0.2)
    model = load_scalar(base, dtype="float32")
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    save_scalar(model, load_tokenizer(base), base.parent / "judge")
    return base


@pytest.fixture
def cluster():
    config = ClusterConfig(resources={"reward": {"num_cpus": 0.1}}, timeout_s=600)
    cluster = RayCluster(config, ["reward"], "cpu")
    yield cluster
    cluster.close()


def build(folder: Path):
    args = {"path": str(folder.parent / "judge"), "dtype": "float32"}
    return build_rewards(RewardConfig(functions=[{"function": "reward_model", "args": args}]))


@pytest.fixture
def moved(folder, cluster):
    rewards = build(folder)
    move_models(rewards, cluster)
    return rewards


def pid(cluster: RayCluster) -> int:
    (actor,) = cluster.actors
    return actor.pid


@pytest.mark.short
def test_the_same_scores_and_it_returns_when_it_dies(folder, cluster, moved, caplog):
    expected = values(build(folder)(rollouts(BATCH)))
    assert len({score for group in expected for score in group}) == 5
    assert values(moved(rollouts(BATCH))) == expected
    first = pid(cluster)
    assert first != os.getpid()
    os.kill(first, signal.SIGKILL)  # idle
    assert values(moved(rollouts(BATCH))) == expected
    second = pid(cluster)
    assert second != first and f"reward (pid {first} on 127.0.0.1) died" in caplog.text
    timer = threading.Timer(0.3, os.kill, (second, signal.SIGKILL))
    os.kill(second, signal.SIGSTOP)  # under way, for sure
    timer.start()
    assert values(moved(rollouts(BATCH))) == expected
    assert pid(cluster) not in (first, second)


def test_a_hanging_reward_actor_is_named_and_replaced(folder, cluster, moved):
    expected = values(moved(rollouts(BATCH)))
    stopped = pid(cluster)
    cluster.config = cluster.config.model_copy(update={"timeout_s": 2.0})
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    scored = moved(rollouts(BATCH))
    assert time.monotonic() - began < 17
    failures = [failure for item in scored for failure in item.reward_failures]
    assert len(failures) == 5 and {failure.kind for failure in failures} == {"timeout"}
    assert f"reward (pid {stopped} on 127.0.0.1) has not answered for 2 s" in failures[0].message
    cluster.config = cluster.config.model_copy(update={"timeout_s": 600.0})
    assert values(moved(rollouts(BATCH))) == expected


class Slow:
    def __call__(self, trajectories):
        time.sleep(1)
        return [float(len(item.text)) for item in trajectories]


def test_groups_that_are_scored_at_once_do_not_wait_in_each_others_time(cluster):
    """As the asynchronous loop has them: a thread for each."""
    actor = RewardActor([Slow()], cluster)
    cluster.config = cluster.config.model_copy(update={"timeout_s": 3.0})
    batch = rollouts(BATCH)
    with ThreadPoolExecutor(6) as threads:
        scores = list(threads.map(lambda _: actor.score(0, batch), range(6)))
    assert scores == [[float(len(item.text)) for item in batch]] * 6


class Deadly:
    def __call__(self, trajectories):
        os.kill(os.getpid(), signal.SIGKILL)


class Angry:
    def __call__(self, trajectories):
        raise ValueError("not these")


def test_a_reward_actor_that_dies_of_its_input_ends_the_run(cluster):
    actor = RewardActor([Deadly(), Angry()], cluster)
    with pytest.raises(ValueError, match="not these"):
        actor.score(1, rollouts(BATCH))
    with pytest.raises(RewardError, match="died 4 times"):
        actor.score(0, rollouts(BATCH))


def train(folder: Path, name: str, *more: str) -> int:
    reward = f"{{function: reward_model, args: {{path: '{folder.parent / 'judge'}', dtype: float32}}}}"
    return main(["train", *arithmetic_run(folder, name, reward), *more])


def test_a_run_is_the_same_as_in_one_process(folder):
    own = ("cluster.resources.rollout={num_cpus: 0.5}", "cluster.resources.reward={num_cpus: 0.5}")
    assert train(folder, "here") == 0
    assert train(folder, "there", *own) == 0
    assert trained_weights(folder, "here") == trained_weights(folder, "there")
    assert json.loads((folder.parent / "runs" / "there" / "summary.json").read_text())["finished"]


def test_a_dry_run_says_where_it_goes_and_what_finds_no_room(folder, capsys):
    assert train(folder, "dry", "cluster.resources.reward={num_cpus: 1}", "--dry-run") == 0
    shown = capsys.readouterr()
    assert "reward" in shown.out + shown.err
    assert train(folder, "much", "cluster.resources.reward={num_cpus: 10000}", "--dry-run") == 2
    assert "room for only 0 of 1 reward actors" in capsys.readouterr().err
