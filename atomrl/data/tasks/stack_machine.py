"""Stack machine: run a small program in the head and say what it leaves on top of the stack.

    A stack machine works on numbers modulo 100. Its program: push 7; push 12; dup; add; swap; mul. What is on top of
    the stack at the end?

It tests keeping a state over many steps, which is hard for language models and easier with written reasoning. The
length of the program sets the difficulty. With the defaults (6 to 10 operations, numbers to 20) there are more than
10**10 problems. Score it with `strict_math`.
"""

from __future__ import annotations

import random
from typing import Any

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
