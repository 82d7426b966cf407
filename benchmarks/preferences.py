"""Every method that learns from preferences, on pairs of the chain task, from the quickstart's warm start.

    python benchmarks/preferences.py                          # all of them, three seeds of the main ones
    python benchmarks/preferences.py dpo kto --seeds 0        # some of them
    python benchmarks/preferences.py --docs                   # what is finished, into docs/development/benchmarks.md

A run is a method's own config (configs/algorithms/NAME.yaml) with a seed, which draws the pairs to train on, the 500
held-out ones and the order. Accuracy is how often a method's own score is higher for the chosen of two held-out
completions (ties count half), before and after. Each run leaves OUT/NAME-seed-S.json and is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from atomrl.algorithms import PREFERENCES
from atomrl.config import load_config, merge_trees, parse_overrides, read_yaml
from atomrl.trainer import prepare_run

ROOT = Path(__file__).parents[1]
METHODS = [name for name, objective in PREFERENCES.items() if not objective.online]
MAIN = ("dpo", "ipo", "hinge_dpo", "robust_dpo", "kto", "orpo", "simpo", "cpo")
"""Methods with three seeds."""
PAIRS = 500
"""Held-out ones of a seed."""


def run(name: str, seed: int, out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """One run's figures."""
    tree = read_yaml(ROOT / "configs" / "algorithms" / f"{name}.yaml")
    folder = out / "runs" / f"{name}-seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    own = {
        "run_name": folder.name,
        "output_dir": str(folder.parent),
        "seed": seed,
        "train": {"report_entropy": False},
        "eval": {"every_steps": 0},
        "checkpoint": {"every_steps": 0},
        "tracking": {"save_rollouts": False},
    }
    config = load_config(merge_trees(merge_trees(tree, own), changes))
    summary = prepare_run(config).execute()
    keys = ("steps", "wall_s", *(f"{key}_{when}" for key in KEYS for when in ("before", "after")))
    return {key: summary[key] for key in keys}


KEYS = ("preference_accuracy", "preference_margin", "logprob_accuracy")


def table(out: Path) -> str:
    """Return the table of finished runs: mean over seeds, and the standard error of a share of that many pairs."""
    lines = [
        "| method | seeds | steps | accuracy before | after | margin of rewards after |",
        "|---|---|---|---|---|---|",
    ]
    for name in METHODS:
        found = [json.loads(path.read_text()) for path in sorted(out.glob(f"{name}-seed-*.json"))]
        if not found:
            continue

        def mean(key: str, found: list[dict[str, Any]] = found) -> float:
            return sum(item[key] for item in found) / len(found)

        before, after = mean("preference_accuracy_before"), mean("preference_accuracy_after")
        error = math.sqrt(after * (1 - after) / (PAIRS * len(found)))
        lines.append(
            f"| {name} | {len(found)} | {found[0]['steps']} | {before:.3f} | {after:.3f} ± {error:.3f} "
            f"| {mean('preference_margin_after'):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int, help="0 1 2 of the main methods, 0 of the others")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "preferences")
    parser.add_argument("--set", nargs="*", default=[], help="changes of all configs: train.steps=10")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/development/benchmarks.md")
    arguments = parser.parse_args()
    if arguments.docs:
        page = ROOT / "docs" / "development" / "benchmarks.md"
        text = page.read_text(encoding="utf-8")
        page.write_text(
            re.sub(r"\| method \| seeds.*?\n(?=\n|\Z)", lambda _: table(arguments.out) + "\n", text, flags=re.S)
        )
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed in (0, 1, 2) if arguments.seeds is None else arguments.seeds:
        for name in arguments.methods:
            path = arguments.out / f"{name}-seed-{seed}.json"
            if path.exists() or (arguments.seeds is None and seed and name not in MAIN):
                continue
            path.write_text(json.dumps(run(name, seed, arguments.out, parse_overrides(arguments.set)), indent=1) + "\n")
            print(f"{name} {seed}: {path.read_text()}", flush=True)


if __name__ == "__main__":
    main()
