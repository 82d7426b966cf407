"""Secrets of the environment stay out of a run's folder, and a run opens no port and calls nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atomrl.config import ConfigError, build_config
from atomrl.tracking.environment import redact, refuse_secrets
from atomrl.tracking.run_directory import RunDirectory
from tests.tiny import make_tiny_model

MARKER = "s3cr3t-Marker-0123456789"
SECRETS = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "DB_PASSWORD",
    "MY_CREDENTIALS",
    "OTHER",
)

WITHOUT_NETWORK = """
import socket, sys
def hook(event, arguments):
    if event in ("socket.bind", "socket.connect") and arguments[0].family in (socket.AF_INET, socket.AF_INET6):
        raise RuntimeError(f"{event} {arguments[1:]}")
sys.addaudithook(hook)
from atomrl.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_keeps_no_secret_and_uses_no_network(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n' * 4)
    config = {
        "run_name": "r",
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "data.jsonl"), "eval": str(tmp_path / "data.jsonl")},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 8},
        "reward": {"functions": [{"function": "exact_match"}]},
        "train": {"steps": 2},
        "tracking": {"sinks": ["tensorboard"]},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK, "train", "config.yaml", "output_dir=runs"],
        cwd=tmp_path,
        env=os.environ | dict.fromkeys(SECRETS, MARKER) | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"env.json", "metrics.jsonl", "train.jsonl", "summary.json"} <= {path.name for path in files}
    assert [str(path) for path in files if MARKER.encode() in path.read_bytes()] == []
    assert MARKER not in result.stdout + result.stderr


def test_wandb_gets_no_secret(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from atomrl.tracking.sinks import WandbSink

    for name in SECRETS:
        monkeypatch.setenv(name, MARKER)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = plain_config(tmp_path)
    sink = WandbSink(config, RunDirectory.create(config))
    sink.log({"a": 1.0}, 1)
    sink.close()
    files = [path for path in config.run_dir.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [str(path) for path in files if MARKER.encode() in path.read_bytes()] == []


def plain_config(folder, **reward_args):
    item = {"function": "exact_match", "args": reward_args}
    tree = {"run_name": "r", "output_dir": str(folder), "model": {"path": "m"}, "data": {"train": "d"}}
    return build_config(tree | {"reward": {"functions": [item]}})


def test_a_config_with_a_secret_of_the_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", MARKER)
    with pytest.raises(ConfigError, match="the environment variable JUDGE_API_KEY") as caught:
        RunDirectory.create(plain_config(tmp_path, key=MARKER))
    assert MARKER not in str(caught.value) and list(tmp_path.iterdir()) == []
    RunDirectory.create(plain_config(tmp_path, key="JUDGE_API_KEY"))


def test_variables_that_are_no_secrets_do_not_stop_a_config(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true-enough")
    monkeypatch.setenv("MY_API_KEY", "short")
    monkeypatch.setenv("KEYBOARD", "keyboard-layout")
    refuse_secrets("a config with true-enough, short and keyboard-layout")


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        (f"x.api_key={MARKER}", "x.api_key=[redacted]"),
        (f"reward.functions=[{{function: judge, args: {{api_key: {MARKER}}}}}]", "api_key: [redacted]}"),
        (f'{{"password": "{MARKER}"}}', '"password": [redacted]}'),
        (f"--token={MARKER}", "--token=[redacted]"),
        (f"https://user:{MARKER}@host/model", "https://[redacted]@host/model"),
        ("hf_" + "abcdefghij0123456789", "[redacted]"),
        ("sk-" + "proj-abcdefghij0123456789", "[redacted]"),
        ("rollout.max_completion_tokens=48", "rollout.max_completion_tokens=48"),
        ("rollout.stop_token_ids=[2]", "rollout.stop_token_ids=[2]"),
        ("model.tokenizer=a/b", "model.tokenizer=a/b"),
        ("data.train=secretary.jsonl", "data.train=secretary.jsonl"),
    ],
)
def test_what_a_command_line_leaves_behind(argument, kept):
    line = redact(["atomrl", "train", argument])
    assert kept in line and MARKER not in line


def test_a_secret_by_its_value_is_redacted_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", MARKER)
    assert redact(["atomrl", "train", "c.yaml", f"data.system_prompt=say {MARKER}!"]).endswith(
        "'data.system_prompt=say [redacted]!'"
    )
