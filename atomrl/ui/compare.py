"""Several runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atomrl.reading import Run
from atomrl.reading.lines import flat_tree
from atomrl.reading.run import WHERE
from atomrl.ui.cards import HEADLINES, SPARK_POINTS, card, downsample, number

MAX_RUNS = 16
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
