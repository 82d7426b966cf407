"""What the pages say of a run, as JSON-ready values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from atomrl.reading import Run
from atomrl.reading.comparison import NOT_SETTINGS, settings
from atomrl.reading.lines import flat_tree
from atomrl.reading.metrics import Floats, MetricTable, as_float, newest_held_out
from atomrl.reading.rollouts import Ints
from atomrl.ui.curves import CLOCKS, alike, constant

REWARDS = ("critic/score/mean",)
LOSSES = ("preference/loss", "reward_model/loss", "sft/nll_per_token", "train/loss")
"""Of training; a policy gradient's is none to judge a run by, since it stays near 0 whatever is learnt."""
HELD_OUT_LOSSES = ("eval/nll_per_token", "val/loss", "eval/loss")
SPARK_POINTS = 60


def card(run: Run, run_id: str, name: str) -> dict[str, Any]:
    """What the list shows of a run."""
    config, state = run.config, run.state
    findings = run.findings
    seconds, _ = spent(run)
    return {
        "id": run_id,
        "name": name,
        "kind": kind(config),
        "algorithm": algorithm(config),
        "status": state.status,
        "why": state.why,
        "step": state.step,
        "steps": state.steps,
        "progress": state.progress,
        "eta_s": state.eta_s,
        "step_seconds": state.step_seconds,
        "updated": state.updated,
        "started": run.environment.get("time"),
        "seed": config.get("seed"),
        "learning_rate": at(config, "train", "learning_rate"),
        "model": at(config, "model", "path"),
        "seconds": seconds,
        "silent_s": state.silent_s,
        "reward": course(run.metrics, REWARDS),
        "loss": course(run.metrics, LOSSES),
        "held_out": held_out(run),
        "findings": [{"id": found.id, "severity": found.severity, "step": found.step} for found in findings],
        "group": group(settings(run)),
        "problems": len(run.problems),
        "error": str(run.failure.get("error", "")) or None if state.status == "failed" else None,
    }


def spent(run: Run) -> tuple[float, float]:
    """Seconds that a run took, and tokens that went through it."""
    seconds = as_float(run.summary.get("wall_s"))
    if not seconds > 0:
        seconds = float(run.metrics.points("timing_s/step")[1].sum())
    return seconds, float(run.metrics.points("perf/total_num_tokens")[1].sum())


def course(table: MetricTable, names: Sequence[str]) -> dict[str, Any] | None:
    """Of the first of these metrics that a run has: first and last, least and largest value, each with its step, and
    a small curve; None where it has none."""
    name = next((name for name in names if table.last(name) is not None), None)
    if name is None:
        return None
    steps, values = table.points(name)
    x, y = downsample(steps, values, SPARK_POINTS)
    places = {"first": 0, "last": -1, "least": int(values.argmin()), "largest": int(values.argmax())}
    points = {title: [int(steps[place]), float(values[place])] for title, place in places.items()}
    return {"name": name, **points, "spark": [x.tolist(), y.tolist()]}


def held_out(run: Run) -> list[dict[str, Any]]:
    """The course of each thing that a run is judged by on held-out data: `kind` (accuracy; reward where that says no
    right or wrong; loss) and `source`; of several data sources that of all of them, named `all`, comes first."""
    what, names = newest_held_out(run.evaluations)
    kind = what if names else "loss"
    asked: list[tuple[str | None, Sequence[str]]] = [(source, [name]) for source, name in names.items()]
    found = [
        {"kind": kind, "source": source, **about}
        for source, of in asked or [(None, HELD_OUT_LOSSES)]
        if (about := course(run.evaluations, of)) is not None
    ]
    return sorted(found, key=lambda one: one["source"] != "all")


def unreadable(run_id: str, name: str, error: Exception) -> dict[str, Any]:
    """The same of a run that cannot be read, with why."""
    said = f"it cannot be read: {error!r}"[:1000]
    lacking = ("steps", "progress", "eta_s", "step_seconds", "started", "seed", "learning_rate", "model", "silent_s")
    return dict.fromkeys((*lacking, "reward", "loss")) | {
        "id": run_id, "name": name, "kind": "", "algorithm": "", "status": "failed", "why": said, "step": 0,
        "updated": 0.0, "seconds": 0.0, "held_out": [], "findings": [], "group": run_id, "problems": 1,
        "error": said,
    }  # fmt: skip


def details(run: Run, run_id: str, name: str) -> dict[str, Any]:
    """What the page of a run shows beside its curves."""
    return card(run, run_id, name) | {
        "metrics": [name for name in run.metrics if run.metrics.last(name) is not None],
        "evaluations": [name for name in run.evaluations if run.evaluations.last(name) is not None],
        "constant": constant((run.metrics, run.evaluations)),
        "alike": alike((run.metrics, run.evaluations)),
        "clocks": [name for name, metric in CLOCKS.items() if run.metrics.last(metric) is not None],
        "evaluated": [
            {"step": int(step), "values": {metric: number(column[place]) for metric, column in run.evaluations.items()}}
            for place, step in enumerate(run.evaluations.steps)
        ],
        "findings": [
            {name: getattr(found, name) for name in ("id", "severity", "step", "what", "quote", "advice", "page")}
            for found in run.findings
        ],
        "summary": run.summary,
        "failure": run.failure,
        "environment": run.environment,
        "problems": run.problems,
        "last": {metric: run.metrics.last(metric) for metric in run.metrics},
    }


def kind(config: Mapping[str, Any]) -> str:
    """Which kind of run a config is of, as its file says it."""
    for section in ("sft", "pretrain"):
        if config.get(section) is not None:
            return section
    return "rl"


def algorithm(config: Mapping[str, Any]) -> str:
    """The algorithm's name, or the kind of a run that has none."""
    name = at(config, "algorithm", "name") if kind(config) == "rl" else kind(config)
    return str(name or "")


def group(config: Mapping[str, Any]) -> str:
    """The same for runs that differ in nothing but their seed and name."""
    flat = {key: value for key, value in flat_tree(config).items() if key not in NOT_SETTINGS}
    return blake2b(repr(sorted(flat.items())).encode("utf-8", "replace"), digest_size=6).hexdigest()


def at(tree: Mapping[str, Any], *keys: str) -> Any:
    """A value of a nested dict, or None."""
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(value: float) -> float | None:
    """A number as JSON has it: NaN is null."""
    return None if np.isnan(value) else float(value)


def downsample(steps: Ints, values: Floats, points: int) -> tuple[Ints, Floats]:
    """At most so many points, by the least and the largest of each stretch, so that no spike is lost; the first and the
    last point are kept.

    Example:
        >>> steps, values = downsample(np.arange(9), np.array([0.0, 0, 0, 0, 9, 0, 0, 0, 0]), 6)
        >>> 9.0 in values, steps[0], steps[-1]
        (True, np.int64(0), np.int64(8))
    """
    if len(steps) <= points:
        return steps, values
    stretches = max(1, (points - 2) // 2)
    edges = np.linspace(0, len(steps), stretches + 1).astype(int)[:-1]
    kept = {0, len(steps) - 1}
    for start, end in zip(edges, [*edges[1:], len(steps)], strict=True):
        part = values[start:end]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    places = np.array(sorted(kept))
    return steps[places], values[places]
