"""Seeded problem generators that need no download.

A generator is a module with `make(rng: random.Random, **args) -> dict` that returns one row: `prompt`,
`ground_truth` and any columns, everything as JSON has it. One line in `GENERATORS` makes it available by name.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import random
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, Literal

from atomrl.data.problems import DataError

GENERATORS = {
    "arithmetic": "atomrl.data.arithmetic",
    "chain": "atomrl.data.chain",
    "countdown": "atomrl.data.countdown",
    "stack_machine": "atomrl.data.stack_machine",
}
"""name -> the module that holds its `make`."""

REASONING_GYM = "reasoning_gym:"
EVAL_SHARE = 10
"""One problem in so many belongs to the eval split, whatever the seed."""
PATIENCE = 20_000
"""Draws in a row without a new problem after which the space counts as exhausted."""


def is_generator(source: str) -> bool:
    """Whether `source` names a generator rather than a file."""
    return source in GENERATORS or source.startswith(REASONING_GYM)


def nearest_generator(name: str) -> str | None:
    """The generator whose name is most like `name`."""
    near = difflib.get_close_matches(name, GENERATORS, n=1)
    return near[0] if near else None


def normalise_content(prompt: Any) -> str:
    """A prompt without what does not make it another problem: case, white space, Unicode variants.

    Example:
        >>> normalise_content("What  is 2+2?\\n") == normalise_content("what is 2+2?")
        True
    """
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def content_split(content: str) -> Literal["train", "eval"]:
    """The split to which a problem belongs: decided by a hash of its normalised content alone.

    So train and eval problems are disjoint whatever seeds and sizes they were drawn with.
    """
    digest = hashlib.blake2b(content.encode("utf-8"), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "little") % EVAL_SHARE else "eval"


def generate(
    task: str, size: int, seed: int = 0, split: Literal["train", "eval"] = "train", **args: Any
) -> list[dict[str, Any]]:
    """`size` problems of a generator, distinct by normalised content, all of one split.

    The first rows of a larger size are the rows of a smaller one. How many problems there are is said in each
    generator's module; one in ten of them is of the eval split.

    Args:
        task: a name of `GENERATORS`, or `reasoning_gym:NAME` (needs the `tasks` extra).
        args: of the generator; its module documents them.

    Raises:
        DataError: unknown task or argument, bad values, or fewer than `size` distinct problems exist.

    Example:
        >>> [row] = generate("arithmetic", 1, seed=0, steps=2)
        >>> sorted(row)
        ['data_source', 'ground_truth', 'prompt']
    """
    if split not in ("train", "eval"):
        raise DataError(f"split must be 'train' or 'eval', not {split!r}")
    if size < 1:
        raise DataError(f"size must be at least 1, not {size}")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    misses = 0
    for row in _draws(task, f"{task}/{seed}/{split}", args):
        content = normalise_content(row["prompt"])
        if content in seen or content_split(content) != split:
            misses += 1
            if misses >= PATIENCE:
                raise DataError(
                    f"{task}: only {len(rows)} distinct problems of the {split} split were found, not {size}; "
                    f"ask for fewer, or make the task larger (its arguments: {_names(task)})"
                )
            continue
        misses = 0
        seen.add(content)
        rows.append({**row, "data_source": row.get("data_source", task)})
        if len(rows) == size:
            break
    return rows


def _draws(task: str, key: str, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows without end."""
    number = int.from_bytes(hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest(), "little")
    if task.startswith(REASONING_GYM):
        from atomrl.data.reasoning_gym_rows import draw_rows

        yield from draw_rows(task.removeprefix(REASONING_GYM), number, args)
        return
    make = find_generator(task)
    unknown = sorted(set(args) - set(_parameters(make)))
    if unknown:
        near = difflib.get_close_matches(unknown[0], _parameters(make), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_parameters(make))}"
        raise DataError(f"{task} has no argument {unknown[0]!r}; {hint}")
    rng = random.Random(number)
    while True:
        try:
            yield make(rng, **args)
        except (TypeError, ValueError) as error:
            raise DataError(f"{task} with {args}: {error}") from error


def find_generator(task: str) -> Callable[..., dict[str, Any]]:
    """The `make` function of a generator.

    Raises:
        DataError: there is none of that name.
    """
    if task not in GENERATORS:
        near = nearest_generator(task)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(GENERATORS)}, reasoning_gym:NAME"
        raise DataError(f"unknown task {task!r}; {hint}")
    return importlib.import_module(GENERATORS[task]).make


def find_demonstrator(task: str) -> Callable[[random.Random, dict[str, Any]], str]:
    """The function of a generator's module that writes a demonstration: `demonstrate(rng, row) -> completion text`.

    Raises:
        DataError: the generator has none.
    """
    module = importlib.import_module(GENERATORS[task]) if task in GENERATORS else None
    if not hasattr(module, "demonstrate"):
        raise DataError(f"the task {task!r} writes no demonstrations; give a file that has them")
    return module.demonstrate


def find_pairs(task: str) -> Callable[[random.Random, dict[str, Any]], tuple[str, str]]:
    """The function of a generator's module that writes a preference: `pair(rng, row) -> (chosen, rejected)`.

    Raises:
        DataError: the generator has none.
    """
    module = importlib.import_module(GENERATORS[task]) if task in GENERATORS else None
    if not hasattr(module, "pair"):
        raise DataError(f"the task {task!r} writes no pairs of completions; give a file that has them")
    return module.pair


def task_words(task: str) -> tuple[str, ...]:
    """What a tokenizer made for the task should have as one token each; empty where the task (or file) has no say."""
    module = importlib.import_module(GENERATORS[task]) if task in GENERATORS else None
    return tuple(getattr(module, "WORDS", ()))


def _parameters(make: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(make).parameters)[1:]


def _names(task: str) -> str:
    return "see reasoning-gym" if task.startswith(REASONING_GYM) else ", ".join(_parameters(find_generator(task)))
