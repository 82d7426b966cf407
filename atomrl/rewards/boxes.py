r"""The reward for answers in `\boxed{}`, judged by the math-verify package (the extra `math`).

It runs in worker processes only: an expression that a model wrote can keep sympy busy for ever.
"""

import functools
import logging
import re
from fractions import Fraction
from typing import Any, cast

from atomrl.rewards.answers import answers_equal, normalise_text, parse_number, require_truths
from atomrl.rewards.errors import require
from atomrl.rewards.format import last_boxed

_WORDS = re.compile(r"(?:\\text\s*\{)?\s*[A-Za-z]{3,}(?:[ .,'-]+[A-Za-z]+)*\.?\s*\}?")


def boxed(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    r"""1.0 where the last `\boxed{}` of the completion equals the truth, else 0.0 (also without a box).

    Equal are what `rewards.answers.answers_equal` finds equal, and what math-verify does: `\frac12` and 0.5, `x=3` and
    3, `\sqrt8` and `2\sqrt2`, `\{1, 2\}` and `2, 1`. An answer that math-verify cannot read is a wrong one; where it
    raises an exception or does not end, there is no value. A truth of plain words is compared as text only, since
    math-verify reads words as products of their letters.

    Args:
        ground_truth: the answer, or a whole solution that has it in its last `\boxed{}`.

    Raises:
        RewardError: math-verify is not installed.
    """
    require_truths(ground_truth)
    pairs = zip(completions, ground_truth, strict=True)
    return [float(_equal(last_boxed(completion), truth)) for completion, truth in pairs]


def _equal(answer: str | None, truth: Any) -> bool:
    wanted = last_boxed(truth) if isinstance(truth, str) else None
    wanted = truth if wanted is None else wanted
    if answer is None:
        return False
    if answers_equal(answer, wanted):
        return True
    if _WORDS.fullmatch(str(wanted).strip()) or _far_apart(answer, str(wanted)):
        return False
    gold, given = _parse(str(wanted)), _parse(answer)
    # its own time limits are signals, which a C call does not heed; the pool's limit is a kill
    return bool(gold and given) and _math_verify().verify(gold, given, timeout_seconds=None, raise_on_error=True)


def _far_apart(answer: str, truth: str) -> bool:
    """Whether both are plain numbers that differ by more than rounding: most wrong answers, told without sympy."""
    given, wanted = parse_number(normalise_text(answer)), parse_number(normalise_text(truth))
    if given is None or wanted is None or "%" in answer + truth:  # 50% may be 50 or 0.5
        return False
    return abs(given - wanted) > max(Fraction(1, 10**4), abs(wanted) / 10**6)  # math-verify rounds to 6 decimals


def _parse(text: str) -> list[Any]:
    """The expression of an answer in LaTeX; never by math-verify's reader of plain expressions, which evaluates."""
    from math_verify.parser import LatexExtractionConfig

    text = "\\boxed{" + text + "}"
    config = [LatexExtractionConfig()]
    return cast(list[Any], _math_verify().parse(text, config, fallback_mode="no_fallback", parsing_timeout=None))


@functools.cache
def _math_verify() -> Any:
    require("boxed", "math_verify", "math")
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time limit is the caller's
    return math_verify


def warm_up() -> None:
    """Import math-verify and let it build its tables, which takes a second: no part of a completion's time."""
    for answer in (r"\frac{1}{2}", r"x=\sqrt{2}^3", "(1, 2)", r"\{1, 2\}", r"50\%", r"2x+\pi"):
        _equal(answer, r"\frac{1}{3}")
