"""Chained arithmetic on the last digit: the quickstart's task.

"Start with 3. Add 5. Times 7." is 3 -> 8 -> 6. A small model cannot do several steps in its head, but each single
step is one of 210 facts, so writing the steps down is what makes it right: `3+5=8*7=6`.

Demonstrations come in two styles, as people's do. A careful one writes every step; a hasty one says `easy` and jumps
to the answer. A model that imitates both mostly jumps and is mostly wrong. What reinforcement learning finds out is
that steps pay.

No two steps share an operand, so that the next one can be found by the last one's number. There are
101,482,560 problems of four to six steps (869,760 of four alone).
"""

from __future__ import annotations

import random
import re
from typing import Any

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
