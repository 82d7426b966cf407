"""Whole commands on a tiny random model: train, resume, eval, generate, export, dry run."""

import io
import json
import os
import re
import shutil
import signal
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pandas as pd
import pytest
import torch
import transformers
import yaml

from atomrl.cli.main import main
from atomrl.cli.train import non_defaults
from atomrl.config import load_config
from atomrl.tracking.reading import load_run
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.reading.lock import is_locked
from atomrl.tracking.recorder import Recorder
from atomrl.trainer import base
from tests.tiny import make_tiny_model

CONFIG = {
    "run_name": "first",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 6},
    "reward": {"functions": [{"function": "exact_match"}]},
    "train": {"steps": 2, "learning_rate": 1e-3},
}


@pytest.fixture
def folder(working_directory):
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1), "data_source": "sums"} for k in range(6)]
    return working_directory(CONFIG, train=rows, eval=rows[:3])


def fails(capsys, *arguments, code=2):
    capsys.readouterr()
    assert main(list(arguments)) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_a_reward_that_says_no_right_or_wrong_is_called_reward(folder, capsys):
    (folder / "graded.py").write_text(
        "def graded(completions, **columns):\n    return [len(c) / 7 for c in completions]\n"
    )
    assert main(["train", "c.yaml", "reward.functions=[./graded.py:graded]"]) == 0
    output, run = capsys.readouterr(), folder / "runs" / "first"
    assert "held-out reward: sums" in output.err and "accuracy" not in output.err + output.out
    assert "reward_after" in json.loads(output.out) and "accuracy" not in (run / "metrics.jsonl").read_text()
    main(["doctor", str(run)])
    said = capsys.readouterr().out
    assert "held-out reward of sums:" in said and "accuracy" not in said


def test_an_error_at_the_start_stands_alone(folder, capsys):
    assert main(["train", "c.yaml"]) == 0
    assert fails(capsys, "train", "c.yaml").startswith("error: the run runs/first already exists")


