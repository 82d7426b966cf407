"""Several runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atomrl.reading import Run
from atomrl.reading.comparison import columns, group_names, judged, over, settings, told_apart
from atomrl.reading.diff import diff_runs
from atomrl.reading.metrics import Floats
from atomrl.reading.rollouts import SPLITS, Ints, RolloutFilter
from atomrl.reading.run import WHERE
from atomrl.ui.cards import LOSSES, REWARDS, SPARK_POINTS, card, downsample
from atomrl.ui.rollouts import prompt_text

MAX_RUNS = 16
ANSWERS = 20
"""Prompts on a page of held-out answers."""
CURVES = (
    *REWARDS, "rewards/margins", *LOSSES, "actor/pg_loss", "train/accuracy", "by_group/frac_mixed",
    "response_length/mean", "response_length/clip_ratio", "actor/entropy", "actor/ppo_kl", "actor/grad_norm",
    "perf/throughput",
)  # fmt: skip
POINTS = 5 * SPARK_POINTS


Points = tuple[Ints, Floats]


def part(run: Run, run_id: str, name: str) -> dict[str, Any]:
    """What a comparison needs of one run."""
    curves = {
        metric: points
        for table in (run.metrics, run.evaluations)
        for metric in table
        if (table is run.evaluations or metric in CURVES) and len((points := table.points(metric))[0])
    }
    return {
        "card": card(run, run_id, name), "config": settings(run), "curves": curves, "judged": judged(run)
    }  # fmt: skip


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cards; the runs that differ in their seeds alone, together; what all are judged by; the config keys in which
    any two differ, and those that only some have (as of another version); the curves by metric, one for each run, and
    mean and range one for each group, null where there is none."""
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
    names = group_names([parts[m[0]]["config"] for m in members], [parts[m[0]]["card"]["name"] for m in members])
    return {
        "runs": [one["card"] for one in parts],
        "groups": members,
        "group_names": names,
        "apart": told_apart(found, members, names),
        "columns": [
            {"title": one.title, "values": one.values, "over": [over(one, group) for group in members]} for one in found
        ],
        "config": differing,
        "partial": partial,
        "curves": {metric: [given and _shown(given) for given in row] for metric, row in curves.items()},
        "bands": {
            metric: [band([given for place in group if (given := row[place])], POINTS) for group in members]
            for metric, row in curves.items()
        },
    }  # fmt: skip


def _shown(points: Points) -> list[list[Any]]:
    steps, values = downsample(*points, POINTS)
    return [steps.tolist(), values.tolist()]


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
    """What `atomrl diff` says of two runs. They are read anew: to hold both for as long would keep others waiting."""
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
