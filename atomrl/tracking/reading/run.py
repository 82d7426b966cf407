"""A run's folder, read."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from atomrl.common.files import open_file
from atomrl.tracking.doctor.findings import Finding, is_evaluation
from atomrl.tracking.reading.lines import (
    LOCKS_ANSWER,
    GrowingFile,
    ReadError,
    flat_tree,
    holder,
    is_held,
    loads,
    read_mapping,
)
from atomrl.tracking.reading.metrics import MetricTable, newest_held_out
from atomrl.tracking.reading.rollouts import TOKENS, RolloutIndex, TokenTable, read_tokens, row_of

# --------------------------------------------------------------------------------------------------------------------
# How a run is: running, finished, stopped or failed; how far, how long it will still take, where it was started.

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


# --------------------------------------------------------------------------------------------------------------------
# How a run went, in a few lines: how far, how long, accuracy before and after, the best checkpoint.

COURSES = {"critic/score/mean": "reward"} | dict.fromkeys(
    ("preference/loss", "reward_model/loss", "sft/nll_per_token", "train/loss"), "loss"
)
"""Of the training metrics, the first that a run has is shown, under this name."""
LOSSES = ("eval/nll_per_token", "val/loss")
"""Losses of an evaluation without rewards or preferences."""


def outcome(run: Run) -> Iterator[str]:
    """Lines that answer "how did it go?".

    Args:
        run: finished, under way, or killed.
    """
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
    for name in [known for known in COURSES if known in run.metrics][:1]:
        yield f"  {COURSES[name]}: {course(run.metrics, name)}"
    first = [judged.get("all", next(iter(judged.values())))] if judged else losses
    yield from best_step(run, first[0], lowest=bool(losses)) if first else ()
    for link, title in (("best", "best checkpoint (checkpoint.keep_best)"), ("model", "newest checkpoint")):
        if (target := _target(run.path / link)) is not None:
            yield f"  {title}: {target}"


def best_step(run: Run, name: str, lowest: bool) -> Iterator[str]:
    """The evaluation that found the best value of several, and its checkpoint, if that was kept."""
    steps, values = run.evaluations.points(name)
    if len(values) < 2:
        return
    step = int(steps[(values.argmin if lowest else values.argmax)()])
    folder = f"checkpoints/step_{step:06d}"
    kept = folder if (run.path / folder).is_dir() else "no checkpoint of it was kept"
    yield f"  best on held-out data: step {step}, {'the model it started from' if step == 0 else kept}"


def course(table: MetricTable, name: str) -> str:
    """The first and the last value of a metric, with their steps."""
    steps, values = table.points(name)
    shown = [f"{values[at]:.3f} (step {steps[at]})" for at in ((0, -1) if len(values) > 1 else (0,) * len(values))]
    return " -> ".join(shown) or "none"


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> duration(42), duration(3725)
        ('42 s', '1:02:05')
    """
    if not math.isfinite(seconds):
        return "? s"
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def short_count(number: float) -> str:
    """A count for people.

    Example:
        >>> short_count(950), short_count(1_234_000)
        ('950', '1.23M')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def completions_of(run: Run, step: int) -> Sequence[dict[str, Any]]:
    """The completions of a training step, as rows of `rollouts/`; none where they were not kept.."""
    try:
        with open_file(run.path / f"rollouts/step_{step:06d}/train.jsonl") as file:
            rows = [row_of(line) for line in file.read().splitlines()]
    except OSError:
        return []
    return [row for row in rows if row is not None]


def _target(link: Path) -> str | None:
    """Where a link of the run's folder leads."""
    try:
        return str(link.readlink()) if link.is_symlink() else None
    except OSError:
        return None


MARKS = ("metrics.jsonl", "config.yaml")
"""A folder with one of these is a run's."""
MAPPINGS = ("config.yaml", "env.json", "summary.json", FAILURE)
WHERE = frozenset({"run_name", "output_dir"})
"""Keys of the config that say where a run is, and not what it is."""
FUNCTIONS = "functions"
"""In a run's folder: the source of its own functions, a file each."""
INSIDE = {"rollouts", "checkpoints", "model", "inputs", "tensorboard", "wandb", "mlflow", "pools", FUNCTIONS}
"""Folders that hold no runs."""
MAX_DEPTH = 4
MAX_PROBLEMS = 20


