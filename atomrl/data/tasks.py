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
from atomrl.data import shapes
from atomrl.data.files import DataError
from atomrl.types import Message

# --------------------------------------------------------------------------------------------------------------------
# Questions about places that need a known number of searches: the task of the search quickstart.
#
# "What is the population of the nearest larger place of Balkh?" is a question of two hops: the document of Balkh says
# that it is Kunduz, and that of Kunduz has its population. Questions of 1 to 4 hops cannot be guessed and need as many
# searches; those of 0 hops ("What comes after 41?") need none. The environment `places` answers searches, and the
# reward `exact_match` scores answers.
#
# Demonstrations search 0 to 3 times along the chain, a random number that does not depend on the question, and then
# give the right answer, or `?` if they have not reached it. So a model that imitates them can search and can read an
# answer from a document, but has to learn by reinforcement how often to search.
#
# There are 14,804 places in 191 countries, from GeoNames (https://www.geonames.org, CC BY 4.0; `tools/make_places.py`).
# The nearest larger place is in the same country, so chains never leave it, and whole countries are of the eval split.
# There are 10,494 places to ask about (those with a chain of five), and 10,000 questions of 0 hops.

FILE = Path(__file__).with_name("places.tsv.xz")
MAX_HOPS = 4
CHAIN = MAX_HOPS + 1
"""Places in a chain: one more than any question needs, so that a demonstration can search beyond it."""
SEARCHES = {0: 0.3, 1: 0.3, 2: 0.25, 3: 0.15}
"""Number of searches in a demonstration -> its probability."""
NUMBERS = 10_000
POPULATION, LARGER, NEXT = "What is the population of ", "the nearest larger place of ", "What comes after "
HAS, NEAR = ": population ", ", nearest larger place "
WORDS = (
    *(POPULATION, LARGER, NEXT, HAS, NEAR),
    *("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"),
)
"""Strings that a tokenizer for this task encodes as one token each. Digits and letters are single bytes, so that names
and numbers are copied in the same way."""


class Place(NamedTuple):
    """A row of the file of places."""

    name: str
    country: str
    """Two letters."""
    population: int
    larger: str
    """The nearest place in the country with more people; "" for the largest one."""

    @property
    def document(self) -> str:
        """The text that a search for the place returns."""
        return f"{self.name}{HAS}{self.population}" + (f"{NEAR}{self.larger}" if self.larger else "")


@cache
def read_places() -> dict[str, Place]:
    """Return all places by name.

    Example:
        >>> read_places()["Balkh"].document
        'Balkh: population 114883, nearest larger place Kunduz'
    """
    lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {name: Place(name, country, int(people), larger) for name, country, people, larger in rows}


def find(query: str) -> str:
    """Search for a place by its exact name; an empty result if there is none.

    Example:
        >>> find("Kabul"), find("Camelot")
        ('<information>Kabul: population 4434550</information>', '<information></information>')
    """
    place = read_places().get(query)
    return _information(place.document if place else "")


def _information(document: str) -> str:
    return f"<information>{document}</information>"


def chain_of(name: str) -> list[str]:
    """Return a place, the nearest larger one, and so on; at most `CHAIN` places.

    Example:
        >>> chain_of("Balkh")
        ['Balkh', 'Kunduz', 'Kabul']
    """
    places, chain = read_places(), [name]
    while len(chain) < CHAIN and (larger := places[chain[-1]].larger):
        chain.append(larger)
    return chain


@cache
def _askable() -> list[str]:
    """Return the places with a full chain."""
    return [name for name in read_places() if len(chain_of(name)) == CHAIN]


def _respelt(rng: random.Random, names: Sequence[str]) -> list[str]:
    """Replace names by random ones of the same length, which a model can only copy."""
    letters = [rng.choices(ascii_lowercase, k=len(name)) for name in names]
    return ["".join(chosen).capitalize() for chosen in letters]


