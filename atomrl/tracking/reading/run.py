"""`Run`, a run read from its folder: metrics, evaluations, rollouts, findings, config, state; and a summary as text."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from atomrl.common.files import open_file
from atomrl.tracking.doctor.rules import Finding, is_evaluation
from atomrl.tracking.reading.lines import (
    LOCKS_ANSWER,
    GrowingFile,
    ReadError,
    flat_tree,
    is_locked,
    last_lock_owner,
    loads,
    read_mapping,
)
from atomrl.tracking.reading.metrics import MetricTable, newest_held_out
from atomrl.tracking.reading.rollouts import TOKENS, RolloutIndex, TokenTable, read_tokens, row_of

# --------------------------------------------------------------------------------------------------------------------
# The state of a run: running, finished, stopped or failed; progress, ETA, and where it was started.

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


# --------------------------------------------------------------------------------------------------------------------
# Summary of a run as text: steps, time, accuracy before and after, best checkpoint.

COURSES = {"critic/score/mean": "reward"} | dict.fromkeys(
    ("preference/loss", "reward_model/loss", "sft/nll_per_token", "train/loss"), "loss"
)
"""Training metric -> its title. The first that a run has is shown."""
LOSSES = ("eval/nll_per_token", "val/loss")
"""Losses of an evaluation without rewards or preferences."""


def outcome(run: Run) -> Iterator[str]:
    """Summarize a run (finished, running or killed) in a few lines: status, time, tokens, held-out results,
    checkpoints."""
    state, summary = run.state, run.summary
    seconds = float(summary.get("wall_s") or run.metrics.points("timing_s/step")[1].sum())
    tokens = float(run.metrics.points("perf/total_num_tokens")[1].sum())
    why = f" ({state.why})" if state.status in ("failed", "stopped") else ""
    parts = [f"{state.status}{why}, {state.step} of {state.steps or '?'} steps", duration(seconds)]
    parts += [f"{short_count(tokens)} tokens"] if tokens else []
    parts += [f"{duration(state.eta_s)} left"] if state.eta_s is not None else []
    yield f"{run.path}: {', '.join(parts)}"
    what, judged = newest_held_out(run.evaluations)
    for source, name in judged.items():
        yield f"  held-out {what} of {source}: {course(run.evaluations, name)}"
    losses = [name for name in LOSSES if name in run.evaluations][:1] if not judged else []
    yield from (f"  held-out loss: {course(run.evaluations, name)}" for name in losses)
    for name in [name for name in COURSES if name in run.metrics][:1]:
        yield f"  {COURSES[name]}: {course(run.metrics, name)}"
    first = [judged.get("all", next(iter(judged.values())))] if judged else losses
    yield from best_step(run, first[0], lowest=bool(losses)) if first else ()
    for link, title in (("best", "best checkpoint (checkpoint.keep_best)"), ("model", "newest checkpoint")):
        if (target := _target(run.path / link)) is not None:
            yield f"  {title}: {target}"


def best_step(run: Run, name: str, lowest: bool) -> Iterator[str]:
    """Yield a line with the best evaluation of several, and its checkpoint if it still exists."""
    steps, values = run.evaluations.points(name)
    if len(values) < 2:
        return
    step = int(steps[(values.argmin if lowest else values.argmax)()])
    folder = f"checkpoints/step_{step:06d}"
    place = folder if (run.path / folder).is_dir() else "its checkpoint was not kept"
    yield f"  best on held-out data: step {step}, {'the model it started from' if step == 0 else place}"


def course(table: MetricTable, name: str) -> str:
    """Format the first and the last value of a metric, with their steps."""
    steps, values = table.points(name)
    ends = [f"{values[at]:.3f} (step {steps[at]})" for at in ((0, -1) if len(values) > 1 else (0,) * len(values))]
    return " -> ".join(ends) or "none"


def duration(seconds: float) -> str:
    """Format seconds for display.

    Example:
        >>> duration(42), duration(3725)
        ('42 s', '1:02:05')
    """
    if not math.isfinite(seconds):
        return "? s"
    total = round(seconds)
    return f"{total} s" if total < 60 else f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"


def short_count(number: float) -> str:
    """Format a count for display.

    Example:
        >>> short_count(950), short_count(1_234_000)
        ('950', '1.23M')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def completions_of(run: Run, step: int) -> Sequence[dict[str, Any]]:
    """Read the completions of a training step, as rows of `rollouts/`; empty if they were not saved."""
    try:
        with open_file(run.path / f"rollouts/step_{step:06d}/train.jsonl") as file:
            rows = [row_of(line) for line in file.read().splitlines()]
    except OSError:
        return []
    return [row for row in rows if row is not None]


