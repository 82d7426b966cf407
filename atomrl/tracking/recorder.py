"""`Recorder` logs a run: to its folder, to experiment trackers (sinks) and to the terminal; it also runs the doctor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from atomrl.common.redaction import redacted
from atomrl.config import RunConfig
from atomrl.tracking.console import ProgressBar, describe_evaluation
from atomrl.tracking.doctor import Doctor
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.run_directory import RunDirectory, rollout_rows
from atomrl.tracking.sinks import MAX_SAMPLES, SINKS, TABLE_COLUMNS, BackgroundSink, Sink
from atomrl.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor


class Recorder:
    """Records the steps and evaluations of a run. A context manager, entered before the first step.

    Args:
        config: sinks, logging intervals, whether rollouts are saved and shown.
        directory: the run's folder.
        wording: converts the text of a finding, which names config keys, for the terminal.
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
            self.doctor.observe(row)  # of a resumed run, so that earlier findings are not reported again
        directory.write_findings(self.doctor.findings)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(*error)
        if self.doctor.findings:
            names = ", ".join(f"{finding.id} (step {finding.step})" for finding in self.doctor.findings)
            self.progress.note(
                f"the doctor found: {names}; `atomrl doctor {self.directory.path}` shows them again", always=True
            )
        for sink in self.sinks:
            sink.close()

    def _send(self, step: int, action: Callable[[Sink], None], always: bool = False) -> None:
        for sink in self.sinks if always or step % self.tracking.log_every_steps == 0 else ():
            sink.put(action)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics to `metrics.jsonl`, the sinks and the terminal, and report the doctor's new findings."""
        row, values = self.directory.log(step, metrics), dict(metrics)
        self._send(step, lambda sink: sink.log(values, step))
        self.progress.update(step, metrics)
        new = self.doctor.observe(row, self._completions)
        for finding in new:
            self.progress.note(self.wording(str(finding)), always=True)
        if new:
            self.directory.write_findings(self.doctor.findings)

    def log_rollouts(self, step: int, trajectories: Sequence[Trajectory], advantages: Mapping[int, float]) -> None:
        """Log a step's trajectories: to the folder, as samples to the sinks, and a few to the terminal."""
        rows, every = rollout_rows(step, trajectories, advantages), self.tracking.log_completions
        self._completions = rows
        if self.tracking.save_rollouts:
            self.directory.write_rows(step, rows, "train")
            samples = [{name: row[name] for name in TABLE_COLUMNS} for row in rows[:MAX_SAMPLES]]
            self._send(step, lambda sink: sink.log_samples(redacted(samples), step))
        if every and rows and (step == 1 or step % every == 0):
            self.progress.show_completions(step, rows)

    def log_tokens(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        """Write the token records of a step (`trainer/report/tokens.py`), with the algorithm's state."""
        self.directory.write_tokens(step, tensors, state)

    def log_evaluation(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """Log an evaluation after `step` steps: a separate row of `metrics.jsonl`, and its completions, if any."""
        self.directory.log(step, metrics)
        self._send(step, lambda sink: sink.log(metrics, step), always=True)
        if self.tracking.save_rollouts and rows:
            self.directory.write_rows(step, rows, "eval")
        self.progress.note(f"step {step}: {describe_evaluation(metrics)}")
