"""Compare runs: their figures side by side, the settings that differ, and groups of seeds with 95% intervals."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from atomrl.tracking.reading.lines import flat_tree
from atomrl.tracking.reading.metrics import newest_held_out
from atomrl.tracking.reading.plots import run_names
from atomrl.tracking.reading.run import WHERE, Run
from atomrl.tracking.reading.state import RunState

MOST_SEEDS = 1000
WINDOW = 10
"""Number of last steps that are averaged; a single step is noisy."""
NAMED, MOST_PAIRS = 3, 10
"""Maximum number of settings in a group's name, and of pairs of groups that are compared."""
JUDGED_BY = re.compile(
    r"data\.(?!train(_size)?$)|eval\.(temperature|top_[pk])$|reward\.functions\[0\]\.(function|args)"
)
"""Settings that define the held-out accuracy: the problems, the sampling, and the first reward."""
CELL = 28
"""Maximum width of a config value in the table."""
LAST = {
    "reward": ("critic/score/mean",),
    "margin": ("rewards/margins",),
    "loss": ("sft/nll_per_token", "reward_model/loss", "train/loss"),
    "length": ("response_length/mean",),
    "entropy": ("actor/entropy",),
    "seconds/step": ("timing_s/step",),
}
"""Column -> metrics. The first one that a run has is shown, as a mean over the last steps."""
HELD_OUT_LOSSES = ("eval/nll_per_token", "val/loss")
NOT_SETTINGS = {*WHERE, "seed"}
"""Keys that may differ within a group."""


@dataclass(frozen=True)
class Difference:
    """Difference of the means of two groups, with its 95% interval (Welch's t-test)."""

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
            return f"{text}: significant"
        enough = "" if self.seeds_needed is None else f"; about {self.seeds_needed} seeds each needed"
        return f"{text}: not significant{enough}"


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Return the difference of the second group's mean from the first's; None where a group has a single value, or all
    values are the same.

    Raises:
        ImportError: scipy is not installed (`pip install scipy`).

    Example:
        >>> print(difference([0.50, 0.52, 0.48], [0.53, 0.51, 0.54]))
        +0.0267 [95% -0.0148 to +0.0681], n = 3: not significant; about 5 seeds each needed
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


@dataclass(frozen=True)
class Column:
    """A column of the table: a value for each run, None where it has none."""

    title: str
    values: tuple[float | None, ...]


def final_figures(run: Run) -> dict[str, float]:
    """Return a run's held-out accuracies and loss, final and best, and the means of its last steps; by title."""
    figures = dict[str, float]()
    what, judged_by = newest_held_out(run.evaluations)
    for key in judged_by.values():
        values = run.evaluations.points(key)[1]
        name = key.removeprefix("val-core/") if what == "accuracy" else "held-out reward"
        if len(values):
            figures |= {name: float(values[-1]), f"{name}, best": float(values.max())}
    for key in HELD_OUT_LOSSES:
        values = run.evaluations.points(key)[1]
        if len(values):
            figures |= {"held-out loss": float(values[-1]), "held-out loss, best": float(values.min())}
    for title, keys in LAST.items():
        curves = [values for key in keys if len(values := run.metrics.points(key)[1])]
        if curves:
            figures[title] = float(curves[0][-WINDOW:].mean())
    return figures


def columns(figures: Sequence[Mapping[str, float]]) -> list[Column]:
    """Align the figures of several runs as columns. If there is a single accuracy, its column is titled `accuracy`.

    Args:
        figures: the result of `final_figures` for each run.

    Example:
        >>> columns([{"sums/acc/mean@1": 0.5, "reward": 1.0}, {"reward": 2.0}])
        [Column(title='accuracy', values=(0.5, None)), Column(title='reward', values=(1.0, 2.0))]
    """
    titles = sorted(dict.fromkeys(title for one in figures for title in one), key=lambda title: title in LAST)
    own = {title.removesuffix(", best") for title in titles} - {*LAST, "held-out loss", "held-out reward"}
    names = {title: title.replace(next(iter(own)), "accuracy") if len(own) == 1 else title for title in titles}
    return [Column(names[title], tuple(one.get(title) for one in figures)) for title in titles]


def settings(run: Run) -> dict[str, object]:
    """Return a run's config by dotted keys, list items included, and the source of its functions."""
    flat: dict[str, object] = {}
    for key, value in flat_tree(run.config).items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for place, item in enumerate(value):
                flat |= {f"{key}[{place}].{name}": inner for name, inner in flat_tree(item).items()}
        else:
            flat[key] = value
    return flat | {f"source of {name}": text for name, text in run.functions.items()}


