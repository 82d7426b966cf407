"""The runs below a folder, each read when it is asked for, and kept while it is looked at."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from atomrl.tools.tuning import is_study
from atomrl.tools.ui.curves import CLOCKS, alike, constant
from atomrl.tracking.reading import Run, find_runs
from atomrl.tracking.reading.comparison import NOT_SETTINGS, settings
from atomrl.tracking.reading.lines import flat_tree, is_held
from atomrl.tracking.reading.metrics import Floats, MetricTable, as_float, newest_held_out
from atomrl.tracking.reading.rollouts import Ints
from atomrl.tracking.reading.run import FAILURE, silence

# --------------------------------------------------------------------------------------------------------------------
# What the pages say of a run, as JSON-ready values.

REWARDS = ("critic/score/mean",)
LOSSES = ("preference/loss", "reward_model/loss", "sft/nll_per_token", "train/loss")
"""Of training; a policy gradient's is none to judge a run by, since it stays near 0 whatever is learnt."""
HELD_OUT_LOSSES = ("eval/nll_per_token", "val/loss", "eval/loss")
SPARK_POINTS = 60


def card(run: Run, run_id: str, name: str) -> dict[str, Any]:
    """What the list shows of a run."""
    config, state = run.config, run.state
    findings = run.findings
    seconds, _ = spent(run)
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
        "findings": [{"id": found.id, "severity": found.severity, "step": found.step} for found in findings],
        "group": group(settings(run)),
        "problems": len(run.problems),
        "error": str(run.failure.get("error", "")) or None if state.status == "failed" else None,
    }


def spent(run: Run) -> tuple[float, float]:
    """Seconds that a run took, and tokens that went through it."""
    seconds = as_float(run.summary.get("wall_s"))
    if not seconds > 0:
        seconds = float(run.metrics.points("timing_s/step")[1].sum())
    return seconds, float(run.metrics.points("perf/total_num_tokens")[1].sum())


def course(table: MetricTable, names: Sequence[str]) -> dict[str, Any] | None:
    """Of the first of these metrics that a run has: first and last, least and largest value, each with its step, and
    a small curve; None where it has none."""
    name = next((name for name in names if table.last(name) is not None), None)
    if name is None:
        return None
    steps, values = table.points(name)
    x, y = downsample(steps, values, SPARK_POINTS)
    places = {"first": 0, "last": -1, "least": int(values.argmin()), "largest": int(values.argmax())}
    points = {title: [int(steps[place]), float(values[place])] for title, place in places.items()}
    return {"name": name, **points, "spark": [x.tolist(), y.tolist()]}


def held_out(run: Run) -> list[dict[str, Any]]:
    """The course of each thing that a run is judged by on held-out data: `kind` (accuracy; reward where that says no
    right or wrong; loss) and `source`; of several data sources that of all of them, named `all`, comes first."""
    what, names = newest_held_out(run.evaluations)
    kind = what if names else "loss"
    asked: list[tuple[str | None, Sequence[str]]] = [(source, [name]) for source, name in names.items()]
    found = [
        {"kind": kind, "source": source, **about}
        for source, of in asked or [(None, HELD_OUT_LOSSES)]
        if (about := course(run.evaluations, of)) is not None
    ]
    return sorted(found, key=lambda one: one["source"] != "all")


def unreadable(run_id: str, name: str, error: Exception) -> dict[str, Any]:
    """The same of a run that cannot be read, with why."""
    said = f"it cannot be read: {error!r}"[:1000]
    lacking = ("steps", "progress", "eta_s", "step_seconds", "started", "seed", "learning_rate", "model", "silent_s")
    return dict.fromkeys((*lacking, "reward", "loss")) | {
        "id": run_id, "name": name, "kind": "", "algorithm": "", "status": "failed", "why": said, "step": 0,
        "updated": 0.0, "seconds": 0.0, "held_out": [], "findings": [], "group": run_id, "problems": 1,
        "error": said,
    }  # fmt: skip


def details(run: Run, run_id: str, name: str) -> dict[str, Any]:
    """What the page of a run shows beside its curves."""
    return card(run, run_id, name) | {
        "metrics": [name for name in run.metrics if run.metrics.last(name) is not None],
        "evaluations": [name for name in run.evaluations if run.evaluations.last(name) is not None],
        "constant": constant((run.metrics, run.evaluations)),
        "alike": alike((run.metrics, run.evaluations)),
        "clocks": [name for name, metric in CLOCKS.items() if run.metrics.last(metric) is not None],
        "evaluated": [
            {"step": int(step), "values": {metric: number(column[place]) for metric, column in run.evaluations.items()}}
            for place, step in enumerate(run.evaluations.steps)
        ],
        "findings": [
            {name: getattr(found, name) for name in ("id", "severity", "step", "what", "quote", "advice", "page")}
            for found in run.findings
        ],
        "summary": run.summary,
        "failure": run.failure,
        "environment": run.environment,
        "problems": run.problems,
        "last": {metric: run.metrics.last(metric) for metric in run.metrics},
    }


def kind(config: Mapping[str, Any]) -> str:
    """Which kind of run a config is of, as its file says it."""
    for section in ("sft", "pretrain"):
        if config.get(section) is not None:
            return section
    return "rl"


def algorithm(config: Mapping[str, Any]) -> str:
    """The algorithm's name, or the kind of a run that has none."""
    name = at(config, "algorithm", "name") if kind(config) == "rl" else kind(config)
    return str(name or "")


