"""Say where two runs begin to differ: config, environment, data; then prompts, tokens, rewards, advantages, metrics.

What only names a run and what a clock measured is passed over. Exit code 0: the same; 1: they differ; 2: a mistake.
Another environment alone is said, and no difference: it may well compute the same.

atomrl diff runs/a runs/b
atomrl diff runs/a runs/b --tolerance 1e-5
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="the folder of a run")
    parser.add_argument("b", metavar="B", type=Path, help="that of another")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="SHARE", help="by which numbers may differ (0)")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.reading import load_run
    from atomrl.reading.diff import diff_runs

    if not 0 <= arguments.tolerance < 1:
        raise ValueError(f"--tolerance {arguments.tolerance}: a share from 0 to 1")
    found = diff_runs(load_run(arguments.a), load_run(arguments.b), arguments.tolerance)
    print(f"A is {arguments.a}, B is {arguments.b}", *found.lines(), sep="\n")
    return 0 if found.same else 1
