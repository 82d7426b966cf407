"""Asynchronous against synchronous training at equal samples, with waiting that is injected.

    python benchmarks/async_vs_sync.py --seeds 3               the whole matrix, about 25 minutes on two cores
    python benchmarks/async_vs_sync.py --seeds 3 --minutes 8   ...in pieces: run it again for the next one
    python benchmarks/async_vs_sync.py --seeds 1 --waiting tail --variants synchronous "staleness 2"
    python benchmarks/async_vs_sync.py --short                 a tiny model and a few steps, to try the script itself

Needs the warm start of the quickstart (`make quickstart`). On one machine overlap cannot be seen in compute, so there
is waiting. `reward`: every reward takes as long as a whole step without waiting (all of a batch wait at the same time,
as for a service). `tail`: a completion takes between 0.2 and 2 s longer than its tokens do, as with tools or long
answers, with a Pareto tail.

Each cell (waiting, variant, seed) is a run of 15 to 45 seconds, whose result is a file in OUT/cells; those that are
there are not run again. Prints a markdown table for each kind of waiting: groups an hour (evaluations are outside), how
many times the synchronous ones, idle shares of trainer and engine, staleness in versions, groups dropped, and
held-out accuracy, mean of the seeds with its standard error. OUT/results.json is what
benchmarks/simulate_cluster.py reads.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import logging
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from atomrl.config import load_config, merge_trees, read_yaml  # noqa: E402
from atomrl.rewards import strict_math  # noqa: E402
from atomrl.trainer import prepare_run, rl  # noqa: E402
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
TAILED = tuple(name for name in VARIANTS if name not in ("staleness 1, not corrected", "staleness 2, not corrected"))
SIZES = {"reward": (60, 16), "tail": (14, 16)}
"""Steps of a run and groups of a step, by the kind of waiting."""


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

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        end = time.monotonic() + wait_s
        while self.computing or self.late:
            if self.computing:
                for output in self.engine.poll(max(0.0, end - time.monotonic())):
                    self.computing.discard(output.request_id)
                    self.count += 1
                    late_s = 0.0 if output.request_id.startswith("eval:") else pareto_s(output.request_id, self.scale)
                    heapq.heappush(self.late, (time.monotonic() + late_s, self.count, output))
            elif (late_s := min(end, self.late[0][0]) - time.monotonic()) > 0:
                time.sleep(late_s)
            found = []
            while self.late and self.late[0][0] <= time.monotonic():
                found.append(heapq.heappop(self.late)[2])
            if found or time.monotonic() >= end:
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


def base_config(model: str, folder: Path, steps: int, prompts: int, short: bool = False) -> dict[str, Any]:
    """The quickstart with groups, steps and model of this benchmark; of `short`, something tiny."""
    tree = read_yaml(ROOT / "configs" / "quickstart.yaml")
    if short:
        from tests.tiny import make_tiny_model

        model = str(make_tiny_model(folder / "model", "qwen2"))
    changes = {
        "model": {"path": model, "device": "cpu"},
        "output_dir": str(folder / "runs"),
        "rollout": {"prompts_per_step": prompts},
        "reward": {"functions": ["waiting"]},
        "train": {"steps": steps},
        "eval": {"every_steps": 0, "before": False, "after": not short},
        "checkpoint": {"every_steps": 0},
        "tracking": {"save_rollouts": False, "log_completions": 0},
    }
    if short:
        changes["rollout"] |= {"completions_per_prompt": 4, "max_completion_tokens": 8}
        changes["data"] = {"train_size": 64, "eval_size": 8}
        changes["train"]["tokens_per_micro_batch"] = 512
    return merge_trees(tree, changes)


def one_run(tree: Mapping[str, Any], name: str, seed: int, reward_s: float, tail: float) -> dict[str, Any]:
    """Train, and what its steps took."""
    folder = f"{name.replace(' ', '_').replace(',', '')}_{seed}_{reward_s > 0:d}{tail > 0:d}"
    config = load_config(merge_trees(tree, {"run_name": folder, "seed": seed, **VARIANTS[name]}))
    shutil.rmtree(config.run_dir, ignore_errors=True)  # of one that was interrupted
    build, began = rl.build.build_engine, time.monotonic()
    if tail:
        rl.build.build_engine = lambda *arguments: WaitingEngine(build(*arguments), tail)
    try:
        summary = prepare_run(config, {"waiting": WaitingReward(reward_s)}).execute()
    finally:
        rl.build.build_engine = build
    if not summary["finished"]:
        raise KeyboardInterrupt  # a run takes the signal for itself, and saves
    text = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if "timing_s/step" in row]
    shutil.rmtree(config.run_dir)
    about = {"variant": name, "seed": seed, "reward_s": reward_s, "tail": tail, "wall_s": time.monotonic() - began}
    return measured(rows, config.rollout.prompts_per_step) | about | {"accuracy": summary.get("accuracy_after")}


def measured(rows: Sequence[Mapping[str, float]], prompts: int) -> dict[str, Any]:
    """Summarize a run's metrics."""
    total = sum(row["timing_s/step"] for row in rows)
    phases = {
        phase: [row.get(f"timing_s/{phase}", 0.0) for row in rows]
        for phase in ("gen", "reward", "wait", "sync_weights", "step")
    }
    waits = [a + b + c for a, b, c in zip(phases["gen"], phases["reward"], phases["wait"], strict=True)]
    weights = [row["timing_s/step"] for row in rows]
    asynchronous = "perf/engine_idle" in rows[-1]
    later = rows[1:]  # the first step of an asynchronous run has nothing to run beside
    engine_idle = 1 - sum(phases["gen"]) / total
    if asynchronous:
        engine_idle = sum(row["perf/engine_idle"] * row["timing_s/step"] for row in later) / sum(weights[1:])
    return {
        "steps": len(rows),
        "prompts": prompts,
        "steps_per_hour": 3600 * len(rows) / total,
        "groups_per_hour": 3600 * len(rows) * prompts / total,
        "tokens": statistics.fmean(row["response_length/mean"] for row in rows),
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
    """A line for each variant: medians over seeds, and the accuracy's mean and standard error."""
    lines = [
        "| | groups an hour | x synchronous | trainer idle | engine idle | staleness mean, max | dropped | accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pace = {result["seed"]: result["steps_per_hour"] for result in results if result["variant"] == "synchronous"}
    for name in VARIANTS:
        mine = [result for result in results if result["variant"] == name]
        if not mine:
            continue

        def middle(key: str, mine: Sequence[Mapping[str, Any]] = mine) -> float:
            return statistics.median(result[key] for result in mine)

        both = [result["steps_per_hour"] / pace[result["seed"]] for result in mine if result["seed"] in pace]
        times = f"{statistics.median(both):.2f}" if both else "-"
        lines.append(
            f"| {name} | {middle('groups_per_hour'):,.0f} | {times} | {middle('trainer_idle'):.0%} | "
            f"{middle('engine_idle'):.0%} | {middle('staleness_mean'):.2f}, {middle('staleness_max'):.0f} | "
            f"{middle('dropped'):.0f} | {accuracy([r['accuracy'] for r in mine])} |"
        )
    return "\n".join(lines)


def accuracy(values: Sequence[float | None]) -> str:
    """Mean and standard error over seeds.

    Example:
        >>> accuracy([0.9, 0.92, 0.94]), accuracy([0.5]), accuracy([None])
        ('0.920 ± 0.012', '0.500', '-')
    """
    found = [value for value in values if value is not None]
    error = f" ± {statistics.stdev(found) / math.sqrt(len(found)):.3f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.3f}{error}" if found else "-"


class Cells:
    """Results in files, one for each run; what is there is not run again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def put(self, name: str, result: Mapping[str, Any]) -> None:
        """Written aside and renamed, so that what is there is whole."""
        aside = self.folder / f"{name}.part"
        aside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        aside.rename(self.folder / f"{name}.json")

    def run(self, name: str, tree: Mapping[str, Any], *arguments: Any) -> dict[str, Any]:
        """The result that is there, or a run's."""
        found = self.get(name)
        if found is None:
            found = one_run(tree, *arguments)
            self.put(name, found)
        rollout, train = tree["rollout"], tree["train"]
        if (found["steps"], found["prompts"]) != (train["steps"], rollout["prompts_per_step"]):
            raise SystemExit(f"{self.folder / name}.json is of runs of another size; give another --out")
        return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "runs" / "quickstart-warm-start" / "model"))
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ...")
    parser.add_argument("--waiting", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after these")
    parser.add_argument("--short", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--out", type=Path, help="of the results; default: runs/async_vs_sync (--short: a new folder)")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.seeds, arguments.variants = 1, arguments.variants or list(SHORT)
    elif not Path(arguments.model).is_dir():
        parser.error(f"there is no model in {arguments.model}: run `make quickstart` first, or give --model")
    if arguments.out is None:
        short = arguments.short
        arguments.out = Path(tempfile.mkdtemp(prefix="async_")) if short else ROOT / "runs" / "async_vs_sync"
    return arguments


def main() -> int:
    arguments = parsed()
    logging.disable(logging.WARNING)
    folder, began = arguments.out.resolve(), time.monotonic()
    cells, scale = Cells(folder / "cells"), 0.1 if arguments.short else 1.0
    sizes = dict.fromkeys(SIZES, (5, 4)) if arguments.short else SIZES
    trees = {
        waiting: base_config(arguments.model, folder, steps, prompts, arguments.short)
        for waiting, (steps, prompts) in sizes.items()
    }
    calibration = merge_trees(
        trees["reward"], {"train": {"steps": 5 if arguments.short else 20}, "eval": {"after": False}}
    )
    alone = cells.run("alone", calibration, "synchronous", 0, 0.0, 0.0)
    step_s = 3600 / alone["steps_per_hour"]
    print(f"a step without waiting: {step_s:.3f} s (rollouts {alone['gen_s']:.3f} s, weights {alone['sync_s']:.3f} s)")
    variants = {"reward": arguments.variants or list(VARIANTS), "tail": arguments.variants or list(TAILED)}
    todo = [
        (waiting, seed, name) for seed in range(arguments.seeds) for waiting in arguments.waiting
        for name in variants[waiting]
    ]  # fmt: skip
    runs = []
    for number, (waiting, seed, name) in enumerate(todo, 1):
        file = f"{waiting}_{name.replace(' ', '_').replace(',', '')}_{seed}"
        if cells.get(file) is None and time.monotonic() - began > 60 * arguments.minutes:
            continue
        times = (step_s, 0.0) if waiting == "reward" else (0.0, scale)
        runs.append(cells.run(file, trees[waiting], name, seed, *times) | {"waiting": waiting})
        print(f"  {number} of {len(todo)}, {waiting}, seed {seed}, {name}: {runs[-1]['wall_s']:.0f} s", file=sys.stderr)
    report = {
        "alone": alone,
        "step_s": step_s,
        "scale": scale,
        "completions": completions_of(calibration),
        "runs": runs,
    }
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    titles = {"reward": f"rewards wait {step_s:.2f} s", "tail": f"completions wait {0.2 * scale:g} to {2 * scale:g} s"}
    for waiting in arguments.waiting:
        mine = [run for run in runs if run["waiting"] == waiting]
        steps, prompts = sizes[waiting]
        print(f"\n{titles[waiting]}; {steps} steps of {prompts} groups\n\n{table(mine)}")
    print(f"\n{len(runs)} of {len(todo)} cells, {sum(run['wall_s'] for run in runs):.0f} s; {folder / 'results.json'}")
    return 0


def completions_of(tree: Mapping[str, Any]) -> int:
    """Return the completions per group."""
    return load_config(tree | {"run_name": "x"}).rollout.completions_per_prompt


if __name__ == "__main__":
    sys.exit(main())
