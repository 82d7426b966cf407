"""How a run is: running, finished, stopped or failed; how far, how long it will still take, where it was started."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from atomrl.reading.lock import LOCKS_ANSWER, holder, is_held
from atomrl.reading.metrics import MetricTable

FAILURE = "failure.json"
"""What ended a run: `error`, `where`, `time`, `traceback`."""
LOG = "log.txt"
"""What a run said, with the time: its start, steps, evaluations, findings, warnings and end."""
Status = Literal["running", "finished", "stopped", "failed"]
PACE_STEPS = 20
"""The newest steps, by whose median time the rest is estimated."""
SILENCE_S, SILENT_STEPS = 120.0, 10
"""A run on another machine, or on a system that is not asked after locks, counts as running until it has been silent
for this long, and for this many of its steps. One here that is silent for as long stands still."""
FIRST_STEP_S = 900.0
"""Seconds that a run may need before its first step: it loads a model, and compiles."""
WRITTEN = ("metrics.jsonl", "config.yaml", "summary.json", "env.json", FAILURE, LOG)
"""Files that a run writes to, whose newest time is its last sign of life."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How a run is, as its folder says it."""

    status: Status
    """`stopped`: asked to end, and resumable; `failed`: it ended without a summary, by an error or a kill."""
    why: str
    """By what the status is known."""
    step: int
    """The newest step."""
    steps: int | None
    """How many it is to make."""
    step_seconds: float | None
    """The median of the newest steps."""
    eta_s: float | None
    """Seconds that it will still take; of a run that is running."""
    updated: float
    """When something was last written: seconds since 1970."""
    silent_s: float | None
    """Seconds since then, of a run that is running and stands still: for longer than its pace explains."""

    @property
    def progress(self) -> float | None:
        """From 0 to 1."""
        return min(1.0, self.step / self.steps) if self.steps else None


class Home(NamedTuple):
    """Where a run was started: what its config says relatively is relative to that."""

    folder: Path | None = None
    """The working directory; None: the reader's."""
    functions_in: tuple[str, ...] = ()
    """Where its own functions are looked for, beside that."""


def home_of(environment: Mapping[str, Any]) -> Home:
    """Where a run was started, by its `env.json`; the reader's own folder where that does not say, or is not there."""
    folder, searched = environment.get("folder"), environment.get("functions_in")
    there = Path(folder) if isinstance(folder, str) and Path(folder).is_dir() else None
    return Home(there, tuple(filter(None, map(str, searched if isinstance(searched, list) else []))))


def state_of(
    folder: Path,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    failure: Mapping[str, Any],
    metrics: MetricTable,
) -> RunState:
    """The state of a run.

    Args:
        folder: of the run.
        config, summary, failure: as they are in the folder; empty where they are not.
        metrics: of the training steps.
    """
    step = int(metrics.steps[-1]) if len(metrics.steps) else 0
    train = config.get("train")
    given = train.get("steps") if isinstance(train, Mapping) else None
    steps = given if isinstance(given, int) and given > 0 else None
    times = metrics.points("timing_s/step")[1][-PACE_STEPS:]
    pace = float(np.median(times)) if len(times) else None
    updated = last_written(folder)
    status, why = _status(folder, summary, failure, updated, pace)
    silent = silence(folder, pace) if status == "running" else None
    left = (steps - step) * pace if status == "running" and steps is not None and pace is not None else None
    return RunState(
        status=status, why=why, step=step, steps=steps, step_seconds=pace,
        eta_s=None if left is None else max(0.0, left), updated=updated, silent_s=silent,
    )  # fmt: skip


def _status(
    folder: Path, summary: Mapping[str, Any], failure: Mapping[str, Any], updated: float, pace: float | None
) -> tuple[Status, str]:
    if summary:
        if summary.get("finished", True):
            return "finished", "summary.json"
        return "stopped", "summary.json: it was asked to end before its last step"
    if is_held(folder):
        return "running", "a process holds its lock"
    if failure:
        return "failed", str(failure.get("error", FAILURE))
    last = holder(folder)
    if last is not None and not (LOCKS_ANSWER and last[1] == os.uname().nodename):
        silent = time.time() - updated
        if silent < _patience(pace):
            return "running", f"on {last[1]}; it wrote {silent:.0f} s ago"
        return "failed", f"on {last[1]}, and silent for {silent:.0f} s"
    return "failed", "no process holds its lock, and there is no summary.json"


def silence(folder: Path, pace: float | None) -> float | None:
    """Seconds since a run was last heard of, where that is longer than its pace explains; else None.

    Args:
        folder: of the run.
        pace: seconds that a step takes; None before the first.
    """
    silent = time.time() - last_written(folder)
    return silent if silent >= (FIRST_STEP_S if pace is None else _patience(pace)) else None


def _patience(pace: float | None) -> float:
    return max(SILENCE_S, SILENT_STEPS * (pace or 0.0))


def last_written(folder: Path) -> float:
    """When a run was last heard of: seconds since 1970, 0 where it has written nothing."""
    return max(_modified(folder / name) for name in WRITTEN)


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
