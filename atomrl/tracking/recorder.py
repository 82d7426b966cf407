"""Everything a run writes while it runs, behind one object: the run folder, the sinks and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from atomrl.config import RunConfig
from atomrl.doctor.watch import Doctor
from atomrl.reading.lines import read_metrics
from atomrl.tracking.console import ProgressBar, describe_evaluation
from atomrl.tracking.run_directory import RunDirectory, rollout_rows
from atomrl.tracking.sinks import MAX_SAMPLES, SINKS, BackgroundSink, Sink
from atomrl.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor


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
        """The recorded tokens of a step (`loop/tokens.py`), with the algorithm's state in it."""
        self.directory.write_tokens(step, tensors, state)

    def log_evaluation(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """An evaluation after `step` steps: a line of its own in `metrics.jsonl`, and its completions, if any."""
        self.directory.log(step, metrics)
        self._send(step, lambda sink: sink.log(metrics, step), always=True)
        if self.tracking.save_rollouts and rows:
            self.directory.write_rows(step, rows, "eval")
        self.progress.note(f"step {step}: {describe_evaluation(metrics)}")
