"""Given rows of which `train.max_row_tokens` leaves nothing to learn: counted, and refused where all are; and a run
that makes no update does not end as a success."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from atomrl.cli.main import main
from atomrl.tracking.doctor import diagnose

CONFIG = {
    "run_name": "c",
    "model": {"path": "model", "dtype": "float32", "device": "cpu"},
    "data": {"train": "rows.jsonl"},
    "train": {"steps": 2, "rows_per_update": 4, "learning_rate": 1e-3, "max_row_tokens": 16},
}
KINDS = {
    "sft": {"sft": {}},
    "dpo": {"preference": {}, "algorithm": {"name": "dpo"}},
    "kto": {"preference": {}, "algorithm": {"name": "kto"}},
    "reward-model": {"preference": {}, "algorithm": {"name": "reward_model"}},
}
LONG, SHORT, BEGIN = "p" * 40, "p", "x" * 20


def row(prompt, good, bad):
    return {"prompt": prompt, "completion": good, "chosen": good, "rejected": bad}


def labelled(*rows):
    return [{"prompt": r["prompt"], "completion": r[side], "label": side == "chosen"} for r in rows for side in
            ("chosen", "rejected")]  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request, working_directory, monkeypatch):
    monkeypatch.setattr("atomrl.tracking.reading.plots.draw_curves", lambda *args: None)
    name = request.param
    return lambda *rows: (working_directory(CONFIG | KINDS[name], rows=rows), name)


def test_rows_of_which_nothing_is_left_are_counted(kind, caplog):
    folder, name = kind(row(LONG, "good", "bad"), *(row(SHORT + str(k), "good", "bad") for k in range(4)))
    status = main(["train", "c.yaml"])
    if name == "reward-model":  # learns the whole row, and these differ in nothing
        assert "1 of 5 preferences are the same tokens, chosen and rejected within" in caplog.text
    else:
        assert "have no token to train on within train.max_row_tokens=16 (such as rows.jsonl:1)" in caplog.text
    assert status == 0 and json.loads((folder / "runs/c/summary.json").read_text())["updates"] == 2


def test_rows_of_which_nothing_is_left_are_refused_where_all_are(kind, capsys):
    kind(*(row(LONG + str(k), "good", "bad") for k in range(4)))
    assert main(["train", "c.yaml", "--dry-run"]) == 2
    assert "4 of 4" in (said := capsys.readouterr().err) and "prompt plus completion" in said


def test_pairs_that_the_cut_makes_equal(kind, caplog, capsys):
    same, other = [row(f"{k}", BEGIN + "good", BEGIN + "bad") for k in range(4)], row("5", "good", "bad")
    folder, name = kind(*same, other)
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    if name == "sft":
        assert "train.max_row_tokens=16: 4 of 5 demonstrations are longer and are truncated" in caplog.text
        return
    assert "4 of 5 preferences are the same tokens, chosen and rejected" in caplog.text
    (folder / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in same))
    assert main(["train", "c.yaml", "--dry-run"]) == 2
    assert "4 of 4 preferences are the same tokens" in capsys.readouterr().err


def test_labelled_completions_without_a_token_are_counted(working_directory, caplog):
    rows = labelled(row(LONG, "good", "bad"), row("1", "good", "bad"), row("2", "good", "bad"))
    working_directory(CONFIG | KINDS["kto"], rows=rows)
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    assert "2 of 6 preferences have no token to train on" in caplog.text


def test_windows_are_not_cut(working_directory, capsys):
    working_directory(CONFIG | {"pretrain": {}, "data": {"train": "tokens"}})
    assert main(["train", "c.yaml"]) == 2
    assert "train.max_row_tokens: rows are windows of pretrain.window_tokens" in capsys.readouterr().err


def test_a_run_without_an_update_says_so_and_fails(working_directory, monkeypatch, caplog, model):
    monkeypatch.setattr("atomrl.tracking.reading.plots.draw_curves", lambda *args: None)
    folder = working_directory(CONFIG | KINDS["sft"], rows=[row(str(k), "4", "5") for k in range(4)])
    (folder / "broken").mkdir()
    for file in model.iterdir():
        (folder / "broken" / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.inf)
    save_file(weights, folder / "broken" / "model.safetensors", metadata={"format": "pt"})
    assert main(["train", "c.yaml", "model.path=broken"]) == 1
    assert "none of the 2 steps made an update (2 updates had a non-finite gradient)" in caplog.text
    assert json.loads((folder / "runs/c/summary.json").read_text())["updates"] == 0


def test_the_doctor_knows_given_data_without_a_gradient():
    rows = [{"step": 1, "sft/nll_per_token": 2.0, "actor/grad_norm": 0.0, "actor/empty_updates": 1.0}]
    assert [finding.id for finding in diagnose(rows)] == ["no_updates"]
    assert not diagnose([{**rows[0], "actor/grad_norm": 0.5}, {**rows[0], "step": 2}])
