"""Check that runs are equal up to rounding: loss and gradient norm of every step, and the final weights.

    python benchmarks/same_runs.py runs/one_process runs/two_ranks runs/hybrid --within 1e-4

Compares each run with the first, prints a line for each, and ends with 1 where one is further away than that: it names
the run, what differs, and where. Distances are relative: of a loss and a norm to the number itself, of a weight to the
largest one of its tensor. What is not finite is never within.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.models.loading import read_safetensors

NUMBERS = ("sft/nll_per_token", "actor/grad_norm")


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's updates."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    return [row for row in rows if "actor/grad_norm" in row]


def distances(run: Path, first: Path) -> dict[str, float]:
    """Return the differences of a run from the first, by metric.

    Raises:
        ValueError: there is nothing to compare, or one has other steps or weights.
    """
    mine, theirs = steps_of(run), steps_of(first)
    steps = [[row["step"] for row in rows] for rows in (mine, theirs)]
    if not steps[1] or steps[0] != steps[1]:
        raise ValueError(f"steps {steps[0]}, and {steps[1]} in {first.name}")
    found = {
        f"{name} of step {ours['step']}": abs(ours[name] - other[name]) / abs(other[name])
        for ours, other in zip(mine, theirs, strict=True)
        for name in NUMBERS
    }
    weights, others = (dict(read_safetensors(each / "model")) for each in (run, first))
    if weights.keys() != others.keys():
        raise ValueError(f"other weights: {', '.join(sorted(weights.keys() ^ others.keys()))}")
    for name, weight in others.items():
        apart, largest = (weights[name].double() - weight.double()).abs().max(), weight.double().abs().max()
        found[name] = float(apart / largest) if largest else float(apart)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--within", type=float, required=True)
    asked, differ = parser.parse_args(), []
    for run in asked.runs:
        try:
            found = distances(run, asked.first)
        except (OSError, KeyError, ValueError) as error:
            differ.append(run.name)
            print(f"{run.name:<20} DIFFERS: {error}")
            continue
        worst = max(found, key=lambda name: found[name] if found[name] == found[name] else float("inf"))
        seconds = median(row["timing_s/update_actor"] for row in steps_of(run))
        said = f"{worst} is {found[worst]:.1e} away"
        if not found[worst] <= asked.within:
            differ.append(run.name)
            said = f"DIFFERS: {said}, and {asked.within:g} are allowed"
        print(f"{run.name:<20} {len(steps_of(run)):>3} steps, update {seconds:.3f} s; {said}")
    if differ:
        print(f"other than {asked.first.name}: {', '.join(differ)}")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
