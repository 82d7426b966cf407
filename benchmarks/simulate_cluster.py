"""The loops simulated: on this machine, beside runs of it, and on 2 to 1,024 GPUs.

    python benchmarks/simulate_cluster.py                    clusters: about 4 minutes on two quiet cores
    python benchmarks/simulate_cluster.py --docs             ...into docs/development/scaling.md and its picture
    python benchmarks/simulate_cluster.py groups=256 --gpus 64       with other numbers of plan_cluster.py
    python benchmarks/simulate_cluster.py --calibrate        how far it is off here: about 4 minutes on two quiet cores
    python benchmarks/simulate_cluster.py --results runs/async_vs_sync/results.json    ...of runs of async_vs_sync.py

The simulation itself is in simulation.py, the numbers of a cluster in plan_cluster.py. `--calibrate` runs four short
trainings without any waiting, takes from them what the simulation has to know of this machine (tokens a second by rows,
learning, transfer, what a thread costs, how much trainer and engine slow each other down), and compares it with runs
that have waiting, of which it has seen none. Needs the warm start of the quickstart.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from plan_cluster import H100, H200, QWEN_1_5B, QWEN_32B, Plan, changed  # noqa: E402
from simulated_parts import Machine  # noqa: E402
from simulation import Simulation  # noqa: E402

from atomrl.config import AsynchronousConfig, merge_trees  # noqa: E402

LOOPS: dict[str, AsynchronousConfig | None] = {
    "synchronous": None,
    "one step off": AsynchronousConfig(max_staleness=1, on_update="wait"),
    "staleness 1": AsynchronousConfig(max_staleness=1),
    "staleness 2": AsynchronousConfig(max_staleness=2),
    "staleness 4": AsynchronousConfig(max_staleness=4),
}
"""One step off: what is under way is finished before new weights come. The others go on with them."""
SIZES = [2**n for n in range(1, 11)]
SKIPPED, STEPS, LAST = 4, 5, 4
"""Steps of a simulated run: before it is in its stride, those that count, and those that it draws ahead for."""
BEGIN, END = "<!-- from benchmarks/simulate_cluster.py -->", "<!-- until here -->"
MODELS = (Plan(QWEN_1_5B, H100, tensor_parallel=1), Plan(QWEN_32B, H100))


# ---- Clusters ----


def machine_of(plan: Plan) -> Machine:
    """The cluster of a plan, whose transfer is the broadcast alone, without `Plan.driver_s` on the way to it."""
    return Machine(
        engines=plan.engines, slots=plan.rows, token_s=plan.token_s, length=plan.length, learn_s=plan.learn_s,
        transfer_s=plan.transfer_s, groups=plan.groups, members=plan.members,
        reward_s=lambda rng: rng.expovariate(1 / plan.reward) if plan.reward else 0.0, output_s=plan.output,
    )  # fmt: skip


def simulated(plan: Plan, loop: str, steps: int = STEPS) -> dict[str, float]:
    return in_stride(machine_of(plan), loop, steps)


def in_stride(machine: Machine, loop: str, steps: int) -> dict[str, float]:
    """A stretch of a longer run."""
    return Simulation(machine, LOOPS[loop], SKIPPED + steps + LAST, skip=SKIPPED, tail=LAST).run()


def divided(plan: Plan, loop: str, steps: int = STEPS) -> tuple[Plan, dict[str, float]] | None:
    """The division into trainers and engines that makes the most steps an hour; None where nothing fits."""
    unit = max(plan.tensor_parallel, plan.gpus // 16)
    options = [replace(plan, trainers=trainers) for trainers in range(unit, plan.gpus, unit)]
    options = [option for option in options if option.fits]
    if not options:
        return None
    found: dict[int, dict[str, float]] = {}
    place = min(
        range(len(options)), key=lambda at: max(options[at].learn_s + options[at].transfer_s, options[at].draw_s)
    )
    while True:  # uphill
        for index in (place, place - 1, place + 1):
            if 0 <= index < len(options) and index not in found:
                found[index] = simulated(options[index], loop, steps)
        best = max(found, key=lambda index: found[index]["steps_per_hour"])
        if best == place:
            return options[place], found[place]
        place = best


def limits(plan: Plan, loop: str, steps: int = STEPS) -> str:
    """Return the two largest gains from removing one limit of a run."""
    machine, mean = machine_of(plan), plan.lengths[0]
    full = plan.token_s(plan.rows) / plan.rows
    without = {
        "long completions": replace(machine, length=lambda rng: mean),
        "a token's latency": replace(machine, token_s=lambda rows: rows * full),
        "trainer's scaling": replace(machine, learn_s=plan.compute_s),
        "transfer": replace(machine, transfer_s=0.0),
        "driver": replace(machine, output_s=0.0),
        "rewards": replace(machine, reward_s=lambda rng: 0.0),
    }
    now = simulated(plan, loop, steps)["steps_per_hour"]
    gains = {name: in_stride(other, loop, steps)["steps_per_hour"] / now - 1 for name, other in without.items()}
    top = sorted(gains, key=lambda name: -gains[name])[:2]
    return ", ".join(f"{name} {gains[name]:.0%}" for name in top if gains[name] >= 0.02) or "nothing of these"


@dataclass(frozen=True)
class Point:
    """A size of cluster, by loop; `held` is what holds the loop with staleness 1."""

    plan: Plan
    by_loop: Mapping[str, tuple[Plan, Mapping[str, float]]]
    held: str


def point(plan: Plan, steps: int, gpus: int) -> Point | None:
    plan = replace(plan, gpus=gpus)
    by_loop = {name: found for name in LOOPS if (found := divided(plan, name, steps))}
    return Point(plan, by_loop, limits(by_loop["staleness 1"][0], "staleness 1", steps)) if by_loop else None


def points(plan: Plan, sizes: Sequence[int] = SIZES, steps: int = STEPS) -> list[Point]:
    """All sizes that have room for the model."""
    with ProcessPoolExecutor() as pool:
        return [found for found in pool.map(partial(point, plan, steps), sizes) if found]


def scaling(found: Sequence[Point]) -> str:
    """A line for each size of cluster."""
    name = f"{found[0].plan.model.name} on {found[0].plan.gpu.name}s"
    lines = [
        f"| {name} | {' | '.join(LOOPS)} | steps of a GPU hour | without it, faster by |",
        "|---" * (len(LOOPS) + 3) + "|",
    ]
    first = None
    for each in found:
        cells = [
            f"{3600 / of['steps_per_hour']:,.0f} s ({plan.trainers}): {of['trainer_idle']:.0%}, "
            f"{max(0.0, 1 - of['engine_use']):.0%}"
            for plan, of in each.by_loop.values()
        ]
        pace = each.by_loop["staleness 1"][1]["steps_per_hour"] / each.plan.gpus
        first = first or pace
        lines.append(f"| {each.plan.gpus:,} | {' | '.join(cells)} | {pace / first:.0%} | {each.held} |")
    return "\n".join(lines)


def draw(found: Sequence[Sequence[Point]], out: Path) -> None:
    """Steps an hour and idle shares by number of GPUs, a row for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(found), 3, figsize=(12, 3.2 * len(found)), layout="constrained", squeeze=False)
    for row, line in zip(grid, found, strict=True):
        sizes = [each.plan.gpus for each in line]
        for name in LOOPS:
            results = [each.by_loop[name][1] for each in line]
            curves = (
                [result["steps_per_hour"] for result in results],
                [result["trainer_idle"] for result in results],
                [1 - result["engine_use"] for result in results],
            )
            for axis, values in zip(row, curves, strict=True):
                axis.plot(sizes, values, marker=".", label=name)
        row[0].set(title=f"{line[0].plan.model.name}: steps an hour", yscale="log")
        row[1].set(title="trainer idle", ylim=(0, 1))
        row[2].set(title="pace of the engines that is not used", ylim=(0, 1))
        for axis in row:
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
            axis.grid(alpha=0.3)
    grid[0][0].legend(fontsize=8, frameon=False)
    grid[-1][1].set_xlabel("GPUs")
    figure.savefig(out, dpi=70)


