"""Rewards for problems with one right answer."""

import re
from typing import Any

from atomrl.rewards.answers import answers_equal, parse_number, require_truths
from atomrl.rewards.format import has_strict_format, marked_answer, split_strict


def strict_math(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """1.0 for exactly the form `<think>...</think><answer>...</answer>` and an answer equal to the truth, else 0.0.

    The form is that of `rewards.format.split_strict`, equality that of `rewards.answers.answers_equal`.

    Example:
        >>> strict_math([""] * 2, ["<think>9+9</think><answer>18.0</answer>", "18"], ["18", "18"])
        [1.0, 0.0]
    """
    require_truths(ground_truth)
    rows = zip(map(split_strict, completions), ground_truth, strict=True)
    return [float(parts is not None and answers_equal(parts[1], truth)) for parts, truth in rows]


def strict_format(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """1.0 for the form that `strict_math` demands, whatever the answer, else 0.0.

    Example:
        >>> strict_format([""] * 2, ["<think>9+9</think><answer>19</answer>", "<answer>18</answer>"])
        [1.0, 0.0]
    """
    return [float(has_strict_format(completion)) for completion in completions]


def exact_match(
    prompts: list[Any], completions: list[str], ground_truth: list[Any], format_score: float = 0.0, **columns: Any
) -> list[float]:
    """1.0 where the answer (`rewards.format.extract_answer`) is the truth, character for character.

    Only the white space around both is ignored. Any other answer earns `format_score` where it is marked as one (by
    `<answer>`, `####` or `\\boxed{}`), and 0.0 where it is not.

    Example:
        >>> texts = ["The answer is <answer>B</answer>", "<answer>C</answer>", "b"]
        >>> exact_match([""] * 3, texts, ["B"] * 3, format_score=0.1)
        [1.0, 0.1, 0.0]
    """
    require_truths(ground_truth)
    scores = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        marked = marked_answer(completion)
        right = (completion.strip() if marked is None else marked) == str(truth).strip()
        scores.append(1.0 if right else format_score * (marked is not None))
    return scores


_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)  # 10-3 ends in 3, not in -3


def gsm8k(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """1.0 where the final number of the completion equals the truth, else 0.0.

    The final number is the first one after the last `####` (GSM8K's own form), or, without that mark, the last one
    of the text. The truth is a number, or a whole GSM8K solution that ends in `#### 18`.

    Example:
        >>> gsm8k([""] * 3, ["9 + 9 = 18\\n#### 18", "She makes $18.00 a day.", "18 or 19"], ["18", "#### 18", 18])
        [1.0, 1.0, 0.0]
    """
    pairs = zip(completions, ground_truth, strict=True)
    return [float(_final_number_equals(completion, truth)) for completion, truth in pairs]


def _final_number_equals(completion: str, truth: Any) -> bool:
    wanted = parse_number(str(truth).rpartition("####")[2])
    if wanted is None:
        raise ValueError(f"ground_truth is no number: {truth!r}")
    _, marked, tail = completion.rpartition("####")
    numbers = _NUMBER.findall(tail)  # without the mark, the tail is the whole completion
    return bool(numbers) and parse_number(numbers[0 if marked else -1].rstrip(",")) == wanted