def test_train_export_and_what_a_run_leaves(folder, capsys):
    assert main(["train", "c.yaml", "checkpoint.every_steps=1", "tracking.sinks=[tensorboard]"]) == 0
    run = folder / "runs" / "first"
    summary = json.loads((run / "summary.json").read_text())
    output = capsys.readouterr()
    assert json.loads(output.out) == summary and summary["finished"] and summary["steps"] == 2
    assert {"accuracy_before", "accuracy_after", "format_before", "wall_s", "seed"} <= set(summary)
    assert "step 1/2  reward" in output.err and "step 0: held-out accuracy: sums 0.000" in output.err
    assert "step 2/2  reward" in (run / "log.txt").read_text()
    frame = pd.read_json(run / "metrics.jsonl", lines=True)
    assert list(frame["step"]) == [0, 1, 2, 2]
    assert frame["val-core/sums/acc/mean@1"].notna().tolist() == [True, False, False, True]
    assert {"critic/score/mean", "train/accuracy", "response_length/mean", "actor/entropy", "perf/throughput"} <= set(
        frame
    )
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    rollouts = {"rollouts/step_000000/eval.jsonl", "rollouts/step_000002/train.jsonl"}
    checkpoints = {"checkpoints/step_000001/MANIFEST.json", "checkpoints/step_000002/model.safetensors"}
    assert {"config.yaml", "env.json", "curves.png", *rollouts, *checkpoints} <= files
    assert list((run / "tensorboard").iterdir())

    assert main(["export", str(run / "checkpoints" / "step_000002"), "plain"]) == 0
    assert sorted(path.name for path in (folder / "plain").iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert main(["generate", "plain", "--prompt", "1+1=", "--max-tokens", "3"]) == 0

    assert "already exists" in fails(capsys, "train", "c.yaml")
    assert "no run to resume" in fails(capsys, "train", "c.yaml", "run_name=other", "--resume")


def test_a_stop_signal_saves_and_resume_continues(folder, capsys, monkeypatch):
    log = Recorder.log

    def interrupt_after_step_1(self, step, metrics):
        log(self, step, metrics)
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Recorder, "log", interrupt_after_step_1)
    message = fails(capsys, "train", "c.yaml", "train.steps=3", code=130)
    assert "step_000001; continue with: atomrl train c.yaml train.steps=3 --resume" in message
    monkeypatch.setattr(Recorder, "log", log)
    assert main(["train", "c.yaml", "train.steps=3", "--resume"]) == 0
    summary = json.loads((folder / "runs" / "first" / "summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 3 and "accuracy_before" in summary
    frame = pd.read_json(folder / "runs" / "first" / "metrics.jsonl", lines=True)
    assert list(frame["step"]) == [0, 1, 2, 3, 3]


def test_the_time_of_a_resumed_run_is_that_of_all_its_parts(folder, monkeypatch):
    monkeypatch.setattr(base, "Progress", partial(base.Progress, wall_s=1000.0))
    assert main(["train", "c.yaml", "train.steps=1"]) == 0
    assert 1000 < json.loads((folder / "runs" / "first" / "summary.json").read_text())["wall_s"] < 2000


ADAPTERS = [
    "model.lora.rank=2",
    "train.steps=1",
    "train.learning_rate=0.5",
    "reward.functions=[{function: tests.light_rewards.letter_reward}]",
]


def test_lora_is_merged_by_export(folder, capsys):
    from atomrl.models.loading import read_safetensors

    assert main(["train", "c.yaml", *ADAPTERS]) == 0
    checkpoint = folder / "runs" / "first" / "checkpoints" / "step_000001"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert main(["export", str(checkpoint), "merged"]) == 0
    before, after = (dict(read_safetensors(path)) for path in ("model", "merged"))
    assert set(after) == set(before)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_a_checkpoint_of_adapters_is_evaluated_and_generated_from_as_it_is(folder, capsys):
    """As what `export` makes of it does; and the folder is left as it was."""
    assert main(["train", "c.yaml", *ADAPTERS]) == 0
    checkpoint = folder / "runs" / "first" / "checkpoints" / "step_000001"
    files = sorted(checkpoint.rglob("*"))
    assert main(["export", str(checkpoint), "merged"]) == 0
    capsys.readouterr()
    shown, rows = {}, {}
    for model in ("model", "merged", str(checkpoint)):
        assert main(["generate", model, "--prompt", "1+1=", "--max-tokens", "6", "--temperature", "0", "--ids"]) == 0
        shown[model] = capsys.readouterr().out
        out = folder / f"{len(rows)}.json"
        assert main(["eval", model, "--data", "eval.jsonl", "--max-tokens", "6", "--out", str(out)]) == 0
        rows[model] = out.with_suffix(".jsonl").read_text()
        assert json.loads(out.read_text())["config"]["model"]["path"] == model
        capsys.readouterr()
    assert shown["merged"] == shown[str(checkpoint)] != shown["model"]
    assert rows["merged"] == rows[str(checkpoint)] != rows["model"]
    assert sorted(checkpoint.rglob("*")) == files


def test_top_k_of_one_is_greedy(folder, capsys):
    given = ["generate", "model", "--prompt", "1+1=", "--max-tokens", "6", "--temperature"]
    assert main([*given, "0"]) == 0
    greedy = capsys.readouterr().out
    assert main([*given, "3"]) == 0 and capsys.readouterr().out != greedy, "else there is nothing to see"
    assert main([*given, "3", "--top-k", "1"]) == 0 and capsys.readouterr().out == greedy
    out = ["--data", "eval.jsonl", "--max-tokens", "4", "--out"]
    assert main(["eval", "model", *out, "a.json", "--temperature", "0"]) == 0
    assert main(["eval", "model", *out, "b.json", "--temperature", "3", "--top-k", "1"]) == 0
    texts = [
        [json.loads(line)["completion"] for line in Path(name).read_text().splitlines()]
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert texts[0] == texts[1]
    assert json.loads((folder / "b.json").read_text())["config"]["eval"]["top_k"] == 1


def test_a_prompt_that_is_no_utf8_is_refused(folder, capsys, monkeypatch):
    assert "the prompt is not valid UTF-8" in fails(capsys, "generate", "model", "--prompt", "caf\udce9")
    stdin = io.TextIOWrapper(io.BytesIO("caf\xe9".encode("latin-1")), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    assert "the prompt is not valid UTF-8" in fails(capsys, "generate", "model", "--prompt", "-")


def test_a_run_that_failed_says_why_and_lets_go_of_its_folder(folder, monkeypatch):
    """In a notebook the process goes on."""
    run = folder / "runs" / "first"
    seen = []

    def broken(self, step, watch):
        seen.append(load_run(run).state.status)
        raise RuntimeError("the step broke with --hub-token=abcdefgh")

    with monkeypatch.context() as patched:
        patched.setattr("atomrl.trainer.rollout_training.RolloutTraining.collect", broken)
        with pytest.raises(RuntimeError, match="the step broke"):
            main(["train", "c.yaml", "data.eval=null"])
    failed = load_run(run)
    assert seen == ["running"] and not is_locked(run)
    assert failed.state.status == "failed"
    assert failed.state.why == "RuntimeError: the step broke with --hub-token=[redacted]"
    assert " in broken" in failed.failure["where"] and "Traceback" in failed.failure["traceback"]
    assert main(["train", "c.yaml", "data.eval=null"]) == 0  # it never got to a step
    done = load_run(run)
    assert done.state.status == "finished" and not done.failure and not is_locked(run)


def test_the_lock_is_held_until_the_summary_is_there(folder, monkeypatch):
    held = []
    monkeypatch.setattr(
        "atomrl.tracking.run_directory.RunDirectory.finish", lambda self, summary: held.append(is_locked(self.path))
    )
    assert main(["train", "c.yaml", "data.eval=null"]) == 0
    assert held == [True] and not is_locked(folder / "runs" / "first")


@pytest.mark.parametrize("epochs, steps", [("1", 3), ("0.5", 2), ("2.5", 8)])
def test_total_epochs_says_how_many_steps(folder, epochs, steps):
    """Six problems, two a step."""
    quick = ["data.eval=null", "rollout.max_completion_tokens=2"]
    assert main(["train", "c.yaml", f"train.total_epochs={epochs}", *quick]) == 0
    run = folder / "runs" / "first"
    assert json.loads((run / "summary.json").read_text())["steps"] == steps
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, steps + 1))


def test_eval_writes_results_and_completions(folder, capsys):
    arguments = ["eval", "model", "--data", "eval.jsonl", "--samples-per-prompt", "2", "--max-tokens", "4"]
    assert main([*arguments, "--reward", "exact_match", "--out", "out/result.json"]) == 0
    assert "3 problems x 2 completions" in capsys.readouterr().out
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["prompts"] == 3 and result["samples_per_prompt"] == 2
    assert {"accuracy", "pass@2", "majority@2", "reward", "format", "reasoning_tokens"} <= set(result["overall"])
    assert "val-core/sums/acc/mean@2" in result["metrics"] and result["config"]["eval"]["max_completion_tokens"] == 4
    rows = [json.loads(line) for line in (folder / "out" / "result.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(row["completion_tokens"] <= 4 for row in rows)

    assert main([*arguments, "--seed", "0", "--reward", "exact_match", "--out", "out/again.json"]) == 0
    assert (folder / "out" / "again.jsonl").read_text() == (folder / "out" / "result.jsonl").read_text()
    assert main(["eval", "model", "--config", "c.yaml", "--limit", "1"]) == 0
    (default,) = (folder / "runs" / "eval").glob("model_eval_*.json")
    taken = json.loads(default.read_text())["config"]
    assert taken["reward"]["functions"][0]["function"] == "exact_match" and taken["data"]["eval_size"] == 1


def test_eval_takes_fields_and_answers_apart_by_options_alone(folder, capsys):
    (folder / "q.jsonl").write_text('{"question": "1+1=", "answer": "so\\n#### 2"}\n')
    fields = ["--prompt-field", "question", "--answer-field", "answer", "--answer-pattern", r"####\s*(.+)"]
    assert main(["eval", "model", "--data", "q.jsonl", *fields, "--max-tokens", "2", "--out", "r.json"]) == 0
    assert json.loads((folder / "r.jsonl").read_text())["ground_truth"] == "2"


def test_a_prefix_that_breaks_the_form_is_noted(folder, capsys):
    given = ["--data", "eval.jsonl", "--max-tokens", "2", "--out", "r.json"]
    assert main(["eval", "model", *given, "--response-prefix", "<think></think><answer>"]) == 0
    assert "an empty think block is invalid" in capsys.readouterr().err
    assert json.loads((folder / "r.jsonl").read_text().splitlines()[0])["completion"].startswith("<think></think>")


def test_an_rl_config_becomes_sft_by_an_override(folder, capsys):
    rows = [{"prompt": f"{k}+1=", "completion": f"<think>{k}</think><answer>{k + 1}</answer>"} for k in range(4)]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data.train=shown.jsonl", "data.eval=null", "data.answer_field=null"]
    given = [*data, "train.rows_per_update=2", "sft={}", "train.steps=3"]
    assert main(["train", "c.yaml", *given]) == 0
    assert "step 3/3  loss " in capsys.readouterr().err
    assert (folder / "runs" / "first" / "checkpoints" / "step_000003" / "model.safetensors").is_file()
    assert (folder / "runs" / "first" / "curves.png").is_file()


def test_a_prompt_that_the_models_context_cannot_hold_is_left_out_and_counted(folder, capsys, caplog):
    """Not met for the first time in the middle of a run."""
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "1" * 510, "ground_truth": "1"}) + "\n")
    given = ["data.max_prompt_tokens=100000", "train.steps=4"]
    assert main(["train", "c.yaml", *given, "--dry-run"]) == 0
    assert "1 prompts over 506 tokens were dropped" in caplog.text
    assert "train: 6 problems" in capsys.readouterr().out
    caplog.clear()
    assert main(["train", "c.yaml", *given]) == 0
    assert "1 prompts over 506 tokens were dropped" in caplog.text
    assert "leaves no room for a prompt" in fails(
        capsys, "train", "c.yaml", "run_name=x", "eval.max_completion_tokens=512"
    )


SFT = {
    "run_name": "sft",
    "data": {"train": "shown.jsonl", "answer_field": None, "max_prompt_tokens": 40},
    "sft": {"gpt": {"layers": 1, "hidden": 32, "heads": 1}},
    "train": {"steps": 2, "rows_per_update": 3},
}


def test_sft_resumes_where_a_prompt_was_left_out_for_its_length(folder, capsys):
    rows = [{"prompt": "1" * n, "completion": "a"} for n in (1, 2, 3, 4, 90)]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.yaml").write_text(yaml.safe_dump(SFT))
    assert main(["train", "sft.yaml"]) == 0
    assert main(["train", "sft.yaml", "--resume", "train.steps=3"]) == 0
    assert json.loads((folder / "runs" / "sft" / "summary.json").read_text())["steps"] == 3


def test_a_run_says_its_arithmetic_before_it_begins(folder, capsys):
    assert main(["train", "c.yaml", "eval.before=false", "eval.after=false"]) == 0
    error = capsys.readouterr().err
    assert "the run: 2 steps x 2 prompts" in error[: error.index("completions of step 1")]


def test_a_place_that_cannot_be_written_is_named(folder, capsys):
    error = fails(capsys, "train", "c.yaml", "output_dir=c.yaml")
    assert error.endswith("error: cannot write to c.yaml/first (output_dir/run_name): Not a directory\n")


def test_an_sft_start_that_failed_does_not_block_its_name(folder, capsys):
    (folder / "shown.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    (folder / "sft.yaml").write_text(yaml.safe_dump(SFT))
    assert "1 of 1 prompts are longer than data.max_prompt_tokens" in fails(
        capsys, "train", "sft.yaml", "data.max_prompt_tokens=1"
    )
    assert main(["train", "sft.yaml", "sft.gpt.hidden=64"]) == 0
    saved = folder / "runs" / "sft" / "model" / "config.json"
    assert json.loads(saved.read_text())["hidden_size"] == 64


def test_mistakes_of_eval_and_generate(folder, capsys):
    assert "use --data" in fails(capsys, "eval", "model")
    assert "data file absent.jsonl does not exist" in fails(capsys, "eval", "model", "--data", "absent.jsonl")
    assert "did you mean 'countdown'" in fails(capsys, "eval", "model", "--data", "countdwn")
    assert "unknown reward 'strict_mth'" in fails(
        capsys, "eval", "model", "--data", "eval.jsonl", "--reward", "strict_mth"
    )
    assert "model folder ./absent does not exist" in fails(capsys, "eval", "./absent", "--data", "eval.jsonl")
    assert "unknown engine 'vlm'" in fails(capsys, "eval", "model", "--data", "eval.jsonl", "--engine", "vlm")
    assert "  --temperature: " in fails(capsys, "eval", "model", "--data", "eval.jsonl", "--temperature", "-1")
    assert "  eval.top_p: " in fails(capsys, "eval", "model", "--data", "eval.jsonl", "eval.top_p=2")
    assert "  --n: " in fails(capsys, "generate", "model", "--prompt", "1", "--n", "many")
    assert "must end in .json" in fails(capsys, "eval", "model", "--data", "eval.jsonl", "--out", "r.txt")
    assert "--limit N" in fails(capsys, "eval", "model", "--data", "countdown")
    assert "/proc" in fails(capsys, "eval", "model", "--data", "eval.jsonl", "--out", "/proc/r.json")
    assert "the prompt is empty" in fails(capsys, "generate", "model", "--prompt", "")
    assert not list((folder / "runs").rglob("*.json*"))


def test_generate_prints_text_alone(folder, capsys):
    assert main(["generate", "model", "--prompt", "1+1=", "--temperature", "0", "--max-tokens", "4", "--ids"]) == 0
    first = capsys.readouterr().out
    assert main(["generate", "model", "--prompt", "1+1=", "--temperature", "0", "--max-tokens", "4", "--ids"]) == 0
    assert capsys.readouterr().out == first
    assert len(json.loads(first.splitlines()[-2])) <= 4
    assert main(["generate", "model", "--prompt", "1+1=", "--n", "2", "--max-tokens", "4"]) == 0
    assert "--- 2 of 2" in capsys.readouterr().out


def test_a_short_context_needs_no_options(folder, capsys):
    """The default of 256 tokens would pass it."""
    make_tiny_model(folder / "short", max_position_embeddings=24)
    assert main(["eval", "short", "--data", "eval.jsonl", "--response-prefix", "<a>", "--out", "r.json"]) == 0
    assert main(["generate", "short", "--prompt", "1+1="]) == 0
    rows = [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()]
    assert all(row["prompt_tokens"] + row["completion_tokens"] <= 24 for row in rows)
    error = fails(capsys, "eval", "short", "--data", "eval.jsonl", "--max-tokens", "30", "--out", "r.json")
    assert "exceeds the model's context of 24" in error


def test_dry_run_says_everything_and_writes_nothing(folder, capsys):
    before = sorted(folder.iterdir())
    assert main(["train", "c.yaml", "--dry-run", "train.rows_per_update=2"]) == 0
    shown, config = capsys.readouterr()
    assert yaml.safe_load(config)["train"]["rows_per_update"] == 2
    assert "2 prompts x 2 completions = 4 rows, each of at most 38 tokens" in shown
    assert "4 rows / 2 rows_per_update x 1 epochs = 2" in shown
    assert "4 prompts = 0.67 passes over 6 problems; 4 optimizer steps" in shown
    assert "train: 6 problems (sums x6)" in shown and "prompt tokens: median" in shown
    assert "memory  trainer weights" in shown and "MiB" in shown
    assert sorted(folder.iterdir()) == before


def test_dry_run_without_the_model(folder, capsys):
    said = [fails(capsys, "train", "c.yaml", "model.path=./absent", *more) for more in ([], ["--dry-run"])]
    assert "absent" in said[0] and said[0] == said[1], "as the run says it"
    assert "unknown name" in fails(capsys, "train", "c.yaml", "--dry-run", "algorithm.clipp.low=1")
    assert "algorithm.name: unknown name 'grop'; did you mean 'grpo'?" in fails(
        capsys, "train", "c.yaml", "--dry-run", "algorithm.name=grop"
    )
    assert "unknown reward" in fails(
        capsys, "train", "c.yaml", "--dry-run", "reward.functions=[{function: strictmath}]"
    )
    assert "unknown engine" in fails(capsys, "train", "c.yaml", "--dry-run", "rollout.engine=x")
    assert "not supported by native; use rollout.engine=sglang" in fails(
        capsys, "train", "c.yaml", "--dry-run", "rollout.server_weights=collective"
    )


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("T5ForConditionalGeneration", "T5Config"),
        ("BertForMaskedLM", "BertConfig"),
        ("BertForSequenceClassification", "BertConfig"),
        ("LlamaForSequenceClassification", "LlamaConfig"),
        ("ViTModel", "ViTConfig"),
    ],
)
def test_a_model_that_writes_no_text_is_refused_at_once(architecture, kind, folder, capsys):
    other = folder / "other"
    other.mkdir()
    getattr(transformers, kind)(architectures=[architecture]).save_pretrained(other)
    for file in (folder / "model").glob("tokenizer*"):
        (other / file.name).write_bytes(file.read_bytes())
    changes = ["model.path=other", "data.train=train.jsonl"]
    for more in (["train"], ["train", "--dry-run"], ["train", "--dry-run", "sft={}", "data.answer_field=ground_truth"]):
        command, *more = more
        error = fails(capsys, command, "c.yaml", *more, *changes)
        assert "model.path: other is a " in error and f"({architecture})" in error and "ForCausalLM" in error
    assert "not a causal language model" in fails(capsys, "generate", "other", "--prompt", "1")
    assert not (folder / "runs").exists()


