"""The log of a run is in its folder, whoever started it."""

import io
import logging

import pytest

from atomrl.tracking.console import ProgressBar
from atomrl.tracking.reading.state import LOG
from atomrl.tracking.run_directory import RunDirectory
from atomrl.tracking.run_log import RunLog
from tests.tracking.helpers import make_config

log = logging.getLogger("atomrl.somewhere")


def test_start_warnings_and_end_are_kept_and_a_resumed_run_continues(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["atomrl", "train", "c.yaml"])
    with RunDirectory.create(make_config(tmp_path)) as run:
        log.warning("step %d is slow", 3)
        log.info("nothing that a terminal shows")
        run.log(1, {"a": 1.0})
        run.finish({"finished": False, "steps": 3})
    log.warning("of no run")
    with pytest.raises(ValueError, match="no room"), RunDirectory.create(make_config(tmp_path), resume=True):
        raise ValueError("no room")
    text = (run.path / LOG).read_text()
    assert [line.split(" ", 2)[2] for line in text.splitlines()[:4]] == [
        "atomrl train c.yaml",
        "warning: step 3 is slow",
        'summary: {"finished": false, "steps": 3}',
        f"resume: {run.path} continues from the start: no checkpoint",
    ]
    assert "nothing" not in text and "of no run" not in text
    assert text.splitlines()[-1] == "ValueError: no room" and text.count("atomrl train c.yaml") == 2


@pytest.mark.parametrize("live", [False, True])
def test_steps_and_notes_are_lines_of_it_also_beside_a_live_bar(tmp_path, monkeypatch, live):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: live)
    with ProgressBar(2, stream=stream, log=RunLog(tmp_path / LOG).note) as progress:
        progress.update(1, {"critic/score/mean": 0.25})
        progress.note("held-out [0.5]")
    lines = [line.split(" ", 2)[2] for line in (tmp_path / LOG).read_text().splitlines()]
    assert lines[0].startswith("step 1/2  reward 0.250  ETA ") and lines[1] == "held-out [0.5]"


def test_warnings_are_on_the_terminal_as_without_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with RunLog(tmp_path / LOG):
        log.warning("slow")
    log.warning("slower")
    assert capsys.readouterr().err == "slow\nslower\n"


def test_it_holds_no_secret_and_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-secret")
    RunLog(tmp_path / LOG).note("asked with hunter2-secret: a token is 4 characters")
    assert "asked with [redacted]: a token is 4 characters" in (tmp_path / LOG).read_text()
    RunLog(tmp_path / "gone" / LOG).note("nowhere to write")
    RunLog(tmp_path / "replaced.txt", lambda: False).note("the folder is of another run")
    assert not (tmp_path / "replaced.txt").exists()
