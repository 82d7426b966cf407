"""Preferences on a tiny random model: what a run leaves, resuming, and mistakes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from atomrl.algorithms import PREFERENCES
from atomrl.backends.local import LocalBackend
from atomrl.cli.main import main
from atomrl.config import load_config, merge_trees
from atomrl.trainer import Options, prepare_run

PAIRS = [{"prompt": f"{k}+1=", "chosen": f"{k + 1}", "rejected": f"{k + 3} or so"} for k in range(12)]
LABELS = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in PAIRS
    for name in ("chosen", "rejected")
]
CONFIG = {
    "run_name": "first",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "pairs.jsonl", "eval": "pairs.jsonl"},
    "preference": {},
    "algorithm": {"name": "dpo"},
    "train": {"steps": 4, "rows_per_update": 6, "learning_rate": 3e-3},
}


@pytest.fixture
def folder(working_directory, monkeypatch):
    monkeypatch.setattr("atomrl.tracking.reading.plots.draw_curves", lambda *args: None)
    return working_directory(CONFIG, pairs=PAIRS, labels=LABELS)


def preferences(config, resume=False):
    return prepare_run(config).execute(Options(resume=resume))


def fails(capsys, *arguments):
    capsys.readouterr()
    assert main(["train", "c.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_is_planned_by_a_probe(folder, capsys):
    assert main(["plan", "c.yaml", "--probe"]) == 0
    assert "measured on a few small steps" in capsys.readouterr().out


def test_what_a_run_leaves(folder, capsys):
    assert main(["train", "c.yaml", "train.steps=30", "eval.every_steps=20", "train.schedule=cosine"]) == 0
    output = capsys.readouterr()
    run = folder / "runs" / "first"
    summary = json.loads((run / "summary.json").read_text())
    assert json.loads(output.out) == summary and summary["finished"] and (run / "model" / "config.json").exists()
    assert summary["preference_accuracy_before"] == 0.5 and summary["preference_accuracy_after"] > 0.9
    assert "step 20: held-out accuracy: preference " in output.err
    rows = metrics(run)
    evaluated = [row["step"] for row in rows if "eval/preference_accuracy" in row]
    assert evaluated == [0, 20, 30] and rows[0]["eval/preferences"] == 12
    trained = [row for row in rows if "rewards/margins" in row]
    assert len(trained) == 30 and trained[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert trained[-1]["rewards/margins"] > 0.5 and trained[-1]["rewards/accuracies"] == 1
    assert trained[0]["preference/loss"] == pytest.approx(0.6931, abs=1e-3)
    (line, *_) = (run / "rollouts" / "step_000030" / "eval.jsonl").read_text().splitlines()
    assert json.loads(line)["rewards"][0] > json.loads(line)["rewards"][1]


@pytest.mark.parametrize(("name", "data"), [("dpo", "pairs"), ("bco", "labels"), ("kto", "labels")])
def test_a_run_that_was_killed_continues_as_if_it_had_not_been(folder, monkeypatch, name, data):
    """The error stands for a kill: it comes in the midst of an update, of which nothing is kept."""
    changes = {
        "algorithm": {"name": name},
        "data": {"train": f"{data}.jsonl", "eval": f"{data}.jsonl"},
        "checkpoint": {"every_steps": 2},
    }
    whole = load_config(merge_trees(CONFIG, changes))
    preferences(whole)
    torn = load_config(merge_trees(CONFIG, {**changes, "run_name": "torn"}))
    step, calls = LocalBackend.train_step, []

    def failing(self, batch, algorithm):
        calls.append(step(self, batch, algorithm))
        if len(calls) == 4:
            raise RuntimeError("killed")
        return calls[-1]

    monkeypatch.setattr(LocalBackend, "train_step", failing)
    with pytest.raises(RuntimeError, match="killed"):
        preferences(torn)
    monkeypatch.setattr(LocalBackend, "train_step", step)
    assert preferences(torn, resume=True)["finished"] and metrics(torn.run_dir)[-1]["step"] == 4
    ours, theirs = (load_file(config.run_dir / "model" / "model.safetensors") for config in (whole, torn))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    keys = ("preference/loss", "eval/preference_accuracy", "preference/reference")
    pairs = zip(metrics(whole.run_dir), metrics(torn.run_dir), strict=True)
    assert all(a.get(key) == b.get(key) for a, b in pairs for key in keys)


@pytest.mark.parametrize("name", [name for name, objective in PREFERENCES.items() if not objective.online])
def test_every_method_trains(folder, name):
    config = load_config(
        merge_trees(CONFIG, {"algorithm": {"name": name}, "train": {"steps": 1}, "eval": {"before": False}})
    )
    assert preferences(config)["finished"]
    (row, after) = metrics(config.run_dir)
    assert (
        row["actor/grad_norm"] > 0
        and "actor/skipped_updates" not in row
        and 0 <= after["eval/preference_accuracy"] <= 1
    )


def test_labels_are_held_out_too(folder):
    config = load_config(
        merge_trees(
            CONFIG, {"algorithm": {"name": "kto"}, "data": {"train": "labels.jsonl", "eval": "labels.jsonl"},
                     "train": {"steps": 20, "rows_per_update": 12}}
        )
    )  # fmt: skip
    summary = preferences(config)
    assert summary["preference_accuracy_before"] == 0.5 and summary["preference_accuracy_after"] > 0.7
    assert metrics(config.run_dir)[0]["eval/preferences"] == 144, "every good one against every bad one"


def test_mistakes_of_preference_runs_are_named(folder, capsys):
    assert "labels.jsonl:1: a completion with a label, but dpo needs pairs" in fails(capsys, "data.train=labels.jsonl")
    assert "algorithm.name=grpo is trained on rollouts" in fails(capsys, "algorithm.name=grpo")
    assert "did you mean 'hinge'" in fails(capsys, "algorithm.loss=hing")
    assert "train.rows_per_update must be at least 2" in fails(capsys, "algorithm.name=kto", "train.rows_per_update=1")
    (folder / "bad.jsonl").write_text(json.dumps(PAIRS[0]) + '\n{"prompt": "a", "chosen": "b", "rejected": "b"}\n')
    assert "bad.jsonl:2: the chosen and the rejected completion are the same" in fails(capsys, "data.train=bad.jsonl")
    assert "sft and preference are 2 kinds of run" in fails(capsys, "sft={}")
    assert main(["train", "c.yaml", "run_name=skips", "data.train=bad.jsonl", "data.on_bad_row=skip", "data.eval=null",
                 "train.steps=1"]) == 0  # fmt: skip
    (folder / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": "a", "chosen": "b " * 5000, "rejected": "c"}) + "\n" for _ in range(2))
    )
    assert "preferences are longer than" in fails(capsys, "data.train=long.jsonl", "run_name=long")
