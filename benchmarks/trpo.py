"""TRPO's word over many updates: how many are accepted, and how near the measured KL comes to its bound.

    python benchmarks/trpo.py                            # 200 updates
    python benchmarks/trpo.py train.steps=40 rollout.prompts_per_step=512
    python benchmarks/trpo.py --read runs/trpo-benchmark # what a run, also one under way, says so far

The run is that of configs/algorithms/trpo.yaml, longer; `key=value` changes it. Only the run directory is read.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from atomrl.config import load_config, merge_trees, parse_overrides, read_yaml
from atomrl.trainer import prepare_run

ROOT = Path(__file__).parents[1]
LONGER = ["run_name=trpo-benchmark", "train.steps=200", "eval.every_steps=50"]


def report(folder: Path) -> None:
    """Print the figures of a run directory."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    updates = [row for row in rows if "actor/accepted" in row]
    accepted = [row for row in updates if row["actor/accepted"]]
    ratios = [row["actor/kl"] / row["actor/kl_bound"] for row in accepted]
    figures = {
        "updates": len(updates),
        "accepted": len(accepted) / len(updates),
        "KL / bound, median of all updates": statistics.median(r["actor/kl"] / r["actor/kl_bound"] for r in updates),
        "KL / bound, least accepted": min(ratios),
        "KL / bound, largest": max(ratios),
        "backtracks, mean": statistics.mean(row["actor/backtracks"] for row in updates),
        "residual of conjugate gradients, median": statistics.median(r["actor/cg_residual"] for r in updates),
    }
    for name, value in figures.items():
        print(f"{name:42} {value:.4g}")
    for start in range(0, len(updates), 25):
        part = [row["train/accuracy"] for row in updates[start : start + 25]]
        print(f"accuracy of updates {start + 1} to {start + len(part)}: {statistics.mean(part):.3f}")
    summary = folder / "summary.json"
    if summary.is_file():
        found = json.loads(summary.read_text(encoding="utf-8"))
        print(f"held-out accuracy: {found['accuracy_before']:.3f} before, {found['accuracy_after']:.3f} after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, help="a run directory to report on")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    folder = arguments.read
    if folder is None:
        tree = read_yaml(ROOT / "configs" / "algorithms" / "trpo.yaml")
        config = load_config(merge_trees(tree, parse_overrides([*LONGER, *arguments.overrides])))
        prepare_run(config).execute()
        folder = config.run_dir
    report(folder)


if __name__ == "__main__":
    main()
