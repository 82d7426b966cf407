"""`atomrl doctor`, and the doctor in a run."""

from __future__ import annotations

import json

import pytest

from atomrl.cli.main import main
from atomrl.config import load_config
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
from tests.tracking.doctor.test_rules import rows


def write_metrics(folder, metrics, torn=""):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + torn)
    return str(folder)


def test_a_run_from_its_metrics(tmp_path, capsys):
    sick = write_metrics(tmp_path / "sick", rows(response_length_clip_ratio=0.3), torn='{"step": 21, "crit')
    assert main(["doctor", sick]) == 1
    text = capsys.readouterr().out
    assert "20 of ? steps" in text.partition("\n")[0]
    assert "doctor (step 5, warning): 30% of the completions are cut at the limit of 40 tokens" in text
    assert "rollout.max_completion_tokens" in text and "docs/guides/troubleshooting/length_limit.md" in text
    assert main(["doctor", write_metrics(tmp_path / "well", rows())]) == 0
    assert "the doctor found no problems" in capsys.readouterr().out


def test_the_error_that_ended_a_run_is_said_also_where_no_step_was_made(tmp_path, capsys):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "failure.json").write_text(json.dumps({"error": "RewardError: the service is down"}))
    for metrics in ([], rows()):
        assert main(["doctor", write_metrics(tmp_path / "r", metrics)]) == 1
        text = capsys.readouterr().out
        assert "an error ended the run: RewardError: the service is down" in text and "no problems" not in text


def test_a_folder_of_runs_is_answered_with_its_runs(tmp_path, capsys):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["doctor", str(tmp_path)]) == 2
    assert f"runs in it: {tmp_path / 'one'}" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "absent")]) == 2
    assert main(["doctor", write_metrics(tmp_path / "empty", [])]) == 2
    assert capsys.readouterr().err.count("is it the folder of a run?") == 2


@pytest.mark.parametrize("row", ["[1]", '{"loss": 1.0}', '{"step": 1, "actor/entropy": "high"}'])
def test_rows_of_something_else_are_a_mistake(row, tmp_path, capsys):
    folder = write_metrics(tmp_path / "r", rows(3), torn=row + "\n")
    assert main(["doctor", folder]) == 2
    assert "metrics.jsonl, row 4, is not a row of a run" in capsys.readouterr().err


def test_doctor_describes_this_machine_without_secrets(capsys, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, "s3cr3t-marker")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "transformers", "peft", "cores", "GiB available", "engine", "native", "dtype", "kernels"):
        assert word in text
    assert "s3cr3t" not in text


def test_a_broken_installation_has_an_exit_code(capsys, monkeypatch):
    from atomrl.tools import machine

    monkeypatch.setattr(machine, "CORE", ("torch", "no-such-package"))
    assert main(["doctor"]) == 1
    assert "broken: not installed (pip install no-such-package)" in capsys.readouterr().out


@pytest.fixture
def config(tmp_path):
    return load_config(
        {
            "run_name": "r",
            "output_dir": str(tmp_path),
            "model": {"path": "m"},
            "data": {"train": "d"},
            "train": {"steps": 12},
        }
    )


def log(config, metrics, resume=False):
    with Recorder(config, RunDirectory.create(config, resume)) as record:
        for row in metrics:
            record.log(row["step"], {name: value for name, value in row.items() if name != "step"})
    path = config.run_dir / "findings.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None


def test_in_a_run_it_is_said_once_and_kept(config, capsys):
    [finding] = log(config, rows(12, response_length_clip_ratio=0.3))
    page = "docs/guides/troubleshooting/length_limit.md"
    assert (finding["id"], finding["step"], finding["page"]) == ("length_limit", 5, page)
    text = capsys.readouterr().err
    assert text.count("are cut at the limit") == 1
    assert "the doctor found: length_limit (step 5); `atomrl doctor" in text


def test_a_healthy_run_has_no_file_and_no_line(config, capsys):
    assert log(config, rows(12)) is None
    assert "doctor" not in capsys.readouterr().err


def test_a_resumed_run_does_not_say_it_again(config, capsys):
    sick = rows(12, response_length_clip_ratio=0.3)
    directory = RunDirectory.create(config)
    with Recorder(config, directory) as record:
        for row in sick[:7]:
            record.log(row["step"], {name: value for name, value in row.items() if name != "step"})
            if row["step"] == 6:
                with record.checkpoint(6) as folder:
                    (folder / "weights").write_text("w")
    capsys.readouterr()
    assert [finding["step"] for finding in log(config, sick[6:], resume=True)] == [5]
    text = capsys.readouterr().err
    assert "are cut at the limit" not in text and "the doctor found: length_limit (step 5)" in text
