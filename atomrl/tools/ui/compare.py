"""Several runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from atomrl.tools.tuning import load_study
from atomrl.tools.ui.catalog import LOSSES, REWARDS, Catalog, Entry, card, id_of
from atomrl.tools.ui.curves import clocks, last_of, stretches, summarized
from atomrl.tools.ui.rollouts import prompt_text
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.comparison import Column, columns, differences, group_names, judged, over, settings
from atomrl.tracking.reading.diff import diff_runs
from atomrl.tracking.reading.metrics import Floats
from atomrl.tracking.reading.rollouts import SPLITS, Ints, RolloutFilter
from atomrl.tracking.reading.run import WHERE

MAX_RUNS = 16
ANSWERS = 20
"""Prompts on a page of held-out answers."""
CURVES = (
    *REWARDS, "rewards/margins", *LOSSES, "actor/pg_loss", "train/accuracy", "by_group/frac_mixed",
    "response_length/mean", "response_length/clip_ratio", "actor/entropy", "actor/ppo_kl", "actor/grad_norm",
    "perf/throughput",
)  # fmt: skip
"""Metrics of training that are compared unless all are asked for."""
POINTS = 300
"""Most points of a curve."""
Points = tuple[Ints, Floats]


def part(run: Run, run_id: str, name: str, everything: bool = False) -> dict[str, Any]:
    """The part of a run that a comparison reads.

    Args:
        everything: every metric of training, not only `CURVES`.
    """
    curves = {
        metric: (table.steps, table[metric])
        for table in (run.metrics, run.evaluations)
        for metric in table
        if (everything or table is run.evaluations or metric in CURVES) and table.last(metric) is not None
    }
    steps = last_of(run.metrics.steps, stretches(len(run.metrics.steps), POINTS))
    return {
        "card": card(run, run_id, name), "config": settings(run), "curves": curves, "judged": judged(run),
        "evaluations": list(run.evaluations), "clocks": {"steps": steps, **clocks(run, steps)},
    }  # fmt: skip


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cards; the runs that differ in their seeds alone, together; what all are judged by; the config keys in which
    any two differ, and those that only some have (as of another version); the curves by metric, one for each run, and
    mean and range one for each group, null where there is none; the clocks of each run, and which metrics are the same
    in all runs, or never change."""
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(parts):
        groups.setdefault(one["card"]["group"], []).append(place)
    members = list(groups.values())
    keys = dict.fromkeys(key for one in parts for key in one["config"] if key not in WHERE)
    differing, partial = {}, {}
    for key in keys:
        given = [one["config"][key] for one in parts if key in one["config"]]
        if any(value != given[0] for value in given):
            differing[key] = [one["config"].get(key) for one in parts]
        elif len(given) < len(parts):
            partial[key] = [one["config"].get(key) for one in parts]
    metrics = dict.fromkeys(metric for one in parts for metric in one["curves"])
    curves = {metric: [one["curves"].get(metric) for one in parts] for metric in metrics}
    found = columns([one["judged"] for one in parts])
    same: dict[bytes, list[str]] = {}
    flat: dict[str, float] = {}
    for metric, row in curves.items():
        values = np.concatenate([given[1][~np.isnan(given[1])] for given in row if given])
        if len(values) > len(row) and values.min() == values.max():
            flat[metric] = float(values[0])
        else:
            told = [b"" if given is None else given[0].tobytes() + given[1].tobytes() for given in row]
            same.setdefault(b"|".join(told), []).append(metric)
    names = group_names([parts[m[0]]["config"] for m in members], [parts[m[0]]["card"]["name"] for m in members])
    return {
        "runs": [one["card"] for one in parts],
        "groups": members,
        "group_names": names,
        **_apart(found, members, names),
        "columns": [
            {"title": one.title, "values": one.values, "over": [over(one, group) for group in members]} for one in found
        ],
        "config": differing,
        "partial": partial,
        "curves": {metric: [given and _shown(given) for given in row] for metric, row in curves.items()},
        "bands": {
            metric: [band([_present(given) for place in group if (given := row[place])], POINTS) for group in members]
            for metric, row in curves.items()
        },
        "clocks": [one["clocks"] for one in parts],
        "evaluations": list(dict.fromkeys(metric for one in parts for metric in one["evaluations"])),
        "alike": [metrics for metrics in same.values() if len(metrics) > 1],
        "constant": flat,
    }  # fmt: skip


def _apart(found: Sequence[Column], members: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, Any]:
    try:
        pairs = differences(found, members, names)
    except ImportError:
        return {"apart": [], "apart_lacks": "scipy"}
    return {"apart": [asdict(pair) | {"clear": pair.difference.clear} for pair in pairs], "apart_lacks": None}


def _present(points: Points) -> Points:
    there = ~np.isnan(points[1])
    return points[0][there], points[1][there]


def _shown(points: Points) -> dict[str, Any]:
    """A curve by stretches: the last step of each, its mean, and where it has several steps its range."""
    steps, values = points
    starts = stretches(len(steps), POINTS)
    mean, low, high = (column.astype(np.float32) for column in summarized(values, starts))
    per = int(starts[1]) if len(starts) > 1 else 1
    shown = {"x": last_of(steps, starts), "y": mean, "per": per}
    return shown | ({"low": low, "high": high} if per > 1 else {})


