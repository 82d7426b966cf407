"""Curves for a browser: of a long run the mean and the range of stretches of steps, so that no extreme is lost."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from atomrl.tracking.reading import MetricTable, Run
from atomrl.tracking.reading.metrics import Floats
from atomrl.tracking.reading.rollouts import Ints

CLOCKS = {"time": "timing_s/step", "tokens": "perf/total_num_tokens"}
"""Horizontal axes beside steps -> the metric whose running sum each is."""
LARGEST = float(np.finfo(np.float32).max)
CSV_HEAD = ("run", "step", "time_s", "tokens")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters with which a spreadsheet begins a formula."""


def stretches(count: int, points: int) -> Ints:
    """Where stretches begin, at most `points` of them, all of the same length but the last.

    The boundaries do not move while a run goes on, until there are too many and each is made longer.

    Example:
        >>> stretches(4, 4).tolist(), stretches(5, 4).tolist()
        ([0, 1, 2, 3], [0, 2, 4])
    """
    return np.arange(0, count, max(1, -(-count // points)))


def last_of(steps: Ints, starts: Ints) -> Ints:
    """The last step of each stretch."""
    ends: Ints = steps[np.append(starts[1:], len(steps))[: len(starts)] - 1]
    return ends


def summarized(values: Floats, starts: Ints) -> tuple[Floats, Floats, Floats]:
    """Mean, least and largest value of each stretch, [n] each; NaN for a stretch without a value.

    Example:
        >>> mean, low, high = summarized(np.array([0.0, 9.0, np.nan, 1.0, np.nan]), np.array([0, 2, 4]))
        >>> mean.tolist(), low.tolist(), high.tolist()
        ([4.5, 1.0, nan], [0.0, 1.0, nan], [9.0, 1.0, nan])
    """
    if not len(starts):
        return values, values, values
    there = ~np.isnan(values)
    counts = np.add.reduceat(there, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.add.reduceat(np.where(there, values, 0.0), starts) / counts
    return means, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def clocks(run: Run, steps: Ints) -> dict[str, Floats]:
    """Seconds of training and tokens up to each of `steps`, as far as the run recorded them; evaluations and pauses
    between steps do not count."""
    places = np.searchsorted(run.metrics.steps, steps, "right")
    return {
        name: np.concatenate([np.zeros(1), np.nancumsum(run.metrics[metric])])[places]
        for name, metric in CLOCKS.items()
        if metric in run.metrics
    }


def packed(run: Run, table: MetricTable, names: Iterable[str], points: int, first: int, last: int) -> tuple[Any, bytes]:
    """The curves of a table for a browser, as float32 column by column.

    The columns are those of the axis (`first` and `last` step of each point, then the clocks), then of each metric its
    values, or, where a point stands for `per` > 1 steps, its means, least and largest values. A value that is not there
    is NaN; one beyond float32 is drawn at its end.

    Args:
        names: metrics; those that the table lacks are left out.
        points: most points of a curve.
        first: step from which on curves are asked for; one step more is sent on either side, to which lines lead.
        last: step up to which they are.
    """
    start = max(0, int(np.searchsorted(table.steps, first)) - 1)
    steps = table.steps[start : int(np.searchsorted(table.steps, last, "right")) + 1]
    starts = stretches(len(steps), points)
    ends = last_of(steps, starts)
    axis: dict[str, Any] = {"first": steps[starts], "last": ends, **clocks(run, ends)}
    per = int(starts[1]) if len(starts) > 1 else 1
    there = [name for name in dict.fromkeys(names) if name in table]
    body = list(axis.values())
    for name in there:
        body += summarized(table[name][start : start + len(steps)], starts)[: 3 if per > 1 else 1]
    about = {"count": len(starts), "per": per, "axis": list(axis), "names": there}
    return about, b"".join(np.clip(column, -LARGEST, LARGEST).astype("<f4").tobytes() for column in body)


def alike(tables: Iterable[MetricTable]) -> list[list[str]]:
    """Metrics that have the same values in the same steps, each time two or more; constant ones are left out."""
    found: dict[tuple[int, bytes], list[str]] = {}
    for place, table in enumerate(tables):
        flat = constant([table])
        for name, column in table.items():
            if name not in flat and not np.isnan(column).all():
                found.setdefault((place, column.tobytes()), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def constant(tables: Iterable[MetricTable]) -> dict[str, float]:
    """Metrics that have the same value in all their steps, at least two, with this value."""
    return {
        name: float(values[0])
        for table in tables
        for name in table
        if len(values := table.points(name)[1]) > 1 and values.min() == values.max()
    }


def csv_lines(title: str, run: Run, names: Sequence[str]) -> Iterator[str]:
    """Every value of some metrics of a run, as lines of CSV under `CSV_HEAD` and the metrics' names; a cell is empty
    where a step lacks a value."""
    rows: dict[int, dict[str, float]] = {}
    for name in names:
        for table in (run.metrics, run.evaluations):
            for step, value in zip(*table.points(name), strict=True):
                rows.setdefault(int(step), {})[name] = float(value)
    steps = sorted(rows)
    spent = clocks(run, np.array(steps, np.int64))
    for place, step in enumerate(steps):
        clock = [float(spent[name][place]) if name in spent else None for name in CLOCKS]
        yield csv_line([title, step, *clock, *(rows[step].get(name) for name in names)])


def csv_line(cells: Sequence[Any]) -> str:
    """A line of CSV in which no text is taken for a formula.

    Example:
        >>> csv_line(["=1+1", 0.5, None]).strip()
        "'=1+1,0.5,"
    """
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(
        [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in cells]
    )
    return file.getvalue()
