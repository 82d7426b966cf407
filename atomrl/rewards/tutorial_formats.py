"""The rewards for format of the well-known GRPO tutorials on GSM8K, with their `<think>` and `<answer>` blocks.

Their fourth reward is `verifiable.correctness_reward`. They differ from the tutorials in two points, where those give
0 to correct completions: the reasoning may have several lines, and the text may end with `</answer>`.
"""

from __future__ import annotations

from typing import Any

from atomrl.rewards.extraction import tagged_answer
from atomrl.rewards.format import TAGS

_MARKS = ("<think>\n", "</think>\n", "<answer>\n", "</answer>\n")


def digit_reward(prompts: list[Any], completions: list[str], *unused: Any, **columns: Any) -> list[float]:
    """Return 0.5 if the last `<answer>` block is digits only (no sign, point or comma), else 0.0.

    Example:
        >>> digit_reward([""] * 2, ["<answer>18</answer>", "<answer>$18</answer>"])
        [0.5, 0.0]
    """
    texts = [tagged_answer(completion) or "" for completion in completions]
    return [0.5 * (text.isascii() and text.isdigit()) for text in texts]


def hard_format_reward(prompts: list[Any], completions: list[str], *unused: Any, **columns: Any) -> list[float]:
    r"""Return 0.5 for exactly `<think>\n...\n</think>\n<answer>\n...\n</answer>`, else 0.0.

    Each tag occurs once. A newline at the end is optional.

    Example:
        >>> hard_format_reward([""] * 2, ["<think>\n9+9\n</think>\n<answer>\n18\n</answer>", "<answer>18</answer>"])
        [0.5, 0.0]
    """
    return [0.5 * _has_form(completion.removesuffix("\n")) for completion in completions]


def _has_form(text: str) -> bool:
    _, opened, answer = text.removeprefix("<think>\n").partition("\n</think>\n<answer>\n")
    outer = text.startswith("<think>\n") and answer.endswith("\n</answer>")
    return bool(opened) and outer and all(text.count(tag) == 1 for tag in TAGS)


def mark_reward(prompts: list[Any], completions: list[str], *unused: Any, **columns: Any) -> list[float]:
    r"""Return 0.125 for each of the four tags that occurs exactly once, at the end of its line: partial credit for the
    format of `hard_format_reward`.

    Example:
        >>> mark_reward([""] * 2, ["<think>\n9+9\n</think>\n<answer>\n18\n</answer>", "<think>\n<answer>18"])
        [0.5, 0.125]
    """
    return [0.125 * sum((text + "\n").count(mark) == 1 for mark in _MARKS) for text in completions]
