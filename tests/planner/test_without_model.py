"""A dry run and a plan without the model, which is on the hub, or without the data: all that is here is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atomrl.cli.main import main

KINDS = {
    "rl": ({"prompt": "2+2=", "ground_truth": 4}, "train.total_epochs: 8"),
    "sft": ({"prompt": "2+2=", "completion": "4"}, "sft: {}"),
    "dpo": ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "algorithm: {name: dpo}"),
    "reward-model": ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "algorithm: {name: reward_model}"),
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def write(kind, row=None, more=""):
        usual, own = KINDS[kind]
        (tmp_path / "rows.jsonl").write_text(json.dumps(row or usual) + "\n")
        given = ["run_name: r", "model: {path: nobody/nothing-7b}", "data: {train: rows.jsonl}"]
        own = own.replace("train.total_epochs: 8", "train: {total_epochs: 8}")
        (tmp_path / "c.yaml").write_text("\n".join([*given, own, more]))

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_data_and_batches_are_checked_without_it(config, kind, capsys):
    config(kind)
    for command, code in ((["train", "c.yaml", "--dry-run"], 0), (["plan", "c.yaml"], 2)):
        assert main(command) == code  # a plan that cannot say whether it fits does not pass for one that does
        said = capsys.readouterr().out
        assert "model 'nobody/nothing-7b' is not a folder on this machine" in said and "not checked without it" in said
        assert "train: 1 problems" in said and "a step: " in said


@pytest.mark.parametrize(("row", "more", "words"), [
    ({"prompt": "2+2="}, "", "rows.jsonl:1: field 'ground_truth' is missing"),
    ({"prompt": "2+2=", "completion": "4"}, "", "demonstrations are trained on with `sft: {}`"),
    ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "", "preferences are trained on with algorithm.name=dpo"),
    (None, "reward: {functions: [strict_maths]}", "unknown reward 'strict_maths'"),
    (None, "environment: {function: serch_r1}", "unknown environment 'serch_r1'"),
    (None, "tools: [./no_file.py:f]", "no_file.py"),
    (None, "curriculum: {gates: [{type: custom, function: ./no_gate.py:G}]}", "no_gate.py"),
])  # fmt: skip
def test_mistakes_are_reported_without_the_model(config, row, more, words, capsys):
    config("rl", row, more)
    assert main(["train", "c.yaml", "--dry-run"]) == 2
    assert words in capsys.readouterr().err


def test_a_run_of_it_is_refused(config, capsys):
    config("rl")
    assert main(["train", "c.yaml"]) == 2 and main(["plan", "c.yaml", "--probe"]) == 2
    assert capsys.readouterr().err.count("model.path: model 'nobody/nothing-7b' is not a folder on this machine") == 2


def test_a_folder_that_is_not_there_is_an_error(config, capsys):
    config("rl")
    assert main(["train", "c.yaml", "--dry-run", "model.path=./nothing"]) == 2
    assert "model folder ./nothing does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_data_files_that_are_absent_are_warned_of(config, kind, model, capsys, caplog):
    config(kind)
    given = ["c.yaml", f"model.path={model}", "data.train=absent.jsonl", "data.eval=rows.jsonl"]
    for command in (["train", *given, "--dry-run"], ["plan", *given]):
        caplog.clear()
        assert main(command) == 0
        said = capsys.readouterr().out
        assert "data.train: data file absent.jsonl does not exist" in caplog.text
        assert "train: not on this machine" in said and "eval: 1 problems" in said
        assert "a step: " in said and ("trainer weights" in said or "fits" in said)
    assert main(["train", *given]) == 2
    assert "error: data.train: data file absent.jsonl does not exist" in capsys.readouterr().err


def test_settings_that_are_wrong_are_refused_without_the_data(config, model, capsys):
    config("rl")
    given = ["train", "c.yaml", "--dry-run", f"model.path={model}", "data.train=absent.jsonl"]
    assert main([*given, "checkpoint.keep_best=eval/accuracy"]) == 2
    assert "set data.eval" in capsys.readouterr().err


def test_a_folder_of_tokens_that_is_absent_is_warned_of(config, capsys, caplog):
    config("rl")
    Path("c.yaml").write_text("run_name: r\ndata: {train: absent}\npretrain: {gpt: {}}\n")
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    assert "data.train: absent does not exist; create it" in caplog.text and "windows x" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "absent"), [
    ("sft", "rollout reward algorithm preference critic"), ("dpo", "rollout reward critic sft"),
    ("reward-model", "rollout reward critic sft"), ("rl", "sft preference"),
])  # fmt: skip
def test_a_dry_run_and_a_start_show_the_sections_of_their_kind(config, kind, absent, model, capsys, caplog):
    config(kind)
    given = ["train", "c.yaml", f"model.path={model}", "train.rows_per_update=1", "train.steps=1"]
    given += ["train.total_epochs=null", "rollout.completions_per_prompt=2", "rollout.prompts_per_step=1"]
    for more in (["--dry-run"], ["--verbose"]):
        caplog.clear()
        main([*given, *more])
        shown = capsys.readouterr()
        assert "train: {" in shown.err
        assert not [name for name in absent.split() if f"\n{name}: " in shown.err]
        assert ("key-value cache" in shown.out + shown.err) == (kind == "rl" and more == ["--dry-run"])
        assert ("rollout.completions_per_prompt: without effect" in caplog.text) == (kind != "rl")
