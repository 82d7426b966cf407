"""Countdown: combine numbers into an expression that equals a target.

    Use each of the numbers 3, 7, 25 exactly once, with + - * / and parentheses, to write an expression that
    equals 46.

Many expressions are right, so it is scored by its own reward, `countdown`, which takes the numbers from the column
`numbers` and the target from `ground_truth`; `solution` is one expression that is right. The numbers are in rising
order, so that the same problem cannot appear twice in another order. With the defaults (3 or 4 numbers of 1 to 99,
targets 10 to 99) there are some 5 x 10**7 problems; with three numbers alone some 5 x 10**5.
"""

from __future__ import annotations

import random
from typing import Any


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
