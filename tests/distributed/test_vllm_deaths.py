"""vLLM that dies, in an actor and as a server: no completion is lost, and what comes back has the current weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig
from atomrl.engines.generation import generate, requests_of
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.types import SamplingParams
from atomrl.weight_sync.transfer import InProcessTransfer
from tests.engines.test_sglang_faults import Trainer
from tests.prompts import prompts_of
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.usefixtures("vllm")
SAMPLING = SamplingParams(completions_per_prompt=8, max_completion_tokens=400, ignore_eos=True, seed=1)
PROMPTS = prompts_of([5, 6, 7], [8, 9], [14])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("dying") / "model", "llama", scale=0.2, head_dim=32)


def build(kind, path: str):
    return kind.from_pretrained(path, AutoTokenizer.from_pretrained(path), EngineOptions(torch.float32, "cpu", 8))


@pytest.fixture(scope="module", params=["actor", "server"])
def engine(request, folder):
    """With `kill`, which ends the process that has vLLM."""
    if request.param == "server":
        made = build(VLLMServerEngine, str(folder))
        made.kill = lambda: os.killpg(made.replicas[0].process.pid, signal.SIGKILL)
        yield made
        made.close()
        return
    pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
    cluster = RayCluster(ClusterConfig(resources={"rollout": {"num_cpus": 0.5}}), ["rollout"])
    made = ReplicatedEngine(partial(build, VLLMEngine, str(folder)), cluster)
    made.kill = lambda: os.kill(made.replicas[0].actor.pid, signal.SIGKILL)
    yield made
    cluster.close()


def ids_and_versions(outputs) -> dict[str, list]:
    return {output.request_id: [(s.token_ids, s.policy_version) for s in output.segments] for output in outputs}


def drawn(engine, act) -> dict[str, list]:
    """Return the completions of all prompts; `act` runs while they are sampled."""
    requests = [request for prompt in PROMPTS for request in requests_of(prompt, SAMPLING)]
    engine.submit(requests)
    time.sleep(0.2)
    act()
    completions: dict[str, list] = {}
    while len(completions) < len(requests):
        completions |= ids_and_versions(engine.poll())
    return completions


def test_an_engine_killed_while_sampling_loses_no_completion(engine, folder):
    InProcessTransfer(Trainer(folder), engine)(engine.version + 1)
    undisturbed = drawn(engine, lambda: None)
    assert {version for spans in undisturbed.values() for _, version in spans} == {engine.version}
    assert drawn(engine, engine.kill) == undisturbed


def test_an_engine_killed_during_a_weight_update_has_the_weights_afterwards(engine, folder):
    transfer, version = InProcessTransfer(Trainer(folder), engine), engine.version + 1
    transfer(version)
    timer = threading.Timer(0.05, engine.kill)
    timer.start()
    transfer(version + 1)  # which compares what is held with what was sent
    timer.join()
    assert {t.segments[1].policy_version for t in generate(engine, PROMPTS, SAMPLING)} == {version + 1}
    transfer(version + 2)
