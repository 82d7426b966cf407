"""Curves for the browser. Long runs are downsampled to mean and range of intervals, so that no extreme is lost."""

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
    about = {"count": len(starts), "per": per, "axis": list(axis), "names": present}
    return about, b"".join(np.clip(column, -LARGEST, LARGEST).astype("<f4").tobytes() for column in body)


def alike(tables: Iterable[MetricTable]) -> list[list[str]]:
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
    spent = clocks(run, np.array(steps, np.int64))
    for place, step in enumerate(steps):
        clock = [float(spent[name][place]) if name in spent else None for name in CLOCKS]
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
