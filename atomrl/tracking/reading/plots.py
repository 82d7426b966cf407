"""Plots of the curves of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from atomrl.common.errors import reraise_as
from atomrl.tracking.reading.lines import ReadError
from atomrl.tracking.reading.metrics import accuracies
from atomrl.tracking.reading.run import Run

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
