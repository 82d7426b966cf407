"""Rewards that compare an answer with a ground truth: `exact_match`, `gsm8k`, `strict_math`, `correctness_reward`."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from atomrl.rewards.answers import (
    NUMERAL,
    answers_equal,
    as_written,
    ascii_digits,
    parse_number,
    require_truth,
    require_truths,
    truth_text,
)
from atomrl.rewards.extraction import is_heading, last_boxed, marked_answer, marked_lines, tagged_answer
from atomrl.rewards.format import split_strict
from atomrl.rewards.units import MULTIPLES

_MULTIPLE = (
    rf"(?:\s*(?:{'|'.join(filter(str.isascii, MULTIPLES))})\b|"
    rf"\s*[{''.join(name for name in MULTIPLES if not name.isascii())}](?![0-9克米瓦]))"
)
# A number with its sign, currency and multiple. 10-3 ends with 3, not -3. No index, power or name such as x2 matches.
_TOKEN = re.compile(
    r"(?:(?<![0-9A-Za-z_)\]}])(?P<sign>-)|(?P<word>\b(?:negative|(?<![0-9)] )minus)\s|(?:[负負]|零下|マイナス)\s?))?"
    r"(?:[$€£¥₹](?P<minus>-)?)?"
    r"(?<![A-Za-z0-9^])(?<![A-Za-z0-9)\]}]_)(?<![0-9][.,])(?<![\^_]\{)"
    rf"(?P<number>{NUMERAL})(?P<multiple>{_MULTIPLE}?)"
)
_FUNCTION = r"\\(?:times|cdot|div|pm|mp|leq?|geq?|lt|gt|neq?|over|ln|log)(?![A-Za-z])"
_UNIT = r"(?:text|mathrm|mbox|textrm|rm|operatorname)\s*\{\s*(?:[^\W\d_]{2}|[mgshlL]\s*\})"  # behind a slash
# Text before a number that makes it a part of something else: 3 x 18, x < 18, a root, a date.
_BEFORE = re.compile(
    rf"(?:[√∛±∓×÷≤≥≠/<]|[\w)\]}}%][*+·]|[ \t][+·]\s+|[\w)\]}}$][ \t]+\*[ \t]+|--|-\s*\(|[0-9]{{4}}-[0-9]+-|\bnot\b|"
    rf"sqrt|(?:^|[^\w<>/=\"'-])[\w)\]}}$]+\s*>|{_FUNCTION}|\\sqrt\[[0-9]+\]|\\(?:sin|cos|tan)|\\[dtc]?frac\s*\{{[^{{}}]*\}}?)"
    r"[\s({$]*$"
)
_BEHIND = (
    rf"[\s)}}$]*(?:\^(?!\s*\{{?\s*\\circ)|[×÷√π±≤≥≠⁰¹²³⁴-⁹₀-₉]|\+\s*[\w(\\]|\*(?=[\w(\\])|\s\*\s|"
    rf"/\s*(?:[0-9(]|\\(?!{_UNIT}))|[<>](?:\s|-?[0-9])|x(?=\s*[0-9])|[xyz](?![A-Za-z])|-\s*(?:[0-9(]|[xyz]\b)|{_FUNCTION}|\\(?:sqrt|pi)|(?:sqrt|pi)\b|{_MULTIPLE}|"
    r"(?:,|;|:|to|or|and|through|\\text\s*\{\s*(?:or|and|to)\s*\})?\s*[$€£-]?[0-9]|"
    r"and (?:a|one) (?:half|third|quarter))|"
    r"(?![gmhslLpcdFCWVJNA](?![A-Za-z0-9])|m[23])[A-Za-z](?![A-Za-z])|h[0-9]|_\{?[0-9A-Za-z]|"
    rf"(?<=/)\s*(?:\(|\\(?!{_UNIT}))"
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


def exact_match(
    prompts: list[Any], completions: list[str], ground_truth: list[Any], format_score: float = 0.0, **columns: Any
) -> list[float]:
    """Return 1.0 if the answer (`rewards.extraction.extract_answer`) is exactly the ground truth.

    Only surrounding white space is ignored. A ground truth of 42.0, as pandas may store integers, also accepts 42. A
    wrong answer scores `format_score` if it is marked (by `<answer>`, `####` or `\\boxed{}`), else 0.0.

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


