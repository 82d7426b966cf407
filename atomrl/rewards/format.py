"""The strict format of a completion, `<think>reasoning</think><answer>answer</answer>`, and the reward for it.

Rewards that compare the answer with a ground truth are in `verifiable`; `extraction` finds an answer in any format.
"""

from __future__ import annotations

from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def split_strict(text: str) -> tuple[str, str] | None:
    """Return (reasoning, answer), both stripped, of a completion in exactly the strict format, else None.

    The format is one think block, then one answer block, and only white space outside of them. Each of the four tags
    occurs exactly once, case-sensitive, without attributes or inner spaces. Neither block may be blank: an empty think
    block is the cheapest way to skip the reasoning.

    Example:
        >>> split_strict("<think>2+2 is 4</think> <answer>4</answer>")
        ('2+2 is 4', '4')
        >>> split_strict("So: <think>2+2 is 4</think><answer>4</answer>") is None
        True
    """
    text = text.strip()
    if not (text.startswith("<think>") and text.endswith("</answer>")) or any(text.count(tag) != 1 for tag in TAGS):
        return None
    reasoning, _, rest = text.removeprefix("<think>").partition("</think>")
    between, opened, answer = rest.removesuffix("</answer>").partition("<answer>")
    if not opened or between.strip() or not reasoning.strip() or not answer.strip():
        return None
    return reasoning.strip(), answer.strip()


def has_strict_format(text: str) -> bool:
    """Return True if a completion has exactly the format of `split_strict`."""
    return split_strict(text) is not None


def strict_format(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for the format that `strict_math` requires, with any answer, else 0.0.

    Example:
        >>> strict_format([""] * 2, ["<think>9+9</think><answer>19</answer>", "<answer>18</answer>"])
        [1.0, 0.0]
    """
    return [float(has_strict_format(completion)) for completion in completions]


def reasoning_text(text: str) -> str:
    """Return the text of the think block, stripped. An unclosed block extends to the end; "" if there is none.

    Example:
        >>> reasoning_text("<think> 2+2 is 4 </think><answer>4</answer>")
        '2+2 is 4'
    """
    return text.partition("<think>")[2].partition("</think>")[0].strip()