def differing_keys(runs: Sequence[Run]) -> dict[str, tuple[object, ...]]:
    """Return the settings that differ between runs, with their values by run."""
    flat = [settings(run) for run in runs]
    keys = dict.fromkeys(key for tree in flat for key in tree if key not in WHERE)
    values = {key: tuple(tree.get(key) for tree in flat) for key in keys}
    return {key: by_run for key, by_run in values.items() if any(value != by_run[0] for value in by_run)}


def by_settings(runs: Sequence[Run]) -> list[list[int]]:
    """Group runs that have the same config except seed and name; returns the indices of each group."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        tree = {key: value for key, value in settings(run).items() if key not in NOT_SETTINGS}
        groups.setdefault(json.dumps(tree, sort_keys=True, default=str), []).append(place)
    return list(groups.values())


def group_names(first: Sequence[Mapping[str, object]], names: Sequence[str]) -> list[str]:
    """Name each group of runs by the settings in which it differs from the others.

    Args:
        first: the `settings` of one run per group.
        names: names of these runs, used if no setting differs.

    Example:
        >>> group_names([{"train.learning_rate": 0.1, "seed": 1}, {"train.learning_rate": 0.2, "seed": 1}], ["a", "b"])
        ['learning_rate=0.1', 'learning_rate=0.2']
    """
    keys = [key for key in dict.fromkeys(key for tree in first for key in tree) if key not in NOT_SETTINGS]
    keys = [key for key in keys if any(tree.get(key) != first[0].get(key) for tree in first)]
    if not keys:
        return list(names)
    short = {key: _last_words(key, keys) for key in keys}
    chosen: list[str] = []
    for _ in keys[:NAMED]:  # greedily the key that distinguishes the most groups; the first of equals
        others = [key for key in keys if key not in chosen]
        chosen.append(max(others, key=lambda key: len({str([tree.get(k) for k in (*chosen, key)]) for tree in first})))
    return [
        ", ".join(f"{short[key]}={_setting(key, tree[key])}" for key in chosen if key in tree) or name
        for tree, name in zip(first, names, strict=True)
    ]


def _last_words(key: str, keys: Sequence[str]) -> str:
    """Return the shortest suffix of a dotted key that is unique among `keys`."""
    words = key.split(".")
    ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
    return next((end for end in ends if sum(other.endswith(end) for other in keys) == 1), key)


def _setting(key: str, value: object) -> str:
    """Format a setting for the table; the source of a function becomes a hash."""
    if key.startswith("source of ") and value is not None:
        return hashlib.sha256(str(value).encode()).hexdigest()[:6]
    return _short(value)


@dataclass(frozen=True)
class GroupDifference:
    """Difference of two groups of seeds in a column."""

    title: str
    first: str
    second: str
    difference: Difference

    def __str__(self) -> str:
        return f"{self.title}: ({self.second}) - ({self.first}) = {self.difference}"


def differences(
    figures: Sequence[Column], groups: Sequence[Sequence[int]], names: Sequence[str]
) -> list[GroupDifference]:
    """Compare each pair of groups with several seeds by the main column (accuracy, else reward, loss or margin).

    Args:
        figures: the columns of the table.
        groups: the indices of each group's runs.
        names: names of the groups.

    Raises:
        ImportError: scipy is not installed (`pip install scipy`).
    """
    if not figures:
        return []
    main = ("accuracy", "reward", "loss", "margin")
    column = next((column for column in figures if column.title in main), figures[0])
    several = [place for place, group in enumerate(groups) if len(group) > 1]
    pairs = []
    for first, second in list(combinations(several, 2))[:MOST_PAIRS]:
        ours, theirs = ([v for at in groups[g] if (v := column.values[at]) is not None] for g in (first, second))
        gap = difference(ours, theirs)
        if gap is not None:
            pairs.append(GroupDifference(column.title, names[first], names[second], gap))
    return pairs


def _difference_lines(figures: Sequence[Column], groups: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """Return `differences` as lines, or the advice to install scipy."""
    try:
        return [str(pair) for pair in differences(figures, groups, names)]
    except ImportError:
        return ["install scipy to test whether groups of seeds differ"]


def mean_and_range(column: Column, group: Sequence[int]) -> tuple[float, float, float] | None:
    """Return (mean, minimum, maximum) of a column over some runs; None if none of them has a value."""
    values = [value for place in group if (value := column.values[place]) is not None]
    return (sum(values) / len(values), min(values), max(values)) if values else None


def left_out(statuses: Sequence[str], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the runs that did not finish, in groups of several: they are no seeds to average over."""
    return [place for group in groups if len(group) > 1 for place in group if statuses[place] != "finished"]


