"""Runs side by side: a table of what they are judged by, the runs of one config with other seeds together, and only the
keys of the config that differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from atomrl.reading.curves import run_names
from atomrl.reading.lines import flat_tree
from atomrl.reading.metrics import accuracies
from atomrl.reading.run import WHERE, Run

WINDOW = 10
"""Steps that the value at the end is a mean of: one step is noise."""
CELL = 28
"""Characters of a config's value in the table."""
LAST = {
    "reward": "critic/score/mean",
    "length": "response_length/mean",
    "entropy": "actor/entropy",
    "seconds/step": "timing_s/step",
}
"""Column -> the metric whose mean over the last steps it has."""
NOT_SETTINGS = {*WHERE, "seed"}
"""Keys in which runs of one group may differ."""


@dataclass(frozen=True)
class Column:
    """What several runs have in one column, by run; None where one has nothing."""

    title: str
    values: tuple[float | None, ...]


def columns(runs: Sequence[Run]) -> list[Column]:
    """What the runs are judged by: held-out accuracy at the end and at best, then means of the last steps."""
    found = []
    sources = dict.fromkeys(key for run in runs for key in accuracies(run.evaluations).values())
    for key in sources:
        points = [run.evaluations.points(key)[1] for run in runs]
        name = "accuracy" if len(sources) == 1 else key.removeprefix("val-core/")
        found.append(Column(name, tuple(float(values[-1]) if len(values) else None for values in points)))
        found.append(Column(f"{name}, best", tuple(float(values.max()) if len(values) else None for values in points)))
    for title, key in LAST.items():
        points = [run.metrics.points(key)[1][-WINDOW:] for run in runs]
        if any(len(values) for values in points):
            found.append(Column(title, tuple(float(values.mean()) if len(values) else None for values in points)))
    return found


def differing_keys(runs: Sequence[Run]) -> dict[str, tuple[object, ...]]:
    """The keys of the config that are not the same in all runs, with their values by run."""
    flat = [flat_tree(run.config) for run in runs]
    keys = dict.fromkeys(key for tree in flat for key in tree if key not in WHERE)
    values = {key: tuple(tree.get(key) for tree in flat) for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def by_settings(runs: Sequence[Run]) -> list[list[int]]:
    """The places of the runs that have the same config but for seed and name, together."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        tree = {key: value for key, value in flat_tree(run.config).items() if key not in NOT_SETTINGS}
        groups.setdefault(json.dumps(tree, sort_keys=True, default=str), []).append(place)
    return list(groups.values())


def table(runs: Sequence[Run]) -> list[str]:
    """The runs as lines of text: one for each, and one for each config that has several seeds, with mean and range."""
    found, names = columns(runs), run_names([run.path for run in runs])
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
    for group in by_settings(runs):
        if len(group) > 1:
            rows.append([f"{len(group)} seeds: {names[group[0]]}, ...", "", "", *(_range(c, group) for c in found), ""])
    lines = _aligned([head, *rows])
    keys = differing_keys(runs)
    if keys:
        rows = [[key, *(_short(value) for value in values)] for key, values in keys.items()]
        lines += ["", *_aligned([["config", *names], *rows])]
    return lines


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= CELL else f"{text[: CELL - 3]}..."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _range(column: Column, group: Sequence[int]) -> str:
    values = [value for place in group if (value := column.values[place]) is not None]
    if not values:
        return "-"
    return f"{sum(values) / len(values):.4g} [{min(values):.4g}, {max(values):.4g}]"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
