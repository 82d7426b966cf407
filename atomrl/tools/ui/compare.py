"""Data of the comparison page (several runs side by side) and of the pages of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from atomrl.tools.ui.catalog import LOSSES, REWARDS, Catalog, Entry, card, clocks, id_of, last_of, stretches, summarized
from atomrl.tools.ui.rollouts import prompt_text
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.comparison import (
    Column,
    columns,
    differences,
    final_figures,
    group_names,
    left_out,
    mean_and_range,
    settings,
)
from atomrl.tracking.reading.diff import diff_runs
from atomrl.tracking.reading.metrics import Floats
from atomrl.tracking.reading.rollouts import SPLITS, Ints, RolloutFilter
from atomrl.tracking.reading.run import WHERE
from atomrl.tracking.reading.studies import load_study

MAX_RUNS = 16
ANSWERS = 20
"""Prompts per page of held-out answers."""
CURVES = (
    *REWARDS, "rewards/margins", *LOSSES, "actor/pg_loss", "train/accuracy", "by_group/frac_mixed",
    "response_length/mean", "response_length/clip_ratio", "actor/entropy", "actor/ppo_kl", "actor/grad_norm",
    "perf/throughput",
)  # fmt: skip
"""Training metrics that are compared by default."""
POINTS = 300
"""Maximum number of points of a curve."""
Points = tuple[Ints, Floats]


def run_data(run: Run, run_id: str, name: str, everything: bool = False) -> dict[str, Any]:
    """Return what a comparison needs of a run.

    Args:
        everything: include all training metrics, not only `CURVES`.
    """
    curves = {
        metric: (table.steps, table[metric])
        for table in (run.metrics, run.evaluations)
        for metric in table
        if (everything or table is run.evaluations or metric in CURVES) and table.last(metric) is not None
    }
    steps = last_of(run.metrics.steps, stretches(len(run.metrics.steps), POINTS))
    return {
        "card": card(run, run_id, name), "config": settings(run), "curves": curves, "judged": final_figures(run),
        "evaluations": list(run.evaluations), "clocks": {"steps": steps, **clocks(run, steps)},
    }  # fmt: skip


def combine(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the parts of several runs.

    Returns:
        `runs`: the cards; `groups`: indices of the runs that differ in seed only, with `group_names`; `apart`: the
        differences between groups; `left_out`: indices of runs that did not finish, so that they are no seeds;
        `columns`: final figures per run and group; `config`: keys that differ, `partial`: keys that only some configs
        have; `curves` per metric and run, `bands` (mean and range) per metric and group, null without data; `clocks`
        per run; `alike`: groups of metrics that are equal in all runs; `constant`: metrics that never change.
    """
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(parts):
        groups.setdefault(one["card"]["group"], []).append(place)
    members = list(groups.values())
    unfinished = left_out([one["card"]["status"] for one in parts], members)
    seeds = [[place for place in group if place not in unfinished] for group in members]
    differing, partial = _config_keys([one["config"] for one in parts])
    metrics = dict.fromkeys(metric for one in parts for metric in one["curves"])
    curves = {metric: [one["curves"].get(metric) for one in parts] for metric in metrics}
    figures = columns([one["judged"] for one in parts])
    alike, constant = _repeated(curves)
    names = group_names([parts[m[0]]["config"] for m in members], [parts[m[0]]["card"]["name"] for m in members])
    return {
        "runs": [one["card"] for one in parts],
        "groups": members,
        "group_names": names,
        "left_out": unfinished,
        **_differences(figures, seeds, names),
        "columns": [
            {"title": one.title, "values": one.values, "over": [mean_and_range(one, group) for group in seeds]}
            for one in figures
        ],
        "config": differing,
        "partial": partial,
        "curves": {metric: [curve and _curve(curve) for curve in row] for metric, row in curves.items()},
        "bands": {
            metric: [band([_present(curve) for place in group if (curve := row[place])], POINTS) for group in members]
            for metric, row in curves.items()
        },
        "clocks": [one["clocks"] for one in parts],
        "evaluations": list(dict.fromkeys(metric for one in parts for metric in one["evaluations"])),
        "alike": alike,
        "constant": constant,
    }  # fmt: skip


