"""What a rule says, and the small statistics that rules are made of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

Row = Mapping[str, float | None]
"""A line of `metrics.jsonl`: "step" and metrics by name."""
MetricRows = Sequence[Row]
Severity = Literal["error", "warning"]
Verdict = Iterator[str]
"""What a rule says where it holds."""
SHORT, MEDIUM, LONG = 3, 5, 10
"""Steps that have to agree before a rule speaks: the longer, the noisier its metrics."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a run.

    Example:
        >>> print(Finding(id="length_limit", severity="warning", step=7, what="Half is cut.", advice="Raise it."))
        doctor (step 7, warning): Half is cut.
          Try: Raise it. More: docs/guides/troubleshooting/length_limit.md
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
    quote: str = ""
    """Completions that show it, where the rollouts of the step are at hand."""

    @property
    def page(self) -> str:
        return f"docs/guides/troubleshooting/{self.id}.md"

    def __str__(self) -> str:
        quoted = f"\n  Seen: {self.quote}" if self.quote else ""
        return (
            f"doctor (step {self.step}, {self.severity}): {self.what}{quoted}\n  Try: {self.advice} More: {self.page}"
        )


EVALUATED = ("val-", "val/", "eval/")
"""How the names of an evaluation's metrics begin."""


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether a row of `metrics.jsonl` is an evaluation's, which has no other metrics.

    Example:
        >>> is_evaluation({"step": 5, "val-core/sums/acc/mean@1": 0.5}), is_evaluation({"step": 5, "actor/lr": 0.1})
        (True, False)
    """
    return all(name.startswith(EVALUATED) for name in row if name != "step") and row.keys() != {"step"}


def column(rows: MetricRows, name: str) -> list[float]:
    """The values of a metric in the rows that have it.

    Example:
        >>> column([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}], "a")
        [2.0]
    """
    return [value for row in rows if (value := row.get(name)) is not None]


class NotLogged(LookupError):
    """A metric that a rule needs is not in the rows: the rule has nothing to say."""


def recent(rows: MetricRows, name: str, steps: int, default: float | None = None) -> list[float]:
    """A metric in the last `steps` rows.

    Args:
        default: what stands for all of them where there are fewer rows, or one of them lacks it.

    Raises:
        NotLogged: so it is, and there is no default.

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


GAP = "training/rollout_probs_diff_mean/staleness_0"
"""Of tokens that were drawn by the weights that were trained: of others a gap is what staleness means."""


def having(rows: MetricRows, name: str = GAP) -> list[Row]:
    """The steps that have such tokens."""
    return [row for row in rows if row.get(name) is not None]


def least_stale(rows: MetricRows) -> str:
    """The gap of the freshest tokens that several steps have."""
    if len(_first(reversed(rows), GAP, SHORT)) == SHORT:
        return GAP
    names = {name for row in rows for name in row if name.startswith(GAP[:-1]) and len(having(rows, name)) >= SHORT}
    return min(names, key=lambda name: int(name.removeprefix(GAP[:-1])), default=GAP)


class Shift(NamedTuple):
    """A metric at the start of the window and now."""

    early: float
    late: float
    clear: bool
    """Whether the change is larger than chance makes it: than four standard errors, from how much the steps differ
    among themselves, as the question is asked anew at each of hundreds of steps."""

    @property
    def change(self) -> float:
        return self.late - self.early


def shift(rows: MetricRows, name: str, steps: int = 5) -> Shift:
    """The mean over the first and over the last `steps` rows.

    Raises:
        NotLogged: there are fewer than twice as many.

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
    """(place, value) of the first `count` rows that have a metric."""
    given = ((place, value) for place, row in enumerate(rows) if (value := row.get(name)) is not None)
    return list(islice(given, count))


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and variance, in plain floats: `statistics` takes exact fractions, twenty times as long."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)