def without_end(folder):
    """The tiny model with no end-of-sequence token anywhere."""
    other = folder / "endless"
    shutil.copytree(folder / "model", other)
    for file in other.glob("*.json"):
        tree = json.loads(file.read_text())
        named = tree.keys() & {"eos_token", "eos_token_id"}
        file.write_text(json.dumps(tree | dict.fromkeys(named)))
    return other


def test_no_end_of_sequence_is_said(folder, capsys, caplog):
    without_end(folder)
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    assert "end-of-sequence" not in caplog.text
    assert main(["train", "c.yaml", "--dry-run", "model.path=endless", "rollout.stop_token_ids=[3]"]) == 0
    assert "end-of-sequence" not in caplog.text
    assert main(["train", "c.yaml", "--dry-run", "model.path=endless"]) == 0
    assert "endless has no end-of-sequence token" in caplog.text and "rollout.stop_token_ids" in caplog.text
    (folder / "said.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    given = ["train", "c.yaml", "sft={}", "data.train=said.jsonl", "data.eval=null", "data.answer_field=null"]
    error = fails(capsys, *given, "model.path=endless")
    assert "no end-of-sequence token" in error and "eos_token_id in the model's config.json" in error


def test_training_on_what_is_held_out_is_said(folder, caplog):
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    assert "data.eval: 3 of 3 problems are in data.train as well (such as eval.jsonl:1)" in caplog.text
    caplog.clear()
    rows = [{"prompt": f"{k}+2=", "ground_truth": str(k + 2)} for k in range(3)]
    (folder / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["train", "c.yaml", "--dry-run", "data.eval=new.jsonl"]) == 0
    assert "data.eval" not in caplog.text


class Absent(BaseHTTPRequestHandler):
    """Has nothing at any path."""

    def do_GET(self) -> None:
        self.send_error(404)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_server_that_is_not_there_is_refused_at_once(folder, capsys, more):
    given = ["train", "c.yaml", *more, "rollout.engine=vllm-server"]
    for address in ("http://127.0.0.1:9", "http://127.0.0.1:99999", "http://nowhere.invalid:8000"):
        assert f"rollout.server: cannot connect to {address}: " in fails(capsys, *given, f"rollout.server={address}")
    with HTTPServer(("127.0.0.1", 0), Absent) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        said = fails(capsys, *given, f"rollout.server=http://127.0.0.1:{server.server_port}")
        server.shutdown()
    at_nothing = ["rollout.engine=vllm-server", "rollout.server=http://127.0.0.1:9"]
    assert main(["train", "c.yaml", "--dry-run", "rollout.source=pool", "data.eval=null", *at_nothing]) == 0
    assert "answers /health with status 404: not a server of rollout.engine=vllm-server" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["qwen2.5-1.5b-gsm8k-24gb", "stories260k-gsm8k"])
