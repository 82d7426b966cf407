"""Engines in Ray actors: the same run as in one process; actors that die, hang or find no room."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.cli.main import main
from atomrl.cluster.placement import PlacementError
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig
from atomrl.engines.generation import generate, requests_of
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions
from atomrl.protocols import WeightUpdate
from atomrl.types import SamplingParams
from tests.arithmetic import arithmetic_run, trained_weights
from tests.prompts import prompts_of
from tests.tiny import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
SAMPLING = SamplingParams(completions_per_prompt=8, max_completion_tokens=400, ignore_eos=True, seed=1)
PROMPTS = prompts_of([5, 6, 7], [8, 9], [10, 11, 12, 13], [14])


def build(path: str) -> NativeEngine:
    tokenizer = AutoTokenizer.from_pretrained(path)
    options = {"dtype": torch.float32, "device": "cpu", "max_concurrent_completions": 4}
    return NativeEngine.from_pretrained(path, tokenizer, EngineOptions(**options), use_kernel=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("replicas") / "model", scale=0.2)


def cluster(**settings) -> RayCluster:
    return RayCluster(ClusterConfig(resources={"rollout": {"num_cpus": 0.1}}, **settings), ["rollout"])


@pytest.fixture
def engine(folder):
    with closing(cluster(replicas=2, timeout_s=600)) as started:
        yield ReplicatedEngine(partial(build, str(folder)), started)


def later(seconds: float, pid: int, name: signal.Signals) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (pid, name))
    timer.start()
    return timer


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
def test_a_replica_that_dies_loses_no_completion(engine, seconds):
    undisturbed = generate(engine, PROMPTS, SAMPLING)
    timer = later(seconds, engine.replicas[0].actor.pid, signal.SIGKILL)
    trajectories = generate(engine, PROMPTS, SAMPLING)
    timer.join()
    assert trajectories == undisturbed
    assert generate(engine, PROMPTS, SAMPLING) == undisturbed  # also where it died after its last completion
    assert engine.restarts == 1


@pytest.mark.short
def test_it_returns_with_the_current_weights(engine, folder):
    old = generate(engine, PROMPTS, SAMPLING)
    tensors = [(name, torch.full(shape, 0.01)) for name, shape in engine.weight_shapes().items()]
    engine.update_weights(WeightUpdate(version=3, tensors=tensors))
    new = generate(engine, PROMPTS, SAMPLING)
    assert [t.segments[1].token_ids for t in new] != [t.segments[1].token_ids for t in old]
    os.kill(engine.replicas[1].actor.pid, signal.SIGKILL)
    again = generate(engine, PROMPTS, SAMPLING)
    assert again == new and {t.segments[1].policy_version for t in again} == {3}


def test_a_restarted_replica_takes_weights(engine):
    for replica in engine.replicas:
        os.kill(replica.actor.pid, signal.SIGKILL)
    tensors = [(name, torch.zeros(shape)) for name, shape in engine.weight_shapes().items()]
    engine.update_weights(WeightUpdate(version=1, tensors=tensors))
    assert {t.segments[1].policy_version for t in generate(engine, PROMPTS, SAMPLING)} == {1}


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_that_hangs_is_named(folder, replicas):
    with closing(cluster(replicas=replicas, timeout_s=3)) as started:
        engine = ReplicatedEngine(partial(build, str(folder)), started)
        pid, began = engine.replicas[0].actor.pid, time.monotonic()
        engine.submit([request for prompt in PROMPTS for request in requests_of(prompt, SAMPLING)])
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=rf"rollout 0.*pid {pid} .*not answered for 3 s"):
            while engine.poll():
                pass
        assert time.monotonic() - began < 3 + 15


def test_one_that_hangs_is_not_asked_to_give_up_what_it_holds(folder):
    """Which would wait as long once more."""
    with closing(cluster(replicas=1, timeout_s=16)) as started:
        engine = ReplicatedEngine(partial(build, str(folder)), started)
        timer, began = later(0.1, engine.replicas[0].actor.pid, signal.SIGSTOP), time.monotonic()
        long = SamplingParams(completions_per_prompt=8, max_completion_tokens=500, ignore_eos=True)
        with pytest.raises(TimeoutError, match=r"rollout 0.*answered for 16"):
            while True:
                generate(engine, PROMPTS, long)
        timer.join()
        assert time.monotonic() - began < 16 + 15


def test_an_id_is_taken_once(engine):
    (request, *_) = requests_of(PROMPTS[0], SAMPLING)
    with pytest.raises(ValueError, match="already exists"):
        engine.submit([request, replace(request, group_id="another")])
    assert not any(replica.held for replica in engine.replicas)


class Filling(NativeEngine):
    """Says that it was closed."""

    def close(self) -> None:
        (Path(self.tokenizer.name_or_path).parent / f"closed-{os.getpid()}").touch()


def filling(path: str) -> Filling:
    options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=4)
    return Filling.from_pretrained(path, AutoTokenizer.from_pretrained(path), options, use_kernel=False)


def test_engines_are_closed_before_their_actors_end(folder):
    with closing(cluster(replicas=2, timeout_s=60)) as started:
        engine = ReplicatedEngine(partial(filling, str(folder)), started)
        engine.submit([request for prompt in PROMPTS for request in requests_of(prompt, SAMPLING)])
        hangs, well = (replica.actor.pid for replica in engine.replicas)
        os.kill(hangs, signal.SIGSTOP)
        engine.close()
    assert [path.name for path in folder.parent.glob("closed-*")] == [f"closed-{well}"]


def test_replicas_without_room_are_refused():
    with pytest.raises(PlacementError, match="1 rollout actors"):
        RayCluster(ClusterConfig(resources={"rollout": {"num_cpus": 10_000}}), ["rollout"])


def test_an_error_of_the_engine_is_its_own(engine):
    tensors = [(name, torch.full(shape, torch.nan)) for name, shape in engine.weight_shapes().items()]
    engine.update_weights(WeightUpdate(version=1, tensors=tensors))
    with pytest.raises(ValueError, match="weights have diverged"):
        generate(engine, PROMPTS, SAMPLING)


def config(folder: Path, name: str) -> list[str]:
    return arithmetic_run(folder, name, "{function: tests.distributed.test_replicas.even_tokens}")


def even_tokens(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Something that differs within a group."""
    return float(sum(map(ord, solution_str)) % 7)


@pytest.mark.short
def test_a_run_is_the_same_as_in_one_process(folder):
    assert main(["train", *config(folder, "here")]) == 0
    assert main(["train", *config(folder, "there"), "cluster.replicas=1"]) == 0
    assert trained_weights(folder, "there") == trained_weights(folder, "here")
    summary = json.loads((folder.parent / "runs" / "there" / "summary.json").read_text())
    assert summary["finished"]


def test_a_dry_run_says_what_finds_no_room(folder, capsys):
    assert main(["train", *config(folder, "much"), "cluster.replicas=100000", "--dry-run"]) == 2
    assert "cluster: room for only" in capsys.readouterr().err
