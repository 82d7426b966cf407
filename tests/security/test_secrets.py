"""Secrets of the environment stay out of a run's folder, and a run opens no port and calls nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atomrl.cli.train import format_config
from atomrl.common.redaction import redact_command
from atomrl.common.secrets import check_unmasked, refuse_secrets
from atomrl.config import ConfigError, dump_config, load_config
from atomrl.tracking.run_directory import RunDirectory
from atomrl.trainer import prepare_run
from atomrl.trainer.checks.config import check_secrets
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
    return load_config(tree | {"reward": {"functions": [item]}})


def test_a_config_with_a_secret_of_the_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", MARKER)
    with pytest.raises(ConfigError, match="JUDGE_API_KEY") as caught:
        RunDirectory.create(plain_config(tmp_path, key=MARKER))
    assert MARKER not in str(caught.value) and list(tmp_path.iterdir()) == []
    RunDirectory.create(plain_config(tmp_path, key="JUDGE_API_KEY"))


def with_tool(**tool):
    return {"tools": [{"mcp": ["npx", "-y", "a-server"]} | tool]}


def with_reward(**args):
    return {"reward": {"functions": [{"function": "mine.f", "args": args}]}}


HELD = {
    "a variable of a command": with_tool(env={"BRAVE_API_KEY": MARKER}),
    "one with another name": with_tool(env={"PGPASSWORD": MARKER, "GITHUB_PAT": MARKER, "MY_CRED": MARKER}),
    "one by its form": with_tool(env={"X": f"ntn_{MARKER.replace('-', '')}", "Y": f"postgres://me:{MARKER}@db/x"}),
    "an option": with_tool(mcp=["npx", "s", "--api-key", MARKER, f"--token={MARKER}", "-e", f"A_SECRET={MARKER}"]),
    "a header": with_tool(mcp=["npx", "r", "--header", f"Authorization: Bearer {MARKER}", f"X-API-Key: {MARKER}"]),
    "a password in an address": with_tool(mcp=f"https://me:{MARKER}@host/mcp"),
    "a query": with_tool(mcp=f"https://host/mcp?exaApiKey={MARKER}&x=1"),
    "a path": with_tool(mcp=f"https://host/s/{MARKER.replace('-', '')}abcd/mcp"),
    "arguments of a tool": {"tools": [{"function": "m.f", "args": {"apiKey": MARKER, "h": {"Authorization": MARKER}}}]},
    "arguments of a reward": with_reward(password=MARKER, api_keys=[MARKER], hf_token=MARKER, clientSecret=MARKER),
    "a reward by data source": {"reward": {"by_data_source": {"a": {"function": "m.f", "args": {"api-key": MARKER}}}}},
    "an environment": {"environment": {"function": "m.f", "args": {"url": f"ws://u:{MARKER}@h:1/x"}}},
    "a server of an engine": {"rollout": {"engine": "vllm-server", "server": f"http://u:{MARKER}@h:8000"}},
    "data": {"data": {"train": f"https://host/d.jsonl?token={MARKER}"}},
}
BASE = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "countdown"}}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_a_secret_that_a_config_holds_is_in_nothing_that_is_made_of_it(held):
    config = load_config(BASE | held)
    for text in (dump_config(config), repr(config.to_tree()), format_config(config)):
        assert MARKER not in text and MARKER.replace("-", "") not in text and "[secret-left-out]" in text
    assert load_config(config.to_tree(secrets=True)) == config
    assert any(MARKER.replace("-", "") in secret.replace("-", "") for secret in config.secrets)
    with pytest.raises(ValueError, match="secret"):
        check_unmasked(load_config(config.to_tree()).to_tree(secrets=True))


@pytest.mark.parametrize(
    "plain",
    [
        with_tool(env={"LEVEL": "debugging-all", "LANG": "C.UTF-8", "MODEL": "Qwen2.5-0.5B-Instruct-GGUF"}),
        with_tool(env={"MAX_TOKENS": "512", "TOKENIZERS_PARALLELISM": "false", "A_KEY": "${MY_KEY}"}),
        with_tool(mcp=["uvx", "s", "--tokenizer", "a/long-name", "--api-key", "${MY_KEY}", "/data/v2/corpus-2024.db"]),
        with_tool(mcp="https://host/mcp?key=${MY_KEY}", headers_env={"Authorization": "MY_VERY_LONG_KEY"}),
        with_reward(api_key_env="MY_VERY_LONG_KEY", api_key="MY_VERY_LONG_KEY", end_token="</s>", token="Yes"),
        {"data": {"train": "countdown", "system_prompt": "The password: swordfish. Keep the secret token."}},
        {
            "run_name": "r8_alpha16_dropout0",
            "model": {"path": "out/hf_checkpoint_1000", "tokenizer": "sk-learner-of-it"},
        },
        {"data": {"train": "countdown", "system_prompt": "Basic arithmetic/algebra. Bearer tokens are words."}},
        {"environment": {"function": "m.f", "args": {"gym_env": "CartPole-v1", "end_token": "end_of_turn"}}},
        {"model": {"path": "m", "tokenizer": "some/long-tokenizer"}, "rollout": {"stop": ["<|end_of_token|>"]}},
    ],
)
def test_ordinary_values_are_written_unchanged(plain):
    config = load_config(BASE | plain)
    assert config.to_tree() == config.to_tree(secrets=True) and not config.secrets


@pytest.mark.parametrize(
    "wrong",
    [
        with_tool(env={"API_KEY": MARKER}, timeout_s=-1), with_tool(env=[f"API_KEY={MARKER}"]),
        with_tool(function="a.b", env={"API_KEY": MARKER}), with_tool(headers={"Authorization": MARKER}),
        with_tool(mcp=f"npx s --api-key {MARKER}"), {"tools": f"API_KEY={MARKER}"},
        with_tool(headers_env={"Authorization": f"Bearer {MARKER}"}),
        {"reward": {"functions": [{"function": "http", "args": f"api_key={MARKER}"}]}},
        {"reward": {"functions": [{"function": "http", "api_key": MARKER}]}},
    ],
)  # fmt: skip
def test_a_message_about_a_config_shows_no_secret(wrong):
    with pytest.raises(ConfigError) as caught:
        load_config(BASE | wrong)
    assert MARKER not in str(caught.value)


def test_a_run_with_a_secret_of_its_own_is_resumed_by_the_config_that_has_it(tmp_path, capsys):
    def config_with(key):
        tree = BASE | with_tool(env={"BRAVE_API_KEY": key}) | {"output_dir": str(tmp_path)}
        return load_config(tree)

    with pytest.raises(RuntimeError), RunDirectory.create(config_with(MARKER)) as run:
        run.log_file.note(f"the server said: {MARKER}")
        raise RuntimeError(f"401: {MARKER} is no key")
    written = "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    assert MARKER not in written and "401: [redacted] is no key" in written
    with RunDirectory.create(config_with("another-key"), resume=True):
        assert "BRAVE" not in capsys.readouterr().err, "a new key is no other run"
    with pytest.raises(ConfigError, match=r"env\.BRAVE_API_KEY.*secret"):
        prepare_run(load_config(run.path / "config.yaml"))
    check_secrets(load_config(run.path / "config.yaml", ["tools=[{mcp: [a], env: {BRAVE_API_KEY: x}}]"]))


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
def test_command_lines_are_recorded_without_secrets(argument, kept):
    line = redact_command(["atomrl", "train", argument])
    assert kept in line and MARKER not in line


def test_a_secret_by_its_value_is_redacted_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", MARKER)
    assert redact_command(["atomrl", "train", "c.yaml", f"data.system_prompt=say {MARKER}!"]).endswith(
        "'data.system_prompt=say [redacted]!'"
    )
