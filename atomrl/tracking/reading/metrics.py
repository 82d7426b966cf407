"""The metrics of a run as columns."""

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
    """Columns by name, one value for each of `steps`; NaN where a step lacks a metric, or has NaN or infinity.

    Steps rise. A row of a step that is already there is merged into it; one of an earlier step replaces that step and
    all behind it, as when a run is resumed.

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
        """Steps and values of a metric where it has a value; both empty where no step has it."""
        values = self._columns.get(name)
        if values is None:
            return self.steps[:0], np.zeros(0)
        there = ~np.isnan(values)
        return self.steps[there], values[there]

    def last(self, name: str) -> float | None:
        """The newest value of a metric, or None."""
        values = self.points(name)[1]
        return float(values[-1]) if len(values) else None

    def frame(self) -> pandas.DataFrame:
        """As a pandas table with the steps as index.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(dict(self._columns), index=pandas.Index(self.steps, name="step"))

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of `metrics.jsonl`; each has an int `step`. What is no number counts as not there."""
        new: list[Mapping[str, Any]] = []
        for row in rows:
            step = row["step"]
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
        self.steps = np.concatenate([self.steps, np.array([row["step"] for row in new], np.int64)])
        for name, values in _columns_of(new):
            old = self._columns.get(name)
            if old is None:
                if not any(_is_number(value) for value in values):
                    continue  # text of another version
                old = np.full(before, np.nan)
            self._columns[name] = np.concatenate([old, _floats(values)])
        for name, column in self._columns.items():
            if len(column) < len(self.steps):
                self._columns[name] = np.concatenate([column, np.full(len(self.steps) - len(column), np.nan)])

    def _cut(self, step: int) -> list[dict[str, Any]]:
        """Remove what is of this step or later; returns the row of this step, if there was one."""
        place = int(np.searchsorted(self.steps, step))
        kept = {name: float(column[place]) for name, column in self._columns.items() if not np.isnan(column[place])}
        same = self.steps[place] == step
        self.steps = self.steps[:place]
        self._columns = {name: column[:place] for name, column in self._columns.items()}
        return [{"step": step, **kept}] if same else []


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Sequence[Any] | Floats]]:
    """Each name but `step` with its values, None where a row has none."""
    names = list(rows[0])
    if all(map(names.__eq__, map(list, rows))):  # as most are, and most are numbers alone
        columns: Iterable[Sequence[Any] | Floats]
        try:
            if any(isinstance(value, str) for value in rows[0].values()):
                raise ValueError("text of another version")  # which numpy would read where it looks like a number
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
    """Numbers as they are, all else as NaN; an infinity too, as nothing can be drawn of it."""
    try:
        found = np.array(values, np.float64)  # None is NaN
    except (TypeError, ValueError, OverflowError):
        found = np.array([as_float(value) for value in values])
    if found.ndim != 1:
        return np.full(len(values), np.nan)
    found[np.isinf(found)] = np.nan
    return found


def as_float(value: Any) -> float:
    """A number as it is; NaN for all else, and for one that is too large.

    Example:
        >>> as_float(3), as_float("3"), as_float(10**400)
        (3.0, nan, nan)
    """
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")


def accuracies(names: Iterable[str]) -> dict[str, str]:
    """The metrics among `names` that are held-out accuracies, by what they are of. A data source may have slashes.

    Example:
        >>> accuracies(["val-core/openai/gsm8k/acc/mean@1", "eval/preference_accuracy", "actor/lr"])
        {'openai/gsm8k': 'val-core/openai/gsm8k/acc/mean@1', 'preference': 'eval/preference_accuracy'}
    """
    found: dict[str, str] = {}
    for name in names:
        source, marked, _ = name.removeprefix("val-core/").rpartition("/acc/mean@")
        if marked and name.startswith("val-core/"):
            found[source] = name
        elif name.startswith("eval/") and name.endswith("_accuracy"):
            found[name.removeprefix("eval/").removesuffix("_accuracy")] = name
    return found


def held_out_rewards(names: Iterable[str]) -> dict[str, str]:
    """The metrics among `names` that are mean rewards on held-out problems, by data source: what a run is judged by
    where its reward says no right or wrong.

    Example:
        >>> held_out_rewards(["val-core/openai/gsm8k/reward/mean@1", "val-core/openai/gsm8k/acc/mean@1"])
        {'openai/gsm8k': 'val-core/openai/gsm8k/reward/mean@1'}
    """
    marked = ((name.removeprefix("val-core/").rpartition("/reward/mean@"), name) for name in names)
    return {source: name for (source, found, _), name in marked if found and name.startswith("val-core/")}


def newest_held_out(evaluations: MetricTable) -> tuple[str, dict[str, str]]:
    """What the newest evaluation judges a run by: ("accuracy", metrics by what they are of), or ("reward", ...).

    Earlier evaluations may have an accuracy and the newest none: zeros alone do not show that a reward says no right or
    wrong.

    Example:
        >>> table = MetricTable()
        >>> table.extend([{"step": 0, "val-core/a/acc/mean@1": 0.0, "val-core/a/reward/mean@1": 0.0},
        ...               {"step": 9, "val-core/a/reward/mean@1": 0.4}])
        >>> newest_held_out(table)
        ('reward', {'a': 'val-core/a/reward/mean@1'})
    """
    newest = [name for name in evaluations if not np.isnan(evaluations[name][-1])]
    found = accuracies(newest)
    return ("accuracy", found) if found else ("reward", held_out_rewards(newest))
