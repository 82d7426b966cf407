"""The folder of a run: how it is begun, what is written to it, what is kept, and how a run goes on in it."""

import json
import math
import subprocess
from dataclasses import replace

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import save_file

from atomrl.cli.train import ADVICE
from atomrl.config import ConfigError, load_config
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.resuming import stopping_changes
from atomrl.tracking.run_directory import RunDirectory, rollout_rows
from tests.pool.made import rich_episode
from tests.tracking.helpers import make_config, make_scored


def save(run, step, text="weights"):
    with run.checkpoint(step) as folder:
        save_file({"weights": torch.tensor([*text.encode()], dtype=torch.uint8)}, folder / "model.safetensors")


def test_new_run_has_the_resolved_config_and_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-secret")
    monkeypatch.setattr("sys.argv", ["atomrl", "train", "c.yaml", "hub_token=hunter2-secret"])
    config = make_config(tmp_path, train={"steps": 7})
    run = RunDirectory.create(config)
    assert load_config(yaml.safe_load((run.path / "config.yaml").read_text())) == config
    environment = json.loads((run.path / "env.json").read_text())
    assert environment["packages"]["torch"] and environment["cpus"] >= 1
    assert environment["command"] == "atomrl train c.yaml hub_token=[redacted]"
    for file in run.path.iterdir():
        assert "hunter2" not in file.read_text()


