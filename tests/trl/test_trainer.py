"""GRPOTrainer on a tiny model: the run is that of `atomrl train`, and every argument has its effect."""

import json
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.backends import base
from atomrl.cli.main import main
from atomrl.config import ConfigError
from atomrl.data.files import DataError
from atomrl.trl import GRPOArgs, GRPOTrainer
from tests.light_rewards import letter_reward
from tests.tiny import make_tiny_model

ROWS = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1), "level": k} for k in range(6)]


def small(**changes):
    return GRPOArgs(
        **({"lr": 1e-3, "num_generations": 2, "max_generate_length": 4, "output_dir": "out", "epoch": 0.5} | changes)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def folder(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    return tmp_path


def weights(path):
    return load_file(path / "model.safetensors")


def test_every_argument_has_its_effect(folder, monkeypatch):
    sizes = []
    split = base.micro_batches

    def spy(*arguments):
        parts = split(*arguments)
        sizes.append([len(part) for part in parts])
        return parts

    monkeypatch.setattr(base, "micro_batches", spy)
    args = GRPOArgs(
        lr=2e-3, num_generations=3, output_dir="some/run", device="cpu", save_steps=1, epoch=1.5, max_prompt_length=12,
        max_generate_length=5, reward_weights=[2.0, 0.5], beta=0.1, clip_eps=0.0, gradient_accumulation_steps=2,
        num_iterations=2, batch_size=1,
    )  # fmt: skip
    long = [{"prompt": "a very long prompt", "ground_truth": "1"}]
    trainer = GRPOTrainer("model", "model", [letter_reward, "exact_match"], args, train_dataset=ROWS + long)
    summary = trainer.train()
    run = folder / "some" / "run"
    assert summary["finished"] and summary["run"] == "some/run"
    steps = 5  # ceil(1.5 epochs * 6 problems that fit / (1 * 2) prompts)
    assert summary["steps"] == steps
    rows = [row for row in trainer.log_history if "actor/lr" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["actor/lr"] == 2e-3 and row["training/updates"] == 2 for row in rows)
    assert all(row["prompt_length/max"] <= 12 and row["response_length/max"] <= 5 for row in rows)
    assert max(row["response_length/max"] for row in rows) == 5
    assert all("actor/kl_loss" in row for row in rows) and rows[-1]["actor/kl_loss"] > 0
    assert max(row["actor/pg_clipfrac"] for row in rows) > 0  # a ratio of the second update is never within +-0
    for row in rows:
        parts = 2 * row["reward/letter_reward/mean"] + 0.5 * row["reward/exact_match/mean"]
        assert row["critic/score/mean"] == pytest.approx(parts)
    lines = (run / "rollouts" / "step_000001" / "train.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 3
    assert (run / "checkpoints" / f"step_{steps - 1:06d}").is_dir()
    assert [3, 3] in sizes and not [size for size in sizes if max(size) > 3]  # batch_size * num_generations rows each
    assert trainer.config.model.device == "cpu"


def test_the_run_is_that_of_atomrl_train(folder):
    """The config that the facade writes, given to the command, gives the same weights."""
    trainer = GRPOTrainer("model", reward_funcs="exact_match", args=small(), train_dataset=ROWS)
    trainer.train()
    tree = yaml.safe_load((folder / "out" / "config.yaml").read_text())
    (folder / "again.yaml").write_text(yaml.safe_dump(tree | {"run_name": "again"}))
    assert main(["train", "again.yaml"]) == 0
    first, second = weights(folder / "out" / "model"), weights(folder / "again" / "model")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_resume_gives_the_weights_of_a_run_that_never_stopped(folder):
    def trainer(name):
        args = small(output_dir=name, save_steps=1, epoch=1)
        return GRPOTrainer("model", "model", letter_reward, args, train_dataset=ROWS)

    trainer("whole").train()
    with pytest.raises(ConfigError, match="already exists"):
        trainer("whole").train()
    with pytest.raises(ConfigError, match=r"set GRPOArgs.output_dir"):
        trainer("absent").train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="not the newest checkpoint"):
        trainer("whole").train(resume_from_checkpoint="whole/checkpoints/step_000001")

    script = """
import os, signal, sys
from atomrl.trl import *

seen = []

def letters(prompts, completions, **columns):
    seen.append(1)
    if len(seen) == 2 and "--kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
    return [sum(c in "abcdefghijklm" for c in text) / max(1, len(text)) for text in completions]

args = GRPOArgs(lr=1e-3, num_generations=2, max_generate_length=4, output_dir="cut", save_steps=1, epoch=1)
trainer = GRPOTrainer("model", "model", letters, args, train_dataset=ROWS)
print(trainer.train(resume_from_checkpoint="--kill" not in sys.argv)["finished"])
"""
    (folder / "script.py").write_text(script.replace("ROWS", repr(ROWS)))
    for arguments, finished in (["--kill"], "False"), ([], "True"):
        done = subprocess.run([sys.executable, "script.py", *arguments], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip() == finished, done.stderr
        assert ("stopped early" in done.stderr.splitlines()[-1]) == (finished == "False")
    whole, cut = weights(folder / "whole" / "model"), weights(folder / "cut" / "model")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_objects_in_place_of_paths(folder):
    """A loaded model gets the trained weights, as with TRL, and they are those of the path's run."""
    own = AutoModelForCausalLM.from_pretrained("model")
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained("model")
    trainer = GRPOTrainer(own, tokenizer, [letter_reward], small(), train_dataset=ROWS)
    assert trainer.model is own
    trainer.train()
    assert trainer.model is own and not all(torch.equal(before[n], t) for n, t in own.state_dict().items())
    trainer.save_model("saved")
    by_path = GRPOTrainer("model", "model", [letter_reward], small(output_dir="by_path"), train_dataset=ROWS)
    by_path.train()
    trained = by_path.model.state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in own.state_dict().items())
    loaded = AutoModelForCausalLM.from_pretrained("saved").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())
    assert AutoTokenizer.from_pretrained("saved")("1+1=")["input_ids"] == tokenizer("1+1=")["input_ids"]


def test_functions_of_any_kind(folder):
    class Fixed:
        def __call__(self, prompts, completions, **columns):
            return [1.0] * len(completions)

    offset = 0.25
    funcs = [
        lambda prompts, completions, **columns: [offset] * len(completions),
        Fixed(),
        "exact_match",
        "tests.light_rewards.letter_reward",
        lambda prompts, completions, **columns: [4.0] * len(completions),
    ]
    trainer = GRPOTrainer("model", "model", funcs, small(), train_dataset=ROWS)
    trainer.train()
    row = trainer.log_history[-1]
    named = {name: row[f"reward/{name}/mean"] for name in ("reward", "reward_2", "Fixed")}
    assert named == {"reward": 0.25, "reward_2": 4.0, "Fixed": 1.0} and "reward/letter_reward/mean" in row


def test_data_sets_of_any_kind(folder):
    datasets = pytest.importorskip("datasets")
    trl_rows = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}] * 4
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    seen = []

    def spy(prompts, completions, ground_truth=None, answer=None, **columns):
        seen.append((prompts[0], ground_truth and ground_truth[0], answer and answer[0]))
        return letter_reward(prompts, completions)

    message = [{"role": "user", "content": "1+1="}]
    for number, (data, first) in enumerate(
        [
            (datasets.Dataset.from_list(trl_rows), (message, "2", "2")),
            ("rows.jsonl", None),
            ([{"prompt": "no answer"}] * 3, ("no answer", None, None)),
        ]
    ):
        seen.clear()
        args = small(output_dir=f"out{number}", epoch=1)
        GRPOTrainer("model", "model", spy, args, train_dataset=data, eval_dataset=data).train()
        if first is not None:
            assert seen[0][0] == first[0] and seen[0][2] == first[2] and seen[0][1] in (first[1], [None])
        else:
            assert seen[0][1] in {row["ground_truth"] for row in ROWS}
        assert (folder / f"out{number}" / "rollouts" / "step_000000" / "eval.jsonl").is_file()


