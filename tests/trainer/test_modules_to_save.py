"""Runs that train modules in full beside adapters (`model.lora.modules_to_save`)."""

import json
import os
import signal

import pytest
import torch
import yaml

from atomrl.cli.main import main
from atomrl.models.loading import read_safetensors
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from tests.tiny import make_tiny_model

LORA = {"rank": 2, "modules_to_save": ["lm_head", "embed_tokens"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    rows = [{"prompt": f"{k}+1=", "ground_truth": "1"} for k in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run_name": "a",
        "model": {"path": "model", "device": "cpu", "dtype": "float32", "lora": LORA},
        "data": {"train": "rows.jsonl"},
        "reward": {"functions": [{"function": "tests.light_rewards.letter_reward"}]},
        "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_completion_tokens": 8},
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}},
        "train": {"steps": 4, "learning_rate": 3e-3},
        "checkpoint": {"every_steps": 0},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def run(*arguments, code=0):
    assert main(["train", "c.yaml", *arguments]) == code


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_the_engine_samples_from_what_is_trained(folder, engine):
    """Its log-probs are the trainer's, and the hashes of its weights are compared at each transfer."""
    run(f"rollout.engine={engine}")
    rows = read_metrics(folder / "runs/a/metrics.jsonl")
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4
    assert rows[0]["actor/kl_loss"] == 0 < rows[-1]["actor/kl_loss"], "the reference stays as it was"
    trained, base = (dict(read_safetensors(folder / name)) for name in ("runs/a/model", "model"))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert not torch.equal(trained[f"base_model.model.{name}"], base[name])


def test_a_resumed_run_has_the_same_bits(folder, monkeypatch):
    run()
    log = Recorder.log

    def then_stop(self, now, metrics):
        log(self, now, metrics)
        if now == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "log", then_stop)
    run("run_name=b", code=130)
    monkeypatch.setattr(Recorder, "log", log)
    run("run_name=b", "--resume")
    straight, resumed = (dict(read_safetensors(folder / "runs" / name / "model")) for name in ("a", "b"))
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    kl = [read_metrics(folder / "runs" / name / "metrics.jsonl")[-1]["actor/kl_loss"] for name in ("a", "b")]
    assert kl[0] == kl[1] > 0


def test_what_sends_adapters_alone_is_refused(folder, capsys):
    for changes, message in (
        ({"rollout": {"source": "pool"}}, "without the section cluster and rollout.source=pool"),
        ({"cluster": {}}, "without the section cluster"),
        ({"backend": {"type": "fsdp", "ranks": 2, "tensor": 2}}, "not supported with backend.tensor"),
    ):
        words = [f"{key}={json.dumps(value)}" for key, value in changes.items() if key != "rollout"]
        words += [f"rollout.{key}={value}" for key, value in changes.get("rollout", {}).items()]
        capsys.readouterr()
        run(*words, "--dry-run", code=2)
        assert f"model.lora.modules_to_save: {message}" in (said := capsys.readouterr().err) or message in said