def make(rng: random.Random, hops: Sequence[int] = (0, 1, 1, 2, 2, 3), respelt: float = 0.0) -> dict[str, Any]:
    """Draw one problem.

    Args:
        rng: random number generator.
        hops: numbers of searches to draw from, 0 to 4; a repeated number is drawn more often.
        respelt: share of problems with made-up names. No search finds these places, so they are for demonstrations
            only, which contain the results: names can then only be copied, not memorised.

    Raises:
        ValueError: a number of hops is out of range, or `respelt` is not between 0 and 1.

    Example:
        >>> row = make(random.Random(1), hops=[2])
        >>> row["prompt"], row["ground_truth"], row["data_source"]
        ('What is the population of the nearest larger place of Tulsa?', '633104', 'places-2')
    """
    if not hops or not set(hops) <= set(range(MAX_HOPS + 1)):
        raise ValueError(f"hops must be a list of numbers from 0 to {MAX_HOPS}, got {hops}")
    if not 0.0 <= respelt <= 1.0:
        raise ValueError(f"respelt must be between 0 and 1, got {respelt}")
    number = rng.choice(hops)
    if number == 0:
        start = str(rng.randrange(NUMBERS))
        prompt, answer, country, chain = f"{NEXT}{start}?", int(start) + 1, "", [start] * CHAIN
        documents = [""] * CHAIN
    else:
        chain = chain_of(rng.choice(_askable()))
        places = [read_places()[name] for name in chain]
        answer, country = places[number - 1].population, places[0].country
        if respelt and rng.random() < respelt:
            chain = _respelt(rng, chain)
            larger = [*chain[1:], places[-1].larger]
            places = [p._replace(name=n, larger=x) for p, n, x in zip(places, chain, larger, strict=True)]
        prompt = f"{POPULATION}{LARGER * (number - 1)}{chain[0]}?"
        documents = [place.document for place in places]
    return {
        "prompt": prompt,
        "ground_truth": str(answer),
        "data_source": f"places-{number}",
        "country": country,
        "chain": chain,
        "found": [*map(_information, documents)],
        "hops": number,
    }


def split_by(row: dict[str, Any]) -> str:
    """Return the key of the split: the country, or the question if it has none."""
    return str(row["country"] or row["prompt"])


def demonstrate(rng: random.Random, row: dict[str, Any]) -> list[Message]:
    """Write a demonstration: a random number of searches with their results, then the answer.

    The answer is `?` if the question needs more searches: an answer that no result contains would teach the model to
    invent one.

    Example:
        >>> chain = ["Balkh", "Kunduz", "Kabul"]
        >>> row = {"chain": chain, "found": [*map(find, chain)], "ground_truth": "114883", "hops": 1}
        >>> [message["content"] for message in demonstrate(random.Random(1), row)]
        ['<answer>?</answer>']
        >>> [message["role"] for message in demonstrate(random.Random(0), row)]
        ['assistant', 'environment', 'assistant', 'environment', 'assistant']
    """
    (searches,) = rng.choices([*SEARCHES], [*SEARCHES.values()])
    messages = []
    for name, result in zip(row["chain"][:searches], row["found"], strict=False):
        messages.append(Message(role="assistant", content=f"<search>{name}</search>"))
        messages.append(Message(role="environment", content=result))
    answer = row["ground_truth"] if searches >= row["hops"] else "?"
    return [*messages, Message(role="assistant", content=f"<answer>{answer}</answer>")]


# --------------------------------------------------------------------------------------------------------------------
# Chained arithmetic: a start value and steps that each add, subtract or multiply.
#
#     Start with 17. Add 25. Multiply by 3. Subtract 40. What is the result?
#
# Every intermediate value stays between 0 and `max_value`, so that the answer is a whole number that a person could
# work out. With the defaults (4 steps, numbers to 50, values to 999) there are more than 10**7 problems; with 2 steps
# more than 10**5. Score it with `strict_math`.


