"""Asynchronous against synchronous training at equal samples, with waiting that is injected.

    python benchmarks/async_vs_sync.py                         the quickstart's task, three seeds
    python benchmarks/async_vs_sync.py --short                 a tiny model and a few steps, to try the script itself

On one machine overlap cannot be seen in compute, so there is waiting. `reward`: every reward takes as long as a whole
step without waiting (all of a batch wait at the same time, as for a service). `tail`: a completion takes between 0.2
and 2 s longer than its tokens do, as with tools or long answers, with a Pareto tail. Runs of a seed take turns. Prints
a markdown table: steps an hour (evaluations are outside), how many times the synchronous ones, idle shares of trainer
and engine, staleness in versions, groups dropped, and held-out accuracy by seed. Writes results.json, which
benchmarks/simulate_cluster.py reads.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from atomrl.config import build_config, merge_trees, read_yaml  # noqa: E402
from atomrl.rewards import strict_math  # noqa: E402
from atomrl.runs import prepare_run, rl  # noqa: E402
from atomrl.types import GenerationOutput  # noqa: E402

SHORTEST_S, LONGEST_S = 0.2, 2.0
NO_CORRECTION = {"algorithm": {"rollout_is": "none"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "staleness 0": {"asynchronous": {"max_staleness": 0}},
    "staleness 1": {"asynchronous": {"max_staleness": 1}},
    "staleness 2": {"asynchronous": {"max_staleness": 2}},
    "staleness 4": {"asynchronous": {"max_staleness": 4}},
    "staleness 1, not corrected": {"asynchronous": {"max_staleness": 1}, **NO_CORRECTION},
    "staleness 2, not corrected": {"asynchronous": {"max_staleness": 2}, **NO_CORRECTION},
    "staleness 4, not corrected": {"asynchronous": {"max_staleness": 4}, **NO_CORRECTION},
    "staleness 2, wait": {"asynchronous": {"max_staleness": 2, "on_update": "wait"}},
    "staleness 2, abort": {"asynchronous": {"max_staleness": 2, "on_update": "abort"}},
    "staleness 1, oversampling 1.5": {"asynchronous": {"max_staleness": 1, "oversampling": 1.5}},
}
SHORT = ("synchronous", "staleness 0", "staleness 1")


def pareto_s(name: str, scale: float = 1.0) -> float:
    """Seconds that a completion takes beside its tokens: 0.2 / u, at most 2, of a hash of its name.

    Example:
        >>> 0.2 <= pareto_s("0:a/3") <= 2.0
        True
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 1) / 2**64
    return scale * min(LONGEST_S, SHORTEST_S / uniform)


class WaitingReward:
    """`strict_math`, after a time. Groups wait beside each other, as for a service."""

    concurrent = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, prompts: list[Any], completions: list[str], **columns: Any) -> list[float | None]:
        time.sleep(self.seconds)
        return strict_math(prompts, completions, **columns)


class WaitingEngine:
    """An engine whose outputs come some time after their last token; no more is computed for them meanwhile."""

    def __init__(self, engine: Any, scale: float) -> None:
        self.engine, self.scale = engine, scale
        self.late: list[tuple[float, int, GenerationOutput]] = []
        self.count = 0
        self.computing: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, requests: Sequence[Any]) -> None:
        self.engine.submit(requests)
        self.computing |= {request.request_id for request in requests}

    def poll(self) -> list[GenerationOutput]:
        while self.computing or self.late:
            if self.computing:
                for output in self.engine.poll():
                    self.computing.discard(output.request_id)
                    self.count += 1
                    wait_s = 0.0 if output.request_id.startswith("eval:") else pareto_s(output.request_id, self.scale)
                    heapq.heappush(self.late, (time.monotonic() + wait_s, self.count, output))
            elif (wait_s := self.late[0][0] - time.monotonic()) > 0:
                time.sleep(wait_s)
            found = []
            while self.late and self.late[0][0] <= time.monotonic():
                found.append(heapq.heappop(self.late)[2])
            if found:
                return found
        return []

    def abort(self, request_ids: Any = None) -> list[GenerationOutput]:
        names = None if request_ids is None else set(request_ids)
        found: list[GenerationOutput] = self.engine.abort(request_ids)
        found += [output for _, _, output in self.late if names is None or output.request_id in names]
        gone = {output.request_id for output in found}
        self.late = [item for item in self.late if item[2].request_id not in gone]
        heapq.heapify(self.late)
        self.computing -= gone
        return found


