"""The catalog of the runs in a folder, with a cache of the runs that were read last, and their JSON for the pages."""

from __future__ import annotations

import csv
import io
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from atomrl.tracking.reading import Run, find_runs
from atomrl.tracking.reading.comparison import NOT_SETTINGS, settings
from atomrl.tracking.reading.lines import flat_tree
from atomrl.tracking.reading.lock import is_locked
from atomrl.tracking.reading.metrics import Floats, MetricTable, as_float, newest_held_out
from atomrl.tracking.reading.rollouts import Ints
from atomrl.tracking.reading.state import FAILURE, silence
from atomrl.tracking.reading.studies import is_study

# --------------------------------------------------------------------------------------------------------------------
# Curves for the browser. Long runs are downsampled to mean and range of intervals, so that no extreme is lost.

CLOCKS = {"time": "timing_s/step", "tokens": "perf/total_num_tokens"}
"""Horizontal axis besides the step -> the metric whose running sum it is."""
LARGEST = float(np.finfo(np.float32).max)
CSV_HEAD = ("run", "step", "time_s", "tokens")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters with which a spreadsheet begins a formula."""


def stretches(count: int, points: int) -> Ints:
    """Return the starts of at most `points` intervals of equal length (the last may be shorter).

    The boundaries stay the same while a run grows, until there are too many and all intervals become longer.

    Example:
        >>> stretches(4, 4).tolist(), stretches(5, 4).tolist()
        ([0, 1, 2, 3], [0, 2, 4])
    """
    return np.arange(0, count, max(1, -(-count // points)))


def last_of(steps: Ints, starts: Ints) -> Ints:
    """Return the last step of each interval."""
    ends: Ints = steps[np.append(starts[1:], len(steps))[: len(starts)] - 1]
    return ends


def summarized(values: Floats, starts: Ints) -> tuple[Floats, Floats, Floats]:
    """Return mean, least and largest value of each interval, [n] each; NaN for an interval without a value.

    Example:
        >>> mean, low, high = summarized(np.array([0.0, 9.0, np.nan, 1.0, np.nan]), np.array([0, 2, 4]))
        >>> mean.tolist(), low.tolist(), high.tolist()
        ([4.5, 1.0, nan], [0.0, 1.0, nan], [9.0, 1.0, nan])
    """
    if not len(starts):
        return values, values, values
    present = ~np.isnan(values)
    counts = np.add.reduceat(present, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.add.reduceat(np.where(present, values, 0.0), starts) / counts
    return means, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def clocks(run: Run, steps: Ints) -> dict[str, Floats]:
    """Return the training time and the tokens up to each of `steps`, if the run recorded them; evaluations and pauses
    between steps do not count."""
    places = np.searchsorted(run.metrics.steps, steps, "right")
    return {
        name: np.concatenate([np.zeros(1), np.nancumsum(run.metrics[metric])])[places]
        for name, metric in CLOCKS.items()
        if metric in run.metrics
    }


def packed(run: Run, table: MetricTable, names: Iterable[str], points: int, first: int, last: int) -> tuple[Any, bytes]:
    """Serialize the curves of a table as float32, column by column. Returns a header and the bytes.

    The first columns are the axis: `first` and `last` step of each point, then the clocks. Then each metric has its
    values or, if a point covers `per` > 1 steps, the means, the least and the largest values. Missing values are NaN;
    values beyond float32 are clipped.

    Args:
        names: metrics; those that the table lacks are left out.
        points: maximum number of points of a curve.
        first, last: range of steps; one more on either side is included, so that lines reach the edges.
    """
    start = max(0, int(np.searchsorted(table.steps, first)) - 1)
    steps = table.steps[start : int(np.searchsorted(table.steps, last, "right")) + 1]
    starts = stretches(len(steps), points)
    ends = last_of(steps, starts)
    axis: dict[str, Any] = {"first": steps[starts], "last": ends, **clocks(run, ends)}
    per = int(starts[1]) if len(starts) > 1 else 1
    present = [name for name in dict.fromkeys(names) if name in table]
    body = list(axis.values())
    for name in present:
        body += summarized(table[name][start : start + len(steps)], starts)[: 3 if per > 1 else 1]
    header = {"count": len(starts), "per": per, "axis": list(axis), "names": present}
    return header, b"".join(np.clip(column, -LARGEST, LARGEST).astype("<f4").tobytes() for column in body)


def equal_metrics(tables: Iterable[MetricTable]) -> list[list[str]]:
    """Return groups of two or more metrics with the same values in the same steps; constant metrics are left out."""
    groups: dict[tuple[int, bytes], list[str]] = {}
    for place, table in enumerate(tables):
        flat = constant([table])
        for name, column in table.items():
            if name not in flat and not np.isnan(column).all():
                groups.setdefault((place, column.tobytes()), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def constant(tables: Iterable[MetricTable]) -> dict[str, float]:
    """Return the metrics that have the same value in all of two or more steps, with this value."""
    return {
        name: float(values[0])
        for table in tables
        for name in table
        if len(values := table.points(name)[1]) > 1 and values.min() == values.max()
    }


def csv_lines(title: str, run: Run, names: Sequence[str]) -> Iterator[str]:
    """Yield the values of some metrics of a run as lines of CSV: `CSV_HEAD`, then the metrics; a missing value is an
    empty cell."""
    rows: dict[int, dict[str, float]] = {}
    for name in names:
        for table in (run.metrics, run.evaluations):
            for step, value in zip(*table.points(name), strict=True):
                rows.setdefault(int(step), {})[name] = float(value)
    steps = sorted(rows)
    sums = clocks(run, np.array(steps, np.int64))
    for place, step in enumerate(steps):
        clock = [float(sums[name][place]) if name in sums else None for name in CLOCKS]
        yield csv_line([title, step, *clock, *(rows[step].get(name) for name in names)])


def csv_line(cells: Sequence[Any]) -> str:
    """Format a line of CSV; text that a spreadsheet would evaluate as a formula is quoted.

    Example:
        >>> csv_line(["=1+1", 0.5, None]).strip()
        "'=1+1,0.5,"
    """
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(
        [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in cells]
    )
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# A run as JSON-ready values: the card of the list, and the details of its page.

REWARDS = ("critic/score/mean",)
LOSSES = ("preference/loss", "reward_model/loss", "sft/nll_per_token", "train/loss")
"""Training losses. The loss of a policy gradient is left out: it stays near 0 whatever is learned."""
HELD_OUT_LOSSES = ("eval/nll_per_token", "val/loss", "eval/loss")
SPARK_POINTS = 60


def card(run: Run, run_id: str, name: str) -> dict[str, Any]:
    """Return the card of a run in the list."""
    config, state = run.config, run.state
    seconds, _ = seconds_and_tokens(run)
    return {
        "id": run_id,
        "name": name,
        "kind": kind(config),
        "algorithm": algorithm(config),
        "status": state.status,
        "why": state.why,
        "step": state.step,
        "steps": state.steps,
        "progress": state.progress,
        "eta_s": state.eta_s,
        "step_seconds": state.step_seconds,
        "updated": state.updated,
        "started": run.environment.get("time"),
        "seed": config.get("seed"),
        "learning_rate": at(config, "train", "learning_rate"),
        "model": at(config, "model", "path"),
        "seconds": seconds,
        "silent_s": state.silent_s,
        "reward": course(run.metrics, REWARDS),
        "loss": course(run.metrics, LOSSES),
        "held_out": held_out(run),
        "findings": [{"id": one.id, "severity": one.severity, "step": one.step} for one in run.findings],
        "group": group(settings(run)),
        "problems": len(run.problems),
        "error": str(run.failure.get("error", "")) or run.config_fault or None if state.status == "failed" else None,
    }


def seconds_and_tokens(run: Run) -> tuple[float, float]:
    """Return the seconds that a run took, and the tokens that it processed."""
    seconds = as_float(run.summary.get("wall_s"))
    if not seconds > 0:
        seconds = float(run.metrics.points("timing_s/step")[1].sum())
    return seconds, float(run.metrics.points("perf/total_num_tokens")[1].sum())


def course(table: MetricTable, names: Sequence[str]) -> dict[str, Any] | None:
    """Summarize the first of some metrics that a run has: first, last, least and largest value with their steps, and a
    sparkline; None if it has none of them."""
    name = next((name for name in names if table.last(name) is not None), None)
    if name is None:
        return None
    steps, values = table.points(name)
    x, y = downsample(steps, values, SPARK_POINTS)
    places = {"first": 0, "last": -1, "least": int(values.argmin()), "largest": int(values.argmax())}
    points = {title: [int(steps[place]), float(values[place])] for title, place in places.items()}
    return {"name": name, **points, "spark": [x.tolist(), y.tolist()]}


def held_out(run: Run) -> list[dict[str, Any]]:
    """Return the `course` of each held-out metric, with `kind` (accuracy; reward if it is not binary; loss) and data
    `source`; the source `all` comes first."""
    what, names = newest_held_out(run.evaluations)
    kind = what if names else "loss"
    by_source: list[tuple[str | None, Sequence[str]]] = [(source, [name]) for source, name in names.items()]
    courses = [
        {"kind": kind, "source": source, **summary}
        for source, metrics in by_source or [(None, HELD_OUT_LOSSES)]
        if (summary := course(run.evaluations, metrics)) is not None
    ]
    return sorted(courses, key=lambda one: one["source"] != "all")


def unreadable(run_id: str, name: str, error: Exception) -> dict[str, Any]:
    """Return the card of a run that cannot be read, with the error."""
    why = f"cannot be read: {error!r}"[:1000]
    absent = ("steps", "progress", "eta_s", "step_seconds", "started", "seed", "learning_rate", "model", "silent_s")
    return dict.fromkeys((*absent, "reward", "loss")) | {
        "id": run_id, "name": name, "kind": "", "algorithm": "", "status": "failed", "why": why, "step": 0,
        "updated": 0.0, "seconds": 0.0, "held_out": [], "findings": [], "group": run_id, "problems": 1,
        "error": why,
    }  # fmt: skip


def details(run: Run, run_id: str, name: str) -> dict[str, Any]:
    """Return the card of a run with everything that its page shows besides the curves."""
    return card(run, run_id, name) | {
        "metrics": [name for name in run.metrics if run.metrics.last(name) is not None],
        "evaluations": [name for name in run.evaluations if run.evaluations.last(name) is not None],
        "constant": constant((run.metrics, run.evaluations)),
        "alike": equal_metrics((run.metrics, run.evaluations)),
        "clocks": [name for name, metric in CLOCKS.items() if run.metrics.last(metric) is not None],
        "evaluated": [
            {"step": int(step), "values": {metric: number(column[place]) for metric, column in run.evaluations.items()}}
            for place, step in enumerate(run.evaluations.steps)
        ],
        "findings": [
            {name: getattr(one, name) for name in ("id", "severity", "step", "what", "quote", "advice", "page")}
            for one in run.findings
        ],
        "summary": run.summary,
        "failure": run.failure,
        "environment": run.environment,
        "problems": run.problems,
        "last": {metric: run.metrics.last(metric) for metric in run.metrics},
    }


def outcome(run: Run) -> dict[str, Any]:
    """Return time, tokens, throughput and checkpoints of a run."""
    seconds, tokens = seconds_and_tokens(run)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "throughput": run.metrics.last("perf/throughput"),
        "best": checkpoint(run, "best"),
        "newest": checkpoint(run, "model"),
    }


def checkpoint(run: Run, link: str) -> dict[str, Any] | None:
    """Return path and step of the checkpoint behind a link of the run's folder, or None."""
    path = run.path / link
    try:
        target = str(path.readlink()) if path.is_symlink() else None
    except OSError:
        target = None
    if target is None:
        return None
    step = re.search(r"step_(\d{1,15})", target)
    return {"path": str(path), "step": int(step[1]) if step else None}


