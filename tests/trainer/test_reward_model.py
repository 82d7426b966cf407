"""A reward model, from a file of pairs to a folder that scores, through the command."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal

import peft
import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
)

from atomrl.cli.main import main
from atomrl.models.loading import load_tokenizer, read_safetensors
from atomrl.models.reward_model import Reader, RewardModel
from atomrl.models.scalar import load_scalar
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from tests.models.test_reward_model import rollouts
from tests.tiny import make_tiny_deberta, make_tiny_model

STEPS = 16


def pairs(count, seed):
    """The better completion has more letters a."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        few, many = sorted(rng.sample(range(7), 2))
        texts = ["".join(rng.sample("a" * good + "b" * (6 - good), 6)) for good in (many, few)]
        rows.append(
            {"prompt": f"say {rng.randrange(99)}", "chosen": texts[0], "rejected": texts[1], "margin": many - few}
        )
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", "llama", scale=0.1)
    (tmp_path / "train.jsonl").write_text(pairs(64, 0))
    (tmp_path / "eval.jsonl").write_text(pairs(32, 1))
    config = {
        "run_name": "rm",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "preference": {},
        "algorithm": {"name": "reward_model", "centring": 0.01},
        "train": {"steps": STEPS, "rows_per_update": 16, "learning_rate": 0.01},
        "checkpoint": {"every_steps": 0},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def run(*arguments, code=0):
    assert main(["train", "c.yaml", *arguments]) == code


def summary(folder, name="rm"):
    return json.loads((folder / "runs" / name / "summary.json").read_text())


def fails(capsys, *arguments):
    capsys.readouterr()
    run(*arguments, code=2)
    return capsys.readouterr().err


def batch_of(texts):
    return rollouts(["say 1"] * len(texts), [[t] for t in texts])


def scores(path, texts):
    return RewardModel(str(path), dtype="float32")(batch_of(texts))


def test_it_learns_resumes_bit_for_bit_and_is_a_reward(folder, monkeypatch):
    run()
    evaluated = summary(folder)
    assert evaluated["preference_accuracy_before"] == 0.5, "a fresh score knows nothing"
    assert evaluated["preference_accuracy_after"] >= 0.9 and evaluated["preference_margin_after"] > 0
    metrics = read_metrics(folder / "runs/rm/metrics.jsonl")
    names = {"rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "reward_model/loss"}
    assert names <= set(metrics[1]) and metrics[-2]["rewards/accuracies"] > metrics[1]["rewards/accuracies"]

    log = Recorder.log
    for step in (3, 9):

        def then_stop(self, now, metrics, step=step):
            log(self, now, metrics)
            if now == step:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(Recorder, "log", then_stop)
        run("run_name=again", *(["--resume"] if step > 3 else []), code=130)
    monkeypatch.setattr(Recorder, "log", log)
    run("run_name=again", "--resume")
    straight, resumed = (dict(read_safetensors(folder / "runs" / name / "model")) for name in ("rm", "again"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert {**summary(folder, "again"), "run": 0, "model": 0, "wall_s": 0} == {
        **evaluated,
        "run": 0,
        "model": 0,
        "wall_s": 0,
    }

    model = folder / "runs/rm/model"
    assert AutoModelForSequenceClassification.from_pretrained(model).config.num_labels == 1
    good, middle, bad = scores(model, ["aaaaaa", "ababab", "bbbbbb"])
    assert good > middle > bad


@pytest.mark.parametrize("template", [True, False])
def test_held_out_pairs_are_read_as_rollouts_will_be(folder, template):
    """The scores of the run's own evaluation are those of the reward on the same texts."""
    if not template:
        tokenizer = load_tokenizer("model")
        tokenizer.chat_template = None
        (folder / "model/chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained("model")
    run("train.steps=3")
    written = [
        json.loads(line) for line in (folder / "runs/rm/rollouts/step_000003/eval.jsonl").read_text().splitlines()
    ]
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    batch = rollouts([row["prompt"] for row in rows], [[row["chosen"], row["rejected"]] for row in rows])
    scored = RewardModel("runs/rm/model", dtype="float32")(batch)
    assert [score for row in written for score in row["rewards"]] == pytest.approx(scored, abs=1e-5)


END_OF_TURN = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize("family", [None, MistralConfig])
@pytest.mark.parametrize("template", [END_OF_TURN, None])
@pytest.mark.parametrize("pad", [None, "</s>"])
def test_rows_that_end_in_the_end_of_sequence_score_in_transformers_as_here(folder, family, template, pad):
    """The base has no pad token, or the end of sequence in its place, like Llama 3 and others."""
    tokenizer = load_tokenizer("model")
    tokenizer.chat_template, tokenizer.pad_token = template, pad
    shutil.rmtree("model")
    shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 2, "bos_token_id": 1}
    shape |= {"pad_token_id": pad and 2, "max_position_embeddings": 512}
    AutoModelForCausalLM.from_config((family or LlamaConfig)(**shape)).save_pretrained("model")
    tokenizer.save_pretrained("model")
    run("train.steps=2", "data.eval=null")
    saved = folder / "runs/rm/model"
    theirs, own = AutoModelForSequenceClassification.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    assert own.pad_token_id == theirs.config.pad_token_id != own.eos_token_id
    texts = ["aaaaaa", "ababab", "b", "bb a"]
    rows = [{"input_ids": list(row)} for row in Reader(own, theirs.config, "").token_ids(batch_of(texts))]
    assert all(row["input_ids"][-1] == own.eos_token_id for row in rows)
    for side in ("right", "left"):
        own.padding_side = side
        expected = theirs(**own.pad(rows, return_tensors="pt")).logits[:, 0].tolist()
        assert scores(saved, texts) == pytest.approx(expected, abs=1e-5)


def test_a_classifier_keeps_the_pad_token_that_it_learned_with(folder):
    run("train.steps=1", "data.eval=null")
    config, tokenizer = json.loads((folder / "runs/rm/model/config.json").read_text()), load_tokenizer("runs/rm/model")
    config["pad_token_id"] = tokenizer.eos_token_id
    (folder / "runs/rm/model/config.json").write_text(json.dumps(config))
    run("train.steps=1", "data.eval=null", "run_name=again", "model.path=runs/rm/model")
    config = json.loads((folder / "runs/again/model/config.json").read_text())
    assert config["pad_token_id"] == tokenizer.eos_token_id
    assert AutoTokenizer.from_pretrained("runs/again/model").pad_token_id == tokenizer.eos_token_id


def test_a_classifier_with_its_own_tokenizer_is_trained_too(folder):
    make_tiny_deberta(folder / "deberta", initializer_range=0.2)
    run("model.path=deberta", "train.steps=30", "algorithm.margin=0.2", "data.max_prompt_tokens=64")
    metrics = summary(folder)
    assert metrics["preference_accuracy_after"] >= 0.9 and metrics["preference_margin_after"] > 0.5
    assert metrics["preference_margin_before"] < 0.5
    good, bad = scores(folder / "runs/rm/model", ["aaaaaa", "bbbbbb"])
    assert good > bad


def test_a_critic_starts_from_it_and_resume_knows_it_again(folder, capsys):
    run("train.steps=2")
    (folder / "problems.jsonl").write_text('{"prompt": "say 1", "ground_truth": "aa"}\n' * 2)
    config = {
        "run_name": "ppo",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "problems.jsonl"},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 4},
        "reward": {"functions": [{"function": "reward_model", "args": {"path": "runs/rm/model", "dtype": "float32"}}]},
        "algorithm": {"name": "ppo"},
        "critic": {"path": "runs/rm/model"},
        "train": {"steps": 1},
    }
    (folder / "ppo.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "ppo.yaml"]) == 0
    (row,) = read_metrics(folder / "runs/ppo/metrics.jsonl")
    assert row["reward/reward_model/mean"] == row["critic/score/mean"] != 0
    assert load_scalar(folder / "runs/ppo/model/critic", dtype="float32").score.weight.abs().max() > 0

    run("run_name=other", "train.steps=3")
    shutil.copytree(folder / "runs/other/model", folder / "runs/rm/model", dirs_exist_ok=True)
    capsys.readouterr()
    assert main(["train", "ppo.yaml", "--resume"]) == 2
    assert "model (runs/rm/model): changed since the run was started" in capsys.readouterr().err


def test_mistakes_are_said_first(folder, capsys):
    other = fails(capsys, "algorithm={name: grpo, centring: null}")
    assert "unknown name 'centring'" in other
    assert "did you mean 'centring'" in fails(capsys, "algorithm.centering=1")
    assert "algorithm.margin" in fails(capsys, "algorithm.margin=-1")
    assert "data.system_prompt" in fails(capsys, "data.system_prompt=Be brief.")
    assert "data.chat_template_kwargs" in fails(capsys, "data.chat_template_kwargs={enable_thinking: false}")
    assert "does not exist" in fails(capsys, "model.path=./absent")
    assert "3 labels" in fails(capsys, f"model.path={make_tiny_deberta(folder / 'd3', labels=3)}")
    (folder / "single.jsonl").write_text('{"prompt": "p", "completion": "c", "label": true}\n')
    assert "single.jsonl:1" in fails(capsys, "data.train=single.jsonl")
    assert not (folder / "runs").exists()


def test_pairs_over_the_limit_are_left_out(folder, caplog):
    long = {"prompt": "p", "chosen": "a" * 600, "rejected": "b"}
    (folder / "train.jsonl").write_text(pairs(20, 0) + json.dumps(long) + "\n")
    run("train.steps=1")
    assert "1 of 21 preferences are longer than 512 tokens" in caplog.text


def test_adapters_and_a_score_head_learn_resume_score_and_are_merged(folder, monkeypatch, capsys):
    """The folder has peft's layout of a sequence classifier, whose base has no score head."""
    end, lora = ("data.eval=null",), ("model.lora={rank: 4}", "train.learning_rate=0.02")
    run(*lora)
    evaluated = summary(folder)
    assert evaluated["preference_accuracy_before"] == 0.5 and evaluated["preference_accuracy_after"] >= 0.9

    log = Recorder.log

    def then_stop(self, now, metrics):
        log(self, now, metrics)
        if now == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "log", then_stop)
    run("run_name=again", *lora, *end, code=130)
    monkeypatch.setattr(Recorder, "log", log)
    run("run_name=again", *lora, *end, "--resume")
    straight, resumed = (dict(read_safetensors(folder / "runs" / name / "model")) for name in ("rm", "again"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert {name for name in straight if "lora" not in name} == {"base_model.model.score.weight"}

    trained, texts = folder / "runs/rm/model", ["aaaaaa", "ababab", "bbbbbb"]
    good, middle, bad = scores(trained, texts)
    assert good > middle > bad
    tokenizer = AutoTokenizer.from_pretrained(trained)
    plain = AutoModelForSequenceClassification.from_pretrained("model", num_labels=1)
    plain.config.pad_token_id = tokenizer.pad_token_id
    theirs = peft.PeftModel.from_pretrained(plain, trained).eval()
    rows = [{"input_ids": list(row)} for row in Reader(tokenizer, plain.config, "").token_ids(batch_of(texts))]
    inputs = tokenizer.pad(rows, return_tensors="pt")
    assert theirs(**inputs).logits[:, 0].tolist() == pytest.approx([good, middle, bad], abs=1e-4)
    assert main(["export", "runs/rm"]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained("runs/rm/exported").eval()
    assert merged(**inputs).logits[:, 0].tolist() == pytest.approx([good, middle, bad], abs=1e-4)
    assert scores("runs/rm/exported", texts) == pytest.approx([good, middle, bad], abs=1e-4)

    run("run_name=more", "model.lora={start: runs/rm/model}", "train.steps=1")
    assert summary(folder, "more")["preference_accuracy_before"] == evaluated["preference_accuracy_after"]
    assert "has adapters" in fails(capsys, "run_name=on_top", "model.path=runs/rm/model", *lora)


def test_adapters_need_a_head_named_score(folder, capsys):
    make_tiny_deberta(folder / "deberta")
    said = fails(capsys, "model.path=deberta", "model.lora={rank: 2}", "data.max_prompt_tokens=64")
    assert "not a linear layer named score" in said
    assert not (folder / "runs").exists()
    make_tiny_model(folder / "mixture", "qwen3_moe")
    run("model.path=mixture", "model.lora={rank: 2, target_modules: [q_proj]}", "train.steps=1", "data.eval=null")