def cluster_report(pairs: Sequence[str], steps: int, sizes: Sequence[int], docs: bool) -> None:
    found = []
    for plan in MODELS:
        if each := points(changed(plan, pairs), sizes, steps):
            found.append(each)
            print(f"{scaling(each)}\n", flush=True)
    for gpu in (H100, H200):
        best = divided(changed(replace(MODELS[1], gpu=gpu), pairs), "staleness 1", steps)
        if best is not None:
            print(f"{best[0].gpus} x {gpu.name}, staleness 1: {best[0].trainers} train, "
                  f"{3600 / best[1]['steps_per_hour']:.0f} s a step")  # fmt: skip
    if docs:
        page = ROOT / "docs" / "development" / "scaling.md"
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        tables = "\n\n".join(map(scaling, found))
        page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
        draw(found, ROOT / "docs" / "images" / "scaling.png")


# ---- This machine ----


def local_machine(report: Mapping[str, Any], run: Mapping[str, Any]) -> Machine:
    """This machine as runs without waiting have measured it, with the waiting that a run had."""
    from async_vs_sync import LONGEST_S, SHORTEST_S

    alone, members, prompts = report["alone"], report["completions"], run["prompts"]
    asynchronous, tail = run["variant"] != "synchronous", run["tail"]
    base, each = report.get("token_s", (0.0, alone["gen_s"] / alone["tokens"] / (alone["prompts"] * members)))
    thread_s = report.get("thread_s", 0.0) if asynchronous else 0.0
    return Machine(
        engines=1,
        slots=10**6,
        token_s=lambda rows: base + each * rows,
        length=lambda rng: alone["tokens"],
        learn_s=(alone["learn_s"] - alone["sync_s"]) * prompts / alone["prompts"],
        transfer_s=alone["sync_s"],
        groups=prompts,
        members=members,
        beside_s=lambda rng: tail * min(LONGEST_S, SHORTEST_S / max(rng.random(), 1e-9)) if tail else 0.0,
        reward_s=lambda rng: run["reward_s"],
        output_s=thread_s,
        shared=report.get("shared", 1.0),
    )


