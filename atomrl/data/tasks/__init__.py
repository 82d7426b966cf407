"""Seeded problem generators that need no download.

A generator is a function `make(rng, **arguments)` that returns one row of JSON values: `prompt`, `ground_truth` and any
columns. An entry in `GENERATORS` makes it available by name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import lzma
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal, NamedTuple, TypeGuard, cast

from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.data.files import DataError
from atomrl.data.tasks import search, shapes
from atomrl.data.tasks.arithmetic import make_arithmetic
from atomrl.data.tasks.calculation import CALCULATION_WORDS, demonstrate_calculation, make_calculation
from atomrl.data.tasks.chain import CHAIN_WORDS, chain_pair, demonstrate_chain, make_chain
from atomrl.data.tasks.countdown import make_countdown
from atomrl.data.tasks.reasoning_gym import draw_rows
from atomrl.data.tasks.stack_machine import make_stack_machine
from atomrl.types import Message

Row = dict[str, Any]
Draw = Callable[[random.Random, Row], str | list[Message] | tuple[str, str]]
"""(rng, row) -> completions: `demonstrate` or `pair` of a generator."""
REASONING_GYM = "reasoning_gym:"
EVAL_SHARE = 10
"""One problem in `EVAL_SHARE` is of the eval split, whatever the seed."""
PATIENCE = 20_000
"""Draws in a row without a new problem after which there are taken to be no more."""


@dataclass(frozen=True)
class Generator:
    """The functions of a task."""

    make: Callable[..., Row]
    """`make(rng, **arguments)` -> one problem."""
    demonstrate: Callable[[random.Random, Row], str | list[Message]] | None = None
    """`demonstrate(rng, row)` -> a completion for supervised training: text, or messages of the assistant with an
    environment's (role `environment`) between them."""
    pair: Callable[[random.Random, Row], tuple[str, str]] | None = None
    """`pair(rng, row)` -> (chosen, rejected) completions, for preference training."""
    words: Sequence[str] = ()
    """Strings that a tokenizer made for the task encodes as one token each."""
    split_by: Callable[[Row], str] | None = None
    """Key that decides the split of a problem, so that problems with the same key are in one split; default: the
    normalised prompt."""


GENERATORS = {
    "arithmetic": Generator(make_arithmetic),
    "calculation": Generator(make_calculation, demonstrate_calculation, words=CALCULATION_WORDS),
    "chain": Generator(make_chain, demonstrate_chain, chain_pair, CHAIN_WORDS),
    "countdown": Generator(make_countdown),
    "places": Generator(search.make, search.demonstrate, words=search.WORDS, split_by=search.split_by),
    "shapes": Generator(shapes.make, shapes.demonstrate, words=shapes.WORDS, split_by=shapes.split_by),
    "stack_machine": Generator(make_stack_machine),
}


def is_generator(source: str | list[str]) -> TypeGuard[str]:
    """Return True if `source` is the name of a generator."""
    return isinstance(source, str) and (source in GENERATORS or source.startswith(REASONING_GYM))


def normalise_content(prompt: str | Sequence[Message]) -> str:
    """Normalise case, white space and Unicode variants of a prompt, to compare prompts.

    Example:
        >>> normalise_content("What  is 2+2?\\n") == normalise_content("what is 2+2?")
        True
    """
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def row_content(row: Row) -> str:
    """Return what makes a problem distinct: its normalised prompt, and its pictures."""
    return normalise_content(row["prompt"]) + "".join(row.get("images", ()))


def content_split(content: str) -> Literal["train", "eval"]:
    """Return the split of a problem, from a hash of its normalised prompt alone.

    So train and eval problems are disjoint for all seeds and sizes.
    """
    digest = hashlib.blake2b(content.encode("utf-8"), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "little") % EVAL_SHARE else "eval"


def row_split(task: str, row: Row) -> Literal["train", "eval"]:
    """Return the split of a problem of a task, by the task's `split_by` or by its prompt."""
    split_by = GENERATORS[task].split_by if task in GENERATORS else None
    return content_split(normalise_content(split_by(row) if split_by else row["prompt"]))


def generate(task: str, size: int, seed: int = 0, split: Literal["train", "eval"] = "train", **args: Any) -> list[Row]:
    """Draw `size` distinct problems of one split from a generator.

    The rows of a smaller size are the first rows of a larger one. One in ten problems is of the eval split.

    Args:
        task: a name in `GENERATORS`, or `reasoning_gym:NAME` (needs the `tasks` extra).
        args: arguments of the generator's `make` function.

    Raises:
        DataError: unknown task or argument, invalid value, or fewer than `size` distinct problems.

    Example:
        >>> [row] = generate("arithmetic", 1, seed=0, steps=2)
        >>> sorted(row)
        ['data_source', 'ground_truth', 'prompt']
    """
    if split not in ("train", "eval"):
        raise DataError(f"split must be 'train' or 'eval', not {split!r}")
    if size < 1:
        raise DataError(f"size must be at least 1, not {size}")
    rows: list[Row] = []
    seen: set[str] = set()
    misses = 0
    for row in _draws(task, f"{task}/{seed}/{split}", args):
        content = row_content(row)
        if content in seen or row_split(task, row) != split:
            misses += 1
            if misses >= PATIENCE:
                raise DataError(
                    f"{task}: only {len(rows)} distinct problems of the {split} split were found, not {size}; "
                    f"request fewer, or make the task larger (its arguments: {', '.join(_arguments(task))})"
                )
            continue
        misses = 0
        seen.add(content)
        rows.append({**row, "data_source": row.get("data_source", task)})
        if len(rows) == size:
            break
    return rows


def _draws(task: str, key: str, args: dict[str, Any]) -> Iterator[Row]:
    """Yield rows without end."""
    number = int.from_bytes(hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest(), "little")
    if task.startswith(REASONING_GYM):
        yield from draw_rows(task.removeprefix(REASONING_GYM), number, args)
        return
    make, arguments = find_generator(task).make, _arguments(task)
    for name in args:
        if name not in arguments:
            raise DataError(f"{task} has no argument {name!r}; {did_you_mean(name, arguments)}")
    rng = random.Random(number)
    while True:
        with reraise_as(DataError, f"{task} with {args}", TypeError, ValueError):
            row = make(rng, **args)
        yield row


def find_generator(task: str) -> Generator:
    """Return a generator by name.

    Raises:
        DataError: unknown task.
    """
    if task not in GENERATORS:
        raise DataError(f"unknown task {task!r}; {did_you_mean(task, [*GENERATORS, 'reasoning_gym:NAME'])}")
    return GENERATORS[task]


def find_completions(task: str, kind: Literal["demonstrate", "pair"]) -> Draw:
    """Return the function that writes demonstrations, or pairs of completions, for a generator's problems.

    Raises:
        DataError: the generator has none.
    """
    draw = getattr(GENERATORS.get(task), kind, None)
    if draw is None:
        wanted = "demonstrations" if kind == "demonstrate" else "pairs of completions"
        able = ", ".join(name for name, generator in GENERATORS.items() if getattr(generator, kind))
        raise DataError(f"the task {task!r} has no {wanted} ({able} does); give a file with them")
    return cast(Draw, draw)


def task_words(source: str | list[str]) -> Sequence[str]:
    """Return the strings that a tokenizer made for the task encodes as one token each; empty for files."""
    return GENERATORS[source].words if isinstance(source, str) and source in GENERATORS else ()


def _arguments(task: str) -> list[str]:
    if task.startswith(REASONING_GYM):
        return ["see reasoning-gym"]
    return list(inspect.signature(find_generator(task).make).parameters)[1:]
