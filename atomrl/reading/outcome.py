"""How a run went, in a few lines: how far, how long, accuracy before and after, the best checkpoint."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atomrl.reading.metrics import MetricTable, accuracies
from atomrl.reading.rollouts import RolloutFilter
from atomrl.reading.run import Run

COURSES = {"critic/score/mean": "reward", "preference/loss": "loss", "sft/nll_per_token": "loss", "train/loss": "loss"}
"""Of the training metrics, the first that a run has is shown, under this name."""


def outcome(run: Run) -> Iterator[str]:
    """Lines that answer "how did it go?".

    Args:
        run: finished, under way, or killed.
    """
    state, summary = run.state, run.summary
    seconds = float(summary.get("wall_s") or run.metrics.points("timing_s/step")[1].sum())
    tokens = float(run.metrics.points("perf/total_num_tokens")[1].sum())
    why = f" ({state.why})" if state.status in ("failed", "stopped") else ""
    parts = [f"{state.status}{why}, {state.step} of {state.steps or '?'} steps", duration(seconds)]
    parts += [f"{short_count(tokens)} tokens"] if tokens else []
    parts += [f"{duration(state.eta_s)} left"] if state.eta_s is not None else []
    yield f"{run.path}: {', '.join(parts)}"
    held_out = accuracies(run.evaluations)
    for source, name in held_out.items():
        yield f"  held-out accuracy of {source}: {course(run.evaluations, name)}"
    if not held_out:
        for name in [known for known in run.evaluations if known.startswith("eval/nll")][:1]:
            yield f"  held-out {name.removeprefix('eval/')}: {course(run.evaluations, name)}"
    for name in [known for known in COURSES if known in list(run.metrics)][:1]:
        yield f"  {COURSES[name]}: {course(run.metrics, name)}"
    for link, title in (("best", "best checkpoint"), ("model", "newest checkpoint")):
        if (target := _target(run.path / link)) is not None:
            yield f"  {title}: {target}"


def course(table: MetricTable, name: str) -> str:
    """The first and the last value of a metric, with their steps."""
    steps, values = table.points(name)
    shown = [f"{values[at]:.3f} (step {steps[at]})" for at in ((0, -1) if len(values) > 1 else (0,) * len(values))]
    return " -> ".join(shown) or "none"


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> duration(42), duration(3725)
        ('42 s', '1:02:05')
    """
    if not math.isfinite(seconds):
        return "? s"
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def short_count(number: float) -> str:
    """A count for people.

    Example:
        >>> short_count(950), short_count(1_234_000)
        ('950', '1.23M')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def completions_of(run: Run, step: int) -> Sequence[dict[str, Any]]:
    """The completions of a training step, as rows of `rollouts/`; none where they were not kept."""
    index = run.rollouts
    return index.rows(index.select(RolloutFilter(split="train", first_step=step, last_step=step)))


def _target(link: Path) -> str | None:
    """Where a link of the run's folder leads."""
    try:
        return str(link.readlink()) if link.is_symlink() else None
    except OSError:
        return None
