"""Table and pictures of benchmarks/algorithms.py."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

INK, GREY, GRID = "#2b2b33", "#b9b9c4", "#e6e6ea"
COLORS = ("#2f5fd0", "#d9822b", "#2e8b57")
"""By seed."""
PANELS = {
    "held_out": "Held-out accuracy",
    "reward": "Reward",
    "length": "Length (tokens)",
    "entropy": "Entropy (nats)",
    "kl": "KL to the start (nats)",
    "seconds": "Time (s)",
}
"""The columns of the picture of all; a page's own has the first five."""
PARENT_STYLES = ("-", ":")


class Places(NamedTuple):
    """Paths of the results."""

    numbers: Path
    table: Path
    pictures: Path


def places(folder: Path, docs: bool) -> Places:
    if docs:
        below = folder / "development" / "benchmarks"
        return Places(below / "algorithms.json", below / "algorithms.md", folder / "images" / "algorithms")
    return Places(folder / "results.json", folder / "results.md", folder)


def write(summaries: Mapping[str, Any], where: Places) -> None:
    """Numbers, table, a picture of all and one for each."""
    where.pictures.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(summary)}" for name, summary in summaries.items())
    where.numbers.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    text = where.table.read_text(encoding="utf-8") if where.table.exists() else ""
    before, _, rest = text.partition("| algorithm |")
    after = rest.partition("\n\n")[2]
    where.table.write_text(before + table(summaries) + "\n" + ("\n" + after if after else ""), encoding="utf-8")
    draw_all(summaries, where.pictures / "all.png")
    for name in summaries:
        draw_one(summaries, name, where.pictures / f"{name}.svg")


def table(summaries: Mapping[str, Any]) -> str:
    """A row for each algorithm, in Markdown."""
    columns = "accuracy before | after | by seed | gain in s.e. | reward | length | entropy | KL"
    columns += " | steps | tokens, thousands | time, s"
    lines = [f"| algorithm | {columns} |", "|---" * (columns.count("|") + 2) + "|"]
    for name, s in summaries.items():
        seeds = ", ".join(f"{value:.3f}" for value in s["accuracy_after_by_seed"])
        steps, tokens = between(s["steps"]), between([round(count / 1000) for count in s["tokens"]])
        lines.append(
            f"| {name} | {plus_minus(s['accuracy_before'])} | {plus_minus(s['accuracy_after'])} | {seeds} | "
            f"{s['gain_in_standard_errors']:.0f} | {s['reward_start']:.2f} to {s['reward_end']:.2f} | "
            f"{s['length_start']:.1f} to {s['length_end']:.1f} | {s['entropy_start']:.3f} to {s['entropy_end']:.3f} | "
            f"{s['kl_end']:.2f} | {steps} | {tokens} | {s['train_s']:.0f} |"
        )
    return "\n".join(lines)


def between(values: Sequence[int]) -> str:
    """The smallest to the largest.

    Example:
        >>> between([20, 19, 20]), between([20, 20])
        ('19 to 20', '20')
    """
    return " to ".join(str(value) for value in sorted({min(values), max(values)}))


def plus_minus(figure: Sequence[float]) -> str:
    """Mean and standard error.

    Example:
        >>> plus_minus([0.5, 0.01234])
        '0.500 ± 0.012'
    """
    return f"{figure[0]:.3f} ± {figure[1]:.3f}"


def draw_all(summaries: Mapping[str, Any], out: Path) -> None:
    """A row for each algorithm, a column for each metric with one scale; grey are its parents, most often grpo."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(13, 0.5 + 0.95 * len(summaries)), dpi=80, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.015, w_pad=0.05, hspace=0.0)
    grid = figure.subplots(len(summaries), len(PANELS), sharex=True, sharey="col", squeeze=False)
    for row, name in zip(grid, summaries, strict=True):
        for axis, metric in zip(row, PANELS, strict=True):
            _draw_cell(axis, summaries, name, metric)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, color=INK, labelpad=10)
    for axis, (metric, title) in zip(grid[0], PANELS.items(), strict=True):
        axis.set_title(title, loc="left", fontsize=10, color=INK)
        axis.set_ylim(*_limits(summaries.values(), metric))
    for axis in grid[-1]:
        axis.set_xlabel("tokens sampled, thousands", fontsize=8, color=INK)
    raw = io.BytesIO()
    figure.savefig(raw)
    Image.open(raw).convert("P", palette=Image.Palette.ADAPTIVE, colors=48).save(out, optimize=True)


def draw_one(summaries: Mapping[str, Any], name: str, out: Path) -> None:
    """An algorithm's own curves: accuracy, reward, length, entropy and KL, with its parents' in grey."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    metrics = list(PANELS)[:-1]
    figure = Figure(figsize=(11, 2.1), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    for axis, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        _draw_cell(axis, summaries, name, metric)
        axis.set_title(PANELS[metric], loc="left", fontsize=9, color=INK)
        axis.set_ylim(*_limits([summaries[name], *_parents(summaries, name).values()], metric))
    figure.axes[0].set_xlabel("tokens sampled, thousands", fontsize=8, color=INK)
    if handles := figure.axes[0].get_legend_handles_labels()[0]:
        figure.axes[0].legend(handles=handles, frameon=False, fontsize=8, loc="lower right", labelcolor=INK)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    small = re.sub(r"(\d\.\d)\d{5}", r"\1", text.getvalue())  # a tenth of a point is enough
    out.write_text(re.sub(r"\s*\n\s*", "\n", small), encoding="utf-8")


def _draw_cell(axis: Any, summaries: Mapping[str, Any], name: str, metric: str) -> None:
    for style, (parent, summary) in zip(PARENT_STYLES, _parents(summaries, name).items(), strict=False):
        for i, curve in enumerate(summary["curves"]):
            label = None if i else parent
            axis.plot(*_points(curve, metric), color=GREY, linewidth=0.9, linestyle=style, label=label)
    for curve in summaries[name]["curves"]:
        axis.plot(*_points(curve, metric), color=COLORS[curve["seed"] % len(COLORS)], linewidth=1.2)
    axis.grid(axis="y", color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=7.5, length=0)
    axis.locator_params(nbins=4)


def _parents(summaries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the parents that have results."""
    return {
        parent: summaries[parent] for parent in summaries[name]["parents"] if parent in summaries and parent != name
    }


def _points(curve: Mapping[str, Any], metric: str) -> tuple[list[float], list[float]]:
    if metric == "held_out":
        tokens, values = zip(*curve["held_out"], strict=True)
        return [token / 1000 for token in tokens], list(values)
    return [token / 1000 for token in curve["tokens"]], curve[metric]


def _limits(summaries: Iterable[Mapping[str, Any]], metric: str) -> tuple[float, float]:
    if metric == "held_out":
        return 0.0, 1.02
    values = [value for s in summaries for curve in s["curves"] for value in curve[metric]]
    low, high = min(0.0, *values), max(values)
    return low, high + 0.05 * (high - low)
