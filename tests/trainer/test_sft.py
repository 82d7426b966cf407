"""SFT and its like on a tiny random model: held-out loss, temperature, layouts."""

import json

import pytest
import yaml

import atomrl
from atomrl.cli.main import main
from tests.tiny import make_tiny_model

ROWS = [
    {"prompt": f"{k}+1=", "completion": f"{k + 1}", "chosen": f"{k + 1}", "rejected": f"{k + 3}", "label": k % 2 == 0}
    for k in range(12)
]
CONFIG = {
    "run_name": "first",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "rows.jsonl"},
    "train": {"steps": 4, "rows_per_update": 6, "learning_rate": 3e-3},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atomrl.tracking.reading.plots.draw_curves", lambda *args: None)
    make_tiny_model(tmp_path / "model", scale=0.1)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, section in (("sft", {"sft": {}}), ("dpo", {"preference": {}, "algorithm": {"name": "dpo"}}),
                          ("kto", {"preference": {}, "algorithm": {"name": "kto"}})):  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(CONFIG | section))
    return tmp_path


def metrics(folder, name):
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_held_out_loss_before_between_and_after(folder, capsys):
    assert main(["train", "sft.yaml", "data.eval=rows.jsonl", "eval.every_steps=2", "train.steps=20"]) == 0
    summary = json.loads((folder / "runs/first/summary.json").read_text())
    assert summary["nll_per_token_after"] < summary["nll_per_token_before"] - 0.5
    rows = [row for row in metrics(folder, "first") if "eval/nll_per_token" in row]
    assert [row["step"] for row in rows] == [0, *range(2, 21, 2)]
    capsys.readouterr()
    assert main(["train", "sft.yaml", "run_name=missing", "data.eval=missing.jsonl"]) == 2
    assert "missing.jsonl does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_rows_that_are_trained_on_and_held_out_are_warned_of(folder, name, caplog):
    other = [{**row, "completion": "9", "chosen": "9"} for row in ROWS[:3]]  # of the same prompts
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*other, ROWS[3]]))
    assert main(["train", f"{name}.yaml", "data.eval=held.jsonl", "--dry-run"]) == 0
    assert "data.eval: 1 of 4 problems are in data.train as well" in caplog.text


def test_held_out_data_that_are_missing_are_found_before_the_training_data_are_read(folder, capsys):
    assert main(["train", "sft.yaml", "data.train=none.jsonl", "data.eval=missing.jsonl"]) == 2
    assert "missing.jsonl does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "metric"), [("sft", "sft/nll_per_token"), ("dpo", "logps/chosen"),
                                                 ("dpo", "rewards/margins")])  # fmt: skip
def test_the_temperature_of_rollouts_is_none_of_theirs(folder, kind, metric):
    losses = []
    for temperature in (1.0, 0.7):
        name = f"at-{temperature}"
        more = ["eval.before=false", "eval.after=false"]
        assert main(["train", f"{kind}.yaml", f"run_name={name}", f"rollout.temperature={temperature}", *more]) == 0
        losses.append([row[metric] for row in metrics(folder, name)])
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_conversations_lower_the_loss(folder):
    lines = [{"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"]},
                           {"role": "user", "content": "and?"}, {"role": "assistant", "content": "done"}]}
             for r in ROWS]  # fmt: skip
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert main(["train", "sft.yaml", "data.train=chat.jsonl", "train.steps=20"]) == 0
    rows = metrics(folder, "first")
    assert rows[-1]["sft/nll_per_token"] < rows[0]["sft/nll_per_token"] - 0.5


def test_a_size_of_a_generator_does_not_bite_on_a_file(folder):
    lines = "".join(json.dumps({key: row[key] for key in ("prompt", "completion", "label")}) + "\n" for row in ROWS)
    (folder / "labels.jsonl").write_text(lines)
    assert main(["train", "kto.yaml", "data.train=labels.jsonl", "data.train_size=20000", "train.steps=1"]) == 0


def test_a_run_from_python_calls_back(folder):
    seen = []
    summary = atomrl.train(
        "sft.yaml", ["train.steps=2"], callbacks=[lambda step, metrics: seen.append((step, metrics))]
    )
    assert summary["steps"] == 2 and [step for step, _ in seen] == [1, 2]
    assert all("sft/nll_per_token" in metrics for _, metrics in seen)
