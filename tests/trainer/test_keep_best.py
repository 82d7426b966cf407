"""`checkpoint.keep_best` by a metric of evaluations: the last one counts, and a run says before it starts where there
can be no best checkpoint."""

import json

import pytest

from atomrl.cli.main import main

ROWS = [{"prompt": f"{k}+1=", "completion": f"{k + 1}"} for k in range(16)]
HELD_OUT = [{"prompt": f"{k}+2=", "completion": f"{k + 2}"} for k in range(8)]
CONFIG = {
    "run_name": "b",
    "model": {"path": "model", "dtype": "float32", "device": "cpu"},
    "data": {"train": "rows.jsonl", "eval": "held.jsonl"},
    "sft": {},
    "train": {"steps": 4, "rows_per_update": 8, "learning_rate": 3e-3},
    "eval": {"every_steps": 2},
    "checkpoint": {"every_steps": 2, "keep": 1, "keep_best": "eval/nll_per_token", "best_is": "min"},
}


@pytest.fixture
def folder(working_directory, monkeypatch):
    monkeypatch.setattr("atomrl.tracking.reading.plots.draw_curves", lambda *args: None)
    return working_directory(CONFIG, rows=ROWS, held=HELD_OUT)


def losses(folder):
    rows = [json.loads(line) for line in (folder / "runs/b/metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval/nll_per_token"] for row in rows if "eval/nll_per_token" in row}


@pytest.mark.parametrize("best_is, best", [("min", 4), ("max", 2)])
def test_the_last_evaluation_counts_among_the_best(folder, best_is, best):
    assert main(["train", "c.yaml", f"checkpoint.best_is={best_is}"]) == 0
    assert losses(folder)[4] < losses(folder)[2]
    run = folder / "runs/b"
    assert (run / "best").resolve().name == f"step_{best:06}"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_000004", f"step_{best:06}"}


def test_the_last_evaluation_alone_gives_a_best(folder, caplog):
    assert main(["train", "c.yaml", "eval.every_steps=0", "eval.before=false"]) == 0
    assert (folder / "runs/b/best").resolve().name == "step_000004"
    assert "no step has the metric" not in caplog.text


@pytest.mark.parametrize(
    "settings, message",
    [
        (["eval.every_steps=3", "eval.after=false"], "no step is both evaluated and saved"),
        (["checkpoint.every_steps=0", "eval.after=false"], "no step is both evaluated and saved"),
        (["eval.every_steps=0", "eval.after=false"], "eval.every_steps=0 with eval.after=false"),
        (["data.eval=null"], "set data.eval"),
    ],
)
def test_a_best_that_cannot_be_is_refused_before_the_run(folder, capsys, settings, message):
    assert main(["train", "c.yaml", *settings]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_evaluations_without_a_checkpoint_are_counted_before_the_run(folder, caplog):
    settings = ["train.steps=8", "eval.every_steps=3", "checkpoint.every_steps=4"]
    assert main(["train", "c.yaml", "--dry-run", *settings]) == 0
    assert "2 of 3 evaluations (the first after step 3) are at steps without a checkpoint" in caplog.text
    caplog.clear()
    assert main(["train", "c.yaml", "--dry-run", "train.steps=8", "eval.every_steps=4"]) == 0
    assert "checkpoint.keep_best" not in caplog.text
