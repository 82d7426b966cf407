"""Rewards of tasks with many correct answers: `countdown` and `reasoning_gym`."""

import ast
import functools
import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from atomrl.rewards.answers import parse_number
from atomrl.rewards.errors import require
from atomrl.rewards.expressions import MAX_CHARS, evaluate_arithmetic, is_tame_formula
from atomrl.rewards.extraction import tagged_answer
from atomrl.rewards.format import split_strict

LITERAL_TASKS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
ARITHMETIC_TASKS = ("countdown", "puzzle24")
FORMULA_TASKS = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
_LITERAL = re.compile(r"[0-9A-Za-z\s\[\](){},:'\"+.-]*")
_NO_LITERAL = re.compile(r"[0-9A-Za-z\])}'\"]\s*[(\[]|\.\s*[A-Za-z]")


def countdown(
    prompts: list[Any], completions: list[str], ground_truth: list[Any], numbers: list[list[int]], **columns: Any
) -> list[float]:
    """Return 1.0 for an expression that uses each of `numbers` once and equals the target, in `strict_math`'s format.

    The answer may end with `= target`. The expression is evaluated exactly and never executed.

    Example:
        >>> completion = "<think>25 is a start</think><answer>(25 - 3) * 7 = 154</answer>"
        >>> countdown([""], [completion], ["154"], numbers=[[3, 7, 25]])
        [1.0]
    """
    rows = zip(completions, ground_truth, numbers, strict=True)
    return [float(_solves(completion, str(target), row)) for completion, target, row in rows]


def _solves(completion: str, target: str, numbers: list[int]) -> bool:
    wanted = read_target(target, numbers)
    parts = split_strict(completion)
    if parts is None:
        return False
    expression, equals, claimed = parts[1].partition("=")
    result = evaluate_arithmetic(expression)
    if result is None or (equals and parse_number(claimed) != wanted):
        return False
    return result[0] == wanted and sorted(result[1]) == sorted(numbers)


def read_target(target: Any, numbers: Any) -> Fraction:
    """Parse the target of `countdown`.

    Raises:
        ValueError: it is not a number, or there are no numbers to combine.

    Example:
        >>> read_target("154", [3, 7, 25])
        Fraction(154, 1)
    """
    wanted = parse_number(str(target))
    if wanted is None or numbers is None or not len(numbers):
        raise ValueError(f"needs a number as ground_truth and a list of numbers, not {target!r} and {numbers!r}")
    return wanted


def reasoning_gym(
    prompts: list[Any], completions: list[str], reasoning_gym: list[dict[str, Any]], **columns: Any
) -> list[float]:
    """Score the last `<answer>` block with the task's own `score_answer`; 0.0 without one.

    Values are between 0 and 1; many tasks give partial credit for the right format. An answer on which the task's
    scorer raises an exception scores 0.0. Nine tasks would execute the answer as Python: for those it must be a
    literal, an arithmetic expression or a safe formula (`is_tame_formula`), else it scores 0.0.

    Args:
        reasoning_gym: the column of this name that the generator `reasoning_gym:NAME` writes.
    """
    return [_task_score(completion, task) for completion, task in zip(completions, reasoning_gym, strict=True)]


def _task_score(completion: str, task: dict[str, Any]) -> float:
    answer = tagged_answer(completion)
    score_answer = _scorer(task["name"], json.dumps(task["args"], sort_keys=True))
    metadata = task["metadata"]
    if task["name"] in ("arc_agi", "rearc"):  # their scorers compare boards, which are tuples, with ==
        metadata = _tuples(metadata)
    entry = {"answer": task["answer"], "metadata": metadata}
    if answer is None or not _safe_to_score(task["name"], answer, entry):
        return 0.0
    try:
        return float(score_answer(answer, entry))
    except Exception:  # the scorers do not handle every text
        return 0.0


@functools.lru_cache(maxsize=64)
def _scorer(name: str, args: str) -> Callable[[str, dict[str, Any]], float]:
    warm_up()
    from reasoning_gym.factory import create_dataset

    score: Callable[[str, dict[str, Any]], float]
    score = create_dataset(name, seed=0, size=500, **json.loads(args)).score_answer
    return score


def warm_up() -> None:
    """Import the package, which takes some seconds, before the first time limit starts."""
    require("reasoning_gym", "reasoning_gym", "tasks")
    import reasoning_gym.factory  # noqa: F401


def _safe_to_score(name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Return True if an answer may be passed to the package's scorer. Those of the tasks listed above execute it."""
    if name in LITERAL_TASKS:
        is_solution = answer == entry["answer"] or answer in entry["metadata"].get("valid_answers", ())
        return is_solution or is_literal(answer)
    if name in ARITHMETIC_TASKS:
        return evaluate_arithmetic(answer) is not None
    return name not in FORMULA_TASKS or is_tame_formula(answer)


def is_literal(text: str) -> bool:
    """Return True for a Python literal. Texts with a call, an attribute or an operator never reach Python's parser."""
    if len(text) > 10 * MAX_CHARS or not _LITERAL.fullmatch(text) or _NO_LITERAL.search(text):
        return False
    try:
        ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
