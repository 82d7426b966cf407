"""Types of the doctor's rules and findings, and statistics over metric rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

Row = Mapping[str, float | None]
"""A line of `metrics.jsonl`: "step" and metrics by name."""
MetricRows = Sequence[Row]
Severity = Literal["error", "warning"]
SHORT, MEDIUM, LONG = 3, 5, 10
"""Steps that have to agree before a rule reports: the longer, the noisier its metrics."""
EVALUATED = ("val-", "val/", "eval/")
"""Prefixes of evaluation metrics."""
GAP = "training/rollout_probs_diff_mean/staleness_0"
"""Mean probability gap of on-policy tokens. With older weights a gap is expected: it is the staleness."""


class Symptom(NamedTuple):
    """One match of a rule."""

    what: str
    """The problem, with the numbers."""
    advice: str = ""
    """The remedy, if it depends on the numbers; else the rule's own (`doctor.Rule.advice`)."""


Verdict = Iterator[Symptom]
"""Result of a rule: empty if the run is fine."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem of a run, as the doctor reports it.

    Example:
        >>> print(Finding(id="length_limit", severity="warning", step=7, what="Half is cut.", advice="Raise it."))
        doctor (step 7, warning): Half is cut.
          Try: Raise it. More: docs/guides/troubleshooting/length_limit.md
    """

    id: str
    severity: Severity
    """`error`: the result is wrong or worthless; `warning`: the run continues, but worse than it could."""
    step: int
    """The first step at which the rule matched."""
    what: str
    """The problem, with the numbers."""
    advice: str
    """The remedy, with the config key."""
    quote: str = ""
    """Example completions, if the rollouts of the step are available."""

    @property
    def page(self) -> str:
        return f"docs/guides/troubleshooting/{self.id}.md"

    def __str__(self) -> str:
        quoted = f"\n  Seen: {self.quote}" if self.quote else ""
        return (
            f"doctor (step {self.step}, {self.severity}): {self.what}{quoted}\n  Try: {self.advice} More: {self.page}"
        )


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Return whether a row of `metrics.jsonl` has only evaluation metrics.

    Example:
        >>> is_evaluation({"step": 5, "val-core/sums/acc/mean@1": 0.5}), is_evaluation({"step": 5, "actor/lr": 0.1})
        (True, False)
    """
    for name in row:  # a loop: it ends at the first name of a row of training
        if not name.startswith(EVALUATED) and name != "step":
            return False
    return row.keys() != {"step"}


def column(rows: MetricRows, name: str) -> list[float]:
    """Return the values of a metric, without the rows that lack it.

    Example:
        >>> column([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}], "a")
        [2.0]
    """
    return [value for row in rows if (value := row.get(name)) is not None]


class NotLogged(LookupError):
    """A metric that a rule needs is missing from the rows, so the rule is skipped."""


def recent(rows: MetricRows, name: str, steps: int, default: float | None = None) -> list[float]:
    """Return a metric of the last `steps` rows.

    Args:
        default: returned as `[default]` if there are fewer rows, or one of them lacks the metric.

    Raises:
        NotLogged: the metric is missing and has no default.

    Example:
        >>> rows = [{"a": 1.0}, {"a": 2.0}, {"a": 3.0}]
        >>> recent(rows, "a", 2), recent(rows, "a", 4, default=0.0)
        ([2.0, 3.0], [0.0])
    """
    values = column(rows[-steps:], name)
    if len(values) == steps:
        return values
    if default is None:
        raise NotLogged(name)
    return [default]


def without_idle_accuracy(rows: MetricRows) -> MetricRows:
    """Return the rows without `train/accuracy` if it is 0 in all of them although the first reward function paid: it
    gives parts of a point, or has a scale on which 1.0 means nothing.

    Example:
        >>> without_idle_accuracy([{"reward/similarity/mean": 0.3, "train/accuracy": 0.0}])
        [{'reward/similarity/mean': 0.3}]
    """
    if any(column(rows, "train/accuracy")) or not any(map(_first_part, rows)):
        return rows
    return [{name: value for name, value in row.items() if name != "train/accuracy"} for row in rows]


def _first_part(row: Row) -> float | None:
    return next((value for name, value in row.items() if name.startswith("reward/") and name.endswith("/mean")), None)


def rows_with(rows: MetricRows, name: str = GAP) -> list[Row]:
    """Return the rows that have a metric."""
    return [row for row in rows if row.get(name) is not None]


def least_stale(rows: MetricRows) -> str:
    """Return the gap metric of the lowest staleness that several steps have."""
    if len(_first(reversed(rows), GAP, SHORT)) == SHORT:
        return GAP
    names = {name for row in rows for name in row if name.startswith(GAP[:-1]) and len(rows_with(rows, name)) >= SHORT}
    return min(names, key=lambda name: int(name.removeprefix(GAP[:-1])), default=GAP)


class Shift(NamedTuple):
    """Means of a metric over the first and the last steps of the window."""

    early: float
    late: float
    clear: bool
    """True if the change exceeds four standard errors, estimated from the variance between steps. The test is repeated
    at each of hundreds of steps, so two would be too few."""

    @property
    def change(self) -> float:
        return self.late - self.early


def shift(rows: MetricRows, name: str, steps: int = 5) -> Shift:
    """Return the means over the first and the last `steps` rows.

    Raises:
        NotLogged: fewer than 2 * `steps` rows have the metric.

    Example:
        >>> shift([{"a": value} for value in (0.0, 1.0, 5.0, 6.0)], "a", steps=2)
        Shift(early=0.5, late=5.5, clear=True)
    """
    first, last = _first(rows, name, steps), _first(reversed(rows), name, steps)
    if len(first) < steps or len(last) < steps or first[-1][0] >= len(rows) - 1 - last[-1][0]:
        raise NotLogged(name)
    (before, early), (now, late) = (_moments([value for _, value in part]) for part in (first, last))
    return Shift(before, now, abs(now - before) > 4 * ((early + late) / steps) ** 0.5)


def _first(rows: Iterable[Row], name: str, count: int) -> list[tuple[int, float]]:
    """Return (index, value) of the first `count` rows that have a metric."""
    values = ((index, value) for index, row in enumerate(rows) if (value := row.get(name)) is not None)
    return list(islice(values, count))


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and variance. Plain floats are 20 times as fast as the exact fractions of `statistics`."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)