def test_the_gsm8k_configs_are_clean(name, shared_dir, capsys, caplog, tmp_path, pytestconfig):
    data = shared_dir / "data" / "gsm8k"
    config = pytestconfig.rootpath / "configs" / f"{name}.yaml"
    arguments = [f"data.train={data}/train.jsonl", f"data.eval={data}/test.jsonl"]
    model = shared_dir / "models/stories260k"
    if name.startswith("qwen"):
        model = make_tiny_model(tmp_path / "qwen", "qwen2", max_position_embeddings=32768)
    assert main(["train", str(config), "--dry-run", *arguments, f"model.path={model}"]) == 0
    used = int(re.search(r"train: (\d+) problems", capsys.readouterr().out)[1])
    left_out = int(re.search(r"train.jsonl: (\d+) prompts over \d+ tokens were dropped", caplog.text)[1])
    assert used + left_out == 7473 and used > 4000


def test_the_six_section_config_is_clean_and_answers_the_placement_keys(folder, capsys, pytestconfig):
    config = pytestconfig.rootpath / "configs" / "grpo_config.yaml"
    arguments = ["--config", str(config), "train_config.train_dataset=train.jsonl", "train_config.eval_dataset=null"]
    given = [
        "model_config.model_name_or_path=model",
        "data.max_prompt_tokens=40",
        "--dry-run",
        "generation_config.max_tokens=100",
    ]
    assert main(["train", *arguments, *given]) == 0
    output = capsys.readouterr()
    (note,) = [line for line in output.err.splitlines() if "model_num_gpus" in line]
    assert "no GPU" in note
    assert "128 rows, each of at most 140 tokens" in output.out


@pytest.mark.parametrize("name", ["quickstart", "quickstart_sft", "search_r1_ppo", "algorithms/kto", "pretrain_gpt2"])
def test_a_run_begins_with_what_is_non_defaults_in_ten_lines(name):
    lines = non_defaults(load_config(Path(__file__).parents[2] / f"configs/{name}.yaml"))
    assert 1 < len(lines) <= 10 and all(len(line) <= 160 for line in lines)
    if name == "quickstart_sft":
        assert not any(line.startswith(("algorithm", "rollout", "reward")) for line in lines)
