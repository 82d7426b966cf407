"""Draws the picture of docs/guides/vision.md from the runs of `make quickstart-vision`: held-out questions with the
answers before and after GRPO, and the accuracy in training with the pictures of the questions and with others.

python tools/vision_picture.py [FOLDER]

FOLDER has the runs (default: runs). It needs Pillow and matplotlib (the extras `vision` and `plot`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "vision.png"
RUNS = {"quickstart-vision": "its picture", "quickstart-vision-shuffled": "another picture"}
COLORS = {"quickstart-vision": "#2b5fd0", "quickstart-vision-shuffled": "#9a9a9a"}
ACCURACY = "val-core/shapes-colour/acc/mean@1"
SHOWN = 6
"""Held-out questions shown: the first ones, whatever was answered."""


def answers(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the held-out rows of a step."""
    lines = (run / "rollouts" / f"step_{step:06d}" / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main(folder: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    first = folder / next(iter(RUNS))
    steps = sorted(int(path.parent.name.removeprefix("step_")) for path in first.glob("rollouts/*/eval.jsonl"))
    before, after = answers(first, steps[0])[:SHOWN], answers(first, steps[-1])[:SHOWN]
    figure = plt.figure(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    for axis, old, new in zip(left.subplots(2, SHOWN // 2).flat, before, after, strict=True):
        axis.imshow(Image.open(first / "inputs" / "images" / old["images"][0]), interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        lines = [f"before: {old['completion']}", f"after: {new['completion']}"]
        axis.set_title("\n".join(lines), fontsize=9, loc="left")
        axis.set_xlabel(f"answer: {old['ground_truth']}", fontsize=9)
    left.suptitle("<image>Which colour?", fontsize=11)
    axis = right.subplots()
    for name, label in RUNS.items():
        rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        trained = [(row["step"], row["train/accuracy"]) for row in rows if "train/accuracy" in row]
        held_out = [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row]
        axis.plot(*zip(*trained, strict=True), color=COLORS[name], linewidth=1.4, label=f"training, {label}")
        axis.plot(*zip(*held_out, strict=True), "o", color=COLORS[name], label=f"held out, {label}")
    axis.axhline(1 / 3, color="#c0392b", linewidth=0.8, linestyle=":", label="chance")
    axis.set(xlabel="step", ylim=(0, 1))
    axis.set_title("Accuracy", loc="left")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.4))
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs"))
