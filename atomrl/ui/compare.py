"""Several runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atomrl.reading import Run
from atomrl.reading.diff import diff_runs
from atomrl.reading.lines import flat_tree
from atomrl.reading.rollouts import SPLITS, RolloutFilter
from atomrl.reading.run import WHERE
from atomrl.ui.cards import HEADLINES, SPARK_POINTS, card, downsample, number
from atomrl.ui.rollouts import prompt_text

MAX_RUNS = 16
ANSWERS = 20
"""Prompts on a page of held-out answers."""
CURVES = (
    *HEADLINES, "train/accuracy", "by_group/frac_mixed", "response_length/mean", "response_length/clip_ratio",
    "actor/entropy", "actor/ppo_kl", "actor/grad_norm", "perf/throughput",
)  # fmt: skip
POINTS = 5 * SPARK_POINTS


def part(run: Run, run_id: str, name: str) -> dict[str, Any]:
    """What a comparison needs of one run."""
    curves = {}
    for table in (run.metrics, run.evaluations):
        for metric in table:
            if table is run.evaluations or metric in CURVES:
                steps, values = downsample(*table.points(metric), POINTS)
                if len(steps):
                    curves[metric] = [steps.tolist(), [number(value) for value in values]]
    return {"card": card(run, run_id, name), "config": flat_tree(run.config), "curves": curves}


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cards, the config keys in which any two differ, those that only some have (as of another version), and the
    curves by metric, one for each run that has it."""
    keys = dict.fromkeys(key for one in parts for key in one["config"] if key not in WHERE)
    differing, partial = {}, {}
    for key in keys:
        given = [one["config"][key] for one in parts if key in one["config"]]
        if any(value != given[0] for value in given):
            differing[key] = [one["config"].get(key) for one in parts]
        elif len(given) < len(parts):
            partial[key] = [one["config"].get(key) for one in parts]
    metrics = dict.fromkeys(metric for one in parts for metric in one["curves"])
    return {
        "runs": [one["card"] for one in parts],
        "config": differing,
        "partial": partial,
        "curves": {metric: [one["curves"].get(metric) for one in parts] for metric in metrics},
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
