"""Compare runs: a table of accuracies, losses and rewards with seeds grouped by config, significance of differences,
the config keys that differ, and plots of the curves."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

import numpy as np

from atomrl.common.errors import reraise_as
from atomrl.tracking.reading.lines import ReadError, flat_tree, read_mapping
from atomrl.tracking.reading.metrics import accuracies, newest_held_out
from atomrl.tracking.reading.run import WHERE, Run

if TYPE_CHECKING:
    from optuna.study import Study


# --------------------------------------------------------------------------------------------------------------------
# Studies of `atomrl tune`, read from their folder: trials, the deciding metric, importance of keys.

JOURNAL, STUDY_NAME, SETTINGS, RESULT = "study.journal", "tune", "study.yaml", "result.json"
SECONDS = "seconds"
"""User attribute of a trial with its duration."""
MIN_TRIALS = 4
"""Minimum number of complete trials for estimating importance."""


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial of a study."""

    number: int
    state: str
    """`complete`, `pruned`, `fail`, `running` or `waiting`."""
    value: float | None
    """The metric at the end; the last reported value of a pruned trial."""
    reported: dict[int, float]
    """Intermediate values; 1: at half of the steps, 2: at three quarters."""
    params: dict[str, Any]
    """Config key -> value."""
    seconds: float | None

    @property
    def run(self) -> str:
        """Name of its run, in the study's folder `runs`."""
        return f"trial_{self.number:03d}"


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """A study, read from its folder."""

    metric: str
    window: int
    space: dict[str, Any]
    """Key -> its choices, or `low`, `high`, `log`."""
    trials: list[TrialRow]
    importance: dict[str, float]
    """Key -> importance (PED-ANOVA, sums to 1), largest first; empty with too few trials."""
    result: dict[str, Any]
    """`result.json`; empty until the finals have ended."""
    problems: list[str] = field(default_factory=list)


def is_study(folder: Path) -> bool:
    """Return whether a folder is a study's."""
    places = [folder / name for name in (JOURNAL, SETTINGS)]
    return all(os.path.isfile(place) and not os.path.islink(place) for place in places)


def load_study(folder: str | Path) -> StudyTable:
    """Read the study in a folder: finished, running or killed. Nothing is written.

    Raises:
        ReadError: it is not a study's folder, or one of its files is malformed.
        ImportError: optuna is not installed.
    """
    place = Path(folder)
    if not is_study(place):
        raise ReadError(f"{place} is not the folder of a study (no {JOURNAL} or {SETTINGS})")
    problems: list[str] = []
    search, result = (read_mapping(place / name, problems) for name in (SETTINGS, RESULT))
    with reraise_as(ImportError, "reading a study needs: pip install 'atomrl[tune]'", ImportError):
        import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        storage = JournalStorage(JournalFileBackend(str(place / JOURNAL)))
        study = optuna.load_study(study_name=STUDY_NAME, storage=storage)
        trials = [_row(trial) for trial in study.get_trials(deepcopy=False)]
        importance = _importance(study)
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError, OSError) as error:
        raise ReadError(f"{place / JOURNAL} cannot be read: {error}") from None
    window, space = search.get("window") or 1, search.get("space") or {}
    if not isinstance(window, int) or not _is_mapping_of(space, dict | list):
        raise ReadError(
            f"{place / SETTINGS}: window is not an integer, or space is not a mapping of choices and ranges"
        )
    if not isinstance(result.get("seeds") or [], list) or not _is_mapping_of(result.get("finals") or {}, list):
        raise ReadError(f"{place / RESULT}: seeds is not a list, or finals is not a mapping of lists")
    return StudyTable(
        metric=str(search.get("metric", "")), window=window, space=space, trials=trials, importance=importance,
        result=result, problems=problems,
    )  # fmt: skip


def _is_mapping_of(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, dict) and all(isinstance(one, kind) for one in value.values())