def band(curves: Sequence[Points], points: int) -> dict[str, list[float]] | None:
    """Mean and range over several curves, at the steps that at least two of them have; None where there are none.

    Args:
        points: at most so many; of more, stretches with the mean of their means, and their least and largest value.

    Returns:
        `steps`, `mean`, `low`, `high`, and `count`: the least number of curves that a point is of, since a run that
        ended early has no say in what comes after.

    Example:
        >>> given = [(np.array([1, 2]), np.array([0.0, 1.0])), (np.array([2, 3]), np.array([3.0, 1.0]))]
        >>> band(given, 10)
        {'steps': [2], 'mean': [2.0], 'low': [1.0], 'high': [3.0], 'count': [2]}
    """
    steps, count = np.unique(np.concatenate([np.zeros(0, np.int64), *(own for own, _ in curves)]), return_counts=True)
    steps, count = steps[count > 1], count[count > 1]
    if not len(steps):
        return None
    rows = np.full((len(curves), len(steps)), np.nan)
    for row, (own, values) in zip(rows, curves, strict=True):
        there = np.isin(own, steps)
        row[np.searchsorted(steps, own[there])] = values[there]
    starts = np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int)[:-1]
    return {
        "steps": steps[starts].tolist(),
        "mean": (np.add.reduceat(np.nanmean(rows, 0), starts) / np.diff([*starts, len(steps)])).tolist(),
        "low": np.minimum.reduceat(np.nanmin(rows, 0), starts).tolist(),
        "high": np.maximum.reduceat(np.nanmax(rows, 0), starts).tolist(),
        "count": np.minimum.reduceat(count, starts).tolist(),
    }


def difference(paths: Sequence[Path]) -> dict[str, Any]:
    """Where two runs begin to differ. They are read anew: to hold both for as long would keep others waiting."""
    one, other = (Run(path) for path in paths)
    found = diff_runs(one, other)
    first = found.earliest
    return {
        "same": found.same,
        "lines": found.lines(),
        "first": None if first is None else {"step": first.step, "part": first.part, "split": first.split},
    }


def held_out(run: Run) -> dict[str, Any]:
    """Of the newest evaluation: by prompt the mean reward, and where its first completion is."""
    index = run.rollouts
    steps = index.steps[index.splits == SPLITS.index("eval")]
    if not len(steps):
        return {"step": None, "prompts": {}}
    step, prompts = int(steps.max()), dict[str, tuple[float | None, int]]()
    members: dict[str, list[int]] = {}
    for place in index.select(RolloutFilter(split="eval", first_step=step, last_step=step)).tolist():
        members.setdefault(index.prompt_of(place), []).append(place)
    for prompt, places in members.items():
        rewards = index.numbers["reward"][places]
        given = rewards[~np.isnan(rewards)]
        prompts[prompt] = (float(given.mean()) if len(given) else None, places[0])
    return {"step": step, "prompts": prompts}


def answers_page(found: Sequence[dict[str, Any]], offset: int, differing: bool) -> tuple[list[str], int]:
    """The prompts of a page, in the order in which the first run has them, and how many there are in all.

    Args:
        differing: only those whose mean rewards are not the same in all runs that have them.
    """
    prompts = dict.fromkeys(prompt for one in found for prompt in one["prompts"])
    if differing:
        rewards = {p: {one["prompts"][p][0] for one in found if p in one["prompts"]} for p in prompts}
        prompts = {prompt: None for prompt in prompts if len(rewards[prompt]) > 1}
    return list(prompts)[offset : offset + ANSWERS], len(prompts)


def answers_of(run: Run, found: dict[str, Any], prompts: Sequence[str]) -> list[dict[str, Any] | None]:
    """A run's answers to some prompts; None where it was not asked, or its file has changed."""
    index = run.rollouts
    answers: list[dict[str, Any] | None] = []
    for prompt in prompts:
        mean, first = found["prompts"].get(prompt, (None, None))
        row = index[first] if first is not None and first < len(index) else {}
        shown = index.place(first) if row else None
        answers.append(
            {
                "mean": mean, "prompt": prompt_text(row.get("prompt")), "ground_truth": row.get("ground_truth"),
                "completion": str(row.get("completion", "")), "reward": row.get("reward"), "at": shown,
            }
            if row else None
        )  # fmt: skip
    return answers


# --------------------------------------------------------------------------------------------------------------------
# Studies for the pages: trials, what decides, and what came of it.


def listed(catalog: Catalog) -> list[dict[str, str]]:
    """The studies there are."""
    return [{"id": id_of(name), "name": name} for name in catalog.studies()]


def study_page(catalog: Catalog, study_id: str) -> dict[str, Any]:
    """A study.

    Raises:
        LookupError: there is none with this id.
        ReadError: its journal cannot be read.
        ImportError: optuna is not installed.
    """
    found = next(((name, *both) for name, both in catalog.studies().items() if id_of(name) == study_id), None)
    if found is None:
        raise LookupError("there is no such study")
    return {"name": found[0]} | _page(found[1], found[2])


def _page(folder: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    study, runs = load_study(folder), {entry.path.name: entry.id for entry in entries}
    seeds = study.result.get("seeds") or []
    whole = [trial.value for trial in study.trials if trial.state == "complete" and trial.value is not None]
    return {
        "metric": study.metric, "window": study.window, "space": study.space, "importance": study.importance,
        "best": max(whole, default=None), "problems": study.problems,
        "trials": [
            {
                "number": trial.number, "state": trial.state, "value": trial.value, "reported": trial.reported,
                "params": trial.params, "seconds": trial.seconds, "run": runs.get(trial.run),
            }
            for trial in study.trials
        ],
        "note": study.result.get("note"), "better": study.result.get("better"), "winner": study.result.get("winner"),
        "seeds": seeds,
        "finals": [
            {"name": name, "values": values, "runs": [runs.get(f"final_{name}_seed_{seed}") for seed in seeds]}
            for name, values in (study.result.get("finals") or {}).items()
        ],
    }  # fmt: skip
