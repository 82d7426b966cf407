"""Say whether a run will fit, phase by phase, and how long it will take, before it is started.

Without --probe the memory alone, from shapes, at the longest that rows may become. --probe runs a few small steps in a
process of its own (with random weights of that shape, where the model's are not on this machine) and measures.
Exit code 0: it fits; 1: it does not.

atomrl plan configs/quickstart.yaml
atomrl plan configs/qwen2.5-1.5b-gsm8k-24gb.yaml --memory 24GiB
atomrl plan configs/quickstart.yaml --probe --signal 64
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from atomrl.cli.config_arguments import add_config_arguments, config_from, join_overrides

if TYPE_CHECKING:
    from atomrl.runs.plan import Forecast

OPTIONS = ("--memory", "--signal")


def prepare(arguments: list[str]) -> list[str]:
    """`key=value`, with this command's own options left."""
    probe = [argument for argument in arguments if argument == "--probe"]
    return [*join_overrides([a for a in arguments if a != "--probe"], OPTIONS), *probe]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--probe", action="store_true", help="measure memory and time on a few small steps")
    parser.add_argument("--memory", metavar="SIZE", help="what there is, as in 24GiB (default: this machine's)")
    parser.add_argument("--signal", type=int, metavar="N", help="draw completions of N prompts: what do groups teach?")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.cli.training import described, print_section
    from atomrl.models.loading import ModelNotHere
    from atomrl.runs import prepare_run
    from atomrl.runs.plan import budget_of, forecast, memory_by_phase, memory_lines, signal

    config = config_from(arguments)
    folder = Path(arguments.config).resolve().parent
    budget, place = budget_of(arguments.memory)
    if arguments.signal is not None and arguments.signal < 1:
        raise ValueError(f"--signal {arguments.signal}: draw completions of at least one prompt")
    try:
        prepared = prepare_run(config)
    except ModelNotHere:
        if arguments.probe or arguments.signal is not None:
            raise
        for title, lines in described(config):
            print_section(title, lines)
        return 0
    print(*prepared.describe_batch(), sep="\n")
    fits = True
    if config.gpt is None:
        lines, fits = memory_lines(memory_by_phase(config, prepared), budget, place)
        of = f", of the first of {prepared.ranks} ranks" if prepared.ranks > 1 else ""
        print(f"\nmemory, from shapes, at the longest rows{of}:", *lines, sep="\n  ")
    elif not arguments.probe:
        print("\nof a fresh model there is no estimate from shapes; --probe measures it")
    if arguments.probe:
        found = forecast(config, prepared, folder)
        fits = fits and found.measured.peak_bytes <= budget  # the small steps seldom have rows as long as may come
        print_forecast(found, budget, place)
    if arguments.signal is not None:
        print("\nsignal:", *signal(config, folder, arguments.signal), sep="\n  ")
    return 0 if fits else 1


def print_forecast(found: Forecast, budget: int, place: str) -> None:
    """What was measured, and what it means for the run."""
    from atomrl.runs.base import readable

    measured = found.measured
    if measured.random_weights:
        print("\nthe model's weights are not here: random ones of its shape were measured, whose lengths mean nothing")
    verdict = "fits" if measured.peak_bytes <= budget else "does not fit"
    print("\nmeasured on a few small steps:")
    print(f"  memory  {readable(measured.peak_bytes)} at most, of {readable(budget)} ({place}): {verdict}")
    parts = ", ".join(f"{name} {value:.3g}" for name, value in found.seconds.items() if value >= 0.001)
    print(f"  a step  {found.step_seconds:.3g} s ({parts})")
    if found.tokens:
        print(f"          with completions of {found.tokens:.0f} tokens, as now; {found.at_limit:.3g} s at the limit")
    among, left = (f", {found.evaluations} evaluations among it", "") if found.evaluations else ("", "evaluations, ")
    print(f"  the run {clock(found.run_seconds)}{among}; {left}checkpoints and starting are not in it")


def clock(seconds: float) -> str:
    """Seconds as people say them.

    Example:
        >>> clock(42), clock(3725), clock(200000)
        ('42 s', '1:02:05', '55:33:20')
    """
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
