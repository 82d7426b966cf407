"""Command that runs a script of TRL or unsloth."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from atomrl.cli.main import Run


def add_run(parser: argparse.ArgumentParser) -> Run:
    """Run a Python script or notebook that is written for TRL or unsloth, unchanged, with AtomRL's training.

    `import trl` and `import unsloth` give AtomRL's modules, whether or not these packages are installed. An argument
    without a counterpart is an error before weights are loaded; what differs is printed when training starts
    (docs/start/migrating.md). Options come before the script, and all words after it are the script's own. In a
    notebook, lines that begin with ! or % are left out.

    atomrl run train.py --learning_rate 1e-5
    atomrl run --dry-run train.py            # stop where the script would train, and print the plan
    atomrl run --config-out train.yaml train.py
    torchrun --nproc_per_node 2 -m atomrl run train.py
    """
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file or a notebook (.ipynb)")
    parser.add_argument("--dry-run", action="store_true", help="stop where the script would train, and print the plan")
    parser.add_argument("--config-out", type=Path, metavar="FILE", help="stop there, and write the config of the run")
    parser.add_argument("--word", action="append", default=[], help=argparse.SUPPRESS)
    parser.set_defaults(prepare=with_own_words)
    return run


def with_own_words(words: Sequence[str]) -> list[str]:
    """Mark all words after the script as the script's own.

    Example:
        >>> with_own_words(["--dry-run", "train.py", "--lr", "1"])
        ['--dry-run', 'train.py', '--word=--lr', '--word=1']
    """
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] == "--config-out" else 1
    return [*words[: place + 1], *(f"--word={word}" for word in words[place + 1 :])]


def run(arguments: argparse.Namespace) -> int:
    """Run the script; returns its exit code."""
    from atomrl.trl.running import run_script

    return run_script(arguments.script, arguments.word, arguments.dry_run, arguments.config_out)
