"""Compare runs: a table of their accuracies, losses and rewards, seeds of one config grouped, and the keys of the
config that differ."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from atomrl.reading.curves import run_names
from atomrl.reading.lines import flat_tree
from atomrl.reading.metrics import newest_held_out
from atomrl.reading.run import WHERE, Run
from atomrl.reading.seeds import Difference, difference

WINDOW = 10
"""Steps whose mean is the value at the end; a single step is noisy."""
NAMED, MOST_PAIRS = 3, 10
"""Most settings in the name of a group; most pairs of groups that are compared."""
JUDGED_BY = re.compile(
    r"data\.(?!train(_size)?$)|eval\.(temperature|top_[pk])$|reward\.functions\[0\]\.(function|args)"
)
"""Settings that decide what held-out accuracy is of: the problems, how they are drawn, and the first reward."""
CELL = 28
"""Characters of a config's value in the table."""
LAST = {
    "reward": ("critic/score/mean",),
    "margin": ("rewards/margins",),
    "loss": ("sft/nll_per_token", "reward_model/loss", "train/loss"),
    "length": ("response_length/mean",),
    "entropy": ("actor/entropy",),
    "seconds/step": ("timing_s/step",),
}
"""Column -> metrics; it shows the first of them that a run has, as a mean over the last steps."""
HELD_OUT_LOSSES = ("eval/nll_per_token", "val/loss")
NOT_SETTINGS = {*WHERE, "seed"}
"""Keys that may differ within a group."""


@dataclass(frozen=True)
class Column:
    """A column of the table: a value for each run, None where it has none."""

    title: str
    values: tuple[float | None, ...]


def judged(run: Run) -> dict[str, float]:
    """Return a run's held-out accuracies and loss, at the end and at best, then means of its last steps."""
    found = dict[str, float]()
    what, judged_by = newest_held_out(run.evaluations)
    for key in judged_by.values() if what == "accuracy" else ():
        values, name = run.evaluations.points(key)[1], key.removeprefix("val-core/")
        if len(values):
            found |= {name: float(values[-1]), f"{name}, best": float(values.max())}
    for key in judged_by.values() if what == "reward" else ():
        values = run.evaluations.points(key)[1]
        if len(values):
            found |= {"held-out reward": float(values[-1]), "held-out reward, best": float(values.max())}
    for key in HELD_OUT_LOSSES:
        values = run.evaluations.points(key)[1]
        if len(values):
            found |= {"held-out loss": float(values[-1]), "held-out loss, best": float(values.min())}
    for title, keys in LAST.items():
        given = [values for key in keys if len(values := run.metrics.points(key)[1])]
        if given:
            found[title] = float(given[0][-WINDOW:].mean())
    return found


def columns(found: Sequence[Mapping[str, float]]) -> list[Column]:
    """Align what `judged` says of several runs. The only accuracy, where there is one, is called `accuracy`.

    Args:
        found: the result of `judged` for each run.

    Example:
        >>> columns([{"sums/acc/mean@1": 0.5, "reward": 1.0}, {"reward": 2.0}])
        [Column(title='accuracy', values=(0.5, None)), Column(title='reward', values=(1.0, 2.0))]
    """
    titles = sorted(dict.fromkeys(title for one in found for title in one), key=lambda title: title in LAST)
    own = {title.removesuffix(", best") for title in titles} - {*LAST, "held-out loss", "held-out reward"}
    names = {title: title.replace(next(iter(own)), "accuracy") if len(own) == 1 else title for title in titles}
    return [Column(names[title], tuple(one.get(title) for one in found)) for title in titles]


