"""The loop on real parts, small: native engine, local back end, a tiny random model."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.backends.local import LocalBackend
from atomrl.config import DataConfig, ModelConfig, RewardConfig, TrainConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.prompt_stream import PromptStream
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.models.loading import load_tokenizer
from atomrl.rewards.compute import build_rewards
from atomrl.trainer.loop import Progress
from atomrl.trainer.rollout_training import RolloutTraining
from atomrl.trainer.sources import EngineSource
from atomrl.types import Problem, SamplingParams
from atomrl.weight_sync import InProcessTransfer
from tests.backends.batches import weights_of
from tests.tiny import make_tiny_model
from tests.trainer.scripted import Record, curriculum_of, planned, train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2"))


def make_parts(model, folder, steps=4, algorithm=None, **schedule):
    tokenizer = load_tokenizer(model)
    train_config = TrainConfig(steps=steps, learning_rate=3e-3, tokens_per_micro_batch=128)
    plan = planned(**{"steps": steps, "updates_per_epoch": 2} | schedule)
    problems = [Problem(problem_id=str(i), prompt=f"write {i}", ground_truth="") for i in range(5)]
    settings = {"dtype": torch.float32, "device": "cpu", "max_concurrent_completions": 8}
    engine = NativeEngine.from_pretrained(model, tokenizer, EngineOptions(**settings))
    algorithm = algorithm or objective_of({"name": "grpo"}).resolved(report_entropy=True)
    trainer = LocalBackend(
        ModelConfig(path=model, dtype="float32"),
        train_config,
        algorithm,
        total_updates=steps * plan.updates_per_step,
        tokenizer=tokenizer,
    )
    processor = DataProcessor(tokenizer, DataConfig(train="x.jsonl"))
    source = EngineSource(
        engine=engine,
        algorithm=algorithm,
        curriculum=curriculum_of(PromptStream(problems, seed=0), algorithm),
        processor=processor,
        rewards=build_rewards(RewardConfig(functions=[{"function": "tests.light_rewards.letter_reward"}])),
        sampling=SamplingParams(completions_per_prompt=4, max_completion_tokens=12),
    )
    parts = RolloutTraining(
        source=source,
        transfer=InProcessTransfer(trainer, engine),
        trainer=trainer,
        algorithm=algorithm,
        processor=processor,
        record=Record(folder),
        config=plan,
        progress=Progress(),
    )
    return parts, plan


def saver(parts):
    def save(folder, progress):
        parts.trainer.save(folder)
        (folder / "progress.json").write_text(json.dumps(vars(progress)))

    return save


def weights(parts):
    return {name: tensor.clone() for name, tensor in weights_of(parts.trainer).items()}


def without_time(rows):
    of_the_machine = "timing_s/", "perf/throughput", "perf/cpu_memory"
    return [{name: value for name, value in row.items() if not name.startswith(of_the_machine)} for row in rows]


def test_a_run_trains_and_reports(model, tmp_path):
    parts, plan = make_parts(model, tmp_path)
    before = weights(parts)
    assert train(parts, plan, Progress(), saver(parts)) is True
    assert [row["step"] for row in parts.record.rows] == [1, 2, 3, 4]
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(parts).items())
    row = parts.record.rows[1]
    for name in (
        "critic/score/mean",
        "reward/letter_reward/mean",
        "response_length/mean",
        "response_length/clip_ratio",
        "by_group/frac_mixed",
        "actor/pg_loss",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "timing_s/gen",
        "timing_s/reward",
        "timing_s/old_log_prob",
        "timing_s/adv",
        "timing_s/update_actor",
        "perf/throughput",
        "perf/cpu_memory_used_gb",
    ):
        assert name in row, name
    assert row["training/updates"] == 2 and "timing_s/ref" not in row
    # weights reach the engine: rollout and trainer see the same policy, on every step
    assert max(r["training/rollout_probs_diff_max"] for r in parts.record.rows) < 1e-4
    assert parts.record.saved == [4]
    step, trajectories, advantages = parts.record.rollouts[2]
    assert step == 3 and {item.segments[1].policy_version for item in trajectories} == {2} and len(advantages) == 12


def test_the_reward_rises(model, tmp_path):
    parts, plan = make_parts(model, tmp_path, steps=25, updates_per_epoch=1, prompts_per_step=5)
    train(parts, plan, Progress(), saver(parts))
    scores = [row["critic/score/mean"] for row in parts.record.rows]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.2


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_resuming_gives_the_run_that_never_stopped(model, tmp_path, stop_at):
    whole, plan = make_parts(model, tmp_path / "whole")
    train(whole, plan, Progress(), saver(whole))
    first, _ = make_parts(model, tmp_path / "first")
    train(first, planned(steps=stop_at, updates_per_epoch=2, save=1), Progress(), saver(first))
    second, plan = make_parts(model, tmp_path / "second")
    folder = tmp_path / "first" / f"step_{stop_at}"
    second.trainer.load(folder)
    train(second, plan, Progress(**json.loads((folder / "progress.json").read_text())), saver(second))
    expected = weights(whole)
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, expected[name]), name
    assert without_time(first.record.rows + second.record.rows) == without_time(whole.record.rows)


def test_a_signal_ends_the_step_and_saves(model, tmp_path):
    parts, plan = make_parts(model, tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    transfer = parts.transfer

    def stop_in_step_two(version):
        transfer(version)
        if version == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    parts = replace(parts, transfer=stop_in_step_two)
    progress = Progress()
    assert train(parts, plan, progress, saver(parts)) is False
    assert progress.step == 2 and parts.record.saved == [2]
    assert signal.getsignal(signal.SIGTERM) is handler
