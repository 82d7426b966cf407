"""The state of a run: running, finished, stopped or failed; progress, ETA, and where it was started."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from atomrl.tracking.reading.lock import LOCKS_ANSWER, is_locked, last_lock_owner
from atomrl.tracking.reading.metrics import MetricTable

FAILURE = "failure.json"
"""The error that ended a run: `error`, `where`, `time`, `traceback`."""
LOG = "log.txt"
"""The run's log with times: start, steps, evaluations, findings, warnings and end."""
Status = Literal["running", "finished", "stopped", "failed"]
PACE_STEPS = 20
"""Newest steps whose median time gives the ETA."""
SILENCE_S, SILENT_STEPS = 120.0, 10
"""Seconds, and steps, without a write. After both, a run on another machine (or on a system without lock queries) no
longer counts as running, and a run on this machine as stalled."""
FIRST_STEP_S = 900.0
"""Seconds without a write that are allowed before the first step: loading the model, compiling."""
WRITTEN = ("metrics.jsonl", "config.yaml", "summary.json", "env.json", FAILURE, LOG)
"""Files whose newest modification time shows when the run last wrote."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run, derived from its folder."""

    status: Status
    """`stopped`: asked to end, and resumable; `failed`: it ended without a summary, by an error or a kill."""
    why: str
    """The evidence for the status."""
    step: int
    """The newest step."""
    steps: int | None
    """`train.steps`; None if the config does not have it."""
    step_seconds: float | None
    """Median over the newest steps."""
    eta_s: float | None
    """Estimated seconds to the end; None unless the run is running."""
    updated: float
    """Time of the last write: seconds since 1970."""
    silent_s: float | None
    """Seconds since the last write if a running run has stalled, else None."""

    @property
    def progress(self) -> float | None:
        """Share of the steps that are done, from 0 to 1; None if the number of steps is unknown."""
        return min(1.0, self.step / self.steps) if self.steps else None


class Home(NamedTuple):
    """Working directory of a run, to which its config's paths are relative, and folders of its functions."""

    folder: Path | None = None
    """The working directory; None: that of this process."""
    functions_in: tuple[str, ...] = ()
    """Further folders in which the user's functions are searched."""


def home_of(environment: Mapping[str, Any]) -> Home:
    """Return where a run was started, by its `env.json`; this process's folder if it is missing or does not exist."""
    folder, searched = environment.get("folder"), environment.get("functions_in")
    existing = Path(folder) if isinstance(folder, str) and Path(folder).is_dir() else None
    return Home(existing, tuple(filter(None, map(str, searched if isinstance(searched, list) else []))))


def state_of(
    folder: Path,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    failure: Mapping[str, Any],
    metrics: MetricTable,
) -> RunState:
    """Return the state of a run.

    Args:
        folder: the run's folder.
        config, summary, failure: contents of its files; empty if they do not exist.
        metrics: metrics of the training steps.
    """
    step = int(metrics.steps[-1]) if len(metrics.steps) else 0
    train = config.get("train")
    configured = train.get("steps") if isinstance(train, Mapping) else None
    steps = configured if isinstance(configured, int) and configured > 0 else None
    times = metrics.points("timing_s/step")[1][-PACE_STEPS:]
    pace = float(np.median(times)) if len(times) else None
    updated = last_written(folder)
    status, why = _status(folder, summary, failure, updated, pace)
    silent = silence(folder, pace) if status == "running" else None
    eta = max(0.0, (steps - step) * pace) if status == "running" and steps is not None and pace is not None else None
    return RunState(
        status=status, why=why, step=step, steps=steps, step_seconds=pace, eta_s=eta, updated=updated, silent_s=silent,
    )  # fmt: skip


def _status(
    folder: Path, summary: Mapping[str, Any], failure: Mapping[str, Any], updated: float, pace: float | None
) -> tuple[Status, str]:
    if summary:
        if summary.get("finished", True):
            return "finished", "summary.json"
        return "stopped", "summary.json: stopped before its last step"
    if is_locked(folder):
        return "running", "a process holds its lock"
    if failure:
        return "failed", str(failure.get("error", FAILURE))
    last = last_lock_owner(folder)
    if last is not None and not (LOCKS_ANSWER and last[1] == os.uname().nodename):
        silent = time.time() - updated
        if silent < _patience(pace):
            return "running", f"on {last[1]}; it wrote {silent:.0f} s ago"
        return "failed", f"on {last[1]}, and silent for {silent:.0f} s"
    return "failed", "no process holds its lock, and it has no summary.json"


def silence(folder: Path, pace: float | None) -> float | None:
    """Return the seconds since a run's last write, if they are more than its pace explains; else None.

    Args:
        folder: the run's folder.
        pace: seconds per step; None before the first step.
    """
    silent = time.time() - last_written(folder)
    return silent if silent >= (FIRST_STEP_S if pace is None else _patience(pace)) else None


def _patience(pace: float | None) -> float:
    return max(SILENCE_S, SILENT_STEPS * (pace or 0.0))


def last_written(folder: Path) -> float:
    """Return the time of a run's last write: seconds since 1970; 0 if there is none."""
    return max(_modified(folder / name) for name in WRITTEN)


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