def test_the_commit_is_recorded(tmp_path, monkeypatch):
    for command in (["init", "-q"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    environment = json.loads((RunDirectory.create(make_config(tmp_path)).path / "env.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert environment["git"] == {"commit": head, "modified": True}


def test_an_existing_name_is_refused_with_both_ways_out(tmp_path):
    RunDirectory.create(make_config(tmp_path)).log(0, {"a": 1.0})
    with pytest.raises(ConfigError, match=r"already exists.*--resume"):
        RunDirectory.create(make_config(tmp_path))


def test_a_run_that_ended_before_its_first_step_does_not_block_its_name(tmp_path):
    RunDirectory.create(make_config(tmp_path))
    run = RunDirectory.create(make_config(tmp_path, train={"steps": 7}))
    assert yaml.safe_load((run.path / "config.yaml").read_text())["train"]["steps"] == 7


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="already exists"):
        RunDirectory.create(make_config(tmp_path))


def test_an_empty_folder_is_no_run_and_resume_needs_one(tmp_path):
    with pytest.raises(ConfigError, match="no run"):
        RunDirectory.create(make_config(tmp_path), resume=True)
    (tmp_path / "r").mkdir()
    assert RunDirectory.create(make_config(tmp_path)).first_step == 1


def test_metrics_load_in_pandas(tmp_path):
    run = RunDirectory.create(make_config(tmp_path))
    run.log(1, {"critic/score/mean": 0.25, "actor/entropy": math.nan, "training/updates": 2})
    run.log(2, {"critic/score/mean": 0.5, "actor/entropy": math.inf})
    frame = pd.read_json(run.path / "metrics.jsonl", lines=True)
    assert list(frame["step"]) == [1, 2]
    assert list(frame["critic/score/mean"]) == [0.25, 0.5]
    assert frame["actor/entropy"].isna().all()
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_rollouts_are_written_as_rows(tmp_path):
    run = RunDirectory.create(make_config(tmp_path))
    run.write_rows(10, rollout_rows(10, make_scored(), {0: 0.7, 1: -0.7, 2: 0.0}), "train")
    text = (run.path / "rollouts" / "step_000010" / "train.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 4
    assert rows[0] == {
        "step": 10,
        "prompt_id": "f:1/0",
        "completion_index": 0,
        "data_source": "sums",
        "prompt": "1+1=",
        "ground_truth": 2,
        "completion": "<b>",
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "token_ids": [4, 5],
        "reward": 1.0,
        "reward_parts": {"strict_math": 1.0},
        "reward_failures": {},
        "advantage": 0.7,
        "finish_reason": "stop",
        "policy_version": 3,
        "policy_versions": [3],
    }
    assert [row["advantage"] for row in rows] == [0.7, -0.7, 0.0, None]
    assert rows[2]["prompt"] == [{"role": "user", "content": "hi"}] and rows[3]["reward"] is None


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    run = RunDirectory.create(make_config(tmp_path))
    save(run, 5)
    with pytest.raises(OSError, match="disk full"), run.checkpoint(10) as folder:
        (folder / "model.safetensors").write_text("half")
        assert run.latest_checkpoint() == (5, run.checkpoint_folder(5))
        raise OSError("disk full")
    assert run.latest_checkpoint() == (5, run.checkpoint_folder(5))
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step_000005"]


def test_a_leftover_of_a_kill_is_no_checkpoint_and_in_nobodys_way(tmp_path):
    run = RunDirectory.create(make_config(tmp_path))
    leftover = run.path / "checkpoints" / ".step_000005.partial"
    leftover.mkdir(parents=True)
    (leftover / "old").write_text("half")
    assert run.latest_checkpoint() is None
    save(run, 5)
    assert sorted(path.name for path in run.checkpoint_folder(5).iterdir()) == ["MANIFEST.json", "model.safetensors"]


def test_the_newest_checkpoints_are_kept(tmp_path):
    run = RunDirectory.create(make_config(tmp_path, checkpoint={"keep": 2}))
    for step in (5, 10, 15, 100):
        save(run, step)
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step_000015", "step_000100"]


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, capsys, damage):
    run = RunDirectory.create(make_config(tmp_path))
    save(run, 5)
    save(run, 10)
    weights = run.checkpoint_folder(10) / "model.safetensors"
    if damage == "delete":
        weights.unlink()
    elif damage == "truncate":
        weights.write_text("weight")
    elif damage == "flip":
        weights.write_text("weightS")
    else:
        (run.checkpoint_folder(10) / "MANIFEST.json").unlink()
    assert run.latest_checkpoint() == (5, run.checkpoint_folder(5))
    message = capsys.readouterr().err
    assert "skipping corrupted checkpoint" in message
    assert ("MANIFEST.json" if damage == "no manifest" else "model.safetensors") in message


def test_resume_cuts_what_is_later_than_the_checkpoint(tmp_path, capsys):
    run = RunDirectory.create(make_config(tmp_path))
    for step in range(5):
        run.log(step, {"a": step})
        run.write_rows(step, rollout_rows(step, make_scored(), {}), "train")
        if step in (1, 2):
            save(run, step)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "a"')  # a kill in the middle of a line
    resumed = RunDirectory.create(make_config(tmp_path, train={"steps": 200}), resume=True)
    assert resumed.first_step == 3
    assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == [0, 1, 2]
    assert sorted(path.name for path in (run.path / "rollouts").iterdir()) == [f"step_00000{step}" for step in range(3)]
    assert "resume: train.steps: 100 -> 200" in capsys.readouterr().err
    environment = json.loads((run.path / "env.json").read_text())
    assert environment["resumed"][0]["first_step"] == 3
    assert environment["resumed"][0]["config_changes"] == ["train.steps: 100 -> 200"]
    assert yaml.safe_load((run.path / "config.yaml").read_text())["train"]["steps"] == 200


def test_resume_without_a_checkpoint_starts_over(tmp_path):
    run = RunDirectory.create(make_config(tmp_path))
    run.log(0, {"a": 1.0})
    assert RunDirectory.create(make_config(tmp_path), resume=True).first_step == 1
    assert read_metrics(run.path / "metrics.jsonl") == []


def test_finish_writes_summary_and_picture(tmp_path):
    run = RunDirectory.create(make_config(tmp_path))
    run.log(1, {"critic/score/mean": 0.25})
    run.finish({"accuracy_after": 0.9})
    assert json.loads((run.path / "summary.json").read_text()) == {"accuracy_after": 0.9}
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_another_number_of_threads_is_said(tmp_path, capsys, monkeypatch):
    from atomrl.tracking import run_directory

    run = RunDirectory.create(make_config(tmp_path))
    save(run, 5)
    RunDirectory.create(make_config(tmp_path), resume=True)
    assert "last bits" not in capsys.readouterr().err
    here = run_directory.describe_system()
    monkeypatch.setattr(run_directory, "describe_system", lambda: here | {"threads": 77})
    RunDirectory.create(make_config(tmp_path), resume=True)
    assert f"threads: {here['threads']} -> 77; results may differ in the last bits" in capsys.readouterr().err


def test_the_source_of_functions_is_kept_without_secrets_whatever_their_path(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "swordfish-and-more")
    run = RunDirectory.create(make_config(tmp_path))
    path = f"/{'a' * 120}/{'b' * 140}/mine.py:score"
    run.write_functions({path: "KEYS = 'sk-proj-abcdefghij0123456789', 'swordfish-and-more'\n"})
    (file,) = (run.path / "functions").iterdir()
    assert file.name.endswith("mine.py_score.py")
    assert file.read_text() == "KEYS = '[secret-left-out]', '[redacted]'\n"


def test_an_episode_is_written_turn_by_turn(tmp_path):
    first = replace(make_scored()[0], episode=rich_episode())
    with_episode, without = rollout_rows(1, [first, make_scored()[1]], {})
    assert "episode" not in without and with_episode["episode"]["ended"] == "failed"
    written = json.loads(json.dumps(with_episode["episode"]))
    assert [turn["labels"] for turn in written["turns"]] == [["search", "error"], []] and written["message"] == "exit 3"
    first = {
        "model_tokens": 1,
        "reply_tokens": 2,
        "seconds": 0.1,
        "reward": 0.5,
        "labels": ["search", "error"],
        "reply": "<i>ß</i>",
        "sees_from": 1,
        "images": ["ab.png"],
    }
    assert written["turns"][0] == {**first, "text": rich_episode().turns[0].text}


@pytest.mark.parametrize("key", ["model.activation_offload", "train.tokens_per_micro_batch", "backend.sequence"])
def test_keys_that_leave_the_gradient_unchanged_may_change(key, tmp_path):
    config = make_config(tmp_path)
    assert not stopping_changes([f"{key}: 1 -> 2"], config), "nor does a run say that --allow-changes is needed"
    assert "allow-changes" not in ADVICE["RankOutOfMemory"]
    assert stopping_changes(["train.learning_rate: 1 -> 2"], config)
