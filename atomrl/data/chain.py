"""Chained arithmetic on the last digit: the quickstart's task.

"Start with 3. Add 5. Times 7." is 3 -> 8 -> 6. A small model cannot do several steps in its head, but each single step
is one of 210 facts, so writing the steps down is what makes it right: `3+5=8*7=6`.

Demonstrations come in two styles, as people's do. A careful one writes every step; a hasty one says `easy` and jumps to
the answer. A model that imitates both mostly jumps and is mostly wrong. What reinforcement learning finds out is that
steps pay.

No two steps share an operand, so that the next one can be found by the last one's number. There are
101,482,560 problems of four to six steps (869,760 of four alone).
"""

import random
import re
from typing import Any

SIGNS = {"Add": "+", "Subtract": "-", "Times": "*"}
WORDS = (
    "Start with ",
    *(f". {verb} " for verb in SIGNS),
    ". What is the last digit?",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "easy",
)
"""What a tokenizer for this task has as one token each."""
CAREFUL = 0.3
"""Share of careful demonstrations."""
ONE_BY_ONE = 0.6, 0.3
"""Shares of right and of wrong solutions, in pairs, whose steps are written one by one."""


def make(rng: random.Random, min_steps: int = 4, max_steps: int = 6) -> dict[str, Any]:
    """One problem.

    Args:
        rng: where chance comes from.
        min_steps: fewest operations.
        max_steps: most operations.

    Raises:
        ValueError: the numbers of steps make no range.

    Example:
        >>> make(random.Random(1), min_steps=2, max_steps=2)["prompt"]
        'Start with 2. Subtract 2. Subtract 9. What is the last digit?'
    """
    if not 1 <= min_steps <= max_steps:
        raise ValueError(f"steps must satisfy 1 <= min_steps <= max_steps, got {min_steps} and {max_steps}")
    value = start = rng.randrange(10)
    prompt, steps = f"Start with {start}", str(start)
    count = rng.randint(min_steps, max_steps)
    left = set(range(1, 10))
    for _ in range(count):
        # Odd factors but 5 can be undone, so that no step forgets what was before it.
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


def demonstrate(rng: random.Random, row: dict[str, Any]) -> str:
    """A solution in one of the two styles.

    Example:
        >>> row = {"steps": "3+5=8*7=6", "ground_truth": "6"}
        >>> {demonstrate(random.Random(seed), row) for seed in range(9)} == {
        ...     "<think>easy</think><answer>6</answer>", "<think>3+5=8*7=6</think><answer>6</answer>"}
        True
    """
    reasoning = row["steps"] if rng.random() < CAREFUL else "easy"
    return f"<think>{reasoning}</think><answer>{row['ground_truth']}</answer>"


def pair(rng: random.Random, row: dict[str, Any]) -> tuple[str, str]:
    """A right and a wrong careful solution; the wrong one takes a false step, and counts on from there.

    The steps are written in a chain, as in demonstrations, or one by one, which a model that knows those alone finds
    unlikely. Right solutions are more often of the second kind, so that at first what is likely is as often wrong.

    Example:
        >>> row = {"steps": "3+5=8*7=6", "ground_truth": "6"}
        >>> pair(random.Random(1), row)
        ('<think>3+5=8,8*7=6</think><answer>6</answer>', '<think>3+5=0*7=0</think><answer>0</answer>')
    """
    start, *steps = re.findall(r"^\d|[-+*]\d=\d", row["steps"])
    astray, value = rng.randrange(len(steps)), int(start)
    wrong = [start]
    for place, step in enumerate(steps):
        operand = int(step[1])
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[step[0]] % 10
        if place == astray:
            value = (value + rng.randrange(1, 10)) % 10
        wrong.append(f"{step[:2]}={value}")
    chosen, rejected = ONE_BY_ONE
    return _solution([start, *steps], rng.random() < chosen), _solution(wrong, rng.random() < rejected)


def _solution(steps: list[str], one_by_one: bool) -> str:
    """`3+5=8*7=6`, or `3+5=8,8*7=6`."""
    separators = ["", *(f",{step[-1]}" for step in steps[1:-1])] if one_by_one else [""] * len(steps)
    written = steps[0] + "".join(between + step for between, step in zip(separators, steps[1:], strict=False))
    return f"<think>{written}</think><answer>{steps[-1][-1]}</answer>"
