"""Everything a run writes while it runs, behind one object: the run folder, the sinks and the terminal."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Self

from atomrl.common.errors import said_as
from atomrl.config import ConfigError, RunConfig
from atomrl.tracking.console import ProgressBar, describe_evaluation, prompt_text
from atomrl.tracking.doctor.rules import Doctor
from atomrl.tracking.reading.lines import flat_tree, read_metrics
from atomrl.tracking.run_directory import RunDirectory, rollout_rows
from atomrl.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------------------------
# Where metrics and samples go beside the run folder. Each library is imported only by the sink that wraps it.

TABLE_COLUMNS = ("prompt", "completion", "ground_truth", "reward", "advantage", "finish_reason")
MAX_SAMPLES = 32
MLFLOW_VALUE = 500
"""Characters of a key of the config that MLflow is given: some of its stores take no more."""
MAX_WAITING = 256
"""Calls that may wait for a slow sink; while so many wait, further ones are dropped and counted."""
PATIENCE_S = 30.0
"""At the end of a run, a sink is left behind when it has finished no call for this long."""


class TensorBoardSink:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        with said_as(ConfigError, "tracking.sinks: tensorboard needs: pip install 'atomrl[tensorboard]'", ImportError):
            from torch.utils.tensorboard import SummaryWriter
        # A resumed run hides the points of the steps that are done again.
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
    """Weights & Biases; `WANDB_MODE=offline` writes to `RUN/wandb` alone."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        with said_as(ConfigError, "tracking.sinks: wandb needs: pip install 'atomrl[wandb]'", ImportError):
            import wandb
        self._wandb, tracking, id_file = wandb, config.tracking, run.path / "wandb_run_id"
        try:
            self._run = wandb.init(
                project=tracking.wandb_project,
                entity=tracking.wandb_entity,
                name=config.run_name,
                tags=tracking.wandb_tags or None,
                dir=str(run.path),
                config=config.to_tree(),
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
        with said_as(ConfigError, "tracking.sinks: mlflow needs: pip install 'atomrl[mlflow]'", ImportError):
            import sqlalchemy  # noqa: F401  # which the file needs, and mlflow imports late
            from mlflow.tracking import MlflowClient
        folder, id_file = run.path / "mlflow", run.path / "mlflow_run_id"
        folder.mkdir(exist_ok=True)
        own = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", own))
        project = config.tracking.wandb_project
        found = client.get_experiment_by_name(project)
        # Without a place for files MLflow would put them into the working directory.
        place = None if "MLFLOW_TRACKING_URI" in os.environ else (folder / "files").resolve().as_uri()
        experiment = found.experiment_id if found else client.create_experiment(project, artifact_location=place)
        if id_file.exists():
            self._id = id_file.read_text(encoding="utf-8").strip()
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(experiment, run_name=config.run_name).info.run_id
            for name, value in flat_tree(config.to_tree()).items():
                client.log_param(self._id, name, str(value)[:MLFLOW_VALUE])
            id_file.write_text(self._id + "\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name.replace("@", "_at_"), value, step=step)  # it takes no @

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data = [dict(zip(TABLE_COLUMNS, sample_cells(row), strict=True)) for row in rows]
        self._client.log_dict(self._id, {"samples": data}, f"samples/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioSink:
    """trackio: its own local store, which `trackio show` opens; `TRACKIO_DIR` moves it."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        with said_as(ConfigError, "tracking.sinks: trackio needs: pip install 'atomrl[trackio]'", ImportError):
            import trackio
        self._trackio = trackio
        with redirect_stdout(sys.stderr):  # stdout is for the run's summary
            # In a context of its own: what trackio takes for the current run it would finish again at exit.
            self._run: Any = copy_context().run(
                trackio.init,
                project=config.tracking.wandb_project,
                name=config.run_name,
                config=config.to_tree(),
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
    """A completion as `TABLE_COLUMNS`, one type a column: rewards and advantages are numbers, all else is text."""
    texts = [prompt_text(row["prompt"]), row["completion"], str(row["ground_truth"])]
    return [*texts, *(row[name] for name in TABLE_COLUMNS[3:])]


Sink = TensorBoardSink | WandbSink | MLflowSink | TrackioSink
SINKS: dict[str, type[Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MLflowSink,
    "trackio": TrackioSink,
}
"""Sinks by name. To add one: its class, and its name here and in `Sink`."""


class BackgroundSink:
    """A sink that works in a thread of its own, so that one that is slow, hangs or raises takes no time of a step.

    One that raises is named once and then left out: a tracker must not end a training run. The thread is a daemon's,
    so one that hangs does not keep the process either. (One that cannot start is an error.)

    Args:
        name: in messages.
        sink: called from the thread alone.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self.dropped = name, 0
        self._sink, self._finished = sink, 0
        self._waiting: queue.SimpleQueue[Callable[[Sink], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, action: Callable[[Sink], None]) -> None:
        """Let the sink do something when it comes to it; never waits."""
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
        except Exception as error:  # whatever a tracker raises, training goes on
            print(f"tracking: {self.name} failed and is left out from here on: {error}", file=sys.stderr)

    def close(self) -> None:
        """Wait for what is under way, as long as it gets on."""
        self._waiting.put(None)
        finished, since = -1, 0.0
        while self._thread.is_alive():
            if self._finished != finished:
                finished, since = self._finished, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                print(f"tracking: {self.name} hangs and is left behind", file=sys.stderr)
                break
            self._thread.join(0.05)
        if self.dropped:
            print(f"tracking: {self.name} was too slow: {self.dropped} calls were dropped", file=sys.stderr)


class Recorder:
    """A context manager, opened when the run's first step is about to start.

    Args:
        config: which sinks, how often, and whether rollouts are kept and shown.
        directory: the run's folder.
        wording: how a finding of the doctor, which names keys of the config, is said on the terminal.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, wording: Callable[[str], str] = str) -> None:
        self.directory, self.tracking, self.wording = directory, config.tracking, wording
        self.checkpoint = directory.checkpoint
        self.sinks = [BackgroundSink(name, SINKS[name](config, directory)) for name in config.tracking.sinks]
        self.progress = ProgressBar(
            config.train.steps, first_step=directory.first_step, name=config.run_name, log=directory.log_file.note
        )
        self.doctor = Doctor()
        self._completions: Sequence[Mapping[str, Any]] = ()  # of the newest step, for findings to quote
        for row in read_metrics(directory.path / "metrics.jsonl"):
            self.doctor.observe(row)  # of a resumed run: what was found then is not said again
        directory.write_findings(self.doctor.findings)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(*error)
        if self.doctor.findings:
            names = ", ".join(f"{finding.id} (step {finding.step})" for finding in self.doctor.findings)
            self.progress.note(f"the doctor found: {names}; `atomrl doctor {self.directory.path}` says it again")
        for sink in self.sinks:
            sink.close()

    def _send(self, step: int, action: Callable[[Sink], None], always: bool = False) -> None:
        for sink in self.sinks if always or step % self.tracking.log_every_steps == 0 else ():
            sink.put(action)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line in `metrics.jsonl`, in every sink and on the terminal; and what the doctor newly finds."""
        row, given = self.directory.log(step, metrics), dict(metrics)
        self._send(step, lambda sink: sink.log(given, step))
        self.progress.update(step, metrics)
        new = self.doctor.observe(row, self._completions)
        for finding in new:
            self.progress.note(self.wording(str(finding)))
        if new:
            self.directory.write_findings(self.doctor.findings)

    def log_rollouts(self, step: int, trajectories: Sequence[Trajectory], advantages: Mapping[int, float]) -> None:
        """The trajectories of a step: in the folder, as samples in the sinks, and a few on the terminal."""
        rows, every = rollout_rows(step, trajectories, advantages), self.tracking.log_completions
        self._completions = rows
        if self.tracking.save_rollouts:
            self.directory.write_rows(step, rows, "train")
            self._send(step, lambda sink: sink.log_samples(rows[:MAX_SAMPLES], step))
        if every and rows and (step == 1 or step % every == 0):
            self.progress.show_completions(step, rows)

    def log_tokens(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        """The recorded tokens of a step (`trainer/report.py`), with the algorithm's state in it."""
        self.directory.write_tokens(step, tensors, state)

    def log_evaluation(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """An evaluation after `step` steps: a line of its own in `metrics.jsonl`, and its completions, if any."""
        self.directory.log(step, metrics)
        self._send(step, lambda sink: sink.log(metrics, step), always=True)
        if self.tracking.save_rollouts and rows:
            self.directory.write_rows(step, rows, "eval")
        self.progress.note(f"step {step}: {describe_evaluation(metrics)}")
