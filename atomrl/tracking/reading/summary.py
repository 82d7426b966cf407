"""Summary of a run as text: steps, time, accuracy before and after, best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atomrl.common.files import open_file
from atomrl.tracking.reading.metrics import MetricTable, newest_held_out
from atomrl.tracking.reading.rollouts import row_of
from atomrl.tracking.reading.run import Run

COURSES = {"critic/score/mean": "reward"} | dict.fromkeys(
    ("preference/loss", "reward_model/loss", "sft/nll_per_token", "train/loss"), "loss"
)
"""Training metric -> its title. The first that a run has is shown."""
LOSSES = ("eval/nll_per_token", "val/loss")
"""Losses of an evaluation without rewards or preferences."""


def outcome(run: Run) -> Iterator[str]:
    """Summarize a run (finished, running or killed) in a few lines: status, time, tokens, held-out results,
    checkpoints."""
    state, summary = run.state, run.summary
    seconds = float(summary.get("wall_s") or run.metrics.points("timing_s/step")[1].sum())
    tokens = float(run.metrics.points("perf/total_num_tokens")[1].sum())
    why = f" ({state.why})" if state.status in ("failed", "stopped") else ""
    parts = [f"{state.status}{why}, {state.step} of {state.steps or '?'} steps", duration(seconds)]
    parts += [f"{short_count(tokens)} tokens"] if tokens else []
    parts += [f"{duration(state.eta_s)} left"] if state.eta_s is not None else []
    yield f"{run.path}: {', '.join(parts)}"
    what, judged = newest_held_out(run.evaluations)
    for source, name in judged.items():
        yield f"  held-out {what} of {source}: {course(run.evaluations, name)}"
    losses = [name for name in LOSSES if name in run.evaluations][:1] if not judged else []
    yield from (f"  held-out loss: {course(run.evaluations, name)}" for name in losses)
    for name in [name for name in COURSES if name in run.metrics][:1]:
        yield f"  {COURSES[name]}: {course(run.metrics, name)}"
    first = [judged.get("all", next(iter(judged.values())))] if judged else losses
    yield from best_step(run, first[0], lowest=bool(losses)) if first else ()
    for link, title in (("best", "best checkpoint (checkpoint.keep_best)"), ("model", "newest checkpoint")):
        if (target := _target(run.path / link)) is not None:
            yield f"  {title}: {target}"


def best_step(run: Run, name: str, lowest: bool) -> Iterator[str]:
    """Yield a line with the best evaluation of several, and its checkpoint if it still exists."""
    steps, values = run.evaluations.points(name)
    if len(values) < 2:
        return
    step = int(steps[(values.argmin if lowest else values.argmax)()])
    folder = f"checkpoints/step_{step:06d}"
    place = folder if (run.path / folder).is_dir() else "its checkpoint was not kept"
    yield f"  best on held-out data: step {step}, {'the model it started from' if step == 0 else place}"


def course(table: MetricTable, name: str) -> str:
    """Format the first and the last value of a metric, with their steps."""
    steps, values = table.points(name)
    ends = [f"{values[at]:.3f} (step {steps[at]})" for at in ((0, -1) if len(values) > 1 else (0,) * len(values))]
    return " -> ".join(ends) or "none"


def duration(seconds: float) -> str:
    """Format seconds for display.

    Example:
        >>> duration(42), duration(3725)
        ('42 s', '1:02:05')
    """
    if not math.isfinite(seconds):
        return "? s"
    total = round(seconds)
    return f"{total} s" if total < 60 else f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"


def short_count(number: float) -> str:
    """Format a count for display.

    Example:
        >>> short_count(950), short_count(1_234_000)
        ('950', '1.23M')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def completions_of(run: Run, step: int) -> Sequence[dict[str, Any]]:
    """Read the completions of a training step, as rows of `rollouts/`; empty if they were not saved."""
    try:
        with open_file(run.path / f"rollouts/step_{step:06d}/train.jsonl") as file:
            rows = [row_of(line) for line in file.read().splitlines()]
    except OSError:
        return []
    return [row for row in rows if row is not None]


def _target(link: Path) -> str | None:
    """Return the target of a symbolic link, or None."""
    try:
        return str(link.readlink()) if link.is_symlink() else None
    except OSError:
        return None
