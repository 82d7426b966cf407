"""Experiment trackers. Each library is imported only by the sink that wraps it."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import copy_context
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.common.redaction import redacted, without_secrets
from atomrl.config import ConfigError, RunConfig
from atomrl.tracking.console import prompt_text
from atomrl.tracking.reading.lines import flat_tree
from atomrl.tracking.run_directory import RunDirectory

TABLE_COLUMNS = ("prompt", "completion", "ground_truth", "reward", "advantage", "finish_reason")
MAX_SAMPLES = 32
MLFLOW_VALUE = 500
"""Maximum length of a parameter's value in MLflow; some of its stores refuse longer ones."""
MAX_WAITING = 256
"""Size of a sink's queue; while it is full, further calls are dropped and counted."""
PATIENCE_S = 30.0
"""At the end of a run, a sink is abandoned if it has finished no call for this long."""


class TensorBoardSink:
    """TensorBoard: event files in `RUN/tensorboard`."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        with reraise_as(
            ConfigError, "tracking.sinks: tensorboard needs: pip install 'atomrl[tensorboard]'", ImportError
        ):
            from torch.utils.tensorboard import SummaryWriter
        # A resumed run hides the points of steps that are repeated.
        purge = run.first_step if run.first_step > 1 else None
        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=purge)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for index, row in enumerate(rows[:4]):
            text = f"reward {row['reward']}\n\n{prompt_text(row['prompt'])}{row['completion']}"
            self._writer.add_text(f"samples/{index}", text.replace("\n", "  \n"), step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; with `WANDB_MODE=offline` it writes to `RUN/wandb` only."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        with reraise_as(ConfigError, "tracking.sinks: wandb needs: pip install 'atomrl[wandb]'", ImportError):
            import wandb
        self._wandb, tracking, id_file = wandb, config.tracking, run.path / "wandb_run_id"
        try:
            self._run = wandb.init(
                project=tracking.wandb_project,
                entity=tracking.wandb_entity,
                name=config.run_name,
                tags=tracking.wandb_tags or None,
                dir=str(run.path),
                config=redacted(config.to_tree()),
                id=id_file.read_text().strip() if id_file.exists() else None,
                resume="allow",
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(f"wandb: {str(error).splitlines()[0]} Or set WANDB_MODE=offline") from None
        id_file.write_text(self._run.id + "\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data = [sample_cells(row) for row in rows]
        self._run.log({"samples": self._wandb.Table(columns=list(TABLE_COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflowSink:
    """MLflow: `RUN/mlflow/mlflow.db` (`mlflow ui --backend-store-uri sqlite:///...`), or at `MLFLOW_TRACKING_URI`."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        with reraise_as(ConfigError, "tracking.sinks: mlflow needs: pip install 'atomrl[mlflow]'", ImportError):
            import sqlalchemy  # noqa: F401  # needed for the file; mlflow imports it late
            from mlflow.tracking import MlflowClient
        folder, id_file = run.path / "mlflow", run.path / "mlflow_run_id"
        folder.mkdir(exist_ok=True)
        own = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", own))
        project = config.tracking.wandb_project
        existing = client.get_experiment_by_name(project)
        # Without an artifact location MLflow would write to the working directory.
        place = None if "MLFLOW_TRACKING_URI" in os.environ else (folder / "files").resolve().as_uri()
        experiment = existing.experiment_id if existing else client.create_experiment(project, artifact_location=place)
        if id_file.exists():
            self._id = id_file.read_text(encoding="utf-8").strip()
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(experiment, run_name=config.run_name).info.run_id
            for name, value in flat_tree(redacted(config.to_tree())).items():
                client.log_param(self._id, name, str(value)[:MLFLOW_VALUE])
            id_file.write_text(self._id + "\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name.replace("@", "_at_"), value, step=step)  # MLflow refuses @

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data = [dict(zip(TABLE_COLUMNS, sample_cells(row), strict=True)) for row in rows]
        self._client.log_dict(self._id, {"samples": data}, f"samples/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioSink:
    """trackio: its local store, in `TRACKIO_DIR` if set; `trackio show` opens it."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        with reraise_as(ConfigError, "tracking.sinks: trackio needs: pip install 'atomrl[trackio]'", ImportError):
            import trackio
        self._trackio = trackio
        with redirect_stdout(sys.stderr):  # stdout is for the run's summary
            # In a separate context: trackio finishes the current run of the main context once more at exit.
            self._run: Any = copy_context().run(
                trackio.init,
                project=config.tracking.wandb_project,
                name=config.run_name,
                config=redacted(config.to_tree()),
                resume="allow" if run.first_step > 1 else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data = [sample_cells(row) for row in rows]
        self._run.log({"samples": self._trackio.Table(columns=list(TABLE_COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


def sample_cells(row: Mapping[str, Any]) -> list[Any]:
    """Return a completion as the cells of `TABLE_COLUMNS`: rewards and advantages are numbers, all else is text."""
    texts = [prompt_text(row["prompt"]), row["completion"], str(row["ground_truth"])]
    return [*texts, *(row[name] for name in TABLE_COLUMNS[3:])]


Sink = TensorBoardSink | WandbSink | MLflowSink | TrackioSink
SINKS: dict[str, type[Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MLflowSink,
    "trackio": TrackioSink,
}
"""Sinks by name. To add one, add its class here and to `Sink`."""


class BackgroundSink:
    """Runs a sink in a daemon thread, so that a tracker that is slow, hangs or raises does not delay training.

    A sink that raises is reported once and dropped: a tracker must not end a training run. (A sink that cannot be
    created is an error.)

    Args:
        name: used in messages.
        sink: only called from the thread.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self.dropped = name, 0
        self._sink, self._finished = sink, 0
        self._waiting: queue.SimpleQueue[Callable[[Sink], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, action: Callable[[Sink], None]) -> None:
        """Queue a call of the sink; never blocks."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(action)
        else:
            self.dropped += self._thread.is_alive()

    def _work(self) -> None:
        try:
            while (action := self._waiting.get()) is not None:
                action(self._sink)
                self._finished += 1
            self._sink.close()
        except Exception as error:  # whatever a tracker raises, training continues
            print(f"tracking: {self.name} failed and is disabled: {without_secrets(str(error))}", file=sys.stderr)

    def close(self) -> None:
        """Wait for the queued calls, as long as the sink makes progress."""
        self._waiting.put(None)
        finished, since = -1, 0.0
        while self._thread.is_alive():
            if self._finished != finished:
                finished, since = self._finished, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                print(f"tracking: {self.name} hangs and is abandoned", file=sys.stderr)
                break
            self._thread.join(0.05)
        if self.dropped:
            print(f"tracking: {self.name} was too slow: {self.dropped} calls were dropped", file=sys.stderr)
