"""Check a data file, or make one from a task.

atomrl data check train.jsonl --answer-field answer
atomrl data make countdown --size 1000 --seed 0 --out countdown.jsonl
atomrl data make arithmetic --size 500 --split eval --out held_out.jsonl steps=4
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from atomrl.data.generators import GENERATORS

    parser.add_argument("action", choices=("check", "make"))
    parser.add_argument("name", metavar="FILE|TASK", help=f"tasks: {', '.join(GENERATORS)}, reasoning_gym:NAME")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="arguments of the task")
    check = parser.add_argument_group("check")
    check.add_argument("--prompt-field", default="prompt")
    check.add_argument("--answer-field", default="ground_truth", help="null: the rows have none")
    check.add_argument("--answer-pattern", help="its first group in the answer field is the ground truth")
    check.add_argument("--against", metavar="FILE", help="a file that must not share a prompt with this one")
    make = parser.add_argument_group("make")
    make.add_argument("--size", type=int, help="problems to draw")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--split", choices=("train", "eval"), default="train", help="the two have no problem in common")
    make.add_argument("--out", type=Path, help="the JSONL file to write")


def run(arguments: argparse.Namespace) -> int:
    return make(arguments) if arguments.action == "make" else check(arguments)


def make(arguments: argparse.Namespace) -> int:
    """Write a task's problems."""
    from atomrl.config import parse_overrides
    from atomrl.data.files import write_jsonl
    from atomrl.data.generators import generate

    for option in ("size", "out"):
        if getattr(arguments, option) is None:
            raise ValueError(f"data make needs --{option}")
    extra = parse_overrides(arguments.arguments)
    rows = generate(arguments.name, arguments.size, arguments.seed, arguments.split, **extra)
    print(f"{write_jsonl(rows, arguments.out)} problems of {arguments.name} ({arguments.split} split): {arguments.out}")
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Read a file as training would, and say what is in it; every problem with file and line, on stderr."""
    from atomrl.config import DataConfig
    from atomrl.data.checks import check_data
    from atomrl.data.generators import is_generator

    if is_generator(arguments.name):
        raise ValueError(f"{arguments.name} is a task; data check takes a file (data make writes one)")
    if arguments.arguments:
        raise ValueError(f"data check takes no {arguments.arguments[0]!r}; its options have dashes, see --help")
    config = DataConfig(
        train=arguments.name,
        prompt_field=arguments.prompt_field,
        answer_field=None if arguments.answer_field == "null" else arguments.answer_field,
        answer_pattern=arguments.answer_pattern,
    )
    report = check_data(arguments.name, config, arguments.against)
    print(report.text(), file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 2
