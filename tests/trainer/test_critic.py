"""Runs with a critic through the command: where it starts, what is saved of it, and that a run goes on exactly."""

import json
import os
import signal

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from atomrl.cli.main import main
from atomrl.models.loading import load_tokenizer, read_safetensors
from atomrl.models.scalar import load_scalar, save_scalar
from atomrl.objectives.policy import COEFFICIENT
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from tests.models.gpt2 import save_gpt2
from tests.tiny import make_tiny_model

STEPS = 3
KL = {"type": "k2", "coefficient": 0.02, "apply_to": "reward", "target": 1e-6, "horizon": 20.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atomrl.tracking.reading.plots.draw_curves", lambda *args: None)
    make_tiny_model(tmp_path / "model", "qwen2")
    rows = [{"prompt": f"write {k}", "ground_truth": "x"} for k in range(7)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run_name": "run",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
        "rollout": {"prompts_per_step": 6, "completions_per_prompt": 1, "max_completion_tokens": 6},
        "reward": {"functions": [{"function": "tests.light_rewards.letter_reward"}], "workers": 1},
        "algorithm": {"name": "ppo", "kl": KL},
        "train": {"steps": STEPS, "learning_rate": 1e-3, "rows_per_update": 3, "schedule": "cosine"},
        "critic": {"learning_rate": 1e-2},
        "checkpoint": {"every_steps": 0},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def save_reward_model(base, folder):
    """A reward model with a score that is not 0."""
    model = load_scalar(base, dtype="float32")
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    save_scalar(model, load_tokenizer(base), folder)
    return model


def checkpoint(run, step=STEPS):
    return run / "checkpoints" / f"step_{step:06d}"


def test_a_run_continues_bit_for_bit(folder, monkeypatch):
    """Policy, critic, both optimizers and the coefficient, though the run was stopped after every step."""
    given = ["train", "c.yaml"]
    assert main([*given, "run_name=whole"]) == 0
    log = Recorder.log

    def then_stop(self, now, metrics):
        log(self, now, metrics)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "log", then_stop)
        assert main(given) == 130
        for _ in range(STEPS - 2):
            assert main([*given, "--resume"]) == 130
    assert main([*given, "--resume"]) == 0
    runs = folder / "runs" / "run", folder / "runs" / "whole"
    files = sorted(path.relative_to(checkpoint(runs[1])) for path in checkpoint(runs[1]).rglob("*.safetensors"))
    assert [path.as_posix() for path in files] == [
        "critic/model.safetensors",
        "model.safetensors",
        "training_state/critic_optimizer.safetensors",
        "training_state/optimizer.safetensors",
        "training_state/random.safetensors",
    ]
    for path in files:
        assert (checkpoint(runs[0]) / path).read_bytes() == (checkpoint(runs[1]) / path).read_bytes(), path
    states = [json.loads((checkpoint(run) / "progress.json").read_text())["algorithm_state"] for run in runs]
    assert states[0] == states[1] and states[0][COEFFICIENT] > 0.02
    rows = [[without_time(row) for row in read_metrics(run / "metrics.jsonl")] for run in runs]
    assert rows[0] == rows[1]


def without_time(row):
    return {key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/"))}


def test_a_step_says_what_the_critic_did(folder):
    assert main(["train", "c.yaml", "train.steps=2"]) == 0
    first, second = read_metrics(folder / "runs" / "run" / "metrics.jsonl")
    assert first["critic/values/mean"] == 0, "a fresh critic expects nothing"
    assert {"timing_s/values", "timing_s/ref", "timing_s/adv"} <= first.keys()
    assert second["critic/values/mean"] != 0 and second["critic/vf_explained_var"] < 1
    names = ["critic/vf_loss", "critic/vf_clipfrac", "critic/returns/mean", "critic/grad_norm", "critic/lr"]
    assert all(name in row for name in [*names, "critic/advantages/mean"] for row in (first, second))
    assert first["actor/kl_coef"] != second["actor/kl_coef"]


def test_a_critic_starts_from_a_reward_model_and_is_saved_as_one(folder):
    model = save_reward_model(folder / "model", folder / "reward")
    given = ["critic.path=reward", "train.steps=1", "algorithm.value.coefficient=0", "algorithm.name=ppo"]
    assert main(["train", "c.yaml", *given]) == 0
    run = folder / "runs" / "run"
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["critic/values/mean"] != 0
    saved = dict(read_safetensors(checkpoint(run, 1) / "critic"))
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items()), "coefficient 0"
    loaded = AutoModelForSequenceClassification.from_pretrained(checkpoint(run, 1) / "critic")
    assert loaded.config.num_labels == 1
    assert main(["train", "c.yaml", f"critic.path={checkpoint(run, 1) / 'critic'}", "run_name=next"]) == 0


def make_bad(folder):
    """Folders that cannot be a critic, and what is said of them."""
    model = save_reward_model(folder / "model", folder / "labels")
    settings = json.loads((folder / "labels" / "config.json").read_text())
    settings |= {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (folder / "labels" / "config.json").write_text(json.dumps(settings))
    save_gpt2(folder / "gpt2")
    make_tiny_model(folder / "wider", "qwen2", vocab_size=110)
    save_scalar(model, load_tokenizer(folder / "model"), folder / "renamed")
    tokens = json.loads((folder / "renamed" / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "renamed" / "tokenizer.json").write_text(json.dumps(tokens))
    (folder / "empty").mkdir()
    return {
        "nowhere": "hub failed",
        "empty": "has no config.json",
        "labels": "labels has 2 labels; a critic needs one",
        "gpt2": "gpt2 cannot be used as a critic: model_type 'gpt2' is not one of",
        "wider": "wider must have the vocabulary of the policy model",
        "renamed": "renamed must have the vocabulary of the policy model",
    }


def test_a_bad_start_is_said_before_there_is_a_run(folder, capsys, monkeypatch):
    def never(*args, **settings):
        raise AssertionError("weights were loaded")

    cases = make_bad(folder)
    monkeypatch.setattr("atomrl.trainer.build.LocalBackend", never)
    for path, said in cases.items():
        for more in ([], ["--dry-run"]):
            if path == "nowhere":
                monkeypatch.setenv("HF_HUB_OFFLINE", "1")
            assert main(["train", "c.yaml", f"critic.path={path}", *more]) == 2
            error = capsys.readouterr().err
            assert "critic.path: " in error and said in error, error
    assert not (folder / "runs").exists()
    grpo = ["algorithm={name: grpo}", "rollout.completions_per_prompt=2"]
    assert main(["train", "c.yaml", "critic.path=nowhere", *grpo, "--dry-run"]) == 0


def test_the_memory_plan_includes_the_critic(folder, capsys):
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "critic   " in shown and "critic activations" in shown
    grpo = ["algorithm={name: grpo}", "rollout.completions_per_prompt=2"]
    assert main(["train", "c.yaml", *grpo, "--dry-run"]) == 0
    assert "critic   " not in capsys.readouterr().out