def _config_keys(configs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the keys with different values, and those that only some configs (of other versions) have, with the
    values of all runs."""
    differing, partial = {}, {}
    for key in dict.fromkeys(key for config in configs for key in config if key not in WHERE):
        values = [config[key] for config in configs if key in config]
        if any(value != values[0] for value in values):
            differing[key] = [config.get(key) for config in configs]
        elif len(values) < len(configs):
            partial[key] = [config.get(key) for config in configs]
    return differing, partial


def _repeated(curves: Mapping[str, Sequence[Points | None]]) -> tuple[list[list[str]], dict[str, float]]:
    """Return groups of metrics with the same curves in all runs (compared by their bytes), and the values of those that
    never change."""
    same: dict[bytes, list[str]] = {}
    constant: dict[str, float] = {}
    for metric, row in curves.items():
        merged = np.concatenate([curve[1][~np.isnan(curve[1])] for curve in row if curve])
        if len(merged) > len(row) and merged.min() == merged.max():
            constant[metric] = float(merged[0])
        else:
            content = [b"" if curve is None else curve[0].tobytes() + curve[1].tobytes() for curve in row]
            same.setdefault(b"|".join(content), []).append(metric)
    return [metrics for metrics in same.values() if len(metrics) > 1], constant


def _differences(figures: Sequence[Column], groups: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, Any]:
    try:
        pairs = differences(figures, groups, names)
    except ImportError:
        return {"apart": [], "apart_lacks": "scipy"}
    return {"apart": [asdict(pair) | {"clear": pair.difference.clear} for pair in pairs], "apart_lacks": None}


def _present(points: Points) -> Points:
    present = ~np.isnan(points[1])
    return points[0][present], points[1][present]


def _curve(points: Points) -> dict[str, Any]:
    """Downsample a curve to intervals: last step, mean and, if they have several steps, range of each."""
    steps, values = points
    starts = stretches(len(steps), POINTS)
    mean, low, high = (column.astype(np.float32) for column in summarized(values, starts))
    per = int(starts[1]) if len(starts) > 1 else 1
    curve = {"x": last_of(steps, starts), "y": mean, "per": per}
    return curve | ({"low": low, "high": high} if per > 1 else {})


def band(curves: Sequence[Points], points: int) -> dict[str, list[float]] | None:
    """Return mean and range over several curves, at the steps that at least two of them have; None without such steps.

    Args:
        points: maximum number of points; longer curves are averaged over intervals.

    Returns:
        `steps`, `mean`, `low`, `high`, and `count`: the smallest number of curves behind each point, since some runs
        may have ended early.

    Example:
        >>> curves = [(np.array([1, 2]), np.array([0.0, 1.0])), (np.array([2, 3]), np.array([3.0, 1.0]))]
        >>> band(curves, 10)
        {'steps': [2], 'mean': [2.0], 'low': [1.0], 'high': [3.0], 'count': [2]}
    """
    steps, count = np.unique(np.concatenate([np.zeros(0, np.int64), *(own for own, _ in curves)]), return_counts=True)
    steps, count = steps[count > 1], count[count > 1]
    if not len(steps):
        return None
    rows = np.full((len(curves), len(steps)), np.nan)
    for row, (own, values) in zip(rows, curves, strict=True):
        common = np.isin(own, steps)
        row[np.searchsorted(steps, own[common])] = values[common]
    starts = np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int)[:-1]
    return {
        "steps": steps[starts].tolist(),
        "mean": (np.add.reduceat(np.nanmean(rows, 0), starts) / np.diff([*starts, len(steps)])).tolist(),
        "low": np.minimum.reduceat(np.nanmin(rows, 0), starts).tolist(),
        "high": np.maximum.reduceat(np.nanmax(rows, 0), starts).tolist(),
        "count": np.minimum.reduceat(count, starts).tolist(),
    }


def difference(paths: Sequence[Path]) -> dict[str, Any]:
    """Return where two runs diverge. They are read anew: locking both in the catalog would block other requests."""
    one, other = (Run(path) for path in paths)
    comparison = diff_runs(one, other)
    first = comparison.earliest
    return {
        "same": comparison.same,
        "lines": comparison.lines(),
        "first": None if first is None else {"step": first.step, "part": first.part, "split": first.split},
    }


def held_out(run: Run) -> dict[str, Any]:
    """Return `step` of the newest evaluation and `prompts`: hash -> mean reward and number of its first rollout."""
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
        scored = rewards[~np.isnan(rewards)]
        prompts[prompt] = (float(scored.mean()) if len(scored) else None, places[0])
    return {"step": step, "prompts": prompts}


def answers_page(evaluations: Sequence[dict[str, Any]], offset: int, differing: bool) -> tuple[list[str], int]:
    """Return the prompts of a page, in the order of the first run, and the total number.

    Args:
        evaluations: the result of `held_out` for each run.
        differing: only prompts whose mean rewards differ between runs.
    """
    prompts = dict.fromkeys(prompt for one in evaluations for prompt in one["prompts"])
    if differing:
        rewards = {p: {one["prompts"][p][0] for one in evaluations if p in one["prompts"]} for p in prompts}
        prompts = {prompt: None for prompt in prompts if len(rewards[prompt]) > 1}
    return list(prompts)[offset : offset + ANSWERS], len(prompts)


def answers_of(run: Run, evaluation: dict[str, Any], prompts: Sequence[str]) -> list[dict[str, Any] | None]:
    """Return a run's answers to some prompts; None for a prompt that it was not evaluated on, or if the file changed.

    Args:
        evaluation: the result of `held_out` for this run.
    """
    index = run.rollouts
    answers: list[dict[str, Any] | None] = []
    for prompt in prompts:
        mean, first = evaluation["prompts"].get(prompt, (None, None))
        row = index[first] if first is not None and first < len(index) else {}
        place = index.place(first) if row else None
        answers.append(
            {
                "mean": mean, "prompt": prompt_text(row.get("prompt")), "ground_truth": row.get("ground_truth"),
                "completion": str(row.get("completion", "")), "reward": row.get("reward"), "at": place,
            }
            if row else None
        )  # fmt: skip
    return answers


# --------------------------------------------------------------------------------------------------------------------
# Studies of `atomrl tune`: trials, importance of keys, results.


def listed(catalog: Catalog) -> list[dict[str, str]]:
    """List the studies of a catalog."""
    return [{"id": id_of(name), "name": name} for name in catalog.studies()]


def study_page(catalog: Catalog, study_id: str) -> dict[str, Any]:
    """Return the data of a study's page.

    Raises:
        LookupError: there is none with this id.
        ReadError: its journal cannot be read.
        ImportError: optuna is not installed.
    """
    match = next(((name, *study) for name, study in catalog.studies().items() if id_of(name) == study_id), None)
    if match is None:
        raise LookupError("no such study")
    name, folder, entries = match
    return {"name": name} | _page(folder, entries)


def _page(folder: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    study, runs = load_study(folder), {entry.path.name: entry.id for entry in entries}
    seeds = study.result.get("seeds") or []
    values = [trial.value for trial in study.trials if trial.state == "complete" and trial.value is not None]
    return {
        "metric": study.metric, "window": study.window, "space": study.space, "importance": study.importance,
        "best": max(values, default=None), "problems": study.problems,
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
