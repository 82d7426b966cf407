"""Metrics of a run as columns, and the metrics by which a run is judged on held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas

Floats = NDArray[np.float64]


class MetricTable(Mapping[str, Floats]):
    """Columns by name, one value per step; NaN where a step lacks a metric, or has NaN or infinity.

    Steps are increasing. A row of the last step is merged into it; a row of an earlier step replaces that step and all
    later ones, as when a run is resumed.

    Attributes:
        steps: [n].

    Example:
        >>> table = MetricTable()
        >>> table.extend([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 1.0, "kl": None}])
        >>> table.steps.tolist(), table["reward"].tolist(), table.last("reward")
        ([1, 2], [0.5, 1.0], 1.0)
    """

    def __init__(self) -> None:
        self.steps: NDArray[np.int64] = np.zeros(0, np.int64)
        self._columns: dict[str, Floats] = {}

    def __getitem__(self, name: str) -> Floats:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def points(self, name: str) -> tuple[NDArray[np.int64], Floats]:
        """Return steps and values of a metric, without the steps that lack it."""
        values = self._columns.get(name)
        if values is None:
            return self.steps[:0], np.zeros(0)
        present = ~np.isnan(values)
        return self.steps[present], values[present]

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric, or None."""
        values = self.points(name)[1]
        return float(values[-1]) if len(values) else None

    def frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame indexed by step.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(dict(self._columns), index=pandas.Index(self.steps, name="step"))

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of `metrics.jsonl`; each has an int `step`. A value that is not a number counts as missing."""
        new: list[Mapping[str, Any]] = []
        for row in rows:
            step = row["step"]
            # A resumed run writes steps again: rows of this step and later ones are void.
            while new and new[-1]["step"] > step:
                new.pop()
            if not new and len(self.steps) and self.steps[-1] >= step:
                new += self._cut(step)
            if new and new[-1]["step"] == step:
                new[-1] = {**new[-1], **row}
            else:
                new.append(row)
        if not new:
            return
        before = len(self.steps)
        # Append to the columns of the new rows, create those of new names, and fill up all others with NaN.
        self.steps = np.concatenate([self.steps, np.array([row["step"] for row in new], np.int64)])
        for name, values in _columns_of(new):
            old = self._columns.get(name)
            if old is None:
                if not any(_is_number(value) for value in values):
                    continue  # text, written by another version
                old = np.full(before, np.nan)
            self._columns[name] = np.concatenate([old, _floats(values)])
        for name, column in self._columns.items():
            if len(column) < len(self.steps):
                self._columns[name] = np.concatenate([column, np.full(len(self.steps) - len(column), np.nan)])

    def _cut(self, step: int) -> list[dict[str, Any]]:
        """Remove a step and all later ones; returns the row of the step, if there was one."""
        place = int(np.searchsorted(self.steps, step))
        row = {name: float(column[place]) for name, column in self._columns.items() if not np.isnan(column[place])}
        same = self.steps[place] == step
        self.steps = self.steps[:place]
        self._columns = {name: column[:place] for name, column in self._columns.items()}
        return [{"step": step, **row}] if same else []


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Sequence[Any] | Floats]]:
    """Yield (name, values) for each name but `step`; None where a row has no value."""
    names = list(rows[0])
    if all(map(names.__eq__, map(list, rows))):  # fast path: all rows have the same names, and numbers only
        columns: Iterable[Sequence[Any] | Floats]
        try:
            if any(isinstance(value, str) for value in rows[0].values()):
                raise ValueError("text of another version")  # numpy would parse text that looks like a number
            table = np.fromiter(chain.from_iterable(row.values() for row in rows), np.float64, len(rows) * len(names))
            columns = table.reshape(len(rows), -1).T
        except (TypeError, ValueError, OverflowError):
            columns = zip(*(row.values() for row in rows), strict=True)
    else:
        names = list(dict.fromkeys(chain.from_iterable(rows)))
        columns = ([row.get(name) for row in rows] for name in names)
    return ((name, values) for name, values in zip(names, columns, strict=True) if name != "step")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or value is None


def _floats(values: Sequence[Any] | Floats) -> Floats:
    """Convert to float64; infinities (which cannot be plotted) and what is not a number become NaN."""
    try:
        floats = np.array(values, np.float64)  # None is NaN
    except (TypeError, ValueError, OverflowError):
        floats = np.array([as_float(value) for value in values])
    if floats.ndim != 1:
        return np.full(len(values), np.nan)
    floats[np.isinf(floats)] = np.nan
    return floats


def as_float(value: Any) -> float:
    """Convert a number to float; NaN for anything else, and for an int that is too large.

    Example:
        >>> as_float(3), as_float("3"), as_float(10**400)
        (3.0, nan, nan)
    """
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")


def accuracies(names: Iterable[str]) -> dict[str, str]:
    """Return the held-out accuracies among `names`, by data source. A data source may contain slashes.

    Example:
        >>> accuracies(["val-core/openai/gsm8k/acc/mean@1", "eval/preference_accuracy", "actor/lr"])
        {'openai/gsm8k': 'val-core/openai/gsm8k/acc/mean@1', 'preference': 'eval/preference_accuracy'}
    """
    metrics: dict[str, str] = {}
    for name in names:
        source, marker, _ = name.removeprefix("val-core/").rpartition("/acc/mean@")
        if marker and name.startswith("val-core/"):
            metrics[source] = name
        elif name.startswith("eval/") and name.endswith("_accuracy"):
            metrics[name.removeprefix("eval/").removesuffix("_accuracy")] = name
    return metrics


def held_out_rewards(names: Iterable[str]) -> dict[str, str]:
    """Return the mean rewards on held-out problems among `names`, by data source. They judge a run whose reward has no
    right and wrong.

    Example:
        >>> held_out_rewards(["val-core/openai/gsm8k/reward/mean@1", "val-core/openai/gsm8k/acc/mean@1"])
        {'openai/gsm8k': 'val-core/openai/gsm8k/reward/mean@1'}
    """
    parts = ((name.removeprefix("val-core/").rpartition("/reward/mean@"), name) for name in names)
    return {source: name for (source, marker, _), name in parts if marker and name.startswith("val-core/")}


def newest_held_out(evaluations: MetricTable) -> tuple[str, dict[str, str]]:
    """Return ("accuracy", metrics by data source) of the newest evaluation, or ("reward", ...) if it has no accuracy.

    Runs of earlier versions may have an accuracy in their first evaluations only.

    Example:
        >>> table = MetricTable()
        >>> table.extend([{"step": 0, "val-core/a/acc/mean@1": 0.0, "val-core/a/reward/mean@1": 0.0},
        ...               {"step": 9, "val-core/a/reward/mean@1": 0.4}])
        >>> newest_held_out(table)
        ('reward', {'a': 'val-core/a/reward/mean@1'})
    """
    newest = [name for name in evaluations if not np.isnan(evaluations[name][-1])]
    metrics = accuracies(newest)
    return ("accuracy", metrics) if metrics else ("reward", held_out_rewards(newest))
