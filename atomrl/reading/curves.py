"""The picture of a run, or of several: what it is judged by over the steps, from `metrics.jsonl` alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atomrl.hints import said_as
from atomrl.reading.lines import ReadError
from atomrl.reading.metrics import accuracies
from atomrl.reading.run import Run

Points = list[tuple[int, float]]
PANELS, PARTS = 4, 5
"""Panels of a picture; parts of the reward in one of them."""
HELD_OUT = ("Accuracy", "Completion length (tokens)", "Margin of preferences", "Loss (nats per token)")
"""Panels whose further lines are held-out data; those of the reward are its parts."""


def draw_curves(run: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Draw `metrics.jsonl` of a run folder, or of several in one picture, a colour each.

    Returns:
        Where the picture is: `out`, or `curves.png` in the run folder, or of several runs in the working directory.

    Raises:
        ImportError: matplotlib is not installed.
        ReadError: there are no metrics.
    """
    runs = [run] if isinstance(run, Path) else list(run)
    drawn = panels(with_metrics(runs[0])) if len(runs) == 1 else compared(runs)
    message = "the picture of the curves needs matplotlib: pip install 'atomrl[plot]'"
    with said_as(ImportError, message, ImportError):
        from matplotlib.figure import Figure

    names = run_names(runs)
    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained")
    figure.suptitle(", ".join(names), x=0.012, ha="left", fontweight="bold")
    axes = list(figure.subplots(2, 2).flat)
    for axis, (title, lines) in zip(axes, drawn.items(), strict=False):
        _draw_panel(axis, title, lines, names)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    out = out or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def run_names(runs: Sequence[Path]) -> list[str]:
    """The folders' names, or the whole paths where two are alike."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def compared(runs: Sequence[Path]) -> dict[str, dict[str, Points]]:
    """The panels of several runs: the label of a line is `RUN`, or `RUN, held-out` (its first data source)."""
    merged: dict[str, dict[str, Points]] = {}
    for name, run in zip(run_names(runs), runs, strict=True):
        for title, lines in panels(with_metrics(run)).items():
            panel = merged.setdefault(title, {})
            held_out = [line for label, line in lines.items() if label != "train" and title in HELD_OUT]
            panel |= {name: lines["train"]} | ({f"{name}, held-out": held_out[0]} if held_out else {})
    return dict(list(merged.items())[:PANELS])


def with_metrics(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        ReadError: it has no metrics.
    """
    run = Run(folder)
    if not len(run.metrics.steps) and not len(run.evaluations.steps):
        raise ReadError(f"no metrics in {folder} (looked for metrics.jsonl); is it the folder of a run?")
    return run


def panels(run: Run) -> dict[str, dict[str, Points]]:
    """What is drawn: title -> label -> points. The first four that a run has, in the order in which it is judged by
    them."""
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
    shown = {title: lines for title, lines in every.items() if any(lines.values())}
    return dict(list(shown.items())[:PANELS])


def points(run: Run, key: str) -> Points:
    """(step, value) wherever a step or an evaluation has the metric."""
    tables = (run.metrics.points(key), run.evaluations.points(key))
    found = ((int(step), float(value)) for both in tables for step, value in zip(*both, strict=True))
    return sorted(found)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values, each with those before it.

    Example:
        >>> smooth([0.0, 1.0, 2.0], 2)
        [0.0, 0.5, 1.5]
    """
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])]


def _draw_panel(axis: Any, title: str, lines: dict[str, Points], runs: Sequence[str]) -> None:
    several = len(runs) > 1
    for number, (label, line) in enumerate((label, line) for label, line in lines.items() if line):
        held_out = label.endswith("held-out") or (title == "Accuracy" and label != "train" and not several)
        color = f"C{runs.index(label.removesuffix(', held-out')) if several else number}"
        steps, values = [step for step, _ in line], [value for _, value in line]
        if len(line) >= 40 and not held_out:  # noisy: the raw values pale, their running mean over them
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.9)
            values = smooth(values, max(5, len(line) // 25))
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