def group(config: Mapping[str, Any]) -> str:
    """The same for runs that differ in nothing but their seed and name."""
    flat = {key: value for key, value in flat_tree(config).items() if key not in NOT_SETTINGS}
    return blake2b(repr(sorted(flat.items())).encode("utf-8", "replace"), digest_size=6).hexdigest()


def at(tree: Mapping[str, Any], *keys: str) -> Any:
    """A value of a nested dict, or None."""
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(value: float) -> float | None:
    """A number as JSON has it: NaN is null."""
    return None if np.isnan(value) else float(value)


def downsample(steps: Ints, values: Floats, points: int) -> tuple[Ints, Floats]:
    """At most so many points, by the least and the largest of each stretch, so that no spike is lost; the first and the
    last point are kept.

    Example:
        >>> steps, values = downsample(np.arange(9), np.array([0.0, 0, 0, 0, 9, 0, 0, 0, 0]), 6)
        >>> 9.0 in values, steps[0], steps[-1]
        (True, np.int64(0), np.int64(8))
    """
    if len(steps) <= points:
        return steps, values
    stretches = max(1, (points - 2) // 2)
    edges = np.linspace(0, len(steps), stretches + 1).astype(int)[:-1]
    kept = {0, len(steps) - 1}
    for start, end in zip(edges, [*edges[1:], len(steps)], strict=True):
        part = values[start:end]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    places = np.array(sorted(kept))
    return steps[places], values[places]


SCAN_S = 2.0
"""Seconds after which the folder is searched for new runs again."""
CLOCK_S = 10.0
"""A run on another machine is looked at anew this often, though nothing is written."""
KEPT = 6
"""Runs that are kept in memory beside those that are running."""
WATCHED = ("metrics.jsonl", "summary.json", "findings.jsonl", "config.yaml", FAILURE)
Stamp = tuple[Any, ...]


def id_of(name: str) -> str:
    """What a run or a study is asked for by: a hash of its place, so that it is the same for the next server."""
    return blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


class UnknownRun(LookupError):
    """There is no run with this id, or it is gone."""


class Entry:
    """A run that was found.

    Attributes:
        id: a hash of its place.
        name: its place below the folder.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.id = id_of(name)
        self.lock = threading.Lock()
        self.run: Run | None = None
        self.stamp: Stamp = ()
        self.card: dict[str, Any] = {}

    def look(self) -> Stamp:
        """What tells whether something has changed, without reading."""
        stamps: list[Any] = []
        for name in WATCHED:
            try:
                status = os.lstat(self.path / name)
                stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                stamps.append(None)
        ended = stamps[1] is not None
        return (*stamps, not ended and (self._at_work() or self._by_the_clock()))

    def _at_work(self) -> int:
        """Whether a process holds the run: 0 or 1; 2 where it stands still, since nothing is written then."""
        if not is_held(self.path):
            return 0
        return 1 if silence(self.path, self.card.get("step_seconds")) is None else 2

    def _by_the_clock(self) -> int:
        """Of a run whose lock says nothing here, which runs until it has been silent for long: changes with time."""
        return int(time.time() / CLOCK_S) if self.card.get("status") == "running" else 0


class Catalog:
    """The runs of a folder. Its methods may be called from several threads.

    Args:
        root: is searched; links in it are not followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self._scanned = -SCAN_S
        self._used: list[Entry] = []

    def entries(self) -> list[Entry]:
        """All runs, by name."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_S:
                self._scan()
                self._scanned = time.monotonic()
            return list(self._entries.values())

    def entry(self, run_id: str) -> Entry:
        """A run by its id.

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
        """The run, read up to now. One thread at a time has it, so several that ask at once do not each read it."""
        with entry.lock:
            if entry.run is None:
                entry.run = Run(entry.path)
            else:
                entry.run.refresh()
            self._keep(entry)
            yield entry.run

    def studies(self) -> dict[str, tuple[Path, list[Entry]]]:
        """The studies whose trials are among the runs: place below the folder -> folder and runs."""
        found: dict[str, tuple[Path, list[Entry]]] = {}
        for entry in self.entries():
            place = entry.path.parent.parent
            if entry.path.parent.name == "runs" and place.is_relative_to(self.root) and is_study(place):
                name = place.relative_to(self.root).as_posix()
                found.setdefault(self.root.resolve().name if name == "." else name, (place, []))[1].append(entry)
        return found

    def card(self, entry: Entry) -> dict[str, Any]:
        """What the list shows of a run; made anew where something has changed."""
        stamp = entry.look()
        if entry.stamp != stamp or not entry.card:
            try:
                with self.reading(entry) as run:
                    if entry.stamp != stamp or not entry.card:
                        entry.card = card(run, entry.id, entry.name)
                        entry.stamp = stamp
            except Exception as error:  # of files that nobody thought of: the list has the other runs all the same
                return unreadable(entry.id, entry.name, error)
        return entry.card

    def _scan(self) -> None:
        found = {}
        for path in find_runs(self.root):
            name = path.relative_to(self.root).as_posix()
            name = self.root.resolve().name if name == "." else name
            found[name] = self._entries.get(name) or Entry(path, name)
        self._entries = found

    def _keep(self, entry: Entry) -> None:
        """Forget what was read of runs that nobody has looked at for longest."""
        with self._lock:
            self._used = [other for other in self._used if other is not entry and other.run is not None] + [entry]
            ended = [other for other in self._used[:-1] if not (other.stamp and other.stamp[-1])]
            for other in ended[: max(0, len(ended) - KEPT)]:
                if other.lock.acquire(blocking=False):
                    other.run = None
                    other.lock.release()
