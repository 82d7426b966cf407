"""The four rewards of the well-known GSM8K tutorials for GRPO, in their `<think>` and `<answer>` form.

They differ from the tutorials in three points, each of which gave 0 to what was right: numbers are compared as
numbers (18.0 is 18, 1,000 is 1000), the reasoning may have several lines, and the text may end at `</answer>`.
"""

from collections.abc import Mapping
from typing import Any

from atomrl.rewards.answers import answers_equal, require_truth, truth_text
from atomrl.rewards.format import TAGS, tagged_answer

_MARKS = ("<think>\n", "</think>\n", "<answer>\n", "</answer>\n")


def correctness_reward(
    prompts: list[Any],
    completions: list[str],
    ground_truth: list[Any] | None = None,
    answer: list[Any] | None = None,
    answers: list[Any] | None = None,
    **columns: Any,
) -> list[float]:
    """2.0 where the last `<answer>` block equals the truth (`rewards.answers.answers_equal`), else 0.0.

    Args:
        ground_truth: the truth; a GSM8K solution counts by what follows its `####`.
        answer: read where there is no `ground_truth`, for data sets that call the column so.
        answers: likewise.

    Raises:
        ValueError: a completion has no truth in any of the three.

    Example:
        >>> correctness_reward([""] * 2, ["<answer>18</answer>", "18"], ["18", "18"])
        [2.0, 0.0]
    """
    given = {"ground_truth": ground_truth, "answer": answer, "answers": answers}
    scores = []
    for row, completion in enumerate(completions):
        truth = read_answer({name: column[row] for name, column in given.items() if column is not None})
        found = tagged_answer(completion)
        scores.append(2.0 * (found is not None and answers_equal(found, truth)))
    return scores


def read_answer(row: Mapping[str, Any]) -> str:
    """The truth of a row for `correctness_reward`.

    Raises:
        TypeError: it is neither text nor number.
        ValueError: there is none, or it is empty.

    Example:
        >>> read_answer({"ground_truth": None, "answer": "9 + 9 = 18" + chr(10) + "#### 18"})
        '18'
    """
    truth = next((row[name] for name in ("ground_truth", "answer", "answers") if row.get(name) is not None), None)
    if truth is None:
        raise ValueError("there is no truth: none of the columns ground_truth, answer and answers has a value")
    return require_truth(truth_text(truth).rpartition("####")[2])


def digit_reward(prompts: list[Any], completions: list[str], *unused: Any, **columns: Any) -> list[float]:
    """0.5 where the last `<answer>` block is digits only (no sign, point or comma), else 0.0.

    Example:
        >>> digit_reward([""] * 2, ["<answer>18</answer>", "<answer>$18</answer>"])
        [0.5, 0.0]
    """
    found = [tagged_answer(completion) or "" for completion in completions]
    return [0.5 * (text.isascii() and text.isdigit()) for text in found]


def hard_format_reward(prompts: list[Any], completions: list[str], *unused: Any, **columns: Any) -> list[float]:
    r"""0.5 for exactly `<think>\n...\n</think>\n<answer>\n...\n</answer>`, with or without a last line end, else 0.0.

    Each tag stands once.

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
    r"""0.125 for each of the four tags that stands exactly once, at the end of its line: a step towards the form.

    Example:
        >>> mark_reward([""] * 2, ["<think>\n9+9\n</think>\n<answer>\n18\n</answer>", "<think>\n<answer>18"])
        [0.5, 0.125]
    """
    return [0.125 * sum((text + "\n").count(mark) == 1 for mark in _MARKS) for text in completions]
