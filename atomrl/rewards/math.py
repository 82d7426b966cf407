"""Rewards for problems with one right answer."""

import re
from fractions import Fraction
from typing import Any

from atomrl.rewards.answers import NUMERAL, answers_equal, as_written, parse_number, require_truths, truth_text
from atomrl.rewards.format import (
    has_strict_format,
    is_heading,
    last_boxed,
    marked_answer,
    marked_lines,
    split_strict,
)
from atomrl.rewards.units import MULTIPLES


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

    Only the white space around both is ignored; a truth of 42.0, as pandas keeps whole numbers, is 42 too. Any other
    answer earns `format_score` where it is marked as one (by `<answer>`, `####` or `\\boxed{}`), and 0.0 where it is
    not.

    Example:
        >>> texts = ["The answer is <answer>B</answer>", "<answer>C</answer>", "b"]
        >>> exact_match([""] * 3, texts, ["B"] * 3, format_score=0.1)
        [1.0, 0.1, 0.0]
    """
    require_truths(ground_truth)
    scores = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        marked = marked_answer(completion)
        right = (completion.strip() if marked is None else marked) in (str(truth).strip(), truth_text(truth).strip())
        scores.append(1.0 if right else format_score * (marked is not None))
    return scores


_MULTIPLE = (
    rf"(?:\s*(?:{'|'.join(filter(str.isascii, MULTIPLES))})\b|"
    rf"\s*[{''.join(name for name in MULTIPLES if not name.isascii())}](?![0-9克米瓦]))"
)
_TOKEN = re.compile(  # 10-3 ends in 3, not in -3; no index, power or name such as x2 is a number
    r"(?:(?<![0-9A-Za-z_)\]}])(?P<sign>-)|(?P<word>\b(?:negative|(?<![0-9)] )minus)\s|(?:[负負]|零下|マイナス)\s?))?"
    r"(?:[$€£¥₹](?P<minus>-)?)?"
    r"(?<![A-Za-z0-9^])(?<![A-Za-z0-9)\]}]_)(?<![0-9][.,])(?<![\^_]\{)"
    rf"(?P<number>{NUMERAL})(?P<multiple>{_MULTIPLE}?)"
)
_FUNCTION = r"\\(?:times|cdot|div|pm|mp|leq?|geq?|lt|gt|neq?|over|ln|log)(?![A-Za-z])"
_BEFORE = re.compile(  # what makes a number a part of something: 3 x 18, x < 18, a root, a date
    rf"(?:[√∛±∓×÷≤≥≠/<]|[\w)\]}}%][*+·]|[ \t][+·]\s+|[\w)\]}}$][ \t]+\*[ \t]+|--|-\s*\(|[0-9]{{4}}-[0-9]+-|\bnot\b|"
    rf"sqrt|(?:^|[^\w<>/=\"'-])[\w)\]}}$]+\s*>|{_FUNCTION}|\\sqrt\[[0-9]+\]|\\(?:sin|cos|tan)|\\[dtc]?frac\s*\{{[^{{}}]*\}}?)"
    r"[\s({$]*$"
)
_BEHIND = (
    rf"[\s)}}$]*(?:\^(?!\s*\{{?\s*\\circ)|[×÷√π±≤≥≠⁰¹²³⁴-⁹₀-₉]|\+\s*[\w(\\]|\*(?=[\w(\\])|\s\*\s|"
    rf"/\s*[0-9(\\]|[<>](?:\s|-?[0-9])|x(?=\s*[0-9])|[xyz](?![A-Za-z])|-\s*(?:[0-9(]|[xyz]\b)|{_FUNCTION}|\\(?:sqrt|pi)|(?:sqrt|pi)\b|{_MULTIPLE}|"
    r"(?:,|;|:|to|or|and|through|\\text\s*\{\s*(?:or|and|to)\s*\})?\s*[$€£-]?[0-9]|"
    r"and (?:a|one) (?:half|third|quarter))|"
    r"(?![gmhslLpcdFCWVJNA](?![A-Za-z0-9])|m[23])[A-Za-z](?![A-Za-z])|h[0-9]|_\{?[0-9A-Za-z]|(?<=/)\s*[(\\]"
)
_PART = re.compile(_BEHIND)
_LEAD = re.compile(
    r"[\s*_:=$(]*(?:(?:so|thus|therefore|hence|and),?\s+)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:(?:answer|result|solution|total)\b\s*)?(?:is\b|was\b|[:=*_\s$(])*",
    re.IGNORECASE,
)
_OPERATOR = re.compile(rf"[\s)]*=|{_BEHIND}")
_ASIDE = re.compile(r"(?<=[\w%$]) \([^()\n]{0,200}\)[.!\s]*$")
_GAP = re.compile(r"[ $*(=]*")
_NAMED = re.compile(r"\s*[A-Za-z_]\w*\s*=[\s$(]*")


def gsm8k(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """1.0 where the final number of the completion equals the truth, else 0.0.

    The final number is that after the last `####` that is no heading (GSM8K's own form), of a sum the one after its
    `=`; without that mark the only one in the last box; without a box the last one of the text, but for a closing
    remark in parentheses. It is read as `rewards.answers.parse_number` does, with words such as `million`; what is no
    number by itself (a time, an expression, `1,2`, `17 or 18`, `x > 18`, a root, a date) is wrong. The truth is a
    number, or a whole GSM8K solution that ends in `#### 18`.

    Raises:
        TypeError, ValueError: a truth is no number.

    Example:
        >>> gsm8k([""] * 3, ["9 + 9 = 18\\n#### 18", "She makes $18.00 a day.", "18 or 19"], ["18", "#### 18", 18])
        [1.0, 1.0, 0.0]
    """
    pairs = zip(completions, map(number_truth, ground_truth), strict=True)
    return [float(final_number(completion) == wanted) for completion, wanted in pairs]


def number_truth(truth: Any) -> Fraction:
    """The number of a truth for `gsm8k`.

    Raises:
        TypeError, ValueError: it is none.

    Example:
        >>> number_truth("9 + 9 = 18" + chr(10) + "#### 18")
        Fraction(18, 1)
    """
    wanted = parse_number(truth_text(truth).rpartition("####")[2].strip().removesuffix("."))
    if wanted is None:
        raise ValueError(f"ground_truth is no number: {truth!r:.200}")
    return wanted


def final_number(completion: str) -> Fraction | None:
    """The number that `gsm8k` reads in a completion, or None.

    Example:
        >>> final_number("#### Step 1: add" + chr(10) + "2 + 3 = 5, so there are 5 apples.")
        Fraction(5, 1)
    """
    for line, more in marked_lines(completion):
        line = re.sub(r"^-\s+", "-", as_written(line).replace("**", ""))
        lead = _LEAD.match(line)
        start = _NAMED.match(line) or lead
        assert start is not None and lead is not None
        if not line:
            return None
        if _TOKEN.match(line, start.end()) or _TOKEN.match(line, start.end() - 1):
            if not (more and is_heading(line) and not lead[0].strip(" *_")):
                return _leading(line, start.end())
        elif not more and (found := _TOKEN.search(line)):
            return _value(found)
    boxed = last_boxed(completion)
    text = as_written(boxed or "").rpartition("=")[2]
    numbers = [*_TOKEN.finditer(text)]
    if len(numbers) > 1:
        return None  # 3 or 18
    if not numbers:
        text = as_written(completion).replace("**", "")
        numbers = [*_TOKEN.finditer(text)]
        if aside := _ASIDE.search(text):
            numbers = [number for number in numbers if number.end() <= aside.start()] or numbers
    return _value(numbers[-1]) if numbers else None


def _leading(line: str, at: int) -> Fraction | None:
    """The number with which a line goes on at a place; of a sum, what follows its `=`; None for an expression."""
    whole = None
    while found := _TOKEN.match(line, at) or (_TOKEN.match(line, at - 1) if at else None):
        if not (operator := _OPERATOR.match(line, found.end())):
            return _value(found)
        if operator[0].endswith("=") and whole is None:
            whole = found  # 18 = 9 + 9
        equals = line.find("=", operator.end() - 1)
        if equals < 0:
            break
        at = _GAP.match(line, equals + 1).end()  # type: ignore[union-attr]
    return _value(whole) if whole else None


def _value(found: re.Match[str]) -> Fraction | None:
    """The number; None where it is a part of an expression, of a range or of a date."""
    before = found.string[max(0, found.start() - 40) : found.start()]
    value = parse_number(found["number"].rstrip(".,/:' "))
    if value is None or _BEFORE.search(before) or _PART.match(found.string, found.end()):
        return None
    value *= Fraction(10) ** MULTIPLES.get(found["multiple"].strip(), 0)
    return -value if found["sign"] or found["word"] or found["minus"] else value
