"""`atomrl plan`: estimate or measure the memory and the time of a run."""

from __future__ import annotations

import argparse
import io
import json
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.cli.arguments import add_config, check_config
from atomrl.cli.main import Run

if TYPE_CHECKING:
    from atomrl.planner.fit import Trade
    from atomrl.planner.forecast import Forecast
    from atomrl.planner.plan import Plan


def add_plan(parser: argparse.ArgumentParser) -> Run:
    """Estimate the memory, phase by phase, and the time of a run before it starts.

    --gpu plans for any GPU from shapes and data sheets; a well-known model needs no weights, data or network. --fit
    writes a config that fits, with the cost of each change. Without either: the memory on this machine. --probe
    measures a few small steps in a separate process (with random weights if the model's are not on this machine). Exit
    code 0: it fits; 1: it does not; 2: unknown.

    atomrl plan configs/qwen2.5-1.5b-gsm8k-24gb.yaml --gpu 4090
    atomrl plan configs/qwen2.5-1.5b-gsm8k-24gb.yaml --fit 8GiB --out small.yaml
    atomrl plan configs/quickstart.yaml
    atomrl plan configs/quickstart.yaml --probe --signal 64
    """
    add_config(parser)
    parser.add_argument("--gpu", metavar="CARD", help="plan for a GPU by name or size: 4090, 2xA100, 24GiB")
    parser.add_argument("--fit", metavar="CARD", help="write the config that fits a GPU: 8GiB, 3060")
    parser.add_argument("--out", metavar="FILE", help="file of --fit (default: CONFIG-CARD.yaml beside the config)")
    parser.add_argument("--probe", action="store_true", help="measure memory and time on a few small steps")
    parser.add_argument("--memory", metavar="SIZE", help="memory of this machine, as in 24GiB (default: detected)")
    parser.add_argument(
        "--signal", type=int, metavar="N", help="sample completions of N prompts, count groups with a signal"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else on stdout")
    return plan_run


def plan_run(arguments: argparse.Namespace) -> int:
    """Plan for this machine, or for a GPU by its name."""
    check_config(arguments)
    plan, report = plan_on_gpu if arguments.gpu or arguments.fit else plan_for_machine, dict[str, Any]()
    if not arguments.json:
        return plan(arguments, report)
    with redirect_stdout(io.StringIO()) as printed:
        code = plan(arguments, report)
    fits = {0: True, 1: False}.get(code)
    print(json.dumps({"fits": fits, **report, "text": printed.getvalue().strip().splitlines()}))
    return code


def plan_for_machine(arguments: argparse.Namespace, report: dict[str, Any]) -> int:
    """Plan for this machine. Adds the numbers to `report`."""
    from atomrl.cli.train import dry_run_sections, print_section
    from atomrl.config import load_config
    from atomrl.data.checks import first_rows
    from atomrl.data.files import DataNotHere
    from atomrl.models.loading import ModelNotHere
    from atomrl.planner.forecast import forecast, signal
    from atomrl.planner.plan import budget_of, plan_here
    from atomrl.trainer import prepare_run
    from atomrl.trainer.build import algorithm_of, rank_total

    if arguments.out:
        raise ValueError("--out needs --fit")
    config = load_config(arguments.config, arguments.overrides)
    budget, place = budget_of(arguments.memory)
    if arguments.signal is not None and arguments.signal < 1:
        raise ValueError(f"--signal {arguments.signal}: must be at least 1")
    prepared = None
    try:
        prepared = prepare_run(config)
        print(*prepared.describe_batch(), sep="\n")
        if arguments.json:
            report["rows"] = first_rows(prepared.problems, prepared.images)
    except (ModelNotHere, DataNotHere) as absent:
        if arguments.probe or arguments.signal is not None:
            raise
        for title, lines in dry_run_sections(config):
            if title not in ("ranks", "memory", "choices"):  # printed below
                print_section(title, lines)
        if isinstance(absent, ModelNotHere):
            print("\nunknown whether it fits; for well-known models `--gpu CARD` needs no network")
            return 2
    fits = True
    if config.gpt is None:
        plan = plan_here(config, prepared.algorithm if prepared else algorithm_of(config), rank_total(config), budget)
        report |= numbers(plan)
        fits = print_memory(plan, budget, place)
    elif not arguments.probe:
        print("\nno estimate from shapes for a fresh model; --probe measures it")
    if arguments.probe and prepared is not None:
        result = forecast(config, prepared)
        fits = fits and result.measured.peak_bytes <= budget  # `and`: small steps rarely have the longest rows
        if arguments.json:
            report["probe"] = {**asdict(result), "step_seconds": result.step_seconds}
        print_forecast(result, budget, place)
    if arguments.signal is not None:
        print("\nsignal:", *signal(config, arguments.signal), sep="\n  ")
    return 0 if fits else 1


def print_memory(plan: Plan, budget: int, place: str) -> bool:
    """Print the memory of a plan by phase, and what helps if it does not fit; return True if it fits."""
    from atomrl.planner.plan import memory_lines
    from atomrl.trainer.build import rank_total

    ranks = rank_total(plan.config)
    lines, fits = memory_lines(plan.memory, budget, place)
    of = f", of the first of {ranks} ranks" if ranks > 1 else ""
    print(f"\nmemory, from shapes, at the longest rows{of}:", *lines, sep="\n  ")
    if not fits:
        print_helpful(plan)
    return fits


def numbers(plan: Plan) -> dict[str, Any]:
    """Return the numbers of a plan: bytes by phase, and seconds of a step where time is estimated."""
    memory = plan.memory
    return {
        "memory_bytes": {
            "stays": memory.resident + memory.process,
            "phases": dict(memory.phases),
            "peak": memory.peak,
            "budget": plan.budget,
        },
        "seconds": {**plan.seconds, "step": plan.step_seconds} if plan.seconds else None,
    }


def plan_on_gpu(arguments: argparse.Namespace, report: dict[str, Any]) -> int:
    """Plan for a GPU by its name; with --fit, write a config that fits it. Adds the numbers to `report`."""
    from atomrl.config import load_config
    from atomrl.planner.fit import find_fitting
    from atomrl.planner.gpus import gpu_of
    from atomrl.planner.plan import describe, plan_on

    both = [f"--{name}" for name in ("memory", "signal", "probe") if getattr(arguments, name)]
    if both or (arguments.gpu and arguments.fit):
        other = both[0] if both else "--gpu"
        raise ValueError(f"{other} cannot be combined with --{'fit' if arguments.fit else 'gpu'}")
    config = load_config(arguments.config, arguments.overrides)
    gpu = gpu_of(arguments.fit or arguments.gpu)
    plan = plan_on(config, gpu)
    report |= numbers(plan)
    print(*describe(plan, gpu), sep="\n")
    if not arguments.fit:
        if not plan.fits:
            print_helpful(plan)
            print(f"`--fit {shlex.quote(arguments.gpu)}` instead of `--gpu` searches for combinations that fit")
        return 0 if plan.fits else 1
    if plan.fits:
        print("\nfits unchanged; nothing was written")
        return 0
    solution = find_fitting(plan)
    if solution is None:
        print_least(plan, report)
        print_helpful(plan)
        return 1
    chosen, smaller = solution
    file = Path(arguments.config)
    if file.is_dir():
        file /= "config.yaml"
    out = Path(arguments.out or f"{file.with_suffix('')}-{arguments.fit.replace(' ', '').lower()}.yaml")
    write_fit(file, arguments.overrides, chosen, f"{file} for {arguments.fit}", out)
    print("\nchanged, cheapest first:", *trade_lines(plan, chosen), sep="\n  ")
    report |= {**numbers(smaller), "changes": [str(trade) for trade in chosen], "out": str(out)}
    print(f"\n{out}:", *describe(smaller, gpu), sep="\n")
    return 0


def write_fit(file: Path, overrides: Sequence[str], chosen: Sequence[Trade], title: str, out: Path) -> None:
    """Write the user's config with the changes; a comment at its top lists their costs.

    Args:
        file: the config.
        overrides: of the command line.
        chosen: the changes.
        title: start of the comment.
        out: file to write.

    Raises:
        ConfigError: the file exists.
    """
    import yaml

    from atomrl.config import ConfigError, merge_trees, parse_overrides, read_tree
    from atomrl.planner.fit import merged

    tree = merge_trees(read_tree(file, parse_overrides(overrides)), merged(chosen))
    head = [f"# {title} (atomrl plan --fit). Changed:"]
    head += [f"#   {trade}: {trade.price}" for trade in chosen]
    text = "\n".join(head) + "\n" + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} already exists; remove it, or set --out") from None


