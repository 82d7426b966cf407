"""Compare two groups of runs with several seeds: 95% intervals, and how many seeds a clear difference needs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_SEEDS = 1000


@dataclass(frozen=True)
class Difference:
    """The mean of one group less that of another, with its 95% interval (Welch's t-test)."""

    gain: float
    low: float
    high: float
    counts: tuple[int, int]
    seeds_needed: int | None
    """Seeds in each group with which a difference of this size would be significant; None: more than `MOST_SEEDS`."""

    @property
    def clear(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        few, many = sorted(self.counts)
        count = f"n = {few}" if few == many else f"n = {self.counts[0]} and {self.counts[1]}"
        text = f"{self.gain:+.3g} [95% {self.low:+.3g} to {self.high:+.3g}], {count}"
        if self.clear:
            return f"{text}: told apart"
        enough = "" if self.seeds_needed is None else f"; about {self.seeds_needed} seeds each would"
        return f"{text}: cannot be told apart{enough}"


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Return the difference of the second group's mean from the first's; None where a group has a single value, or all
    values are the same.

    Raises:
        ImportError: scipy is not installed (`pip install scipy`).

    Example:
        >>> print(difference([0.50, 0.52, 0.48], [0.53, 0.51, 0.54]))
        +0.0267 [95% -0.0148 to +0.0681], n = 3: cannot be told apart; about 5 seeds each would
    """
    from scipy import stats

    if min(len(first), len(second)) < 2 or statistics.pvariance([*first, *second]) == 0:
        return None
    gain = statistics.fmean(second) - statistics.fmean(first)
    spread = statistics.variance(first) + statistics.variance(second)
    if spread == 0:
        return Difference(gain, gain, gain, (len(first), len(second)), 2)
    interval = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    needed = next(
        (n for n in range(2, MOST_SEEDS) if stats.t.ppf(0.975, 2 * n - 2) * math.sqrt(spread / n) < abs(gain)), None
    )
    return Difference(gain, float(interval.low), float(interval.high), (len(first), len(second)), needed)


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95% interval of a mean; infinity for a single value.

    Raises:
        ImportError: scipy is not installed (`pip install scipy`).

    Example:
        >>> round(half_width([1.0, 2.0, 3.0]), 3), half_width([1.0])
        (2.484, inf)
    """
    from scipy import stats

    if len(values) < 2:
        return math.inf
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