def _row(trial: Any) -> TrialRow:
    reported = {int(place): float(value) for place, value in sorted(trial.intermediate_values.items())}
    value = trial.value
    if value is None and trial.state.name != "FAIL":  # what a failed or invalid one reported is no value
        value = next(reversed(reported.values()), None)
    return TrialRow(
        number=trial.number, state=trial.state.name.lower(), value=value, reported=reported,
        params={key: _plain(value, trial.distributions[key]) for key, value in trial.params.items()},
        seconds=trial.user_attrs.get(SECONDS),
    )  # fmt: skip


def _plain(value: Any, distribution: Any) -> Any:
    """Return a parameter's value; choices are stored as JSON (`Space.suggest`)."""
    return json.loads(value) if hasattr(distribution, "choices") else value


def _importance(study: Study) -> dict[str, float]:
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.trial import TrialState

    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    if len(done) < MIN_TRIALS or len({trial.value for trial in done}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator is marked experimental
        shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {key: float(share) for key, share in shares.items()}


# --------------------------------------------------------------------------------------------------------------------
# Compare two groups of runs with several seeds: 95% intervals, and how many seeds a clear difference needs.

MOST_SEEDS = 1000


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


def table(runs: Sequence[Run]) -> list[str]:
    """Return the table as lines: one per run, mean and range per config with several seeds, differences, settings.

    Runs that are under way, stopped or failed are no seeds: they are left out of means and differences, and named.
    """
    figures, names = columns([final_figures(run) for run in runs]), run_names([run.path for run in runs])
    head = ["run", "state", "step", *(column.title for column in figures), "findings"]
    states = [run.state for run in runs]
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
    all_groups = by_settings(runs)
    titles = group_names([settings(runs[group[0]]) for group in all_groups], [names[group[0]] for group in all_groups])
    unfinished = left_out([state.status for state in states], all_groups)
    groups = [[place for place in group if place not in unfinished] for group in all_groups]
    for place, group in enumerate(groups):
        seeds = len({str(runs[place].config.get("seed")) for place in group})
        if seeds > 1:
            many = f"{seeds} seeds" if seeds == len(group) else f"{seeds} seeds, {len(group)} runs"
            unnamed = titles[place] == names[all_groups[place][0]]  # no setting differs from the other groups
            rows.append(
                [
                    f"{many}: {titles[place]}{', ...' if unnamed else ''}",
                    "",
                    "",
                    *(_range(c, group) for c in figures),
                    "",
                ]
            )
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
    figures, names = columns([final_figures(run) for run in runs]), run_names([run.path for run in runs])
    states, every = [run.state for run in runs], by_settings(runs)
    titles = group_names([settings(runs[group[0]]) for group in every], [names[group[0]] for group in every])
    unfinished = left_out([state.status for state in states], every)
    groups = [[place for place in group if place not in unfinished] for group in every]
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


# --------------------------------------------------------------------------------------------------------------------
# Plots of the curves of one or several runs.

Points = list[tuple[int, float]]
PANELS, PARTS = 4, 5
"""Maximum number of panels, and of reward parts in a panel."""
HELD_OUT = ("Accuracy", "Completion length (tokens)", "Margin of preferences", "Loss (nats per token)")
"""Panels whose further lines are held-out data; those of the reward panel are its parts."""


def draw_curves(run: Path | Run | Sequence[Path | Run], out: Path | None = None) -> Path:
    """Plot `metrics.jsonl` of one or several runs, a colour per run.

    Args:
        run: folders, or runs that have been read.

    Returns:
        Path of the image: `out`, else `curves.png` in the run's folder (one run) or the working directory (several).

    Raises:
        ImportError: matplotlib is not installed.
        ReadError: the run has no metrics.
    """
    runs = [*map(with_metrics, [run] if isinstance(run, Path | Run) else run)]
    drawn = panels(runs[0]) if len(runs) == 1 else compared(runs)
    message = "plotting needs matplotlib: pip install 'atomrl[plot]'"
    with reraise_as(ImportError, message, ImportError):
        from matplotlib.figure import Figure

    names = run_names([each.path for each in runs])
    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained")
    figure.suptitle(", ".join(names), x=0.012, ha="left", fontweight="bold")
    axes = list(figure.subplots(2, 2).flat)
    for axis, (title, lines) in zip(axes, drawn.items(), strict=False):
        _draw_panel(axis, title, lines, names)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    out = out or (runs[0].path if len(runs) == 1 else Path()) / "curves.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def run_names(runs: Sequence[Path]) -> list[str]:
    """Return the folders' names, or their paths if two names are equal."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def compared(runs: Sequence[Run]) -> dict[str, dict[str, Points]]:
    """Return the panels of several runs. A line's label is `RUN`, or `RUN, held-out` (the first data source)."""
    merged: dict[str, dict[str, Points]] = {}
    names = run_names([run.path for run in runs])
    for name, run in zip(names, runs, strict=True):
        for title, lines in panels(run).items():
            panel = merged.setdefault(title, {})
            held_out = [line for label, line in lines.items() if label != "train" and title in HELD_OUT]
            panel |= {name: lines["train"]} | ({f"{name}, held-out": held_out[0]} if held_out else {})
    return dict(list(merged.items())[:PANELS])


def with_metrics(run: Path | Run) -> Run:
    """Read the run in a folder, unless it has been read.

    Raises:
        ReadError: it has no metrics.
    """
    run = run if isinstance(run, Run) else Run(run)
    if not len(run.metrics.steps) and not len(run.evaluations.steps):
        raise ReadError(f"no metrics in {run.path} (looked for metrics.jsonl); is it the folder of a run?")
    return run


def panels(run: Run) -> dict[str, dict[str, Points]]:
    """Return title -> label -> points of the first `PANELS` panels that a run has data for, most important first."""
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
    panels = {title: lines for title, lines in every.items() if any(lines.values())}
    return dict(list(panels.items())[:PANELS])


def points(run: Run, key: str) -> Points:
    """Return the (step, value) pairs of a metric, from training steps and evaluations."""
    tables = (run.metrics.points(key), run.evaluations.points(key))
    return sorted((int(step), float(value)) for table in tables for step, value in zip(*table, strict=True))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the running mean over up to `window` values, each with those before it.

    Example:
        >>> smooth([0.0, 1.0, 2.0], 2)
        [0.0, 0.5, 1.5]
    """
    sums = np.convolve(values, np.ones(window))[: len(values)]
    means: list[float] = (sums / np.minimum(np.arange(1, len(values) + 1), window)).tolist()
    return means


def thinned(line: Points, stretches: int = 1000) -> Points:
    """Return the lowest, the highest and the last point of each stretch of a long line, in order. More would not be
    seen in an image, and matplotlib would search long for a place of the legend.

    Example:
        >>> thinned([(1, 0.0), (2, 9.0), (3, 1.0), (4, 2.0), (5, 3.0)], stretches=1)
        [(1, 0.0), (2, 9.0), (5, 3.0)]
    """
    if len(line) <= 3 * stretches:
        return line
    size = -(-len(line) // stretches)
    parts = [line[at : at + size] for at in range(0, len(line), size)]
    ends = [{min(part, key=itemgetter(1)), max(part, key=itemgetter(1)), part[-1]} for part in parts]
    return [point for each in ends for point in sorted(each)]


def _draw_panel(axis: Any, title: str, lines: dict[str, Points], runs: Sequence[str]) -> None:
    several = len(runs) > 1
    for number, (label, line) in enumerate((label, line) for label, line in lines.items() if line):
        held_out = label.endswith("held-out") or (title == "Accuracy" and label != "train" and not several)
        color = f"C{runs.index(label.removesuffix(', held-out')) if several else number}"
        steps, values = [step for step, _ in line], [value for _, value in line]
        if len(line) >= 40 and not held_out:  # noisy: raw values in a light colour, the running mean on top
            axis.plot(*zip(*thinned(line), strict=True), color=color, alpha=0.25, linewidth=0.9)
            line = thinned([*zip(steps, smooth(values, max(5, len(line) // 25)), strict=True)])
            steps, values = [step for step, _ in line], [value for _, value in line]
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
