"""Runs that stand still in their own process are ended by name; slow ones are left alone."""

import json
import subprocess
import sys

import pytest
import torch
import yaml

from atomrl.backends.local import LocalBackend
from atomrl.common import hangs as module
from atomrl.common.hangs import HUNG, HangWatch, phase, progress
from atomrl.config import ModelConfig, TrainConfig, load_config
from atomrl.engines.generation import requests_of
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.models.loading import load_tokenizer
from atomrl.trainer.hang_watch import hang_watch
from atomrl.types import SamplingParams
from tests.backends.batches import make_algorithm, make_batch
from tests.prompts import prompts_of
from tests.tiny import make_tiny_model

LIMIT_S, TOKENS = 4.0, 30
STUCK = """
import sys, threading
from atomrl.common import hangs
from atomrl.cli.main import main
from {module} import {owner}

hangs.HANG_GRACE_S = 1e9  # what goes well may take as long as it likes
calls, real = [], {owner}.{method}

def stuck(*arguments, **options):
    calls.append(1)
    if len(calls) > {after}:
        hangs.HANG_GRACE_S = 0.0
        threading.Event().wait()
    return real(*arguments, **options)

{owner}.{method} = stuck
sys.exit(main(sys.argv[1:]))
"""
BLOCKED = {
    "engine": ("atomrl.engines.native.engine", "NativeEngine", "_advance", r"the engine (native) (gen)"),
    "trainer": ("atomrl.backends.local", "LocalBackend", "train_step", "training (update_actor)"),
    "reward": ("atomrl.rewards", "compute", "call", "a reward (reward)"),
}


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(module, "open_phases", [])
    return HangWatch(LIMIT_S, {}, "train.timeout_s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def seconds_until_hung(watch, most=1000):
    return next((second for second in range(1, most) if watch.check(1.0)), None)


def test_without_progress_a_phase_hangs_and_the_innermost_is_named(watch):
    with phase("outer"), phase("inner"):
        watch.check(1.0)
        assert seconds_until_hung(watch) == LIMIT_S + module.HANG_GRACE_S + 1
        assert watch.check(1.0) == "inner"
        progress()
        assert watch.check(1.0) is None
        assert seconds_until_hung(watch) == LIMIT_S + module.HANG_GRACE_S + 1


def test_between_phases_nothing_hangs(watch):
    assert seconds_until_hung(watch) is None
    with phase("gen"):
        assert seconds_until_hung(watch)
    assert seconds_until_hung(watch) is None


def test_time_in_which_the_process_stood_still_does_not_count(watch):
    with phase("gen"):
        watch.check(1.0)
        assert watch.check(1e6) is None, "stopped and continued"


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_a_slow_engine_that_draws_is_left_alone(watch, folder, monkeypatch, kind):
    """A token in two seconds: a completion takes many times the limit."""
    tokenizer = load_tokenizer(folder)
    options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=8)
    engine = kind.from_pretrained(str(folder), tokenizer, options)
    drawing = {NativeEngine: "atomrl.engines.native.decoder", HFEngine: "atomrl.engines.hf"}[kind]
    reports = []

    def slowly():
        progress()
        reports.append(watch.check(2.0))

    monkeypatch.setattr(f"{drawing}.progress", slowly)
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=TOKENS, stop_token_ids=(), seed=1)
    engine.submit([request for prompt in prompts_of([5, 6, 7]) for request in requests_of(prompt, sampling)])
    with phase("gen"):
        tokens = max(len(part.token_ids) for output in engine.poll() for part in output.segments)
        assert len(reports) >= tokens and not any(reports)
        assert seconds_until_hung(watch), "it draws no more"


def test_a_slow_trainer_that_computes_is_left_alone(watch, folder, monkeypatch):
    reports, batch = [], make_batch(rows=8)
    backend = LocalBackend(
        ModelConfig(path=str(folder), dtype="float32"),
        TrainConfig(rows_per_micro_batch=1),
        make_algorithm(),
        total_updates=1,
    )

    def slowly():
        progress()
        reports.append(watch.check(2.0))

    monkeypatch.setattr("atomrl.backends.base.progress", slowly)
    with phase("update_actor"):
        backend.train_step(batch, make_algorithm())
    assert len(reports) >= 8 and not any(reports)


def test_the_limit_is_the_longest_of_what_the_run_waits_for():
    names = {"run_name": "a", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    watch = hang_watch(load_config(names))
    assert (watch.limit_s, watch.limit_name) == (3600, "train.timeout_s")
    short = names | {"train": {"timeout_s": 60}}
    assert hang_watch(load_config(short)).limit_s == 60
    waits = short | {"cluster": {"timeout_s": 100}, "rollout": {"engine": "sglang", "server_timeout_s": 200}}
    watch = hang_watch(load_config(waits))
    assert (watch.limit_s, watch.limit_name) == (200, "rollout.server_timeout_s")


@pytest.mark.slow
@pytest.mark.parametrize("what", BLOCKED)
def test_a_run_that_blocks_ends_with_its_name_and_can_be_gone_on_with(what, tmp_path, folder):
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1), "data_source": "sums"} for k in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run_name": "run",
        "model": {"path": str(folder), "dtype": "float32", "device": "cpu"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 6},
        "reward": {"functions": [{"function": "exact_match", "timeout_s": 0.5}]},
        "train": {"steps": 3, "timeout_s": 1.0},
        "checkpoint": {"every_steps": 1},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    place, owner, method, name = BLOCKED[what]

    def run(after, *more):
        script = STUCK.format(module=place, owner=owner, method=method, after=after)
        command = [sys.executable, "-c", script, "train", "c.yaml", *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)

    done = run(1)
    assert done.returncode == HUNG, done.stderr
    assert f"error: {name} has made no progress for 1 s (train.timeout_s)" in done.stderr
    assert "in stuck" in done.stderr, "the stacks of all threads"
    assert "Use --resume to continue from the newest checkpoint" in done.stderr
    if what == "trainer":  # one is enough: it was killed, as far as the folder is concerned
        done = run(1000, "--resume", "train.timeout_s=3600")
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["steps"] == 3
