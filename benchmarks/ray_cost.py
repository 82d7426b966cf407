"""Cost of Ray: the step of a run with engine, or engine and trainer, in actors, relative to the run in one process.

    python benchmarks/ray_cost.py                          3M parameters, five rounds of 12 steps, in turns
    python benchmarks/ray_cost.py --rounds 2 --steps 6

The three kinds of run take turns, so that what else the machine does meets all of them; each computes with one thread,
does the same work and ends with the same weights, which is checked. A ratio is the median over the rounds of the
medians of their steps, the first two of which are left out. Start-up is until the first step is done, less that step.
Memory is what Ray's own processes have for themselves (PSS): no actor, and not the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
KINDS: dict[str, list[str]] = {
    "one process": [],
    "engine in an actor": ["cluster.replicas=1"],
    "engine and trainer in actors": ["cluster.resources.trainer={num_cpus: 1}"],
}
SKIPPED = 2


def config(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "run_name": "run",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": "arithmetic", "train_size": 512},
        "rollout": {"prompts_per_step": 8, "completions_per_prompt": 8, "max_completion_tokens": 64},
        "reward": {"functions": ["tests.light_rewards.letter_reward"]},
        "train": {"steps": steps, "learning_rate": 1e-4},
        "checkpoint": {"every_steps": 0},
        "eval": {"before": False, "after": False},
    }


def private_bytes(pids: list[int]) -> int:
    """Return the proportional memory of processes (PSS): private pages, and their share of common ones."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # gone
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def measured(folder: Path, name: str, arguments: list[str], steps: int) -> dict[str, Any]:
    """A run: median step, start-up, memory of Ray, and the weights it ends with."""
    from benchmarks.faults import TrainingRun

    began = time.monotonic()
    run = TrainingRun(folder, name, *arguments)
    try:
        run.until_step(1)
        first = time.monotonic() - began
        own = run.ours()
        memory = private_bytes([pid for pid in run.processes() if pid not in own])
        if code := run.process.wait(1800):
            raise SystemExit(f"{name} ended with {code}: see {run.log}")
        rows = [json.loads(line) for line in (run.out / "run" / "metrics.jsonl").read_text().splitlines()]
        seconds = [row["timing_s/step"] for row in rows]
        assert len(seconds) == steps
        return {
            "step_s": median(seconds[SKIPPED:]),
            "start_s": first - seconds[0],
            "ray_bytes": memory,
            "weights": run.weights(),
        }
    finally:
        run.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help=f"of each run, the first {SKIPPED} left out")
    parser.add_argument("--out", type=Path, help="where to work; a temporary folder unless given")
    arguments = parser.parse_args()
    import yaml

    from tests.tiny import make_tiny_model

    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="ray_cost_"))).resolve()
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    make_tiny_model(folder / "model", scale=0.02, **shape, num_key_value_heads=4, max_position_embeddings=512)
    (folder / "c.yaml").write_text(yaml.safe_dump(config(folder, arguments.steps)))
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for turn in range(arguments.rounds):
        for kind, more in KINDS.items():
            found[kind].append(measured(folder, f"{kind.replace(' ', '-')}-{turn}", more, arguments.steps))
            print(f"round {turn}: {kind:<30} {found[kind][-1]['step_s']:.3f} s a step", flush=True)
    plain = found["one process"]
    same = len({each["weights"] for kind in found.values() for each in kind}) == 1
    for kind, rounds in found.items():
        ratios = [each["step_s"] / base["step_s"] for each, base in zip(rounds, plain, strict=True)]
        print(
            f"{kind:<30} step {median(each['step_s'] for each in rounds):.3f} s, {median(ratios):.3f} of one process "
            f"({min(ratios):.3f} to {max(ratios):.3f}); start-up {median(each['start_s'] for each in rounds):.1f} s; "
            f"Ray {median(each['ray_bytes'] for each in rounds) / 2**20:.0f} MiB"
        )
    print(f"the weights are {'the same' if same else 'NOT THE SAME'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