class _Compared(NamedTuple):
    """Runs side by side: their figures, and their groups of seeds."""

    figures: Sequence[Column]
    names: Sequence[str]
    states: Sequence[RunState]
    groups: Sequence[Sequence[int]]
    """Indices of the runs that differ in seed only, without those that did not finish."""
    titles: Sequence[str]
    """Title of each group: the settings in which it differs from the others, or the name of its first run."""
    unnamed: Sequence[bool]
    """Whether no setting of a group differs from the others."""
    unfinished: Sequence[int]


def _compared(runs: Sequence[Run]) -> _Compared:
    figures, names = columns([final_figures(run) for run in runs]), run_names([run.path for run in runs])
    states, every = [run.state for run in runs], by_settings(runs)
    titles = group_names([settings(runs[group[0]]) for group in every], [names[group[0]] for group in every])
    unfinished = left_out([state.status for state in states], every)
    groups = [[place for place in group if place not in unfinished] for group in every]
    unnamed = [title == names[group[0]] for title, group in zip(titles, every, strict=True)]
    return _Compared(figures, names, states, groups, titles, unnamed, unfinished)


def table(runs: Sequence[Run]) -> list[str]:
    """Return the table as lines: one per run, mean and range per config with several seeds, differences, settings.

    Runs that are under way, stopped or failed are no seeds: they are left out of means and differences, and named.
    """
    figures, names, states, groups, titles, unnamed, unfinished = _compared(runs)
    head = ["run", "state", "step", *(column.title for column in figures), "findings"]
    rows = [
        [
            name,
            state.status,
            f"{state.step}/{state.steps or '?'}",
            *(_number(column.values[place]) for column in figures),
            ", ".join(dict.fromkeys(finding.id for finding in run.findings)) or "-",
        ]
        for place, (name, run, state) in enumerate(zip(names, runs, states, strict=True))
    ]
    for place, group in enumerate(groups):
        seeds = len({str(runs[place].config.get("seed")) for place in group})
        if seeds > 1:
            many = f"{seeds} seeds" if seeds == len(group) else f"{seeds} seeds, {len(group)} runs"
            title = f"{many}: {titles[place]}{', ...' if unnamed[place] else ''}"
            rows.append([title, "", "", *(_range(column, group) for column in figures), ""])
    lines = _aligned([head, *rows])
    if unfinished:
        each = (
            f"{names[at]} ({states[at].status}, step {states[at].step}/{states[at].steps or '?'})" for at in unfinished
        )
        lines += ["", f"not finished, so left out of seeds and differences: {', '.join(each)}"]
    if gaps := _difference_lines(figures, groups, titles):
        lines += ["", *gaps]
    keys = differing_keys(runs)
    unlike = [key for key in keys if JUDGED_BY.match(key)]
    if unlike and any(column.title not in LAST for column in figures):
        lines += ["", f"held-out results use different problems or rewards: {', '.join(unlike)} differ"]
    if keys:
        rows = [[key, *(_setting(key, value) for value in values)] for key, values in keys.items()]
        lines += ["", *_aligned([["config", *names], *rows])]
    return lines


def as_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the content of the table as data, for a program: runs, groups of seeds, differences, settings."""
    figures, names, states, groups, titles, _, unfinished = _compared(runs)
    seeds = [
        {
            "settings": title,
            "runs": [names[place] for place in group],
            "figures": {each.title: mean_and_range(each, group) for each in figures},
        }
        for title, group in zip(titles, groups, strict=True)
        if len(group) > 1
    ]
    rows = [
        {
            "name": name,
            "run": str(run.path),
            "status": state.status,
            "step": state.step,
            "steps": state.steps,
            "figures": {each.title: each.values[place] for each in figures},
            "findings": list(dict.fromkeys(finding.id for finding in run.findings)),
        }
        for place, (name, run, state) in enumerate(zip(names, runs, states, strict=True))
    ]
    return {
        "runs": rows,
        "seeds": seeds,
        "not_finished": [names[place] for place in unfinished],
        "differences": _difference_lines(figures, groups, titles),
        "config": {key: dict(zip(names, values, strict=True)) for key, values in differing_keys(runs).items()},
    }


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= CELL else f"{text[: CELL - 3]}..."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _range(column: Column, group: Sequence[int]) -> str:
    summary = mean_and_range(column, group)
    return "-" if summary is None else "{:.4g} [{:.4g}, {:.4g}]".format(*summary)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
