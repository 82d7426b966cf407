"""Everything a run writes while it runs, behind one object: the run folder, the sinks and the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from atomrl.config import RunConfig
from atomrl.doctor.watch import Doctor
from atomrl.tracking.console import ProgressBar
from atomrl.tracking.run_directory import RunDirectory, accuracies, read_metrics, rollout_rows
from atomrl.tracking.sinks import Sinks
from atomrl.types import Trajectory


class Recorder:
    """A context manager, opened when the run's first step is about to start.

    Args:
        config: which sinks, how often, and whether rollouts are kept.
        directory: the run's folder.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self.directory = directory
        self.sinks = Sinks(config, directory)
        self.progress = ProgressBar(config.train.steps, first_step=directory.first_step, name=config.run_name)
        self._save_rollouts = config.tracking.save_rollouts
        self.doctor = Doctor()
        metrics = directory.path / "metrics.jsonl"
        if metrics.exists():  # a resumed run: what was found then is not said again
            for row in read_metrics(metrics):
                self.doctor.observe(row)
            directory.write_findings(self.doctor.findings)

    def __enter__(self) -> Recorder:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(*error)
        if self.doctor.findings:
            names = ", ".join(f"{finding.id} (step {finding.step})" for finding in self.doctor.findings)
            self.progress.note(f"the doctor found: {names}; `atomrl doctor {self.directory.path}` says it again")
        self.sinks.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line in `metrics.jsonl`, in every sink and on the terminal; and what the doctor newly finds."""
        row = self.directory.log(step, metrics)
        self.sinks.log(metrics, step)
        self.progress.update(step, metrics)
        new = self.doctor.observe(row)
        for finding in new:
            self.progress.note(str(finding))
        if new:
            self.directory.write_findings(self.doctor.findings)

    def log_rollouts(self, step: int, trajectories: Sequence[Trajectory], advantages: Mapping[int, float]) -> None:
        """The trajectories of a step, in the folder and as samples in the sinks."""
        if self._save_rollouts:
            rows = rollout_rows(step, trajectories, advantages)
            self.directory.write_rows(step, rows, "train")
            self.sinks.log_samples(rows, step)

    def log_evaluation(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """An evaluation after `step` steps: a line of its own in `metrics.jsonl`, and its completions, if any."""
        self.directory.log(step, metrics)
        self.sinks.log(metrics, step, always=True)
        if self._save_rollouts and rows:
            self.directory.write_rows(step, rows, "eval")
        shown = ", ".join(f"{source} {metrics[name]:.3f}" for source, name in accuracies(metrics).items())
        losses = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.progress.note(f"step {step}: " + (f"held-out accuracy: {shown}" if shown else losses))

    def checkpoint(self, step: int) -> AbstractContextManager[Path]:
        """See `RunDirectory.checkpoint`."""
        return self.directory.checkpoint(step)