def kind(config: Mapping[str, Any]) -> str:
    """Return the kind of run of a config: `sft`, `pretrain` or `rl`."""
    for section in ("sft", "pretrain"):
        if config.get(section) is not None:
            return section
    return "rl"


def algorithm(config: Mapping[str, Any]) -> str:
    """Return the name of the algorithm, or the kind of a run without one."""
    name = at(config, "algorithm", "name") if kind(config) == "rl" else kind(config)
    return str(name or "")


def group(config: Mapping[str, Any]) -> str:
    """Hash a config without seed and name, so that seeds of one config have the same group."""
    flat = {key: value for key, value in flat_tree(config).items() if key not in NOT_SETTINGS}
    return blake2b(repr(sorted(flat.items())).encode("utf-8", "replace"), digest_size=6).hexdigest()


def at(tree: Mapping[str, Any], *keys: str) -> Any:
    """Return a value of a nested dict, or None."""
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(value: float) -> float | None:
    """Convert NaN to None, which JSON has."""
    return None if np.isnan(value) else float(value)


def downsample(steps: Ints, values: Floats, points: int) -> tuple[Ints, Floats]:
    """Reduce a curve to at most `points` points: the least and the largest of each interval, so that no spike is lost,
    and the first and the last point.

    Example:
        >>> steps, values = downsample(np.arange(9), np.array([0.0, 0, 0, 0, 9, 0, 0, 0, 0]), 6)
        >>> 9.0 in values, steps[0], steps[-1]
        (True, np.int64(0), np.int64(8))
    """
    if len(steps) <= points:
        return steps, values
    stretches = max(1, (points - 2) // 2)
    edges = np.linspace(0, len(steps), stretches + 1).astype(int)[:-1]
    chosen = {0, len(steps) - 1}
    for start, end in zip(edges, [*edges[1:], len(steps)], strict=True):
        part = values[start:end]
        chosen |= {start + int(part.argmin()), start + int(part.argmax())}
    places = np.array(sorted(chosen))
    return steps[places], values[places]


# --------------------------------------------------------------------------------------------------------------------
# The catalog.

SCAN_S = 2.0
"""Seconds between searches for new runs."""
CLOCK_S = 10.0
"""Seconds between refreshes of a run on another machine, even if nothing was written."""
KEPT = 6
"""Maximum number of ended runs in memory."""
WATCHED = ("metrics.jsonl", "summary.json", "findings.jsonl", "config.yaml", FAILURE)
Stamp = tuple[Any, ...]


def id_of(name: str) -> str:
    """Return the id of a run or study: a hash of its path, so that it is the same after a restart of the server."""
    return blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


class UnknownRun(LookupError):
    """There is no run with this id, or it was removed."""


class Entry:
    """A run of the catalog.

    Attributes:
        id: hash of its name.
        name: path relative to the catalog's folder.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.id = id_of(name)
        self.lock = threading.Lock()
        self.run: Run | None = None
        self.stamp: Stamp = ()
        self.card: dict[str, Any] = {}

    def current_stamp(self) -> Stamp:
        """Return a stamp that differs if the run has changed, without reading its files."""
        stamps: list[Any] = []
        for name in WATCHED:
            try:
                status = os.lstat(self.path / name)
                stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                stamps.append(None)
        ended = stamps[1] is not None
        return (*stamps, not ended and (self._activity() or self._tick()))

    def _activity(self) -> int:
        """Return 1 if a process holds the run's lock, 2 if that run has stalled (no file changes then), else 0."""
        if not is_locked(self.path):
            return 0
        return 1 if silence(self.path, self.card.get("step_seconds")) is None else 2

    def _tick(self) -> int:
        """Return a number that changes every `CLOCK_S` seconds while a run counts as running without a lock here: its
        status then depends on the time."""
        return int(time.time() / CLOCK_S) if self.card.get("status") == "running" else 0


class Catalog:
    """The runs of a folder. Thread-safe.

    Args:
        root: the folder; symbolic links in it are not followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self._scanned = -SCAN_S
        self._used: list[Entry] = []

    def entries(self) -> list[Entry]:
        """Return all runs, sorted by name."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_S:
                self._scan()
                self._scanned = time.monotonic()
            return list(self._entries.values())

    def entry(self, run_id: str) -> Entry:
        """Return a run by its id.

        Raises:
            UnknownRun: there is none.
        """
        for entries in (self._entries.values(), self.entries()):
            for entry in entries:
                if entry.id == run_id:
                    if not entry.path.is_dir():
                        raise UnknownRun(run_id)
                    return entry
        raise UnknownRun(run_id)

    @contextmanager
    def reading(self, entry: Entry) -> Iterator[Run]:
        """Yield the run, refreshed. One thread at a time holds it, so concurrent requests do not read it twice."""
        with entry.lock:
            if entry.run is None:
                entry.run = Run(entry.path)
            else:
                entry.run.refresh()
            self._keep(entry)
            yield entry.run

    def studies(self) -> dict[str, tuple[Path, list[Entry]]]:
        """Return the studies whose trials are among the runs: relative path -> folder and runs."""
        studies: dict[str, tuple[Path, list[Entry]]] = {}
        for entry in self.entries():
            place = entry.path.parent.parent
            if entry.path.parent.name == "runs" and place.is_relative_to(self.root) and is_study(place):
                name = place.relative_to(self.root).as_posix()
                studies.setdefault(self.root.resolve().name if name == "." else name, (place, []))[1].append(entry)
        return studies

    def card(self, entry: Entry) -> dict[str, Any]:
        """Return the card of a run; computed again only if the run has changed."""
        stamp = entry.current_stamp()
        if entry.stamp != stamp or not entry.card:
            try:
                with self.reading(entry) as run:
                    if entry.stamp != stamp or not entry.card:
                        entry.card = card(run, entry.id, entry.name)
                        entry.stamp = stamp
            except Exception as error:  # malformed files of one run must not hide the others
                return unreadable(entry.id, entry.name, error)
        return entry.card

    def _scan(self) -> None:
        entries = {}
        for path in find_runs(self.root):
            name = path.relative_to(self.root).as_posix()
            name = self.root.resolve().name if name == "." else name
            entries[name] = self._entries.get(name) or Entry(path, name)
        self._entries = entries

    def _keep(self, entry: Entry) -> None:
        """Mark a run as used, and evict the least recently used ended runs from memory."""
        with self._lock:
            self._used = [other for other in self._used if other is not entry and other.run is not None] + [entry]
            ended = [other for other in self._used[:-1] if not (other.stamp and other.stamp[-1])]
            for other in ended[: max(0, len(ended) - KEPT)]:
                if other.lock.acquire(blocking=False):
                    other.run = None
                    other.lock.release()
