"""A project folder that runs as it is, and whose own test passes."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from atomrl.cli.main import main
from atomrl.config import load_config


def test_a_new_project_runs_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    assert "cd mine" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "mine")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert subprocess.run(tests, capture_output=True, text=True).returncode == 0
    assert main(["train", "warm_start.yaml", "train.steps=2"]) == 0
    assert main(["train", "grpo.yaml", "--dry-run"]) == 0
    small = ["train.steps=1", "rollout.prompts_per_step=2", "eval.before=false", "eval.after=false"]
    assert main(["train", "grpo.yaml", *small]) == 0
    rows = (tmp_path / "mine/runs/grpo/rollouts/step_000001/train.jsonl").read_text().splitlines()
    assert len(rows) == 16 and set(json.loads(rows[0])["reward_parts"]) == {"correct"}


def test_with_a_model_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--model", "org/model"]) == 0
    assert not (tmp_path / "mine/warm_start.yaml").exists()
    assert "sft" not in (tmp_path / "mine/README.md").read_text()
    assert load_config(tmp_path / "mine/grpo.yaml").model.path == "org/model"
    assert "dtype" not in yaml.safe_load((tmp_path / "mine/grpo.yaml").read_text())["model"]


def test_a_models_folder_is_found_from_the_project(tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    assert main(["init", "mine", "--model", "./model"]) == 0
    assert Path(load_config("mine/grpo.yaml").model.path) == model.resolve()
    assert main(["init", "yours", "--model", "./absent"]) == 2
    assert "model folder ./absent does not exist" in capsys.readouterr().err and not Path("yours").exists()


def test_a_folder_that_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kept").write_text("x")
    assert main(["init", str(tmp_path / "mine")]) == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["kept"]
