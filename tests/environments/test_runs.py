"""Whole runs with an environment: resumed, killed, asynchronous, by each algorithm of a kind, refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from safetensors.torch import load_file

from atomrl.cli.main import main
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from tests.trainer.test_recovery import seen, stop_after, write_problems

ROOT = Path(__file__).parents[2]
PLAYED = ROOT / "tests" / "environments" / "played.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_problems(tmp_path)
    config = {
        "run_name": "run",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
        "rollout": {"prompts_per_step": 3, "completions_per_prompt": 2, "max_completion_tokens": 40},
        "environment": {"function": f"{PLAYED}:vowels", "max_turn_tokens": 6},
        "train": {"steps": 6, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 1, "keep": 9},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_a_run_learns_from_episodes_and_continues_as_if_it_had_not_stopped(folder, monkeypatch):
    assert main(["train", "c.yaml", "run_name=whole"]) == 0
    rows = read_metrics(folder / "runs" / "whole" / "metrics.jsonl")
    assert len(rows) == 6 and all(row["actor/grad_norm"] > 0 for row in rows)
    assert all(0 < row["critic/score/mean"] < 1 for row in rows)
    log = Recorder.log
    stop_after(monkeypatch, 3)
    assert main(["train", "c.yaml"]) == 130
    monkeypatch.setattr(Recorder, "log", log)
    assert main(["train", "c.yaml", "--resume"]) == 0
    assert same(weights(folder / "runs" / "whole"), weights(folder / "runs" / "run"))


@pytest.mark.slow
def test_killed_within_an_episode_it_ends_with_the_same_weights(folder):
    slow = "environment.args={seconds: 0.2}"
    assert main(["train", "c.yaml", "run_name=whole"]) == 0
    command = [sys.executable, "-m", "atomrl.cli.main", "train", "c.yaml", slow]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not (folder / "runs" / "run" / "checkpoints" / "step_000002").exists():
        time.sleep(0.01)
    time.sleep(0.25)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert main(["train", "c.yaml", slow, "--resume"]) == 0
    assert same(weights(folder / "runs" / "whole"), weights(folder / "runs" / "run"))


@pytest.mark.parametrize("more", [[], ["asynchronous.on_update=abort"], ["asynchronous.on_update=wait"]])
def test_an_asynchronous_run_draws_each_problem_once_within_its_staleness(folder, more):
    arguments = ["asynchronous.max_staleness=2", "environment.args={seconds: 0.02}", *more]
    assert main(["train", "c.yaml", *arguments]) == 0
    rows = read_metrics(folder / "runs" / "run" / "metrics.jsonl")
    assert len(rows) == 6 and max(row["async/staleness_max"] for row in rows) <= 2
    assert set(seen(folder / "runs" / "run").values()) == {1}


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp", "rloo", "dapo", "gspo"])
def test_other_algorithms_learn_from_episodes(folder, algorithm):
    assert main(["train", "c.yaml", f"algorithm={{name: {algorithm}}}", "train.steps=2"]) == 0
    rows = read_metrics(folder / "runs" / "run" / "metrics.jsonl")
    assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("name, advantage", [("gigpo", None), ("grpo", "turn_grpo"), ("rloo", "last_turn")])
def test_credit_by_turn(folder, name, advantage):
    """Turns of one completion have advantages of their own, from rewards of turns and an outcome."""
    kind = f", advantage: {advantage}" if advantage else ""
    assert main(["train", "c.yaml", f"algorithm={{name: {name}{kind}}}", "train.steps=2"]) == 0
    rows = read_metrics(folder / "runs" / "run" / "metrics.jsonl")
    assert all(row["actor/grad_norm"] > 0 and row["environment/turns/mean"] == 3 for row in rows)
    assert all(row["train/reply_tokens"] == 0 and 0 < row["environment/token_share"] < 0.5 for row in rows)
    lines = (folder / "runs/run/rollouts/step_000001/train.jsonl").read_text().splitlines()
    episodes = [json.loads(line)["episode"] for line in lines]
    assert {len(episode["turns"]) for episode in episodes} == {3}
    assert all(turn["reply"].isdigit() and turn["text"] for episode in episodes for turn in episode["turns"][:2])


@pytest.mark.parametrize("algorithm", ["ppo", "gigpo", "dr_grpo"])
def test_a_run_whose_episodes_are_longer_than_the_context(folder, algorithm, monkeypatch):
    """In several updates, and resumed: the same weights."""
    keys = [f"algorithm={{name: {algorithm}}}", "environment.args={turns: 9}", "environment.max_turns=12"]
    keys += ["environment.when_full=drop_oldest", "train.steps=2", "train.rows_per_update=3"]
    assert main(["train", "c.yaml", *keys, "run_name=whole"]) == 0
    for row in read_metrics(folder / "runs" / "whole" / "metrics.jsonl"):
        assert row["train/rows"] > 2 * 6 and row["environment/dropped_turns"] > 3 and row["actor/grad_norm"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-4 and row["training/updates"] == 2
        assert row["train/reply_tokens"] == 0 and row["train/cut_rows"] == 0
    lines = (folder / "runs/whole/rollouts/step_000001/train.jsonl").read_text().splitlines()
    assert len(lines) == 6 and all(json.loads(line)["advantage"] is not None for line in lines)
    stop_after(monkeypatch, 1)
    assert main(["train", "c.yaml", *keys]) == 130
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert main(["train", "c.yaml", *keys, "--resume"]) == 0
    assert same(weights(folder / "runs" / "whole"), weights(folder / "runs" / "run"))


def test_an_environment_beside_a_reward(folder):
    reward = "reward={functions: [environment, {function: exact_match, weight: 0}]}"
    assert main(["train", "c.yaml", reward, "train.steps=1", "data.eval=train.jsonl", "eval.before=false"]) == 0
    row, metrics = read_metrics(folder / "runs/run/metrics.jsonl")
    assert row["environment/turn_rewards"] > 0 == row["reward/exact_match/mean"]
    both = row["reward/environment/mean"] + row["environment/turn_rewards"]
    assert row["critic/score/mean"] == pytest.approx(both)
    for split, mean in (("train", row["critic/score/mean"]), ("eval", metrics["val-core/sums/reward/mean@1"])):
        lines = (folder / f"runs/run/rollouts/step_000001/{split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for one in rows:
            turns = sum(turn["reward"] or 0.0 for turn in one["episode"]["turns"])
            assert one["reward"] == pytest.approx(one["reward_parts"]["environment"] + turns)
        assert mean == pytest.approx(fmean(one["reward"] for one in rows))


@pytest.mark.parametrize("keys, words", [
    (["environment.function=serch_r1"], "did you mean 'search_r1'?"),
    (["environment.function=nowhere.at_all"], "module 'nowhere' cannot be imported"),
    (["environment.args={turms: 3}"], "unexpected keyword argument 'turms'"),
    ([f"environment.function={PLAYED}:asyncio"], "has no function 'asyncio'"),
    ([f"environment.function={PLAYED}:Reply", "environment.args={text: a}"], "is not an environment"),
    (["environment.max_turns=0"], "environment.max_turns"),
    (["environment.stop=['']"], "environment.stop.0"),
    (["environment.when_full=drop_oldest", "environment.max_turn_tokens=21"], "max_turn_tokens of at most 20"),
    (["rollout.min_completion_tokens=4"], "turns of an episode"),
    (["environment=null", "reward={functions: [environment]}"], "no section environment"),
    (["sft={}"], "environment: this kind of run samples no rollouts"),
])  # fmt: skip
def test_unusable_environments_are_refused_before_a_run(folder, capsys, keys, words):
    for command in (["train", "c.yaml", *keys, "--dry-run"], ["train", "c.yaml", *keys]):
        assert main(command) == 2
        assert words in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_a_step_of_failed_episodes_is_recorded_and_the_doctor_says_why(folder, capsys):
    (folder / "down.py").write_text("def f(sample):\n    yield None\n    raise RuntimeError('service down')\n")
    down = ["environment.function=./down.py:f", "rollout.prompts_per_step=4"]
    assert main(["train", "c.yaml", *down]) != 0
    lines = (folder / "runs/run/rollouts/step_000001/train.jsonl").read_text().splitlines()
    assert len(lines) == 8 and all("service down" in json.loads(line)["episode"]["message"] for line in lines)
    capsys.readouterr()
    assert main(["doctor", "runs/run"]) == 1 and "service down" in capsys.readouterr().out
    assert main(["train", "c.yaml", "train.steps=1"]) == 0, "it made no step: its folder is used again"


def test_generate_plays_an_episode_and_shows_who_wrote_what(folder, capsys):
    given = ["generate", "model", "--config", "c.yaml", "--prompt", "1+1="]
    assert main([*given, "--n", "2", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n> 6\n") + out.count("\n> 5\n") >= 2, "the environment says how long the text was"
    assert out.count("--- ended by the environment after 3 turns, outcome 0") == 2 and "--- 2 of 2" in out
    assert main([*given, "--seed", "3", "environment.max_turns=2"]) == 0
    assert "--- ended at environment.max_turns after 2 turns" in capsys.readouterr().out
    for row, words in (('{"a": 1', "--row: not valid JSON"), ("[1]", "--row: not a JSON object")):
        assert main([*given, "--row", row]) == 2 and words in capsys.readouterr().err
    assert main([*given, "environment.function=serch_r1"]) == 2 and "search_r1" in capsys.readouterr().err


def test_generate_gives_an_environment_the_columns_of_its_problem(folder, capsys):
    own = folder / "own.py"
    own.write_text("def f(sample):\n    yield f'{sample.ground_truth} {sample.columns[\"level\"]}'\n    return 1 / 0\n")
    given = ["generate", "model", "--config", "c.yaml", "--prompt", "1+1=", "environment.function=./own.py:f"]
    assert main([*given, "--row", '{"ground_truth": "7", "level": 3}']) == 1
    out = capsys.readouterr().out
    assert out.startswith("> 7 3\n") and "--- ended by a failure after 1 turn: error: ZeroDivisionError" in out