class Run:
    """A run, as its folder has it when this is made; `refresh` reads on. Make it with `load_run`.

    Nothing is written, and no file is kept open. Files that are not there or cannot be read leave what is read of
    them empty, and what is wrong is in `problems`.

    Attributes:
        path: the folder.
        metrics: of the training steps, by name.
        evaluations: likewise of the evaluations.
        problems: what could not be read, a line each.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics, self.evaluations = MetricTable(), MetricTable()
        self._problems: list[str] = []
        self._file, self._line = GrowingFile(self.path / "metrics.jsonl"), 0
        self._files: dict[str, tuple[tuple[int, ...], dict[str, Any], list[str]]] = {}
        self.refresh()

    def __repr__(self) -> str:
        state = self.state
        return f"Run({str(self.path)!r}: {state.status}, step {state.step} of {state.steps or '?'})"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """`config.yaml` as it was written, of whatever version."""
        return self._mapping("config.yaml")

    @property
    def environment(self) -> dict[str, Any]:
        """`env.json`: versions, hardware, commit, command, and those of each resumption."""
        return self._mapping("env.json")

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty until the run ends."""
        return self._mapping("summary.json")

    @property
    def failure(self) -> dict[str, Any]:
        """`failure.json`: the error that ended it; empty where none did, or where it was killed."""
        return self._mapping(FAILURE)

    @property
    def state(self) -> RunState:
        """How it is, at this moment."""
        return state_of(self.path, self.config, self.summary, self.failure, self.metrics)

    @property
    def findings(self) -> list[Finding]:
        """What the doctor found while the run ran, oldest first."""
        return read_findings(self.path / "findings.jsonl")

    @property
    def functions(self) -> dict[str, str]:
        """The source of its own functions, by the file's name; it is never run."""
        folder = self.path / FUNCTIONS
        files = sorted(folder.glob("*.py")) if folder.is_dir() else []
        return {
            file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files if not file.is_symlink()
        }

    @cached_property
    def rollouts(self) -> RolloutIndex:
        """Its completions, of training and evaluation."""
        return RolloutIndex(self.path / "rollouts")

    def tokens(self, step: int) -> TokenTable | None:
        """The recorded tokens of a step; None where there are none (`tracking.tokens`).

        Raises:
            ReadError: their file is damaged.
        """
        return read_tokens(self.path / "rollouts" / f"step_{step:06d}" / TOKENS)

    @property
    def problems(self) -> list[str]:
        """What could not be read."""
        for name in MAPPINGS:
            self._mapping(name)
        noted = [line for _, _, lines in self._files.values() for line in lines]
        rollouts = self.rollouts.problems if "rollouts" in self.__dict__ else []
        return [*noted, *self._problems, *rollouts]

    def refresh(self) -> bool:
        """Read on; whether there were new metrics. A `metrics.jsonl` that was written anew is read anew."""
        changed = False
        while True:
            anew, lines = self._file.read()
            if anew:
                self.metrics, self.evaluations, self._line, self._problems = MetricTable(), MetricTable(), 0, []
            changed |= anew or bool(lines)
            if not lines:
                break
            self._take(lines)
        if "rollouts" in self.__dict__:
            self.rollouts.refresh()
        return changed

    def plot(self, out: str | Path | None = None) -> Path:
        """Draw its curves, as `atomrl compare --plot` does; returns where the picture is.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from atomrl.tracking.reading.comparison import draw_curves  # which reads a run

        return draw_curves(self.path, Path(out) if out is not None else None)

    def _take(self, lines: list[bytes]) -> None:
        trained, evaluated = list[dict[str, Any]](), list[dict[str, Any]]()
        for line in lines:
            self._line += 1
            row = _row(line)
            if row is not None:
                (evaluated if is_evaluation(row) else trained).append(row)
            elif len(self._problems) < MAX_PROBLEMS:
                self._problems.append(f"metrics.jsonl:{self._line} is no row of metrics, and is passed over")
        self.metrics.extend(trained)
        self.evaluations.extend(evaluated)

    def _mapping(self, name: str) -> dict[str, Any]:
        """A file with one mapping, read again when it has changed."""
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


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and 0 <= step < 2**53 else None


def read_findings(path: Path) -> list[Finding]:
    """The findings in a file, none where it is not there; a line of another form is left out."""
    try:
        with open_file(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            given = {name: row[name] for name in ("id", "severity", "step", "what", "advice")}
            given["quote"] = row.get("quote", "")
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(given["step"], int):
            found.append(Finding(**given | {name: str(given[name]) for name in given if name != "step"}))
    return found


def load_run(path: str | Path) -> Run:
    """The run in a folder: finished, under way or killed, of this or another version.

    Example:
        >>> run = load_run("runs/quickstart")  # doctest: +SKIP
        >>> run.state.status, run.metrics["critic/score/mean"][-1]  # doctest: +SKIP
        ('finished', 0.9921875)

    Raises:
        ReadError: it is no run's folder; runs below it are named.
    """
    folder = Path(path)
    if not is_run(folder):
        below = [str(run) for run in find_runs(folder)][:5]
        hint = f"; there are runs in it: {', '.join(below)}" if below else ""
        what = "is no folder of a run (it has neither metrics.jsonl nor config.yaml)"
        raise ReadError(f"{folder} {what if folder.is_dir() else 'does not exist'}{hint}")
    return Run(folder)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return any(os.path.isfile(folder / name) for name in MARKS)  # False in a folder that may not be entered, too


def find_runs(root: str | Path) -> Iterator[Path]:
    """All folders of runs in a folder, and that folder if it is one; in the order of their names. Links are not
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
    """Keys, with dots, in which two configs differ, each with both values; None where one of them lacks it.

    Example:
        >>> config_differences({"train": {"steps": 1}, "seed": 0}, {"train": {"steps": 2}, "seed": 0})
        {'train.steps': (1, 2)}
    """
    old, new = flat_tree(one), flat_tree(other)
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
