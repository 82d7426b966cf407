"""Sums and products, one kind of which needs a computer: the task of the Python quickstart.

"Add 6 to 4837." a small model can learn to answer at once. "Multiply 483 by 962." it cannot, but a program can. The
environment `python` runs what the model writes between `<python>` and `</python>`; `exact_match` scores the answer.

Demonstrations run the program or say the answer at once, by chance and whatever the question is; either way they end
with the right answer. So a model that imitates them can write programs, but does not know when it needs one; that is
left to reinforcement learning. There are 90,000 sums and 810,000 products.
"""

from __future__ import annotations

import random
from typing import Any

from atomrl.types import Message

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