def _target(link: Path) -> str | None:
    """Return the target of a symbolic link, or None."""
    try:
        return str(link.readlink()) if link.is_symlink() else None
    except OSError:
        return None


# --------------------------------------------------------------------------------------------------------------------
# The run and its files.

MARKS = ("metrics.jsonl", "config.yaml")
"""A folder with one of these files is a run's folder."""
MAPPINGS = ("config.yaml", "env.json", "summary.json", FAILURE)
WHERE = frozenset({"run_name", "output_dir"})
"""Config keys that name a run's folder; they do not change what the run computes."""
FUNCTIONS = "functions"
"""Subfolder with the source of the user's functions, one file each."""
INSIDE = {"rollouts", "checkpoints", "model", "inputs", "tensorboard", "wandb", "mlflow", "pools", FUNCTIONS}
"""Subfolders in which no runs are searched."""
MAX_DEPTH = 4
MAX_PROBLEMS = 20


class Run:
    """A run, read from its folder; `refresh` reads what was written since. Create it with `load_run`.

    Nothing is written, and no file stays open. What belongs to a missing or unreadable file is empty; `problems` has
    the reason.

    Args:
        path: the folder.
        rows: the rows of its `metrics.jsonl`, if they have been read already.

    Attributes:
        path: the folder.
        metrics: metrics of the training steps, by name.
        evaluations: metrics of the evaluations, by name.
        problems: files and lines that could not be read, with the reason.
    """

    def __init__(self, path: str | Path, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.path = Path(path)
        self.metrics, self.evaluations = MetricTable(), MetricTable()
        self._problems: list[str] = []
        self._file, self._line = GrowingFile(self.path / "metrics.jsonl"), 0
        self._files: dict[str, tuple[tuple[int, ...], dict[str, Any], list[str]]] = {}
        if rows is None:
            self.refresh()
        else:
            self._add(row for row in rows if has_step(row))

    def __repr__(self) -> str:
        state = self.state
        return f"Run({str(self.path)!r}: {state.status}, step {state.step} of {state.steps or '?'})"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """`config.yaml` as written, of any version."""
        return self._mapping("config.yaml")

    @property
    def environment(self) -> dict[str, Any]:
        """`env.json`: versions, hardware, commit and command of the start, and of each resumption."""
        return self._mapping("env.json")

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty until the run ends."""
        return self._mapping("summary.json")

    @property
    def failure(self) -> dict[str, Any]:
        """`failure.json`: the error that ended the run; empty if there was none, or if it was killed."""
        return self._mapping(FAILURE)

    @property
    def state(self) -> RunState:
        """The current state."""
        state = state_of(self.path, self.config, self.summary, self.failure, self.metrics)
        fault = self.config_fault
        return replace(state, why=f"{state.why}; {fault}") if fault and state.status in ("failed", "stopped") else state

    @property
    def config_fault(self) -> str:
        """Why the run cannot be resumed: its config is missing or cannot be read; "" if it can."""
        config = self.config
        lines = self._files["config.yaml"][2] if self._files["config.yaml"][0] else ["config.yaml is missing"]
        return "" if config and not lines else f"{(lines or ['config.yaml is empty'])[0]}, so the run cannot be resumed"

    @property
    def findings(self) -> list[Finding]:
        """The doctor's findings during the run, oldest first."""
        return read_findings(self.path / "findings.jsonl")

    @property
    def functions(self) -> dict[str, str]:
        """Source of the user's functions, by file name; it is never executed."""
        folder = self.path / FUNCTIONS
        files = sorted(folder.glob("*.py")) if folder.is_dir() else []
        return {
            file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files if not file.is_symlink()
        }

    @cached_property
    def rollouts(self) -> RolloutIndex:
        """The index of the completions, of training and evaluation."""
        return RolloutIndex(self.path / "rollouts")

    def tokens(self, step: int) -> TokenTable | None:
        """Read the recorded tokens of a step; None if there are none (`tracking.tokens`).

        Raises:
            ReadError: the file is damaged.
        """
        return read_tokens(self.path / "rollouts" / f"step_{step:06d}" / TOKENS)

    @property
    def problems(self) -> list[str]:
        """Files and lines that could not be read, with the reason."""
        for name in MAPPINGS:
            self._mapping(name)
        noted = [line for _, _, lines in self._files.values() for line in lines]
        rollouts = self.rollouts.problems if "rollouts" in self.__dict__ else []
        return [*noted, *self._problems, *rollouts]

    def refresh(self) -> bool:
        """Read what was written since. Returns whether there were new metrics. A rewritten `metrics.jsonl` is read from
        its start."""
        changed = False
        while True:
            restarted, lines = self._file.read()
            if restarted:
                self.metrics, self.evaluations, self._line, self._problems = MetricTable(), MetricTable(), 0, []
            changed |= restarted or bool(lines)
            if not lines:
                break
            self._add(self._parsed(lines))
        if "rollouts" in self.__dict__:
            self.rollouts.refresh()
        return changed

    def plot(self, out: str | Path | None = None) -> Path:
        """Plot the curves, as `atomrl compare --plot` does; returns the path of the image.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from atomrl.tracking.reading.comparison import draw_curves  # it imports this module

        return draw_curves(self, Path(out) if out is not None else None)

    def _parsed(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            self._line += 1
            row = row_of(line)
            if row is not None and has_step(row):
                yield row
            elif len(self._problems) < MAX_PROBLEMS:
                self._problems.append(f"metrics.jsonl:{self._line} is not a row of metrics; skipped")

    def _add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        trained, evaluated = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        for row in rows:
            (evaluated if is_evaluation(row) else trained).append(row)
        self.metrics.extend(trained)
        self.evaluations.extend(evaluated)

    def _mapping(self, name: str) -> dict[str, Any]:
        """Read a file with one mapping; again only if it has changed."""
        path = self.path / name
        try:
            status = path.lstat()
            identity: tuple[int, ...] = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            identity = ()
        if name not in self._files or self._files[name][0] != identity:
            problems: list[str] = []
            value = read_mapping(path, problems) if identity else {}
            self._files[name] = identity, value, problems
        return self._files[name][1]


def has_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row of metrics has a step that a table can hold."""
    step = row.get("step")
    return isinstance(step, int) and 0 <= step < 2**53


def read_findings(path: Path) -> list[Finding]:
    """Read the findings in a file; empty if it does not exist. A line of another format is skipped."""
    try:
        with open_file(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    findings = []
    for line in lines:
        try:
            row = loads(line)
            fields = {name: row[name] for name in ("id", "severity", "step", "what", "advice")}
            fields["quote"] = row.get("quote", "")
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(fields["step"], int):
            findings.append(Finding(**fields | {name: str(fields[name]) for name in fields if name != "step"}))
    return findings


def load_run(path: str | Path) -> Run:
    """Read the run in a folder: finished, running or killed, of this or another version.

    Example:
        >>> run = load_run("runs/quickstart")  # doctest: +SKIP
        >>> run.state.status, run.metrics["critic/score/mean"][-1]  # doctest: +SKIP
        ('finished', 0.9921875)

    Raises:
        ReadError: it is not a run's folder; the message names runs below it.
    """
    folder = Path(path)
    if not is_run(folder):
        below = [str(run) for run in find_runs(folder)][:5]
        hint = f"; runs in it: {', '.join(below)}" if below else ""
        what = "is not the folder of a run (it has neither metrics.jsonl nor config.yaml)"
        raise ReadError(f"{folder} {what if folder.exists() else 'does not exist'}{hint}")
    return Run(folder)


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's."""
    return any(os.path.isfile(folder / name) for name in MARKS)  # also False without permission to enter the folder


def find_runs(root: str | Path) -> Iterator[Path]:
    """Yield the folders of runs in `root`, or `root` itself if it is one; sorted by name. Symbolic links are not
    followed."""
    yield from _runs_below(Path(root), MAX_DEPTH)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries if depth else ():
        if not entry.name.startswith(".") and entry.name not in INSIDE and entry.is_dir(follow_symlinks=False):
            yield from _runs_below(Path(entry.path), depth - 1)


def config_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two configs differ, with both values; None for a key that one of them lacks.

    Example:
        >>> config_differences({"train": {"steps": 1}, "seed": 0}, {"train": {"steps": 2}, "seed": 0})
        {'train.steps': (1, 2)}
    """
    old, new = flat_tree(one), flat_tree(other)
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