def settings(run: Run) -> dict[str, object]:
    """A run's config by dotted keys, each item of a list apart, and the source of its own functions."""
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
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def by_settings(runs: Sequence[Run]) -> list[list[int]]:
    """Group runs that have the same config but for seed and name; as indices."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        tree = {key: value for key, value in settings(run).items() if key not in NOT_SETTINGS}
        groups.setdefault(json.dumps(tree, sort_keys=True, default=str), []).append(place)
    return list(groups.values())


def group_names(first: Sequence[Mapping[str, object]], names: Sequence[str]) -> list[str]:
    """Name each group of runs by the settings in which it differs from the others.

    Args:
        first: the `settings` of a run of each group.
        names: of these runs, used where no setting differs.

    Example:
        >>> group_names([{"train.learning_rate": 0.1, "seed": 1}, {"train.learning_rate": 0.2, "seed": 1}], ["a", "b"])
        ['learning_rate=0.1', 'learning_rate=0.2']
    """
    keys = [key for key in dict.fromkeys(key for tree in first for key in tree) if key not in NOT_SETTINGS]
    keys = [key for key in keys if any(tree.get(key) != first[0].get(key) for tree in first)]
    if not keys:
        return list(names)
    short = {key: _last_words(key, keys) for key in keys}
    named: list[str] = []
    for _ in keys[:NAMED]:  # that tells the most groups apart, of equals the first
        others = [key for key in keys if key not in named]
        named.append(max(others, key=lambda key: len({str([tree.get(k) for k in (*named, key)]) for tree in first})))
    return [
        ", ".join(f"{short[key]}={_setting(key, tree[key])}" for key in named if key in tree) or name
        for tree, name in zip(first, names, strict=True)
    ]


def _last_words(key: str, keys: Sequence[str]) -> str:
    """The shortest end of a dotted key that no other key has."""
    words = key.split(".")
    ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
    return next((end for end in ends if sum(other.endswith(end) for other in keys) == 1), key)


def _setting(key: str, value: object) -> str:
    """Shorten a setting; the source of a function becomes a hash."""
    if key.startswith("source of ") and value is not None:
        return hashlib.sha256(str(value).encode()).hexdigest()[:6]
    return _short(value)


@dataclass(frozen=True)
class GroupDifference:
    """How two groups of seeds differ in a column."""

    title: str
    first: str
    second: str
    difference: Difference

    def __str__(self) -> str:
        return f"{self.title}: ({self.second}) - ({self.first}) = {self.difference}"


def differences(
    found: Sequence[Column], groups: Sequence[Sequence[int]], names: Sequence[str]
) -> list[GroupDifference]:
    """Compare each two groups of several seeds by their main column (accuracy, else reward, loss or margin).

    Args:
        found: the columns of the table.
        groups: the indices of each group's runs.
        names: of the groups.

    Raises:
        ImportError: scipy is not installed (`pip install scipy`).
    """
    column = _judge(found)
    if column is None:
        return []
    several = [place for place, group in enumerate(groups) if len(group) > 1]
    pairs = []
    for first, second in list(combinations(several, 2))[:MOST_PAIRS]:
        ours, theirs = ([v for at in groups[g] if (v := column.values[at]) is not None] for g in (first, second))
        apart = difference(ours, theirs)
        if apart is not None:
            pairs.append(GroupDifference(column.title, names[first], names[second], apart))
    return pairs


def _judge(found: Sequence[Column]) -> Column | None:
    first = next((column for column in found if column.title in ("accuracy", "reward", "loss", "margin")), None)
    return first or next(iter(found), None)


def told_apart(found: Sequence[Column], groups: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """The lines of `differences`, or how to have them."""
    try:
        return [str(pair) for pair in differences(found, groups, names)]
    except ImportError:
        return ["pip install scipy says whether groups of seeds can be told apart"]


def over(column: Column, group: Sequence[int]) -> tuple[float, float, float] | None:
    """Return (mean, smallest, largest) of a column over some runs; None where none of them has a value."""
    values = [value for place in group if (value := column.values[place]) is not None]
    return (sum(values) / len(values), min(values), max(values)) if values else None


def table(runs: Sequence[Run]) -> list[str]:
    """Return the table as lines: one for each run, and mean and range for each config with several seeds."""
    found, names = columns([judged(run) for run in runs]), run_names([run.path for run in runs])
    head = ["run", "state", "step", *(column.title for column in found), "findings"]
    rows = [
        [
            name,
            (state := run.state).status,
            f"{state.step}/{state.steps or '?'}",
            *(_number(column.values[place]) for column in found),
            ", ".join(dict.fromkeys(finding.id for finding in run.findings)) or "-",
        ]
        for place, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    groups = by_settings(runs)
    titles = group_names([settings(runs[group[0]]) for group in groups], [names[group[0]] for group in groups])
    for place, group in enumerate(groups):
        seeds = len({str(runs[place].config.get("seed")) for place in group})
        if seeds > 1:
            many = f"{seeds} seeds" if seeds == len(group) else f"{seeds} seeds, {len(group)} runs"
            alike = titles[place] == names[group[0]]  # it differs from the others in no setting
            rows.append(
                [f"{many}: {titles[place]}{', ...' if alike else ''}", "", "", *(_range(c, group) for c in found), ""]
            )
    lines = _aligned([head, *rows])
    if apart := told_apart(found, groups, titles):
        lines += ["", *apart]
    keys = differing_keys(runs)
    unlike = [key for key in keys if JUDGED_BY.match(key)]
    if unlike and any(column.title not in LAST for column in found):
        lines += ["", f"held-out figures are not of the same problems or the same reward: {', '.join(unlike)} differ"]
    if keys:
        rows = [[key, *(_setting(key, value) for value in values)] for key, values in keys.items()]
        lines += ["", *_aligned([["config", *names], *rows])]
    return lines


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= CELL else f"{text[: CELL - 3]}..."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _range(column: Column, group: Sequence[int]) -> str:
    found = over(column, group)
    return "-" if found is None else "{:.4g} [{:.4g}, {:.4g}]".format(*found)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
