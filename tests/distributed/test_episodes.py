"""Episodes on engines apart from the trainer: vLLM in this process, and replicas of which one dies in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig, EnvironmentConfig
from atomrl.data.rows import to_rows
from atomrl.engines.episodes import EpisodeEngine
from atomrl.engines.generation import generate, requests_of, to_trajectory
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions
from atomrl.engines.vllm import VLLMEngine
from atomrl.models.loading import read_weights
from atomrl.protocols import WeightUpdate
from atomrl.types import SamplingParams
from tests.prompts import prompts_of
from tests.tiny import make_tiny_model

SAMPLING = SamplingParams(completions_per_prompt=4, max_completion_tokens=300, seed=7)
SETTINGS = {"function": "tests.environments.played.echo", "max_turn_tokens": 60}
DROPPING = {"when_full": "drop_oldest", "max_turns": 16, "max_turn_tokens": 12, "args": {"turns": 14}}
SHORT = replace(SAMPLING, max_completion_tokens=48)
BLOCK = 128
"""Tokens that vLLM's cache on a CPU keeps together."""
GENERATOR = random.Random(1)
PROMPTS = prompts_of(*([GENERATOR.randint(5, 101) for _ in range(100)] for _ in range(6)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("episodes") / "model", scale=0.2, head_dim=32))


def options(rows: int = 32) -> EngineOptions:
    return EngineOptions(torch.float32, "cpu", max_concurrent_completions=rows)


def over(engine, folder: str, **settings) -> EpisodeEngine:
    config = EnvironmentConfig(**(SETTINGS | settings))
    return EpisodeEngine(engine, AutoTokenizer.from_pretrained(folder), config)


def largest_error(folder: str, trajectories, changed=lambda model, version: None) -> float:
    """Largest error of log-probs of the model's tokens: float64 forward passes over the row with the weights of its
    version."""
    worst, models = 0.0, {}
    for trajectory in trajectories:
        row = torch.tensor([trajectory.token_ids])
        begin = 0
        for segment in trajectory.segments:
            end = begin + len(segment.token_ids)
            if segment.origin == "model":
                if segment.policy_version not in models:
                    models[segment.policy_version] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
                    changed(models[segment.policy_version], segment.policy_version)
                with torch.no_grad():
                    logits = models[segment.policy_version](row).logits[0, begin - 1 : end - 1]
                expected = logits.log_softmax(-1).gather(-1, row[0, begin:end, None])[:, 0]
                worst = max(worst, float((expected - torch.tensor(segment.logprobs)).abs().max()))
            begin = end
    return worst


def lengths_after_turns(trajectory) -> list[int]:
    """Tokens of the row when each turn of the model ended."""
    length, lengths = 0, []
    for segment in trajectory.segments:
        length += len(segment.token_ids)
        lengths += [length] if segment.origin == "model" else []
    return lengths


def rows_error(folder: str, trajectories) -> float:
    """Largest error of log-probs of the rows to train on, beside a float64 forward pass over each of them."""
    rows = to_rows([replace(item, reward=1.0) for item in trajectories])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert rows.rows > 2 * len(trajectories), "turns were dropped"
    mask = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    with torch.no_grad():
        logits = model(rows.tokens, attention_mask=mask.long()).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, rows.tokens[:, 1:, None])[..., 0]
    trained = rows.loss_mask[:, 1:]
    return float((expected - rows.rollout.logprobs[:, 1:])[trained].abs().max())


@pytest.fixture
def in_vllm(vllm, folder, request):
    made = VLLMEngine.from_pretrained(folder, AutoTokenizer.from_pretrained(folder), options())
    with closing(over(made, folder, **getattr(request, "param", {}))) as episodes:
        yield episodes


def test_vllm_continues_from_its_prefix_cache(in_vllm, folder):
    llm, cached = in_vllm.engine.llm, {}
    step = llm.step

    def counting():
        outputs = step()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    llm.step = counting
    trajectories = generate(in_vllm, PROMPTS, SAMPLING)
    llm.step = step
    assert len(trajectories) == 24 and {item.episode.ended for item in trajectories} == {"environment"}
    origins = ["prompt", *["model", "environment"] * 3, "model"]
    assert all([part.origin for part in item.segments] == origins for item in trajectories)
    assert largest_error(folder, trajectories) < 5e-5
    used = 0
    for item in trajectories:
        for turn, length in enumerate(lengths_after_turns(item)[:-1], start=1):
            whole = (length - 1) // BLOCK * BLOCK  # its last token has been drawn, and not computed
            assert cached[f"{item.trajectory_id}#{turn}"] == whole
            used += whole
    assert used > 24 * BLOCK
    again = generate(in_vllm, PROMPTS, SAMPLING)
    assert [item.token_ids for item in again] == [item.token_ids for item in trajectories]
    other = generate(in_vllm, PROMPTS, SamplingParams(completions_per_prompt=4, max_completion_tokens=300, seed=8))
    assert [item.token_ids for item in other] != [item.token_ids for item in trajectories]


@pytest.mark.parametrize("in_vllm", [DROPPING], indirect=True, ids=["dropping"])
def test_turns_that_vllm_does_not_see_any_more(in_vllm, folder):
    trajectories = generate(in_vllm, PROMPTS[:3], SHORT)
    assert rows_error(folder, trajectories) < 5e-5
    assert [item.token_ids for item in generate(in_vllm, PROMPTS[:3], SHORT)] == [
        item.token_ids for item in trajectories
    ]


