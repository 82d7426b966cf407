"""Inject faults into one of several ranks at random points, and check the result of the run.

    python benchmarks/rank_faults.py                                10 points of each fault
    python benchmarks/rank_faults.py --points 1 --ranks 2 --faults SIGKILL
    python benchmarks/rank_faults.py --backend megatron             two ranks that share every layer

A tiny model on the CPU, as a user starts it. At a random point (a forward pass, of log-probs or of an update, within a
backward pass, before a step of the optimizer, or as a checkpoint is written) the second rank

- `SIGKILL`: is killed. `ended` are the seconds until the run says so; it then goes on with a new group, from its newest
  checkpoint. Its weights must be those of a run that was left alone, bit for bit.
- `SIGSTOP`: stands still. `ended` is counted in the same way; the time-out is 10 s.
- `out of memory`, forward or backward: a new group goes on with micro-batches of half the size; weights within 1e-4 of
  the largest.
- `not finite`, likewise: gives a NaN. All ranks leave the update out, and the run ends as ever.

Each is also made with `backend.restarts=0`, where the run must end with an error that names the rank, and leave no
process behind. A death must be known within 3 s, a hang within its time-out and 15 s. Prints a line for each, and
exits with 1 unless all is as said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
TIMEOUT_S = 10.0
STEPS = 6
SAVED_EVERY = 2
PLACES = {"forward": 3 * STEPS, "backward": 2 * STEPS, "step": STEPS, "write": STEPS // SAVED_EVERY}
"""Points of a fault, and the minimum number of times that a rank passes them in a run: a step has log-probs of the
reference, and two micro-batches of an update."""
COMPUTING = ("forward", "backward")
LIMITS_S = {"SIGKILL": 3.0, "SIGSTOP": TIMEOUT_S + 15.0, "out of memory": 15.0, "not finite": None}
NAMED = {
    "SIGKILL": r"rank \d \(pid \d+\) died by SIGKILL",
    "SIGSTOP": r"rank \d does not respond",
    "out of memory": r"rank \d: OutOfMemory: out of memory with \d+ padded tokens",
    "not finite": r"its gradient is not finite",
}
Weights = dict[str, Any]


def prepare(folder: Path, ranks: int, timeout_s: float = TIMEOUT_S, **backend: Any) -> None:
    """The model of all runs, and their config.

    Args:
        backend: what is otherwise than in that of `fsdp`.
    """
    import yaml

    from tests.tiny import make_tiny_model

    make_tiny_model(folder / "model", "qwen2", scale=0.2)
    config = {
        "run_name": "run",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": "arithmetic", "train_size": 64},
        "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_completion_tokens": 16},
        "reward": {"functions": ["tests.light_rewards.letter_reward"]},
        "algorithm": {"name": "grpo", "kl": {"type": "k3", "coefficient": 0.01}},
        "train": {"steps": STEPS, "learning_rate": 1e-3, "adam_eps": 1e-3, "tokens_per_micro_batch": 480},
        "checkpoint": {"every_steps": SAVED_EVERY},
        "backend": {"type": "fsdp", "ranks": ranks, "timeout_s": timeout_s} | backend,
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config))


class Outcome:
    """A run with a fault, from its start to its end."""

    def __init__(self, folder: Path, name: str, fault: str, at: int, *more: str, where: str = "forward") -> None:
        self.out = folder / name
        once = folder / f"{name}.fault"
        command = [sys.executable, "-m", "tests.backends.faulty_runs", "train", str(folder / "c.yaml")]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RANK_FAULTS": name,
            "FAULT": json.dumps({"fault": fault, "where": where, "at": at, "once": str(once)}),
        }
        with subprocess.Popen(
            [*command, f"output_dir={self.out}", *more],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            self.said, self.known = "", None
            for line in process.stderr:
                self.said += line
                if self.known is None and once.exists() and re.search(NAMED.get(fault, "$^"), line):
                    self.known = time.time() - float(once.read_text() or "nan")
        self.code, self.struck, self.name = process.returncode, once.exists(), name

    def left(self) -> list[int]:
        """Processes of the run that are still there."""
        mark, found = f"RANK_FAULTS={self.name}\0".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (place / "environ").read_bytes() and b" Z " not in (place / "stat").read_bytes():
                    found.append(int(place.name))
            except OSError:
                continue
        return found

    def weights(self) -> Weights:
        from atomrl.models.loading import read_safetensors

        return dict(read_safetensors(self.out / "run" / "model"))


def distance(mine: Weights, theirs: Weights) -> float:
    """The largest difference, of the largest number of the same tensor."""
    return max(float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


def faults_of(fault: str, going_on: Outcome, ending: Outcome, alone: Weights) -> list[str]:
    """Return the differences from the expected result."""
    found = []
    limit = LIMITS_S[fault]
    for outcome in (going_on, ending):
        found += ["the fault was never made"] * (not outcome.struck)
        found += [f"{outcome.known} s until it was known"] * (
            outcome.known is None or (limit is not None and outcome.known > limit)
        )
        found += [f"processes are left: {outcome.left()}"] * bool(outcome.left())
    if going_on.code != 0:
        return [*found, f"exit code {going_on.code}: {going_on.said[-400:]}"]
    apart = distance(going_on.weights(), alone)
    allowed = {"out of memory": 1e-4, "not finite": float("inf")}.get(fault, 0.0)
    found += [f"weights differ by {apart:.1e}"] * (apart > allowed)
    if (ending.code == 0) != (fault == "not finite"):
        found.append(f"exit code {ending.code} without a restart")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, wrong = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cut = {"type": "megatron", "tensor": asked.ranks} if asked.backend == "megatron" else {}
        prepare(folder, asked.ranks, **cut)
        untouched = Outcome(folder, "alone", "none", 10**9)
        assert untouched.code == 0, untouched.said
        alone = untouched.weights()
        for fault in asked.faults:
            seconds = []
            for point in range(asked.points):
                where = rng.choice([*PLACES] if fault in ("SIGKILL", "SIGSTOP") else COMPUTING)
                at, name = rng.randint(1, PLACES[where]), f"{fault.replace(' ', '_')}_{point}"
                going_on = Outcome(folder, name, fault, at, where=where)
                ending = Outcome(folder, f"{name}_once", fault, at, "backend.restarts=0", where=where)
                found = faults_of(fault, going_on, ending, alone)
                wrong += bool(found)
                seconds += [outcome.known for outcome in (going_on, ending) if outcome.known is not None]
                print(f"{fault:<14} {where:<8} {at:>2}: {'; '.join(found) or 'as said'}", flush=True)
            if seconds:
                print(f"{fault:<14} known after {median(seconds):.1f} s, at most {max(seconds):.1f} s", flush=True)
    print(f"{wrong} of {asked.points * len(asked.faults)} were not as said")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