def trade_lines(plan: Plan, chosen: Sequence[Trade]) -> list[str]:
    """Format each change with the memory it saves after the previous ones, and its cost."""
    from atomrl.planner.fit import changed

    lines, before = [], plan
    for count in range(1, len(chosen) + 1):
        after = changed(plan, chosen[:count]) or before
        saved = (before.memory.peak - after.memory.peak) / 2**30
        slower = after.step_seconds / before.step_seconds if before.step_seconds else 1.0
        lines.append(
            f"{chosen[count - 1]!s:<48} {saved:6.2f} GiB less, {slower:.2f} x the time: {chosen[count - 1].price}"
        )
        before = after
    return lines


def print_helpful(plan: Plan) -> None:
    """Print single changes that reduce memory, with the resulting memory of the run."""
    from atomrl.common.memory import readable
    from atomrl.planner.fit import helpful

    changes = helpful(plan)
    if not changes:
        print("no single setting reduces memory; use a smaller model")
        return
    print("each of these reduces memory:")
    for trade, smaller in changes:
        verdict = "fits" if smaller.fits else "not enough alone"
        print(f"  {trade!s:<48} {readable(smaller.memory.peak).strip():>10}, {verdict}: {trade.price}")


def print_least(plan: Plan, report: dict[str, Any]) -> None:
    """Print the least memory with which a run would fit, and the largest model that fits."""
    from atomrl.common.memory import readable
    from atomrl.planner.fit import largest_that_fits, least

    changes, smallest = least(plan)
    peak, budget = (readable(size).strip() for size in (smallest.memory.peak, plan.budget))
    print(f"\nno setting makes it fit: with all of them it needs {peak} of {budget}")
    found = largest_that_fits(plan, changes)
    report |= {"least_bytes": smallest.memory.peak, "largest_model": found and found[0]}
    if found is None:
        print("no well-known model fits either; use a larger GPU")
    else:
        size = readable(found[1].memory.peak).strip()
        print(f"the largest well-known model that fits so is model.path={found[0]}, {size}")


def print_forecast(forecast: Forecast, budget: int, place: str) -> None:
    """Print the measurements of a probe, and the forecast for the whole run."""
    from atomrl.common.memory import readable
    from atomrl.tracking.reading.summary import duration

    measured = forecast.measured
    if measured.random_weights:
        print("\nthe model's weights are not on this machine: measured with random weights, so lengths mean nothing")
    verdict = "fits" if measured.peak_bytes <= budget else "does not fit"
    print("\nmeasured on a few small steps:")
    print(f"  memory  {readable(measured.peak_bytes)} at most, of {readable(budget)} ({place}): {verdict}")
    parts = ", ".join(f"{name} {value:.3g}" for name, value in forecast.seconds.items() if value >= 0.001)
    print(f"  a step  {forecast.step_seconds:.3g} s ({parts})")
    if forecast.tokens:
        at_limit = f"{forecast.at_limit:.3g} s at the limit"
        print(f"          with completions of {forecast.tokens:.0f} tokens, as now; {at_limit}")
    evaluations = forecast.evaluations
    included, excluded = (f" with {evaluations} evaluations", "") if evaluations else ("", "evaluations, ")
    print(f"  the run {duration(forecast.run_seconds)}{included}; {excluded}checkpoints and startup not included")
