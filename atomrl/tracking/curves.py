"""The picture of a run: reward, accuracy, length and entropy over the steps, from `metrics.jsonl` alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.tracking.run_directory import read_metrics

Rows = list[dict[str, Any]]
Points = list[tuple[int, float]]

SUPERVISED = {
    "Loss (nats per token)": "sft/nll_per_token",
    "Gradient norm": "actor/grad_norm",
    "Learning rate": "actor/lr",
    "Tokens per second": "perf/throughput",
}
"""What is drawn of supervised training: title -> metric."""
INK, GRID = "#2b2b33", "#e6e6ea"
COLORS = ("#2f5fd0", "#d9822b", "#2e8b57", "#b03a6f", "#6b4fbb", "#7a7a85")


def draw_curves(run: Path, out: Path | None = None) -> Path:
    """Draw `metrics.jsonl` of a run folder.

    Returns:
        Where the picture is: `out`, or `curves.png` in the run folder.

    Raises:
        ImportError: matplotlib is not installed.
        ConfigError: there are no metrics.
    """
    path = run / "metrics.jsonl"
    rows = read_metrics(path) if path.is_file() else []
    if not rows:
        raise ConfigError(f"no metrics in {run} (looked for {path.name}); is it the folder of a run?")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the picture of the curves needs matplotlib: pip install 'atomrl[plot]'") from None

    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12, hspace=0.03)
    axes = figure.subplots(2, 2, sharex=True).flat
    figure.suptitle(run.resolve().name, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    for axis, (title, lines) in zip(axes, panels(rows).items(), strict=True):
        _draw_panel(axis, title, lines)
    for axis in figure.axes[2:]:
        axis.set_xlabel("step", color=INK)
    out = out or run / "curves.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def panels(rows: Rows) -> dict[str, dict[str, Points]]:
    """What is drawn: title -> label -> points, from the rows of `metrics.jsonl`."""
    if not points(rows, "critic/score/mean") and points(rows, "sft/nll_per_token"):
        return {title: {"train": points(rows, key)} for title, key in SUPERVISED.items()}
    accuracy = {"train": points(rows, "train/accuracy")}
    for key in _keys(rows, "val-core/", "/acc/mean@"):
        source = key.split("/")[1]
        accuracy["held-out" if source == "all" else source] = points(rows, key)
    if "held-out" not in accuracy and len(accuracy) == 2:
        accuracy["held-out"] = accuracy.pop(next(label for label in accuracy if label != "train"))
    parts = {key.split("/")[1]: points(rows, key) for key in _keys(rows, "reward/", "/mean")}
    reward = {"train": points(rows, "critic/score/mean")} | (parts if len(parts) > 1 else {})
    length = {
        "train": points(rows, "response_length/mean"),
        "held-out": points(rows, "val-aux/response_length/mean"),
    }
    return {
        "Reward": reward,
        "Accuracy": accuracy,
        "Completion length (tokens)": length,
        "Entropy (nats per token)": {"train": points(rows, "actor/entropy")},
    }


def points(rows: Rows, key: str) -> Points:
    """(step, value) wherever a row has the key.

    Example:
        >>> points([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}], "a")
        [(1, 2.0)]
    """
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values, each with those before it.

    Example:
        >>> smooth([0.0, 1.0, 2.0], 2)
        [0.0, 0.5, 1.5]
    """
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])]


def _keys(rows: Rows, start: str, part: str) -> list[str]:
    found = {key: None for row in rows for key in row if key.startswith(start) and part in key}
    return list(found)[:5]


def _draw_panel(axis: Any, title: str, lines: dict[str, Points]) -> None:
    drawn = {label: line for label, line in lines.items() if line}
    for color, (label, line) in zip(COLORS, drawn.items(), strict=False):
        steps, values = zip(*line, strict=True)
        held_out = label == "held-out" or (title == "Accuracy" and label != "train")
        if len(line) >= 40 and not held_out:  # noisy: the raw values pale, their running mean over them
            axis.plot(steps, values, color=color, alpha=0.22, linewidth=0.9)
            values = smooth(values, max(5, len(line) // 25))
        axis.plot(
            steps, values, color=color, linewidth=1.9, label=f"{label}  {values[-1]:.3g}", solid_capstyle="round",
            marker="o" if held_out or len(line) < 12 else None, markersize=4,
        )  # fmt: skip
    axis.set_title(title, loc="left", fontsize=11, color=INK)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#b9b9c0")
    axis.tick_params(colors=INK, labelsize=8.5, length=0)
    axis.tick_params(axis="x", labelbottom=True)
    if title == "Accuracy":
        axis.set_ylim(-0.02, 1.05)
    if not drawn:
        axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", color="#9a9aa3", fontsize=9)
        axis.set_yticks([])
    else:  # with the last values
        axis.legend(frameon=False, fontsize=8.5, loc="best", labelcolor=INK)
