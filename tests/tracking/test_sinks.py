"""Trackers get the metrics of a run, here without a network; one that fails is named."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest

from atomrl.config import ConfigError
from atomrl.tracking import sinks
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
from tests.tracking.helpers import make_config, make_scored


def test_tensorboard_has_scalars_and_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(tmp_path, tracking={"sinks": ["tensorboard"]})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        recorder.log(1, {"critic/score/mean": 0.25})
        recorder.log(2, {"critic/score/mean": 0.5})
        recorder.log_rollouts(2, make_scored(), {})
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert "samples/0/text_summary" in events.Tags()["tensors"]


def test_wandb_gets_the_metrics_offline(tmp_path):
    """In a process of its own: wandb keeps global state and a service."""
    script = f"""
from tests.tracking.helpers import make_config, make_scored
from atomrl.tracking import sinks
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
sinks.PATIENCE_S = 600.0  # a busy machine takes its time to import it
config = make_config({str(tmp_path)!r}, tracking={{"sinks": ["wandb"], "wandb_tags": ["t"]}})
with Recorder(config, RunDirectory.create(config)) as recorder:
    recorder.log_rollouts(1, make_scored(), {{0: 1.0}})
    recorder.log(1, {{"critic/score/mean": 0.25}})
"""
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    (run,) = (tmp_path / "r" / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    (table,) = run.rglob("*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == list(sinks.TABLE_COLUMNS)
    assert content["data"] == [
        ["1+1=", "<b>", "2", 1.0, 1.0, "stop"],
        ["1+1=", "é", "2", 0.0, None, "length"],
        ["user: hi\n", "é", "x", 0.5, None, "length"],
        ["user: hi\n", "<b>", "x", None, None, "stop"],
    ]


def test_mlflow_gets_the_metrics_offline(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="MLflow is not installed: pip install 'atomrl[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(sinks, "PATIENCE_S", 600.0)  # which a busy machine takes to make its database
    config = make_config(tmp_path, tracking={"sinks": ["mlflow"]})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        recorder.log_rollouts(1, make_scored(), {0: 1.0})
        recorder.log(1, {"critic/score/mean": 0.25, "val-core/sums/acc/mean@1": 0.5})
        recorder.log(2, {"critic/score/mean": 0.75})
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/r/mlflow/mlflow.db")
    run = (tmp_path / "r/mlflow_run_id").read_text().strip()
    history = client.get_metric_history(run, "critic/score/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.75)]
    logged = client.get_run(run)
    assert logged.data.metrics["val-core/sums/acc/mean_at_1"] == 0.5 and logged.info.status == "FINISHED"
    assert logged.data.params["train.learning_rate"] == str(config.train.learning_rate)
    [samples] = (tmp_path / "r/mlflow/files").rglob("step_000001.json")
    assert json.loads(samples.read_text())["samples"][0]["completion"] == "<b>"


def test_trackio_gets_the_metrics_offline(tmp_path):
    """In a process of its own: it reads where its store is when it is imported."""
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'atomrl[trackio]'")
    script = f"""
from tests.tracking.helpers import make_config, make_scored
from atomrl.tracking import sinks
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
sinks.PATIENCE_S = 600.0  # a busy machine takes its time to import it
config = make_config({str(tmp_path)!r}, tracking={{"sinks": ["trackio"]}})
with Recorder(config, RunDirectory.create(config)) as recorder:
    recorder.log_rollouts(1, make_scored(), {{0: 1.0}})
    recorder.log(1, {{"critic/score/mean": 0.25}})
"""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "store"), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    assert done.stdout == ""
    with sqlite3.connect(tmp_path / "store" / "atomrl.db") as store:
        logged = [json.loads(row[0]) for row in store.execute("SELECT metrics FROM metrics")]
    assert any(row.get("critic/score/mean") == 0.25 for row in logged) and any("samples" in row for row in logged)


ABSENT = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard", "mlflow": "sqlalchemy", "trackio": "trackio"}


@pytest.mark.parametrize("name, module", ABSENT.items())
def test_an_absent_library_is_an_error_that_names_the_extra(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    config = make_config(tmp_path, tracking={"sinks": [name]})
    with pytest.raises(ConfigError, match=rf"pip install 'atomrl\[{name}\]'"):
        Recorder(config, RunDirectory.create(config))


def test_a_sink_that_fails_is_named_and_the_run_continues(tmp_path, monkeypatch, capsys):
    class Broken:
        def __init__(self, config, run):
            pass

        def log(self, metrics, step):
            raise RuntimeError("server is down")

        def close(self):
            raise AssertionError("a sink that failed is not used again")

    monkeypatch.setitem(sinks.SINKS, "wandb", Broken)
    config = make_config(tmp_path, tracking={"sinks": ["wandb"]})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        recorder.log(1, {"a": 1.0})
        recorder.log(2, {"a": 2.0})
    assert capsys.readouterr().err.count("wandb failed and is disabled: server is down") == 1
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_log_interval_is_of_the_sinks_alone(tmp_path, monkeypatch):
    steps = []

    class Counting:
        def __init__(self, config, run):
            pass

        def log(self, metrics, step):
            steps.append(step)

        def close(self):
            pass

    monkeypatch.setitem(sinks.SINKS, "wandb", Counting)
    config = make_config(tmp_path, tracking={"sinks": ["wandb"], "log_every_steps": 2})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        for step in range(1, 6):
            recorder.log(step, {"a": 1.0})
    assert steps == [2, 4]
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 5


def test_rollouts_are_kept_only_where_wanted(tmp_path):
    config = make_config(tmp_path, tracking={"save_rollouts": False})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        recorder.log_rollouts(1, make_scored(), {})
    assert not (tmp_path / "r" / "rollouts").exists()
