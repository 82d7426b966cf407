"""Seeded problem generators that need no download.

A generator is a function `make(rng, **arguments)` that returns one row: `prompt`, `ground_truth` and any columns,
everything as JSON has it. One line in `GENERATORS` makes it available by name.
"""

import hashlib
import inspect
import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

from atomrl.data import arithmetic, calculation, chain, countdown, places, stack_machine
from atomrl.data.problems import DataError
from atomrl.hints import did_you_mean, said_as
from atomrl.types import Message

Row = dict[str, Any]
Draw = Callable[[random.Random, Row], str | list[Message] | tuple[str, str]]
"""`demonstrate` or `pair` of a generator."""


@dataclass(frozen=True)
class Generator:
    """What a task offers."""

    make: Callable[..., Row]
    """`make(rng, **arguments)`: one problem."""
    demonstrate: Callable[[random.Random, Row], str | list[Message]] | None = None
    """`demonstrate(rng, row)`: the text of a completion that solves it, for supervised training; or messages of the
    assistant with those of an environment (role `environment`) between them."""
    pair: Callable[[random.Random, Row], tuple[str, str]] | None = None
    """`pair(rng, row)`: a better and a worse completion, for training on preferences."""
    words: Sequence[str] = ()
    """What a tokenizer made for the task has as one token each."""
    split_by: Callable[[Row], str] | None = None
    """What decides the split of a problem, and so is in one of them alone; None: its normalised content."""


GENERATORS = {
    "arithmetic": Generator(arithmetic.make),
    "calculation": Generator(calculation.make, calculation.demonstrate, words=calculation.WORDS),
    "chain": Generator(chain.make, chain.demonstrate, chain.pair, chain.WORDS),
    "countdown": Generator(countdown.make),
    "places": Generator(places.make, places.demonstrate, words=places.WORDS, split_by=places.split_by),
    "stack_machine": Generator(stack_machine.make),
}

REASONING_GYM = "reasoning_gym:"
EVAL_SHARE = 10
"""One problem in so many belongs to the eval split, whatever the seed."""
PATIENCE = 20_000
"""Draws in a row without a new problem after which the space counts as exhausted."""


def is_generator(source: str | list[str]) -> TypeGuard[str]:
    """Whether `source` names a generator rather than a file or several."""
    return isinstance(source, str) and (source in GENERATORS or source.startswith(REASONING_GYM))


def normalise_content(prompt: str | Sequence[Message]) -> str:
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


def row_split(task: str, row: Row) -> Literal["train", "eval"]:
    """The split to which a problem of a task belongs: by its content, or by what the task says decides it."""
    decides = GENERATORS[task].split_by if task in GENERATORS else None
    return content_split(normalise_content(decides(row) if decides else row["prompt"]))


def generate(task: str, size: int, seed: int = 0, split: Literal["train", "eval"] = "train", **args: Any) -> list[Row]:
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
    rows: list[Row] = []
    seen: set[str] = set()
    misses = 0
    for row in _draws(task, f"{task}/{seed}/{split}", args):
        content = normalise_content(row["prompt"])
        if content in seen or row_split(task, row) != split:
            misses += 1
            if misses >= PATIENCE:
                raise DataError(
                    f"{task}: only {len(rows)} distinct problems of the {split} split were found, not {size}; "
                    f"ask for fewer, or make the task larger (its arguments: {', '.join(_arguments(task))})"
                )
            continue
        misses = 0
        seen.add(content)
        rows.append({**row, "data_source": row.get("data_source", task)})
        if len(rows) == size:
            break
    return rows


def _draws(task: str, key: str, args: dict[str, Any]) -> Iterator[Row]:
    """Rows without end."""
    number = int.from_bytes(hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest(), "little")
    if task.startswith(REASONING_GYM):
        from atomrl.data.reasoning_gym_rows import draw_rows

        yield from draw_rows(task.removeprefix(REASONING_GYM), number, args)
        return
    make, known = find_generator(task).make, _arguments(task)
    for name in args:
        if name not in known:
            raise DataError(f"{task} has no argument {name!r}; {did_you_mean(name, known)}")
    rng = random.Random(number)
    while True:
        with said_as(DataError, f"{task} with {args}", TypeError, ValueError):
            row = make(rng, **args)
        yield row


def find_generator(task: str) -> Generator:
    """The generator of a name.

    Raises:
        DataError: there is none.
    """
    if task not in GENERATORS:
        raise DataError(f"unknown task {task!r}; {did_you_mean(task, [*GENERATORS, 'reasoning_gym:NAME'])}")
    return GENERATORS[task]


def find_completions(task: str, kind: Literal["demonstrate", "pair"]) -> Draw:
    """What writes completions of that kind for a generator's problems.

    Raises:
        DataError: it has none.
    """
    draw = getattr(GENERATORS.get(task), kind, None)
    if draw is None:
        what = "demonstrations" if kind == "demonstrate" else "pairs of completions"
        able = ", ".join(name for name, generator in GENERATORS.items() if getattr(generator, kind))
        raise DataError(f"the task {task!r} writes no {what} ({able} does); give a file that has them")
    return cast(Draw, draw)


def task_words(source: str | list[str]) -> Sequence[str]:
    """What a tokenizer made for the task should have as one token each; empty where the task (or file) has no say."""
    return GENERATORS[source].words if isinstance(source, str) and source in GENERATORS else ()


def _arguments(task: str) -> list[str]:
    if task.startswith(REASONING_GYM):
        return ["see reasoning-gym"]
    return list(inspect.signature(find_generator(task).make).parameters)[1:]
