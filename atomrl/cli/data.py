"""Check a data file, make one from a task, or tokenize text for `atomrl pretrain`.

atomrl data check gsm8k.jsonl --prompt-field question --answer-field answer --reward gsm8k
atomrl data make countdown --size 1000 --seed 0 --out countdown.jsonl
atomrl data make arithmetic --size 500 --split eval --out held_out.jsonl steps=4
atomrl data prepare input.txt --tokenizer char --out data/shakespeare
atomrl data prepare books/*.txt --tokenizer gpt2 --val-fraction 0.01 --out data/books
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from atomrl.files import write_jsonl

if TYPE_CHECKING:
    from atomrl.types import Sample

FIELDS = ("--prompt-field", "--answer-field", "--answer-pattern")
"""Options of `check` that a config has as keys of `data`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from atomrl.data.generators import GENERATORS

    parser.add_argument("action", choices=("check", "make", "prepare"))
    parser.add_argument("name", metavar="FILE|TASK", help=f"tasks: {', '.join(GENERATORS)}, reasoning_gym:NAME")
    parser.add_argument("arguments", nargs="*", metavar="key=value|FILE", help="of a task; or further text files")
    check = parser.add_argument_group("check", "problems, demonstrations or preferences, as the columns say")
    check.add_argument("--prompt-field", default="prompt")
    check.add_argument("--answer-field", default="ground_truth", help="of problems; null: they have none")
    check.add_argument("--answer-pattern", help="its first group in the answer field is the ground truth")
    check.add_argument(
        "--reward", metavar="NAME[,NAME]", help="the built-in rewards that have to read the ground truths"
    )
    check.add_argument("--against", metavar="FILE", help="a file that must not share a prompt with this one")
    make = parser.add_argument_group("make")
    make.add_argument("--size", type=int, help="problems to draw")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--split", choices=("train", "eval"), default="train", help="the two have no problem in common")
    make.add_argument("--out", type=Path, help="the JSONL file to write; of prepare, the folder")
    prepare = parser.add_argument_group("prepare")
    prepare.add_argument("--tokenizer", metavar="char|gpt2|MODEL", help="MODEL: a folder or a hub name")
    prepare.add_argument("--val-fraction", type=float, default=0.1, help="of the text, at its end (default 0.1)")


NEEDED = {"make": ("size", "out"), "check": (), "prepare": ("out", "tokenizer")}
"""Options that an action cannot do without."""


def run(arguments: argparse.Namespace) -> int:
    for option in NEEDED[arguments.action]:
        if getattr(arguments, option) is None:
            raise ValueError(f"data {arguments.action} needs --{option}")
    for option in ("size", "out", "tokenizer"):
        if option not in NEEDED[arguments.action] and getattr(arguments, option) is not None:
            instead = ": `--dry-run` of the run writes prompts with its tokenizer" if option == "tokenizer" else ""
            raise ValueError(f"data {arguments.action} takes no --{option}{instead}")
    return {"make": make, "check": check, "prepare": prepare_text}[arguments.action](arguments)


def prepare_text(arguments: argparse.Namespace) -> int:
    """Text files to a folder of token ids."""
    from atomrl.data.text import distinct_characters
    from atomrl.data.tokens import prepare_tokens
    from atomrl.models.tokenizer import text_tokenizer

    paths, name = [arguments.name, *arguments.arguments], arguments.tokenizer
    tokenizer = text_tokenizer(name, distinct_characters(paths) if name == "char" else ())
    meta = prepare_tokens(paths, tokenizer, name, arguments.out, arguments.val_fraction)
    for split, part in (("train", meta.train), ("val", meta.val)):
        print(f"{split}: {part.tokens:,} tokens of {part.characters:,} characters ({part.bytes:,} bytes)")
    print(f"{arguments.out}: {name}, {meta.vocab_size:,} tokens in the vocabulary, {meta.dtype}")
    return 0


def make(arguments: argparse.Namespace) -> int:
    """Write a task's problems."""
    from atomrl.config import parse_overrides
    from atomrl.data.generators import generate

    extra = parse_overrides(arguments.arguments)
    rows = generate(arguments.name, arguments.size, arguments.seed, arguments.split, **extra)
    print(f"{write_jsonl(rows, arguments.out)} problems of {arguments.name} ({arguments.split} split): {arguments.out}")
    return 0


def truth_reader(names: str | None) -> Callable[[Sample], str | None]:
    """What says why a ground truth cannot be read, by the rewards of the names; without names only whether it is empty.

    Raises:
        ValueError: an unknown reward.
    """
    from atomrl.rewards.answers import require_truth
    from atomrl.rewards.table import find_reward, truth_problem

    rewards = names.split(",") if names else []
    for name in rewards:
        find_reward(name)

    def problem(sample: Sample) -> str | None:
        truth = sample.ground_truth
        row = {**sample.columns, "ground_truth": truth}
        try:
            if not rewards and isinstance(truth, str | float):
                require_truth(truth.rpartition("####")[2] if isinstance(truth, str) and "####" in truth else truth)
        except ValueError as error:
            return str(error)
        return next((found for name in rewards if (found := truth_problem(name, row))), None)

    return problem


def check(arguments: argparse.Namespace) -> int:
    """Read a file as the run that it is made for would, and say what is in it; problems go to stderr."""
    from atomrl.config import DataConfig
    from atomrl.data.checks import check_data
    from atomrl.data.generators import is_generator

    if is_generator(arguments.name):
        raise ValueError(f"{arguments.name} is a task; data check takes a file (data make writes one)")
    if arguments.arguments:
        key, _, value = arguments.arguments[0].partition("=")
        option = "--" + key.removeprefix("data.").replace("_", "-")
        like = f"it is {option} {shlex.quote(value)} here" if option in FIELDS else "its options have dashes (--help)"
        raise ValueError(f"data check takes no {arguments.arguments[0]!r}; {like}")
    config = DataConfig(
        train=arguments.name,
        prompt_field=arguments.prompt_field,
        answer_field=None if arguments.answer_field == "null" else arguments.answer_field,
        answer_pattern=arguments.answer_pattern,
    )
    report = check_data(arguments.name, config, arguments.against, truth_reader(arguments.reward))
    print(report.text(), file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 2
