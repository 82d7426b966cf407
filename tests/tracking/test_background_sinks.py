"""Trackers that raise, hang or are slow: training neither waits for them nor ends with them."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atomrl.tracking import sinks
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
from tests.tracking.helpers import make_config, make_scored

ROOT = Path(__file__).parents[2]


class Hanging:
    """Until `released` is set, its first call does not return."""

    made = None

    def __init__(self, config, run):
        self.released, self.steps = threading.Event(), []
        Hanging.made = self

    def log(self, metrics, step):
        self.released.wait(600)
        self.steps.append(step)

    def log_samples(self, rows, step):
        self.log({}, step)

    def close(self):
        pass


def record(tmp_path, monkeypatch, kind, steps, patience_s=0.3):
    """The recorder's sink after so many steps of a run with one."""
    monkeypatch.setitem(sinks.SINKS, "wandb", kind)
    monkeypatch.setattr(sinks, "PATIENCE_S", patience_s)
    config = make_config(tmp_path, tracking={"sinks": ["wandb"]})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        for step in range(1, steps + 1):
            recorder.log(step, {"a": 1.0})
            recorder.log_rollouts(step, make_scored(), {})
        (sink,) = recorder.sinks
    return sink


def test_a_hanging_sink_is_abandoned(tmp_path, monkeypatch, capsys):
    sink = record(tmp_path, monkeypatch, Hanging, steps=200)
    assert not Hanging.made.steps, "nobody waited for its first call"
    said = capsys.readouterr().err
    assert "wandb hangs and is abandoned" in said
    under_way = 400 - sinks.MAX_WAITING - sink.dropped
    assert under_way in (0, 1), "one if its thread came to it before the others had come"
    assert f"{sink.dropped} calls were dropped" in said
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 200
    Hanging.made.released.set()


def test_a_slow_sink_is_waited_for(tmp_path, monkeypatch, capsys):
    class Slow(Hanging):
        def log(self, metrics, step):
            time.sleep(0.02)
            self.steps.append(step)

    before = set(threading.enumerate())
    record(tmp_path, monkeypatch, Slow, steps=30, patience_s=120)
    assert Hanging.made.steps == [step for step in range(1, 31) for _ in range(2)]
    assert set(threading.enumerate()) <= before and "left" not in capsys.readouterr().err


@pytest.mark.parametrize("method", ["log", "log_samples", "close"])
def test_a_failing_sink_is_named_once(tmp_path, monkeypatch, capsys, method):
    def broken(*arguments):
        raise ConnectionError("offline")

    kind = type("Broken", (Hanging,), {"log": lambda *a: None, "log_samples": lambda *a: None, method: broken})
    record(tmp_path, monkeypatch, kind, steps=50, patience_s=60)
    assert capsys.readouterr().err.count("wandb failed and is disabled: offline") == 1
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 50


def test_a_hanging_sink_does_not_keep_the_process(tmp_path):
    script = f"""
from tests.tracking.test_background_sinks import *
monkey = pytest.MonkeyPatch()
record(Path({str(tmp_path)!r}), monkey, Hanging, 3)
print("done", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)  # would hang 600 s
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


def test_metrics_are_those_of_the_time_of_the_call(tmp_path, monkeypatch):
    """The loop may go on with its dict while the sink has not come to it."""
    seen = []

    class Late(Hanging):
        def log(self, metrics, step):
            time.sleep(0.1)
            seen.append(dict(metrics))

    monkeypatch.setitem(sinks.SINKS, "wandb", Late)
    config = make_config(tmp_path, tracking={"sinks": ["wandb"]})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        metrics = {"a": 1.0}
        recorder.log(1, metrics)
        metrics["a"] = 2.0
    assert seen == [{"a": 1.0}]


def test_no_secret_is_sent(tmp_path, monkeypatch, capsys):
    sent = []

    class Told(Hanging):
        def log(self, metrics, step):
            pass

        def log_samples(self, rows, step):
            sent.extend(rows)
            raise ConnectionError("401 for key abcd-1234-efgh")

    monkeypatch.setenv("JUDGE_API_KEY", "abcd-1234-efgh")
    monkeypatch.setitem(sinks.SINKS, "wandb", Told)
    config = make_config(tmp_path, tracking={"sinks": ["wandb"]})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        recorder.log_rollouts(1, [replace(item, text="my key is abcd-1234-efgh") for item in make_scored()], {})
    assert sent and {row["completion"] for row in sent} == {"my key is [redacted]"}
    assert "disabled: 401 for key [redacted]" in capsys.readouterr().err
