"""Whole asynchronous runs: resumed after stops and kills, evaluated on the way, told to stop, and refused."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atomrl.cli.main import main
from atomrl.config import ConfigError, load_config
from atomrl.engines.native.engine import NativeEngine
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from atomrl.trainer import prepare_run
from tests.trainer.test_recovery import PROBLEMS, STEPS, fails, folder, seen, stop_after

ASYNC = "asynchronous={max_staleness: 2}"
assert folder  # a fixture


def only_the_main_thread_is_left():
    return not [thread.name for thread in threading.enumerate() if thread.name == "rollouts"]


def test_resumed_at_every_step_each_problem_is_seen_exactly_twice(folder, monkeypatch):
    log = Recorder.log
    for step in range(1, STEPS):
        stop_after(monkeypatch, step)
        assert main(["train", "c.yaml", ASYNC, *(["--resume"] if step > 1 else [])]) == 130
        assert only_the_main_thread_is_left()
        monkeypatch.setattr(Recorder, "log", log)
        state = json.loads((folder / f"runs/run/checkpoints/step_{step:06d}/progress.json").read_text())
        assert state["position"] == 3 * step + len(state["pending"]) == 3 * min(STEPS, step + 2)
    assert main(["train", "c.yaml", ASYNC, "--resume"]) == 0
    rows = read_metrics(folder / "runs" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["async/staleness_max"] for row in rows) <= 2
    counts = seen(folder / "runs" / "run")
    assert len(counts) == PROBLEMS and set(counts.values()) == {2}, counts


@pytest.mark.slow
def test_killed_at_random_points_it_loses_and_doubles_nothing(folder):
    root, rng, run = Path(__file__).parents[2], random.Random(0), folder / "runs" / "run"
    reward = "reward={functions: [{function: tests.light_rewards.letter_reward, args: {seconds: 0.05}}]}"
    command = [sys.executable, "-m", "atomrl.cli.main", "train", "c.yaml", ASYNC, reward, "checkpoint.every_steps=2"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    kills = 0
    for _ in range(3):
        process = subprocess.Popen(
            [*command, *(["--resume"] if run.exists() else [])], cwd=folder, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        before = sorted(run.glob("checkpoints/step_*"))
        while process.poll() is None and sorted(run.glob("checkpoints/step_*")) == before:
            time.sleep(0.005)
        time.sleep(0.3 * rng.random())
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills and main(["train", "c.yaml", ASYNC, reward, "checkpoint.every_steps=2", "--resume"]) == 0
    counts = seen(run)
    assert len(counts) == PROBLEMS and set(counts.values()) == {2}, counts


def test_evaluations_on_the_way_are_of_the_weights_of_their_step(folder, monkeypatch):
    made = []
    generate = NativeEngine.submit

    def noted(self, requests):
        if requests[0].request_id.startswith("eval:"):
            made.append((self.version, len(self.held)))
        return generate(self, requests)

    monkeypatch.setattr(NativeEngine, "submit", noted)
    assert main(["train", "c.yaml", ASYNC, "data.eval=train.jsonl", "eval.every_steps=3"]) == 0
    assert made == [(step, 0) for step in (0, 3, 6, 9, 12)]
    assert set(seen(folder / "runs" / "run").values()) == {2}


def test_an_error_on_the_engines_thread_saves_the_steps_before(folder, monkeypatch, capsys):
    submit = NativeEngine.submit

    def broken(self, requests):
        if self.version == 4:
            raise ValueError("the engine broke")
        return submit(self, requests)

    monkeypatch.setattr(NativeEngine, "submit", broken)
    assert "the engine broke" in fails(capsys, ASYNC) and only_the_main_thread_is_left()
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert main(["train", "c.yaml", ASYNC, "--resume"]) == 0
    assert set(seen(folder / "runs" / "run").values()) == {2}


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signals_end_both_threads(folder, number):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "atomrl.cli.main", "train", "c.yaml", ASYNC, "train.steps=100000"]
    process = subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.PIPE)
    metrics = folder / "runs" / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert (folder / "runs" / "run" / "model").exists()


def test_what_cannot_be_is_refused(folder):
    def config(**keys):
        tree = {"run_name": "r", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
        return load_config(tree | {"rollout": {"completions_per_prompt": 4}} | keys)

    with pytest.raises(ConfigError, match="min_completions=5"):
        config(asynchronous={"min_completions": 5})
    with pytest.raises(ConfigError, match="no rollouts"):
        config(asynchronous={}, algorithm={"name": "dpo"})
    for settings, expected in (({"max_staleness": 1}, 1), ({"max_staleness": 0}, 0), (None, 0)):
        algorithm = prepare_run(config(asynchronous=settings)).algorithm
        assert [choice.type for choice in algorithm.rollout_is] == ["token_tis"] * expected
    none = prepare_run(config(asynchronous={}, algorithm={"name": "grpo", "rollout_is": "none"})).algorithm
    assert not none.rollout_is
