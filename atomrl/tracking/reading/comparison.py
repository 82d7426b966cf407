"""Compare runs: a table of their accuracies, losses and rewards, seeds of one config grouped, and the keys of the
config that differ."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from atomrl.common.errors import said_as
from atomrl.tracking.reading.lines import ReadError, flat_tree
from atomrl.tracking.reading.metrics import accuracies, newest_held_out
from atomrl.tracking.reading.run import WHERE, Run

# --------------------------------------------------------------------------------------------------------------------
# Compare two groups of runs with several seeds: 95% intervals, and how many seeds a clear difference needs.

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


# --------------------------------------------------------------------------------------------------------------------
# The picture of a run, or of several: what it is judged by over the steps, from `metrics.jsonl` alone.

Points = list[tuple[int, float]]
PANELS, PARTS = 4, 5
"""Panels of a picture; parts of the reward in one of them."""
HELD_OUT = ("Accuracy", "Completion length (tokens)", "Margin of preferences", "Loss (nats per token)")
"""Panels whose further lines are held-out data; those of the reward are its parts."""


def draw_curves(run: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Draw `metrics.jsonl` of a run folder, or of several in one picture, a colour each.

    Returns:
        Where the picture is: `out`, or `curves.png` in the run folder, or of several runs in the working directory.

    Raises:
        ImportError: matplotlib is not installed.
        ReadError: there are no metrics.
    """
    runs = [run] if isinstance(run, Path) else list(run)
    drawn = panels(with_metrics(runs[0])) if len(runs) == 1 else compared(runs)
    message = "the picture of the curves needs matplotlib: pip install 'atomrl[plot]'"
    with said_as(ImportError, message, ImportError):
        from matplotlib.figure import Figure

    names = run_names(runs)
    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained")
    figure.suptitle(", ".join(names), x=0.012, ha="left", fontweight="bold")
    axes = list(figure.subplots(2, 2).flat)
    for axis, (title, lines) in zip(axes, drawn.items(), strict=False):
        _draw_panel(axis, title, lines, names)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    out = out or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def run_names(runs: Sequence[Path]) -> list[str]:
    """The folders' names, or the whole paths where two are alike."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def compared(runs: Sequence[Path]) -> dict[str, dict[str, Points]]:
    """The panels of several runs: the label of a line is `RUN`, or `RUN, held-out` (its first data source)."""
    merged: dict[str, dict[str, Points]] = {}
    for name, run in zip(run_names(runs), runs, strict=True):
        for title, lines in panels(with_metrics(run)).items():
            panel = merged.setdefault(title, {})
            held_out = [line for label, line in lines.items() if label != "train" and title in HELD_OUT]
            panel |= {name: lines["train"]} | ({f"{name}, held-out": held_out[0]} if held_out else {})
    return dict(list(merged.items())[:PANELS])


def with_metrics(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        ReadError: it has no metrics.
    """
    run = Run(folder)
    if not len(run.metrics.steps) and not len(run.evaluations.steps):
        raise ReadError(f"no metrics in {folder} (looked for metrics.jsonl); is it the folder of a run?")
    return run


def panels(run: Run) -> dict[str, dict[str, Points]]:
    """What is drawn: title -> label -> points. The first four that a run has, in the order in which it is judged by
    them."""
    accuracy = {"train": points(run, "train/accuracy") or points(run, "rewards/accuracies")}
    keys = dict.fromkeys([*run.metrics, *run.evaluations])
    held_out = accuracies(keys)
    for source, key in held_out.items():
        accuracy["held-out" if source == "all" or len(held_out) == 1 else source] = points(run, key)
    score = points(run, "critic/score/mean")
    means = [key for key in keys if key.startswith("reward/") and key.endswith("/mean")][:PARTS]
    parts = {key.removeprefix("reward/").removesuffix("/mean"): points(run, key) for key in means}
    loss = points(run, "train/loss") or points(run, "sft/nll_per_token") or points(run, "actor/pg_loss")
    margin = {"train": points(run, "rewards/margins"), "held-out": points(run, "eval/preference_margin")}
    length = {"train": points(run, "response_length/mean"), "held-out": points(run, "val-aux/response_length/mean")}
    every = {
        "Reward": {"train": score} | (parts if score and len(parts) > 1 else {}),
        "Accuracy": accuracy,
        "Completion length (tokens)": length if score else {},
        "Entropy (nats per token)": {"train": points(run, "actor/entropy")},
        "Margin of preferences": margin,
        "Loss (nats per token)": {"train": loss, "held-out": points(run, "val/loss")} if not score else {},
        "Gradient norm": {"train": points(run, "actor/grad_norm")},
        "Learning rate": {"train": points(run, "actor/lr")},
        "Tokens per second": {"train": points(run, "perf/throughput")},
    }
    shown = {title: lines for title, lines in every.items() if any(lines.values())}
    return dict(list(shown.items())[:PANELS])


def points(run: Run, key: str) -> Points:
    """(step, value) wherever a step or an evaluation has the metric."""
    tables = (run.metrics.points(key), run.evaluations.points(key))
    found = ((int(step), float(value)) for both in tables for step, value in zip(*both, strict=True))
    return sorted(found)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values, each with those before it.

    Example:
        >>> smooth([0.0, 1.0, 2.0], 2)
        [0.0, 0.5, 1.5]
    """
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])]


def _draw_panel(axis: Any, title: str, lines: dict[str, Points], runs: Sequence[str]) -> None:
    several = len(runs) > 1
    for number, (label, line) in enumerate((label, line) for label, line in lines.items() if line):
        held_out = label.endswith("held-out") or (title == "Accuracy" and label != "train" and not several)
        color = f"C{runs.index(label.removesuffix(', held-out')) if several else number}"
        steps, values = [step for step, _ in line], [value for _, value in line]
        if len(line) >= 40 and not held_out:  # noisy: the raw values pale, their running mean over them
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.9)
            values = smooth(values, max(5, len(line) // 25))
        marker = "o" if held_out or len(line) < 12 else None
        style = "--" if held_out and several else "-"
        label = f"{label}  {values[-1]:.3g}"  # the legend has the last values
        axis.plot(steps, values, color=color, label=label, marker=marker, markersize=4, linestyle=style)
    axis.set_title(title, loc="left")
    axis.set_xlabel("step")
    axis.grid(axis="y", alpha=0.4)
    axis.spines[["top", "right"]].set_visible(False)
    if title == "Accuracy":
        axis.set_ylim(-0.02, 1.05)
    axis.legend(frameon=False)
