"""What a rule says, and the small statistics that rules are made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Row = Mapping[str, float | None]
"""A line of `metrics.jsonl`: "step" and metrics by name."""
MetricRows = Sequence[Row]
Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a run.

    Example:
        >>> print(Finding(id="length_limit", severity="warning", step=7, what="Half is cut.", advice="Raise it."))
        doctor (step 7, warning): Half is cut.
          Try: Raise it. More: docs/failures/length_limit.md
    """

    id: str
    severity: Severity
    """`error`: what is being computed is wrong or worthless; `warning`: the run goes on, but worse than it could."""
    step: int
    """The first step at which the rule held."""
    what: str
    """What is wrong, with the numbers."""
    advice: str
    """What to try, with the config key."""

    @property
    def page(self) -> str:
        return f"docs/failures/{self.id}.md"

    def __str__(self) -> str:
        return f"doctor (step {self.step}, {self.severity}): {self.what}\n  Try: {self.advice} More: {self.page}"


def column(rows: MetricRows, name: str) -> list[float]:
    """The values of a metric in the rows that have it.

    Example:
        >>> column([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}], "a")
        [2.0]
    """
    return [value for row in rows if (value := row.get(name)) is not None]


def recent(rows: MetricRows, name: str, steps: int) -> list[float]:
    """A metric in the last `steps` rows; empty where there are fewer rows, or one of them lacks it.

    Example:
        >>> rows = [{"a": 1.0}, {"a": 2.0}, {"a": 3.0}]
        >>> recent(rows, "a", 2), recent(rows, "a", 4)
        ([2.0, 3.0], [])
    """
    values = column(rows[-steps:], name)
    return values if len(values) == steps else []


@dataclass(frozen=True)
class Shift:
    """A metric at the start of the window and now."""

    early: float
    late: float
    error: float
    """Standard error of the difference, from how much the steps differ among themselves."""

    @property
    def change(self) -> float:
        return self.late - self.early

    def beyond_noise(self) -> bool:
        """Whether the change is larger than chance makes it. Four standard errors, as the question is asked anew at
        each of hundreds of steps."""
        return abs(self.change) > 4 * self.error


def shift(rows: MetricRows, name: str, steps: int = 5) -> Shift | None:
    """The mean over the first and over the last `steps` rows; None where there are fewer than twice as many.

    Example:
        >>> shift([{"a": value} for value in (0.0, 1.0, 5.0, 6.0)], "a", steps=2)
        Shift(early=0.5, late=5.5, error=0.7071067811865476)
    """
    values = column(rows, name)
    if len(values) < 2 * steps:
        return None
    early, late = values[:steps], values[-steps:]
    error = ((statistics.variance(early) + statistics.variance(late)) / steps) ** 0.5
    return Shift(statistics.fmean(early), statistics.fmean(late), error)