def gsm8k(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """Return 1.0 if the final number of the completion equals the ground truth, else 0.0.

    The final number is the one after the last `####` that is not a heading (GSM8K's format); of a calculation, the one
    after `=`. Without a mark it is the only number in the last box. Without a box it is the last number of the text,
    ignoring a final remark in parentheses. Numbers are parsed as by `rewards.answers.parse_number`, with words such as
    `million`, and in the digits of any script. Anything that is not a single number (a time, an expression, `1,2`,
    `17 or 18`, `x > 18`, a root, a date) is wrong. The ground truth is a number, or a GSM8K solution that ends with
    `#### 18`.

    Raises:
        TypeError, ValueError: a ground truth is not a number.

    Example:
        >>> gsm8k([""] * 3, ["9 + 9 = 18\\n#### 18", "She makes $18.00 a day.", "18 or 19"], ["18", "#### 18", 18])
        [1.0, 1.0, 0.0]
    """
    pairs = zip(completions, map(number_truth, ground_truth), strict=True)
    return [float(final_number(completion) == wanted) for completion, wanted in pairs]


def number_truth(truth: Any) -> Fraction:
    """Parse a ground truth for `gsm8k`.

    Raises:
        TypeError, ValueError: it is not a number.

    Example:
        >>> number_truth("9 + 9 = 18" + chr(10) + "#### 18")
        Fraction(18, 1)
    """
    wanted = parse_number(ascii_digits(truth_text(truth)).rpartition("####")[2].strip().removesuffix("."))
    if wanted is None:
        raise ValueError(f"ground_truth is not a number: {truth!r:.200}")
    return wanted


def final_number(completion: str) -> Fraction | None:
    """Return the final number of a completion as defined by `gsm8k`, or None.

    Example:
        >>> final_number("#### Step 1: add" + chr(10) + "2 + 3 = 5, so there are 5 apples.")
        Fraction(5, 1)
    """
    completion = ascii_digits(completion)
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
        elif not more and (match := _TOKEN.search(line)):
            return _value(match)
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
    """Return the number at position `at` of a line; of a calculation, the result after `=`; None for an expression."""
    first = None
    while match := _TOKEN.match(line, at) or (_TOKEN.match(line, at - 1) if at else None):
        if not (operator := _OPERATOR.match(line, match.end())):
            return _value(match)
        if operator[0].endswith("=") and first is None:
            first = match  # the result comes first: 18 = 9 + 9
        equals = line.find("=", operator.end() - 1)
        if equals < 0:
            break
        at = _GAP.match(line, equals + 1).end()  # type: ignore[union-attr]
    return _value(first) if first else None


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a matched number, or None if it is part of an expression, a range or a date."""
    before = match.string[max(0, match.start() - 40) : match.start()]
    value = parse_number(match["number"].rstrip(".,/:' "))
    if value is None or _BEFORE.search(before) or _PART.match(match.string, match.end()):
        return None
    value *= Fraction(10) ** MULTIPLES.get(match["multiple"].strip(), 0)
    return -value if match["sign"] or match["word"] or match["minus"] else value


def strict_math(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """Return 1.0 for exactly `<think>...</think><answer>...</answer>` with the right answer, else 0.0.

    The format is defined by `rewards.format.split_strict`, equality by `answers_equal`.

    Example:
        >>> strict_math([""] * 2, ["<think>9+9</think><answer>18.0</answer>", "18"], ["18", "18"])
        [1.0, 0.0]
    """
    require_truths(ground_truth)
    rows = zip(map(split_strict, completions), ground_truth, strict=True)
    return [float(parts is not None and answers_equal(parts[1], truth)) for parts, truth in rows]


def correctness_reward(
    prompts: list[Any],
    completions: list[str],
    ground_truth: list[Any] | None = None,
    answer: list[Any] | None = None,
    answers: list[Any] | None = None,
    **columns: Any,
) -> list[float]:
    """Return 2.0 if the last `<answer>` block equals the ground truth (`answers_equal`), else 0.0.

    It is the reward of the well-known GRPO tutorials on GSM8K, except that numbers are compared as numbers: 18.0 is 18,
    and 1,000 is 1000. Their rewards for format are in `rewards.format`.

    Args:
        ground_truth: the ground truth; of a GSM8K solution, the part after `####`.
        answer: used if there is no `ground_truth`, for data sets with a column of this name.
        answers: likewise.

    Raises:
        ValueError: a completion has no ground truth in any of the three.

    Example:
        >>> correctness_reward([""] * 2, ["<answer>18</answer>", "18"], ["18", "18"])
        [2.0, 0.0]
    """
    truths = {"ground_truth": ground_truth, "answer": answer, "answers": answers}
    scores = []
    for row, completion in enumerate(completions):
        truth = read_answer({name: column[row] for name, column in truths.items() if column is not None})
        text = tagged_answer(completion)
        scores.append(2.0 * (text is not None and answers_equal(text, truth)))
    return scores


def read_answer(row: Mapping[str, Any]) -> str:
    """Return the ground truth of a row for `correctness_reward`.

    Raises:
        TypeError: it is neither text nor a number.
        ValueError: there is none, or it is empty.

    Example:
        >>> read_answer({"ground_truth": None, "answer": "9 + 9 = 18" + chr(10) + "#### 18"})
        '18'
    """
    truth = next((row[name] for name in ("ground_truth", "answer", "answers") if row.get(name) is not None), None)
    if truth is None:
        raise ValueError("no ground truth: none of the columns ground_truth, answer and answers has a value")
    return require_truth(truth_text(truth).rpartition("####")[2])
