"""Pretraining on a small text: it learns, is resumed exactly, and its model is the base of the other commands."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.cli.main import main
from atomrl.tracking.recorder import Recorder
from tests.tiny import make_tiny_model

TEXT = "".join(f"{a}+{b}={a + b}\n" for a in range(30) for b in range(30))
CONFIG = {
    "run_name": "first",
    "data": {"train": "tokens"},
    "pretrain": {
        "gpt": {"layers": 1, "hidden": 32, "heads": 2, "max_tokens": 48},
        "window_tokens": 32,
        "eval_windows": 8,
    },
    "train": {"steps": 6, "rows_per_update": 8, "learning_rate": 1e-2, "schedule": "cosine", "weight_decay": 0.1},
    "eval": {"every_steps": 2},
    "checkpoint": {"every_steps": 2},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    assert main(["data", "prepare", "text.txt", "--tokenizer", "char", "--out", "tokens"]) == 0
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def fails(capsys, *arguments):
    capsys.readouterr()
    assert main(["train", "c.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def rows_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_the_machine = "timing", "perf/throughput", "perf/cpu_memory"
    return [{name: value for name, value in row.items() if not name.startswith(of_the_machine)} for row in rows]


def test_from_text_to_a_model_that_every_command_takes(folder, capsys):
    samples = ["pretrain.sample_every_steps=25", "pretrain.sample_prompt=1+", "pretrain.sample_tokens=16"]
    changes = ["train.steps=60", "eval.every_steps=30", "checkpoint.every_steps=0", *samples]
    assert main(["train", "c.yaml", *changes]) == 0
    summary = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    run = folder / "runs" / "first"
    assert summary["val_loss_before"] > 5 and summary["val_loss_after"] < 1.8
    meta = json.loads((folder / "tokens" / "meta.json").read_text())["val"]
    bits = summary["val_loss_after"] / 0.6931471805599453 * meta["tokens"] / meta["bytes"]
    assert summary["val_bits_per_byte_after"] == pytest.approx(bits) == summary["val_bits_per_character_after"]
    rows = rows_of(run)
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 30, 60]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 60 and all(row["perf/total_num_tokens"] == 8 * 32 for row in steps)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"] / 2
    for step in (25, 50, 60):
        written = (run / "rollouts" / f"step_{step:06d}" / "train.jsonl").read_text().splitlines()
        assert [json.loads(line)["prompt"] for line in written] == ["1+", "1+"]
    assert (
        len(AutoTokenizer.from_pretrained(run / "model"))
        == AutoModelForCausalLM.from_pretrained(run / "model").config.vocab_size
    )
    data = [{"prompt": "1+2=", "completion": "3", "ground_truth": "3"}] * 2
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    small = {"model": {"path": str(run / "model")}, "data": {"train": "d.jsonl", "chat_template": "none"}}
    small |= {
        "train": {"steps": 1, "rows_per_update": 2},
        "rollout": {"prompts_per_step": 1, "max_completion_tokens": 4},
    }
    small["rollout"]["completions_per_prompt"] = 2
    for name, section in (("sft", {"sft": {}}), ("rl", {})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(small | section | {"run_name": name}))
        assert main(["train", f"{name}.yaml"]) == 0, capsys.readouterr().err
    assert (
        main(["generate", str(run / "model"), "--prompt", "1+2=", "--chat-template", "none", "--max-tokens", "4"]) == 0
    )


def test_resume_is_exact(folder, monkeypatch):
    assert main(["train", "c.yaml", "run_name=whole"]) == 0
    log = Recorder.log

    def stops_at_5(self, step, metrics):
        log(self, step, metrics)
        if step == 5:
            raise MemoryError("cut off")

    monkeypatch.setattr(Recorder, "log", stops_at_5)
    with pytest.raises(MemoryError):
        main(["train", "c.yaml"])
    monkeypatch.setattr(Recorder, "log", log)
    assert main(["train", "c.yaml", "--resume"]) == 0
    runs = folder / "runs"
    assert rows_of(runs / "first") == rows_of(runs / "whole")
    for name in ("model.safetensors", "training_state/optimizer.safetensors"):
        first, whole = (load_file(runs / run / "model" / name) for run in ("first", "whole"))
        assert first.keys() == whole.keys() and all(torch.equal(first[key], whole[key]) for key in whole)


def test_micro_batches_do_not_change_the_loss(folder):
    for name, tokens in (("one", 10**6), ("many", 64)):
        limit = [f"run_name={name}", f"train.tokens_per_micro_batch={tokens}", "train.steps=2"]
        assert main(["train", "c.yaml", "model.dtype=float32", *limit]) == 0
    one, many = (rows_of(folder / "runs" / name) for name in ("one", "many"))
    for first, second in zip(one, many, strict=True):
        assert first == pytest.approx(second, rel=1e-4)


def test_it_continues_from_a_model_that_is_there(folder, capsys):
    make_tiny_model(folder / "model")
    assert main(["data", "prepare", "text.txt", "--tokenizer", "model", "--out", "own"]) == 0
    there = ["model.path=model", "pretrain.gpt=null", "train.steps=1"]
    assert "the tokens in tokens were made with another tokenizer" in fails(capsys, *there)
    assert main(["train", "c.yaml", *there, "data.train=own"]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", folder / "runs/first/model"))
    assert before.keys() == after.keys() and not all(torch.equal(before[key], after[key]) for key in before)
    assert "window_tokens=600 is longer than the context of model, 512" in fails(
        capsys, *there, "data.train=own", "run_name=x", "pretrain.window_tokens=600"
    )


def test_mistakes_of_pretraining_are_named(folder, capsys):
    assert "data.train: absent does not exist; create it with: atomrl data prepare" in fails(
        capsys, "data.train=absent"
    )
    assert "both set the initial model" in fails(capsys, "model.path=m")
    assert "data.eval: the validation split is in the folder" in fails(capsys, "data.eval=x.jsonl")
    assert "is longer than pretrain.gpt.max_tokens, 48" in fails(capsys, "pretrain.window_tokens=64")
    assert "fewer than one window" in fails(capsys, "pretrain.window_tokens=40000", "pretrain.gpt.max_tokens=50000")
    samples = ["pretrain.sample_every_steps=1", "pretrain.sample_tokens=48"]
    assert "sample_prompt has 1 tokens, which with pretrain.sample_tokens=48" in fails(capsys, *samples)
    assert "did you mean 'pretrain.window_tokens'?" in fails(capsys, "pretrain.windw_tokens=3")
    for more in ([], ["--dry-run"]):
        assert "use family llama" in fails(capsys, "pretrain.gpt.family=qwen2", *more)
    make_tiny_model(folder / "model")
    assert "another tokenizer" in fails(capsys, "model.tokenizer=model")
    (folder / "tokens" / "val.bin").write_bytes(b"")
    assert "val.bin was changed" in fails(capsys)
