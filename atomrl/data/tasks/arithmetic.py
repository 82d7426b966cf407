"""Chained arithmetic: a start value and steps that each add, subtract or multiply.

    Start with 17. Add 25. Multiply by 3. Subtract 40. What is the result?

Every intermediate value stays between 0 and `max_value`, so that the answer is a whole number that a person could
work out. With the defaults (4 steps, numbers to 50, values to 999) there are more than 10**7 problems; with 2 steps
more than 10**5. Score it with `strict_math`.
"""

from __future__ import annotations

import random
from typing import Any


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
