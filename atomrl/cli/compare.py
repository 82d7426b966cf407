"""`atomrl compare`: compare runs by table, curves, or the first difference of two."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from atomrl.cli.main import Run as Command
from atomrl.common.files import check_writable


def add_compare(parser: argparse.ArgumentParser) -> Command:
    """Compare runs: their results, and the config keys in which they differ.

    Results are held-out accuracies, final and best, and means over the last 10 steps. Runs that differ only in seed and
    name share a line, with mean and range. --plot draws curves of reward, accuracy, completion length and entropy.

    --diff prints where two runs first differ: config, environment, data; then prompts, tokens, rewards, advantages,
    metrics. Names and measured times are ignored. Exit code 0: the same; 1: they differ; 2: an error. A different
    environment alone is printed but does not count as a difference, because it may compute the same.

    atomrl compare runs/a runs/b runs/c
    atomrl compare runs/lr-* --plot compared.png
    atomrl compare runs/quickstart --plot curves.png
    atomrl compare runs/a runs/b --diff
    atomrl compare runs/a runs/b --diff --tolerance 1e-5
    """
    add = parser.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="the folder of a run")
    add("--plot", type=Path, metavar="FILE", help="plot their curves into this image")
    add("--diff", action="store_true", help="print where two runs first differ")
    add(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="with --diff: relative difference of numbers that is allowed (0)",
    )
    add("--json", action="store_true", help="print one JSON object, and nothing else on stdout")
    return compare_runs


def compare_runs(arguments: argparse.Namespace) -> int:
    """Print the table of the runs, or the first difference of two."""
    if arguments.diff:
        return diff_two(arguments)
    if arguments.tolerance is not None:
        raise ValueError("--tolerance needs --diff")
    from atomrl.tracking.reading import load_run
    from atomrl.tracking.reading.comparison import as_data, table
    from atomrl.tracking.reading.plots import draw_curves

    if arguments.plot is not None:
        check_writable(arguments.plot)
    runs = [load_run(path) for path in arguments.runs]
    if not arguments.json:
        print(*table(runs), sep="\n")
    image = None if arguments.plot is None else str(draw_curves(runs, arguments.plot))
    if arguments.json:
        print(json.dumps({**as_data(runs), "plot": image}, default=str))
    elif image is not None:
        print(image)
    return 0


def diff_two(arguments: argparse.Namespace) -> int:
    """Print where two runs first differ; exit code 0 if they do not, else 1."""
    from atomrl.tracking.reading import load_run
    from atomrl.tracking.reading.diff import diff_runs

    tolerance = arguments.tolerance or 0.0
    if not 0 <= tolerance < 1:
        raise ValueError(f"--tolerance {tolerance}: must be at least 0 and below 1")
    if len(arguments.runs) != 2 or arguments.plot is not None:
        raise ValueError("--diff needs exactly two runs, and no --plot")
    a, b = arguments.runs
    diff = diff_runs(load_run(a), load_run(b), tolerance)
    if arguments.json:
        print(json.dumps({"a": str(a), "b": str(b), "same": diff.same, "lines": [*diff.lines()]}))
    else:
        print(f"A is {a}, B is {b}", *diff.lines(), sep="\n")
    return 0 if diff.same else 1