def make_arithmetic(rng: random.Random, steps: int = 4, max_number: int = 50, max_value: int = 999) -> dict[str, Any]:
    """Draw one problem.

    Args:
        steps: operations after the start value.
        max_number: the largest number added or subtracted; multipliers go to 9.
        max_value: no intermediate value exceeds it.

    Raises:
        ValueError: an argument below 1, or `max_value` below `max_number`.

    Example:
        >>> make_arithmetic(random.Random(1), steps=2)["prompt"]
        'Start with 9. Multiply by 3. Subtract 4. What is the result?'
    """
    if steps < 1 or max_number < 1 or max_value < max_number:
        raise ValueError("steps and max_number must be at least 1, and max_value at least max_number")
    value = rng.randint(1, max_number)
    sentences = [f"Start with {value}."]
    for _ in range(steps):
        choices = []
        if value < max_value:
            choices.append("Add")
        if value > 0:
            choices.append("Subtract")
        if 0 < 2 * value <= max_value:
            choices.append("Multiply by")
        verb = rng.choice(choices)
        if verb == "Add":
            number = rng.randint(1, min(max_number, max_value - value))
            value += number
        elif verb == "Subtract":
            number = rng.randint(1, min(max_number, value))
            value -= number
        else:
            number = rng.randint(2, min(9, max_value // value))
            value *= number
        sentences.append(f"{verb} {number}.")
    return {"prompt": " ".join([*sentences, "What is the result?"]), "ground_truth": str(value)}


# --------------------------------------------------------------------------------------------------------------------
# Sums and products, one kind of which needs a computer: the task of the Python quickstart.
#
# "Add 6 to 4837." a small model can learn to answer at once. "Multiply 483 by 962." it cannot, but a program can. The
# environment `python` runs what the model writes between `<python>` and `</python>`; `exact_match` scores the answer.
#
# Demonstrations run the program or say the answer at once, by chance and whatever the question is; either way they end
# with the right answer. So a model that imitates them can write programs, but does not know when it needs one; that is
# left to reinforcement learning. There are 90,000 sums and 810,000 products.

CALCULATION_WORDS = (
    *("Add ", " to ", "Multiply ", " by "),
    *("<python>print(", ")</python>", "\n<output>\n", "\n</output>\n", "<answer>", "</answer>"),
)
"""Strings that a tokenizer for this task encodes as one token each."""
PROGRAMS = 0.5
"""Share of demonstrations that run a program."""


def make_calculation(rng: random.Random, products: float = 0.5) -> dict[str, Any]:
    """Draw one problem.

    Args:
        rng: random number generator.
        products: share of products among problems; the others are sums.

    Raises:
        ValueError: `products` is not between 0 and 1.

    Example:
        >>> row = make_calculation(random.Random(1), products=1.0)
        >>> row["prompt"], row["ground_truth"], row["data_source"]
        ('Multiply 967 by 921.', '890607', 'calculation-product')
    """
    if not 0.0 <= products <= 1.0:
        raise ValueError(f"products must be between 0 and 1, got {products}")
    if rng.random() < products:
        first, second = rng.randint(100, 999), rng.randint(100, 999)
        prompt, expression = f"Multiply {first} by {second}.", f"{first}*{second}"
        answer, kind = first * second, "product"
    else:
        first, second = rng.randrange(10_000), rng.randint(1, 9)
        prompt, expression = f"Add {second} to {first}.", f"{first}+{second}"
        answer, kind = first + second, "sum"
    return {
        "prompt": prompt,
        "ground_truth": str(answer),
        "data_source": f"calculation-{kind}",
        "expression": expression,
    }


def demonstrate_calculation(rng: random.Random, row: dict[str, Any]) -> list[Message]:
    """Write the right answer, half of the time after a program that computes it.

    Example:
        >>> row = {"expression": "3*4", "ground_truth": "12"}
        >>> [message["content"] for message in demonstrate_calculation(random.Random(1), row)]
        ['<python>print(3*4)</python>', '\\n<output>\\n12\\n</output>\\n', '<answer>12</answer>']
    """
    messages = []
    if rng.random() < PROGRAMS:
        program = f"<python>print({row['expression']})</python>"
        messages.append(Message(role="assistant", content=program))
        messages.append(Message(role="environment", content=f"\n<output>\n{row['ground_truth']}\n</output>\n"))
    return [*messages, Message(role="assistant", content=f"<answer>{row['ground_truth']}</answer>")]


# --------------------------------------------------------------------------------------------------------------------
# Chained arithmetic on the last digit: the quickstart's task.
#
# "Start with 3. Add 5. Times 7." is 3 -> 8 -> 6. A small model cannot do several steps in its head, but each single
# step is one of 210 facts, so writing the steps down is what makes it right: `3+5=8*7=6`.
#
# Demonstrations come in two styles, as people's do. A careful one writes every step; a hasty one says `easy` and jumps
# to the answer. A model that imitates both mostly jumps and is mostly wrong. What reinforcement learning finds out is
# that steps pay.
#
# No two steps share an operand, so that the next one can be found by the last one's number. There are
# 101,482,560 problems of four to six steps (869,760 of four alone).

SIGNS = {"Add": "+", "Subtract": "-", "Times": "*"}
CHAIN_WORDS = (
    "Start with ",
    *(f". {verb} " for verb in SIGNS),
    ". What is the last digit?",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "easy",
)
"""Strings that a tokenizer for this task encodes as one token each."""
CAREFUL = 0.3
"""Share of careful demonstrations."""
ONE_BY_ONE = 0.6, 0.3
"""Shares of right and of wrong solutions, in pairs, whose steps are written one by one."""


def make_chain(rng: random.Random, min_steps: int = 4, max_steps: int = 6) -> dict[str, Any]:
    """Draw one problem.

    Args:
        rng: random number generator.
        min_steps: fewest operations.
        max_steps: most operations.

    Raises:
        ValueError: not 1 <= `min_steps` <= `max_steps`.

    Example:
        >>> make_chain(random.Random(1), min_steps=2, max_steps=2)["prompt"]
        'Start with 2. Subtract 2. Subtract 9. What is the last digit?'
    """
    if not 1 <= min_steps <= max_steps:
        raise ValueError(f"steps must satisfy 1 <= min_steps <= max_steps, got {min_steps} and {max_steps}")
    value = start = rng.randrange(10)
    prompt, steps = f"Start with {start}", str(start)
    count = rng.randint(min_steps, max_steps)
    left = set(range(1, 10))
    for _ in range(count):
        # Multiplication by 3, 7 or 9 is invertible mod 10, so no step loses the value before it.
        factors = left & {3, 7, 9}
        verb = rng.choice(list(SIGNS) if factors else ["Add", "Subtract"])
        operand = rng.choice(sorted(factors if verb == "Times" else left))
        left.remove(operand)
        value = {"Add": value + operand, "Subtract": value - operand, "Times": value * operand}[verb] % 10
        prompt += f". {verb} {operand}"
        steps += f"{SIGNS[verb]}{operand}={value}"
    return {
        "prompt": f"{prompt}. What is the last digit?",
        "ground_truth": str(value),
        "steps": steps,
        "operations": count,
    }


def demonstrate_chain(rng: random.Random, row: dict[str, Any]) -> str:
    """Write a solution in one of the two styles.

    Example:
        >>> row = {"steps": "3+5=8*7=6", "ground_truth": "6"}
        >>> {demonstrate_chain(random.Random(seed), row) for seed in range(9)} == {
        ...     "<think>easy</think><answer>6</answer>", "<think>3+5=8*7=6</think><answer>6</answer>"}
        True
    """
    reasoning = row["steps"] if rng.random() < CAREFUL else "easy"
    return f"<think>{reasoning}</think><answer>{row['ground_truth']}</answer>"


def chain_pair(rng: random.Random, row: dict[str, Any]) -> tuple[str, str]:
    """Write a right and a wrong careful solution. The wrong one has a false step, from which it computes correctly.

    Steps are written as a chain, as in demonstrations, or one by one, which a model trained on demonstrations finds
    unlikely. Right solutions are more often one by one, so that at first likelihood does not tell right from wrong.

    Example:
        >>> row = {"steps": "3+5=8*7=6", "ground_truth": "6"}
        >>> chain_pair(random.Random(1), row)
        ('<think>3+5=8,8*7=6</think><answer>6</answer>', '<think>3+5=0*7=0</think><answer>0</answer>')
    """
    start, *steps = re.findall(r"^\d|[-+*]\d=\d", row["steps"])
    false_step, value = rng.randrange(len(steps)), int(start)
    wrong = [start]
    for place, step in enumerate(steps):
        operand = int(step[1])
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[step[0]] % 10
        if place == false_step:
            value = (value + rng.randrange(1, 10)) % 10
        wrong.append(f"{step[:2]}={value}")
    chosen, rejected = ONE_BY_ONE
    return _solution([start, *steps], rng.random() < chosen), _solution(wrong, rng.random() < rejected)


def _solution(steps: list[str], one_by_one: bool) -> str:
    """Join steps to a solution: `3+5=8*7=6`, or one by one, `3+5=8,8*7=6`."""
    separators = ["", *(f",{step[-1]}" for step in steps[1:-1])] if one_by_one else [""] * len(steps)
    joined = steps[0] + "".join(between + step for between, step in zip(separators, steps[1:], strict=False))
    return f"<think>{joined}</think><answer>{steps[-1][-1]}</answer>"


# --------------------------------------------------------------------------------------------------------------------
# Countdown: combine numbers into an expression that equals a target.
#
#     Use each of the numbers 3, 7, 25 exactly once, with + - * / and parentheses, to write an expression that
#     equals 46.
#
# Many expressions are right, so it is scored by its own reward, `countdown`, which takes the numbers from the column
# `numbers` and the target from `ground_truth`; `solution` is one expression that is right. The numbers are in rising
# order, so that the same problem cannot appear twice in another order. With the defaults (3 or 4 numbers of 1 to 99,
# targets 10 to 99) there are some 5 x 10**7 problems; with three numbers alone some 5 x 10**5.


def make_countdown(
    rng: random.Random,
    min_numbers: int = 3,
    max_numbers: int = 4,
    max_number: int = 99,
    min_target: int = 10,
    max_target: int = 99,
) -> dict[str, Any]:
    """Draw one problem that has a solution.

    Args:
        min_numbers, max_numbers: how many numbers a problem has.
        max_number: the largest of them.
        min_target, max_target: the range of the target.

    Raises:
        ValueError: an empty range, or no problem with such a target in 100,000 draws.
    """
    if not 2 <= min_numbers <= max_numbers or max_number < 1 or not 0 <= min_target <= max_target:
        raise ValueError("needs 2 <= min_numbers <= max_numbers, max_number >= 1 and 0 <= min_target <= max_target")
    for _ in range(100_000):
        numbers = [rng.randint(1, max_number) for _ in range(rng.randint(min_numbers, max_numbers))]
        value, solution = _combine(rng, [(number, str(number)) for number in numbers])
        if min_target <= value <= max_target:
            return _countdown_row(sorted(numbers), value, solution)
    raise ValueError("found no problem with a target in that range")


def _combine(rng: random.Random, parts: list[tuple[int, str]]) -> tuple[int, str]:
    """Join random pairs until one value is left; only whole, non-negative values appear on the way."""
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        operators = ["+", "*"] + (["-"] if a >= b else []) + (["/"] if b and a % b == 0 else [])
        operator = rng.choice(operators)
        value = {"+": a + b, "*": a * b, "-": a - b, "/": a // b if b else 0}[operator]
        parts.append((value, f"({left} {operator} {right})"))
    value, solution = parts[0]
    return value, solution[1:-1]


def _countdown_row(numbers: list[int], target: int, solution: str) -> dict[str, Any]:
    listed = ", ".join(map(str, numbers))
    prompt = (
        f"Use each of the numbers {listed} exactly once, with + - * / and parentheses, "
        f"to write an expression that equals {target}."
    )
    return {"prompt": prompt, "ground_truth": str(target), "numbers": numbers, "solution": solution}


# --------------------------------------------------------------------------------------------------------------------
# Stack machine: run a small program in the head and say what it leaves on top of the stack.
#
#     A stack machine works on numbers modulo 100. Its program: push 7; push 12; dup; add; swap; mul. What is on top of
#     the stack at the end?
#
# It tests keeping a state over many steps, which is hard for language models and easier with written reasoning. The
# length of the program sets the difficulty. With the defaults (6 to 10 operations, numbers to 20) there are more than
# 10**10 problems. Score it with `strict_math`.

RULES = (
    "push n puts n on top; add, sub and mul replace the two topmost numbers a (below) and b (top) by a+b, a-b and "
    "a*b; dup copies the top; swap exchanges the two topmost numbers; drop removes the top"
)
NEEDS = {"add": 2, "sub": 2, "mul": 2, "dup": 1, "swap": 2, "drop": 2}
"""Operation -> numbers that it needs on the stack."""


def make_stack_machine(
    rng: random.Random,
    min_operations: int = 6,
    max_operations: int = 10,
    max_number: int = 20,
    modulus: int = 100,
    explain_rules: bool = True,
) -> dict[str, Any]:
    """Draw a program; the answer is the number on top of the stack at its end.

    Args:
        min_operations, max_operations: the length of the program.
        max_number: the largest number pushed.
        modulus: every result is taken modulo this.
        explain_rules: explain the operations in the prompt.

    Raises:
        ValueError: an empty range, or a modulus below 2.
    """
    if not 1 <= min_operations <= max_operations or max_number < 0 or modulus < 2:
        raise ValueError("needs 1 <= min_operations <= max_operations, max_number >= 0 and modulus >= 2")
    program: list[str] = []
    stack: list[int] = []
    for _ in range(rng.randint(min_operations, max_operations)):
        possible = [name for name, needs in NEEDS.items() if len(stack) >= needs]
        # with fewer pushes the stack would often be empty
        name = "push" if not possible or rng.random() < 0.4 else rng.choice(possible)
        if name == "push":
            name = f"push {rng.randint(0, max_number)}"
        program.append(name)
        run_operation(stack, name, modulus)
    rules = f" ({RULES})" if explain_rules else ""
    prompt = (
        f"A stack machine works on numbers modulo {modulus}{rules}. Its program: {'; '.join(program)}. "
        "What number is on top of the stack at the end?"
    )
    return {"prompt": prompt, "ground_truth": str(stack[-1]), "operations": len(program)}


def run_operation(stack: list[int], operation: str, modulus: int) -> None:
    """Apply one operation to the stack, in place.

    Example:
        >>> stack = [7, 12]
        >>> run_operation(stack, "sub", 100)
        >>> stack
        [95]
    """
    name, _, number = operation.partition(" ")
    if name == "push":
        stack.append(int(number) % modulus)
    elif name == "dup":
        stack.append(stack[-1])
    elif name == "drop":
        stack.pop()
    elif name == "swap":
        stack[-1], stack[-2] = stack[-2], stack[-1]
    else:
        b, a = stack.pop(), stack.pop()
        stack.append({"add": a + b, "sub": a - b, "mul": a * b}[name] % modulus)


# --------------------------------------------------------------------------------------------------------------------
# The tasks of the `reasoning-gym` package (more than 100). Needs the `tasks` extra.
#
# The column `reasoning_gym` has everything that the package needs to score an answer; the reward of the same name reads
# it. Arguments are those of the task's own config class, such as `min_n` for `binary_matrix`.

CHUNK = 500
"""Problems per reasoning-gym data set: some tasks generate all of them at once."""
ANY_ANSWER = "(any answer that the task accepts)"
"""Ground truth of tasks with several right answers."""


def draw_rows(name: str, seed: int, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield problems of a reasoning-gym task without end.

    Raises:
        DataError: the package is not installed, or the task or an argument is unknown.
    """
    with reraise_as(DataError, "reasoning_gym tasks need the extra: pip install 'atomrl[tasks]'", ImportError):
        from reasoning_gym.factory import DATASETS, create_dataset
    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no task {name!r}; {did_you_mean(name, DATASETS)}")
    if {"seed", "size"} & set(args):
        raise DataError("seed and size are not arguments of the task; pass them separately")
    while True:
        seed %= 2**31
        with reraise_as(DataError, f"reasoning_gym:{name} with {args}", AssertionError, TypeError, ValueError):
            dataset = create_dataset(name, seed=seed, size=CHUNK, **args)
            for index in range(len(dataset)):
                yield _reasoning_gym_row(name, args, dataset[index])
        seed += CHUNK  # a problem's own seed is the data set's plus its index


def _reasoning_gym_row(name: str, args: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    answer = entry["answer"]
    return {
        "prompt": entry["question"],
        "ground_truth": ANY_ANSWER if answer is None else str(answer),
        "data_source": f"reasoning_gym:{name}",
        # through JSON, so that rows from a file and from the generator are equal
        "reasoning_gym": json.loads(
            json.dumps({"name": name, "args": args, "answer": answer, "metadata": entry["metadata"]}, default=str)
        ),
    }


# --------------------------------------------------------------------------------------------------------------------
# The registry, and drawing the problems of a split.

Row = dict[str, Any]
Draw = Callable[[random.Random, Row], str | list[Message] | tuple[str, str]]
"""(rng, row) -> completions: `demonstrate` or `pair` of a generator."""


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
    "places": Generator(make, demonstrate, words=WORDS, split_by=split_by),
    "shapes": Generator(shapes.make, shapes.demonstrate, words=shapes.WORDS, split_by=shapes.split_by),
    "stack_machine": Generator(make_stack_machine),
}

REASONING_GYM = "reasoning_gym:"
EVAL_SHARE = 10
"""One problem in `EVAL_SHARE` is of the eval split, whatever the seed."""
PATIENCE = 20_000
"""Draws in a row without a new problem after which there are taken to be no more."""


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