def settings_of(variant: str) -> AsynchronousConfig | None:
    from async_vs_sync import VARIANTS

    keys = VARIANTS[variant].get("asynchronous")
    return None if keys is None else AsynchronousConfig(**keys)


def pace(report: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, float]:
    return Simulation(local_machine(report, run), settings_of(run["variant"]), run["steps"]).run()


def compare(report: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """Simulated beside measured, of runs that nothing was taken from."""
    lines = [
        "| waiting | | measured steps an hour | simulated | off by | staleness measured, simulated |",
        "|---|---|---|---|---|---|",
    ]
    errors = []
    for waiting, variant in dict.fromkeys((run["waiting"], run["variant"]) for run in runs):
        mine = [run for run in runs if (run["waiting"], run["variant"]) == (waiting, variant)]
        measured = statistics.median(run["steps_per_hour"] for run in mine)
        stale = statistics.median(run["staleness_mean"] for run in mine)
        found = pace(report, mine[0])
        errors.append(found["steps_per_hour"] / measured - 1)
        lines.append(
            f"| {waiting} | {variant} | {measured:,.0f} | {found['steps_per_hour']:,.0f} | {errors[-1]:+.0%} | "
            f"{stale:.2f}, {found['staleness_mean']:.2f} |"
        )
    size = statistics.median(map(abs, errors))
    return "\n".join([*lines, "", f"median error {size:.0%}, largest {max(map(abs, errors)):.0%}"])


def fitted(runs: Mapping[str, Mapping[str, Any]], completions: int) -> dict[str, Any]:
    """Fit the constants of this machine for the simulation.

    Args:
        runs: without waiting: `many` and `few` synchronous, of two numbers of groups; `thread` with staleness 0;
            `beside` with staleness 1.
        completions: of a group.
    """
    many, few = runs["many"], runs["few"]
    rows = [run["prompts"] * completions for run in (many, few)]
    seconds = [run["gen_s"] / run["tokens"] for run in (many, few)]
    each = max(0.0, (seconds[0] - seconds[1]) / (rows[0] - rows[1]))
    report: dict[str, Any] = {
        "alone": many, "completions": completions, "token_s": (max(0.0, seconds[0] - each * rows[0]), each)
    }  # fmt: skip
    report["thread_s"] = max(0.0, 3600 / runs["thread"]["steps_per_hour"] - 3600 / many["steps_per_hour"]) / rows[0]
    low, high = 0.3, 1.0
    for _ in range(12):
        report["shared"] = (low + high) / 2
        slow = pace(report, runs["beside"])["steps_per_hour"] < runs["beside"]["steps_per_hour"]
        low, high = (report["shared"], high) if slow else (low, report["shared"])
    return report


def calibrate(model: str, folder: Path, short: bool) -> dict[str, Any]:
    """Short runs without waiting, for what is fitted, and with waiting, to compare."""
    from async_vs_sync import SHORT, base_config, completions_of, one_run

    steps, tail_steps, prompts, scale = (4, 4, 4, 0.1) if short else (14, 7, 16, 1.0)

    def run(name: str, reward_s: float = 0.0, tail: float = 0.0, groups: int = prompts, number: int = steps) -> Any:
        tree = merge_trees(base_config(model, folder, number, groups, short), {"eval": {"after": False}})
        print(f"  {name}: {number} steps of {groups} groups", file=sys.stderr)
        return one_run(tree, name, 0, reward_s, tail)

    completions = completions_of(base_config(model, folder, 1, 1, short))
    runs = {
        "many": run("synchronous"), "few": run("synchronous", groups=prompts // 4),
        "thread": run("staleness 0"), "beside": run("staleness 1"),
    }  # fmt: skip
    report = fitted(runs, completions)
    step_s = 3600 / report["alone"]["steps_per_hour"]
    names = SHORT if short else ("synchronous", "staleness 0", "staleness 1", "staleness 2")
    found = [run(name, reward_s=step_s) | {"waiting": "reward"} for name in names]
    others = SHORT if short else ("synchronous", "staleness 1", "staleness 2", "staleness 4", "staleness 2, wait",
                                  "staleness 2, abort", "staleness 1, oversampling 1.5")  # fmt: skip
    found += [run(name, tail=scale, number=tail_steps) | {"waiting": "tail"} for name in others]
    return report | {"runs": found, "fitted_to": runs, "driver_s": driver_s()}


def driver_s(tokens: int = 8000, completions: int = 16) -> float:
    """Seconds that the driver needs for a completion that comes from another process: to unpickle it, and to make a
    trajectory and then a row of it."""
    from atomrl.data.rows import to_rows
    from atomrl.engines.generation import to_trajectory
    from atomrl.types import GenerationOutput, Problem, Prompt, Segment

    prompt = Prompt(prompt_id="a", problem=Problem(problem_id="a", prompt="", ground_truth=""), token_ids=(1,) * 512)
    drawn = Segment(
        origin="model", token_ids=tuple(range(1000, 1000 + tokens)), policy_version=0,
        logprobs=tuple(-1 / (place + 1) for place in range(tokens)),
    )  # fmt: skip
    output = GenerationOutput(request_id="a/0", segments=(drawn,), text="x" * 4 * tokens, finish_reason="stop")
    sent = [pickle.dumps(output) for _ in range(completions)]
    began = time.perf_counter()
    trajectories = [to_trajectory(prompt, index, pickle.loads(each)) for index, each in enumerate(sent)]
    to_rows([replace(item, reward=1.0) for item in trajectories])
    return (time.perf_counter() - began) / completions


def local_report(report: Mapping[str, Any]) -> None:
    base, each = report["token_s"]
    alone = report["alone"]
    rows = alone["prompts"] * report["completions"]
    print(
        f"fitted to 4 runs without waiting: a token of {rows} rows {1000 * (base + each * rows):.1f} ms (of few "
        f"{1000 * base:.1f} ms), learning {alone['learn_s']:.3f} s, transfer {alone['sync_s']:.3f} s, "
        f"the thread {1e6 * report['thread_s']:.0f} us a completion, pace of engine and trainer beside each other "
        f"{report['shared']:.2f}; the driver {1000 * report['driver_s']:.1f} ms for 8,000 tokens\n"
    )
    print(compare(report, report["runs"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="of plan_cluster.py")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each simulated run on a cluster")
    parser.add_argument("--gpus", type=int, nargs="+", default=SIZES)
    parser.add_argument("--docs", action="store_true", help="into docs/development/scaling.md")
    parser.add_argument("--calibrate", action="store_true", help="runs of this machine, and how far it is off")
    parser.add_argument("--results", type=Path, help="of benchmarks/async_vs_sync.py: how far it is off")
    parser.add_argument("--model", default=str(ROOT / "runs" / "quickstart-warm-start" / "model"))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "calibration.json")
    parser.add_argument("--short", action="store_true", help="--calibrate with a tiny model, to try the script itself")
    arguments = parser.parse_args()
    if arguments.calibrate:
        if not arguments.short and not Path(arguments.model).is_dir():
            parser.error(f"there is no model in {arguments.model}: run `make quickstart` first, or give --model")
        logging.disable(logging.WARNING)
        report = calibrate(arguments.model, Path(tempfile.mkdtemp(prefix="calibrate_")), arguments.short)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        local_report(report)
    elif arguments.results:
        if not arguments.out.exists():
            parser.error(f"{arguments.out} is not there: run --calibrate first")
        report = json.loads(arguments.out.read_text(encoding="utf-8"))
        print(compare(report, json.loads(arguments.results.read_text(encoding="utf-8"))["runs"]))
    else:
        cluster_report(arguments.changes, arguments.steps, arguments.gpus, arguments.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