def base_config(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The quickstart with groups, steps and model of this benchmark; of `--short`, something tiny."""
    tree = read_yaml(ROOT / "configs" / "quickstart.yaml")
    model = arguments.model
    if arguments.short:
        from tests.tiny import make_tiny_model

        model = str(make_tiny_model(folder / "model", "qwen2"))
    changes = {
        "model": {"path": model, "device": "cpu"},
        "output_dir": str(folder / "runs"),
        "rollout": {"prompts_per_step": arguments.prompts},
        "reward": {"functions": ["waiting"]},
        "train": {"steps": arguments.steps},
        "eval": {"every_steps": 0, "before": False, "after": not arguments.short},
        "checkpoint": {"every_steps": 0},
        "tracking": {"save_rollouts": False, "log_completions": 0},
    }
    if arguments.short:
        changes["rollout"] |= {"completions_per_prompt": 4, "max_completion_tokens": 8}
        changes["data"] = {"train_size": 64, "eval_size": 8}
        changes["train"]["tokens_per_micro_batch"] = 512
    return merge_trees(tree, changes)


def one_run(tree: Mapping[str, Any], name: str, seed: int, reward_s: float, tail: float) -> dict[str, Any]:
    """Train, and what its steps took."""
    folder = f"{name.replace(' ', '_').replace(',', '')}_{seed}_{reward_s > 0:d}{tail > 0:d}"
    config = build_config(merge_trees(tree, {"run_name": folder, "seed": seed, **VARIANTS[name]}))
    build = rl.build.build_rollout
    if tail:
        rl.build.build_rollout = lambda *arguments: WaitingEngine(build(*arguments), tail)
    try:
        summary = prepare_run(config, {"waiting": WaitingReward(reward_s)}).execute()
    finally:
        rl.build.build_rollout = build
    if not summary["finished"]:
        raise KeyboardInterrupt  # a run takes the signal for itself, and saves
    text = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if "timing_s/step" in row]
    return measured(rows) | {"variant": name, "seed": seed, "accuracy": summary.get("accuracy_after")}


def measured(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of a run's metrics."""
    total = sum(row["timing_s/step"] for row in rows)
    phases = {
        phase: [row.get(f"timing_s/{phase}", 0.0) for row in rows]
        for phase in ("gen", "reward", "wait", "sync_weights", "step")
    }
    waits = [a + b + c for a, b, c in zip(phases["gen"], phases["reward"], phases["wait"], strict=True)]
    weights = [row["timing_s/step"] for row in rows]
    asynchronous = "async/engine_idle" in rows[-1]
    later = rows[1:]  # the first step of an asynchronous run has nothing to run beside
    engine_idle = 1 - sum(phases["gen"]) / total
    if asynchronous:
        engine_idle = sum(row["async/engine_idle"] * row["timing_s/step"] for row in later) / sum(weights[1:])
    return {
        "steps": len(rows),
        "steps_per_hour": 3600 * len(rows) / total,
        "trainer_idle": sum(waits) / total,
        "engine_idle": engine_idle,
        "staleness_mean": statistics.fmean(row.get("async/staleness_mean", 0.0) for row in rows),
        "staleness_max": max(row.get("async/staleness_max", 0.0) for row in rows),
        "dropped": sum(row.get("async/groups_dropped", 0.0) for row in rows),
        "gen_s": statistics.median(phases["gen"]),
        "learn_s": statistics.median(step - wait for step, wait in zip(phases["step"], waits, strict=True)),
        "sync_s": statistics.median(phases["sync_weights"]),
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A line for each variant: medians over seeds, and the accuracy of each."""
    lines = [
        "| | steps an hour | x synchronous | trainer idle | engine idle | staleness mean, max | dropped | accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pace = {result["seed"]: result["steps_per_hour"] for result in results if result["variant"] == "synchronous"}
    for name in VARIANTS:
        mine = [result for result in results if result["variant"] == name]
        if not mine:
            continue

        def middle(key: str, mine: Sequence[Mapping[str, Any]] = mine) -> float:
            return statistics.median(result[key] for result in mine)

        times = statistics.median(result["steps_per_hour"] / pace[result["seed"]] for result in mine)
        accuracy = ", ".join("-" if r["accuracy"] is None else f"{r['accuracy']:.3f}" for r in mine)
        lines.append(
            f"| {name} | {middle('steps_per_hour'):,.0f} | {times:.2f} | {middle('trainer_idle'):.0%} | "
            f"{middle('engine_idle'):.0%} | {middle('staleness_mean'):.2f}, {middle('staleness_max'):.0f} | "
            f"{middle('dropped'):.0f} | {accuracy} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "runs" / "quickstart-warm-start" / "model"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="groups in a step")
    parser.add_argument("--waiting", nargs="+", choices=("reward", "tail"), default=["reward", "tail"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--short", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--out", type=Path, help="where to work; a temporary folder unless given")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.seeds, arguments.steps, arguments.prompts, arguments.variants = [0], 5, 4, list(SHORT)
    logging.disable(logging.WARNING)
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="async_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tree = base_config(arguments, folder)
    calibration = merge_trees(tree, {"train": {"steps": min(12, arguments.steps)}, "eval": {"after": False}})
    alone = one_run(merge_trees(calibration, {"output_dir": str(folder / "alone")}), "synchronous", 0, 0.0, 0.0)
    step_s = 3600 / alone["steps_per_hour"]
    scale = 0.1 if arguments.short else 1.0
    print(f"a step without waiting: {step_s:.3f} s (rollouts {alone['gen_s']:.3f} s, weights {alone['sync_s']:.3f} s)")
    report: dict[str, Any] = {
        "alone": alone, "step_s": step_s, "scale": scale, "prompts": arguments.prompts,
        "completions": build_config(tree).rollout.completions_per_prompt, "runs": [],
    }  # fmt: skip
    for waiting in arguments.waiting:
        reward_s, tail = (step_s, 0.0) if waiting == "reward" else (0.0, scale)
        for seed in arguments.seeds:
            for name in arguments.variants:
                result = one_run(tree, name, seed, reward_s, tail) | {"waiting": waiting}
                report["runs"].append(result)
                print(f"  {waiting} seed {seed} {name}: {result['steps_per_hour']:,.0f} steps an hour", file=sys.stderr)
                (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        title = f"rewards wait {step_s:.2f} s" if waiting == "reward" else f"completions wait {0.2 * scale:g} to "
        print(f"\n{title}{'' if waiting == 'reward' else f'{2 * scale:g} s'}\n")
        print(table([result for result in report["runs"] if result["waiting"] == waiting]))
    print(f"\n{folder / 'results.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