def test_new_weights_of_vllm_come_between_two_tokens_of_an_episode(in_vllm, folder):
    weights = {name: t for name, t in read_weights(folder) if name in in_vllm.weight_shapes()}
    for prompt in PROMPTS:
        in_vllm.submit(requests_of(prompt, SAMPLING))
    outputs, polls = [], 0
    while len(outputs) < 24:
        outputs += in_vllm.poll(0.01)
        polls += bool(in_vllm.engine.held)
        if polls > 5 * in_vllm.version + 5 and in_vllm.version < 8:
            version = in_vllm.version + 1
            update = [(name, tensor * (1 + 0.02 * version)) for name, tensor in weights.items()]
            in_vllm.update_weights(WeightUpdate(version=version, tensors=update))

    def changed(model, version):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + 0.02 * version

    prompts = {prompt.prompt_id: prompt for prompt in PROMPTS}
    trajectories = [to_trajectory(prompts[output.request_id.partition("/")[0]], 0, output) for output in outputs]
    assert len({segment.policy_version for item in trajectories for segment in item.segments} - {None}) > 2
    assert largest_error(folder, trajectories, changed) < 5e-5


class Watched(NativeEngine):
    """Writes down what it is asked for, and whether it goes on from a cache that it has."""

    notes: Path

    def note(self, **what) -> None:
        with (self.notes / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"pid": os.getpid()} | what) + "\n")

    def submit(self, requests):
        super().submit(requests)
        for request in requests:
            fed = id(self.held[request.request_id]) in self.batch.retained.claimed
            self.note(name=request.request_id, continues=request.continues, fed=fed)

    def abort(self, request_ids=None):
        aborted = super().abort(request_ids)
        self.note(parked=len(self.batch.retained.slots))
        return aborted


def build(path: str, notes: Path) -> Watched:
    engine = Watched.from_pretrained(path, AutoTokenizer.from_pretrained(path), options(), use_kernel=False)
    engine.notes = notes
    return engine


def read_notes(folder: Path) -> list[dict]:
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


@pytest.fixture
def in_replicas(folder, tmp_path, request):
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed; `make distributed` has it")
    config = ClusterConfig(replicas=2, timeout_s=600, resources={"rollout": {"num_cpus": 0.1}})
    with closing(RayCluster(config, ["rollout"])) as cluster:
        engine = ReplicatedEngine(partial(build, folder, tmp_path), cluster)
        with closing(over(engine, folder, **getattr(request, "param", {}))) as episodes:
            yield episodes


@pytest.fixture(scope="module")
def alone(folder):
    """The episodes of one engine in this process."""
    made = NativeEngine.from_pretrained(folder, AutoTokenizer.from_pretrained(folder), options(), use_kernel=False)
    with closing(over(made, folder)) as episodes:
        return generate(episodes, PROMPTS, SAMPLING)


@pytest.mark.short
def test_a_turn_goes_to_the_replica_that_has_the_cache_of_the_one_before(in_replicas, folder, alone, tmp_path):
    trajectories = generate(in_replicas, PROMPTS, SAMPLING)
    assert [item.token_ids for item in trajectories] == [item.token_ids for item in alone]
    assert largest_error(folder, trajectories) < 5e-5
    asked = [note for note in read_notes(tmp_path) if "name" in note]
    where = {note["name"]: note["pid"] for note in asked}
    later = [note for note in asked if note["continues"]]
    assert len(later) == 24 * 3 and len(set(where.values())) == 2
    assert all(note["fed"] and note["pid"] == where[note["continues"]] for note in later)
    engine = in_replicas.engine
    engine.weight_hashes()  # what was sent before has been done
    assert not any(replica.retained or replica.held for replica in engine.replicas)
    last = {note["pid"]: note["parked"] for note in read_notes(tmp_path) if "parked" in note}
    assert set(last.values()) == {0} and len(last) == 2


@pytest.mark.parametrize("in_replicas", [DROPPING], indirect=True, ids=["dropping"])
def test_turns_that_replicas_do_not_see_any_more(in_replicas, folder):
    trajectories = generate(in_replicas, PROMPTS[:3], SHORT)
    assert rows_error(folder, trajectories) < 5e-5
    made = NativeEngine.from_pretrained(folder, AutoTokenizer.from_pretrained(folder), options(), use_kernel=False)
    with closing(over(made, folder, **DROPPING)) as episodes:
        assert [item.token_ids for item in generate(episodes, PROMPTS[:3], SHORT)] == [
            item.token_ids for item in trajectories
        ]


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_replica_that_dies_in_the_middle_of_episodes_loses_nothing(in_replicas, alone, tmp_path, turn):
    engine = in_replicas.engine
    pid, end = engine.replicas[0].actor.pid, time.monotonic() + 60
    for prompt in PROMPTS:
        in_replicas.submit(requests_of(prompt, SAMPLING))
    outputs, killed = [], False
    while len(outputs) < 24 and time.monotonic() < end:
        outputs += in_replicas.poll(0.02)
        mine = [note["name"] for note in read_notes(tmp_path) if note["pid"] == pid and "name" in note]
        if not killed and any(name.endswith(f"#{turn}") for name in mine):
            os.kill(pid, signal.SIGKILL)
            killed = True
    assert killed and engine.restarts == 1
    by_id = {output.request_id: output for output in outputs}
    for item in alone:
        segments = by_id[item.trajectory_id].segments
        assert [segment.token_ids for segment in segments] == [segment.token_ids for segment in item.segments[1:]]
    assert all(output.episode.ended == "environment" for output in outputs)