def test_without_a_data_set_it_says_so(folder, capsys):
    trainer = GRPOTrainer("model", "model", "strict_math", small(epoch=0.003, output_dir=None))
    trainer.train()
    assert "built-in arithmetic task" in capsys.readouterr().err
    row = json.loads(
        (folder / "runs" / "grpo" / "rollouts" / "step_000001" / "train.jsonl").read_text().splitlines()[0]
    )
    assert row["data_source"] == "arithmetic" and "<answer>" in row["prompt"]
    again = GRPOTrainer("model", "model", "strict_math", small(output_dir=None))
    assert str(again.run_dir) == "runs/grpo-2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": {"lr": 1e-6}}, "args must be .* not dict"),
        ({"reward_funcs": None}, "at least one reward function"),
        ({"reward_funcs": []}, "at least one reward function"),
        ({"reward_funcs": [3]}, "neither a function nor its name"),
        ({"reward_funcs": "strict_maths"}, "did you mean 'strict_math'"),
        ({"args": GRPOArgs(reward_weights=[1, 2])}, "reward_weights has 2 values for 1 reward functions"),
        ({"args": GRPOArgs(output_dir="..")}, "GRPOArgs.output_dir"),
        ({"model": "absent/folder/x"}, "does not exist"),
        ({"model": object(), "tokenizer": "model"}, "not object"),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": "absent.jsonl"}, "absent.jsonl does not exist"),
        ({"train_dataset": "arithmetic"}, r"generate\('arithmetic', 500\)"),
        ({"train_dataset": {"train": ROWS}}, "pass one of its splits"),
        ({"train_dataset": [{"question": "x"}]}, r"train_dataset\[0\]: field 'prompt' is missing"),
        ({"train_dataset": ["x"]}, r"train_dataset\[0\]: a row must be a dict"),
        ({"train_dataset": [*ROWS, {"prompt": " "}]}, r"train_dataset\[6\]"),
        ({"train_dataset": [{"prompt": "x", "extra": object()}]}, "not JSON serializable"),
        ({"eval_dataset": 5}, "eval_dataset must be a list"),
    ],
)
def test_mistakes_are_found_before_the_run(folder, changes, message):
    given = {"model": "model", "tokenizer": "model", "reward_funcs": letter_reward, "train_dataset": ROWS} | changes
    with pytest.raises((ConfigError, DataError, ValueError), match=message):
        GRPOTrainer(**given)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_generate_length": 600}, "^max_generate_length=600 leaves no room"),
        ({"max_prompt_length": 3}, "all 6 prompts are longer than 3 tokens"),
        ({"device": "cuda:77"}, "^device=cuda:77"),
        ({"device": "tpu"}, "device: .*'tpu'"),
    ],
)
def test_mistakes_are_named_by_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        GRPOTrainer("model", "model", letter_reward, small(**changes), train_dataset=ROWS).train()


def test_a_tokenizer_of_another_model(folder):
    from atomrl.models.tokenizer import make_tokenizer

    with pytest.raises(ConfigError, match="model's own tokenizer"):
        GRPOTrainer("model", make_tokenizer(), letter_reward, small(), train_dataset=ROWS).train()


def test_callbacks_and_max_steps(folder):
    seen = []
    trainer = GRPOTrainer(
        "model",
        reward_funcs=letter_reward,
        args=small(max_steps=3),
        train_dataset=ROWS,
        callbacks=[lambda step, metrics: seen.append((step, metrics["critic/score/mean"]))],
    )
    assert trainer.train()["steps"] == 3
    assert [step for step, _ in seen] == [1, 2, 3]
    assert [score for _, score in seen] == [row["critic/score/mean"] for row in trainer.log_history]
    with pytest.raises(ConfigError, match="callbacks"):
        GRPOTrainer("model", reward_funcs=letter_reward, callbacks=[3])


def test_the_doctor_speaks_of_arguments(folder, capsys):
    args = small(max_steps=6)
    GRPOTrainer("model", reward_funcs=letter_reward, args=args, train_dataset=ROWS).train()
    assert "a larger max_generate_length (twice)" in capsys.readouterr().err
