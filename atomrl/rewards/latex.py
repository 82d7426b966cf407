r"""The reward `boxed`: parse the LaTeX in `\boxed{}` with math-verify (the extra `math`) and compare it exactly.

It runs in worker processes only: sympy may never finish on an expression that a model wrote.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import signal
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import sympy
from sympy import Integer

from atomrl.rewards.answers import answers_equal, ascii_digits, fold, parse_number, require_truth, truth_text
from atomrl.rewards.equality import UnreadableError, rounds_to, same, same_value, tamed
from atomrl.rewards.errors import require
from atomrl.rewards.extraction import last_boxed
from atomrl.rewards.regions import read_region, same_regions
from atomrl.rewards.units import Quantity, clock_time, same_unit, split_base, split_unit

MAX_CHARS = 2000
"""Maximum length of an answer."""
LIMIT_S = 4.0
"""CPU seconds for one comparison."""
_WORDS = re.compile(r"(?:\\text\s*\{)?\s*[A-Za-z]{3,}(?:[ .,'-]+[A-Za-z]+)*\.?\s*\}?")
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]+|[abcdxyz]+")  # a product of variables, not a word
_NAMES = re.compile(
    r"(?:\\(?:angle|triangle|overline|vec|overrightarrow|mathrm|text|measuredangle|square)|[{}\s])*[A-Z]{2,}'*[{}\s]*"
)
_DATE = re.compile(
    r"[0-9]+(?:\s*-\s*[0-9]+)+(?:[T ][0-9:.]+(?:Z|[+-][0-9:]+)?)?|[0-9]+(?:/[0-9]+){2,}|[0-9]+(?::[0-9]+){2,}"
)
_DOTS = re.compile(r"\\[lcd]?dots|\.\.\.|…")
_DECIMAL = re.compile(r"[+-]?[0-9]*\.[0-9]+")
_CHOICE = re.compile(r"(?:\\text\s*\{\s*)?\(?([A-J])[).:][\s\\}]")  # (C) 5
_SET, _TUPLE = re.compile(r"\\\{[^()\[\]]*,[^()\[\]]*\\\}"), re.compile(r"\(.*,.*\)", re.DOTALL)
_VALUES = re.compile(r"[A-Za-z]\s*=[^=,()\[\]]+(?:,[^=,()\[\]]+)+")
"""Several values of one unknown: `x = 1, 2`."""
_POWER = re.compile(r"(?<![0-9])([0-9]+)\s*\^\s*(?:\{\s*(?:([0-9]+)|\{([0-9]+)\})\s*\}|([0-9]+))(?!\s*[\^!0-9])")
_LIST = re.compile(r"\s*\[\s*[\"'].*[\"']\s*\]\s*", re.DOTALL)
_PRIME = re.compile(r"(?<=[A-Za-z)])'+|\\prime")
_INDEX_OF_NUMBER = re.compile(r"(?<![A-Za-z0-9_}.])[0-9]+\s*_")  # 1_000
_SIZES = r"\\left\b|\\right\b|\\[bB]igg?[lrm]?(?![A-Za-z])"
_MAY_BE_REGION = re.compile(r"[Rr]eal|[<>≤≥≠=∈∉ℝ[(]|\\(?:[gln]eq?|[gl]t|[gl]eqslant|in|notin|mathbb|R|\{)(?![A-Za-z])")
_SENTENCE = re.compile(r"[a-z0-9)}]\.\s+[A-Z]")


def boxed(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    r"""Return 1.0 if the last box (`extraction.last_boxed`) equals the ground truth, else 0.0 (also without a box).

    Answers are equal if `rewards.answers.answers_equal` says so, if they are the same text in different LaTeX, or if
    math-verify parses both and `same` holds: `\frac12` and 0.5, `x=3` and 3, `\sqrt8` and `2\sqrt2`, `\{1, 2\}` and
    `2, 1`, 0.333333 (at least six decimals) and 1/3. A unit may be missing on one side but must not differ: `5` equals
    `5 \text{ cm}`, which is not `5 \text{ m}`. The same holds for the base of a number. An answer that cannot be parsed
    and compared within four CPU seconds is wrong. A ground truth that is words, names of points, a date or a list with
    dots is compared as text only.

    Args:
        ground_truth: the answer, or a whole solution with the answer in its last box.

    Raises:
        RewardError: math-verify is not installed.
        TypeError, ValueError: a ground truth cannot be parsed (`read_truth`).
    """
    truths = [read_truth(truth) for truth in ground_truth]
    return [float(_equal(last_boxed(completion), truth)) for completion, truth in zip(completions, truths, strict=True)]


def read_truth(truth: Any) -> str:
    r"""Return the answer in a ground truth: the content of its last box, else all of it.

    Raises:
        TypeError: it is neither text nor a number.
        ValueError: it is empty, has unbalanced braces, or is a solution without a box.

    Example:
        >>> read_truth(r"9 + 9 = 18, so \boxed{18}"), read_truth(42.0)
        ('18', '42')
    """
    text = truth_text(truth)
    inside = last_boxed(text)
    wanted = text if inside is None else inside
    if _LIST.fullmatch(wanted):
        raise ValueError(f"ground_truth is a list written as text: {truth!r:.200}")
    require_truth(wanted)
    braces = re.sub(r"\\\\|\\[{}]", "", wanted)
    if braces.count("{") != braces.count("}"):
        raise ValueError(f"ground_truth is not LaTeX, its braces do not match: {truth!r:.200}")
    if inside is None and _SENTENCE.search(wanted):
        raise ValueError(
            f"ground_truth is a text of several sentences, without an answer in \\boxed{{}}: {truth!r:.200}"
        )
    return wanted


def _equal(answer: str | None, wanted: str) -> bool:
    """Compare the content of a box with a ground truth: the cheap comparisons first, sympy last."""
    if answer is None or not answer.strip() or len(answer) > MAX_CHARS:
        return False
    answer, wanted = ascii_digits(answer), ascii_digits(wanted)
    if answers_equal(answer, wanted) or _bare(answer) == _bare(wanted):
        return True
    given, gold = _tidy(answer), _tidy(wanted)
    if (regions := _regions(given, gold)) is not None:
        return regions
    given, gold = _listed(given), _listed(gold)
    if (choice := _CHOICE.match(given)) and choice[1] == gold:
        return True
    if _PRIME.findall(given) != _PRIME.findall(gold):
        return False
    values = [_SET.fullmatch(one) or _VALUES.fullmatch(one) for one in (given, gold)]
    if (values[0] and _TUPLE.fullmatch(gold)) or (values[1] and _TUPLE.fullmatch(given)):
        return False  # {1, 2} and x = 1, 2 are neither a point nor an interval
    if (ratios := _ratios(given, gold)) is not None:
        return ratios
    if _is_text(gold) or _DOTS.search(_repeating(given)):
        return False
    if (times := _times(given, gold)) is not None:
        return times
    if (digits := _digits(given, gold)) is not None:
        return digits
    quantities = split_unit(given), split_unit(gold)
    if quantities[0].unit or quantities[1].unit:  # the m of 5 m is a unit if the other answer has a unit
        quantities = split_unit(given, bool(quantities[1].unit)), split_unit(gold, bool(quantities[0].unit))
    return _same_quantity(*quantities)


def _ratios(given: str, gold: str) -> bool | None:
    """Compare two answers as ratios; None where neither is one, or both are times of day."""
    if clock_time(given) is not None and clock_time(gold) is not None:
        return None
    (names, parts), (gold_names, gold_parts) = _ratio(given), _ratio(gold)
    if not (parts or gold_parts):
        return None
    return (names == gold_names or not (names and gold_names)) and _same_ratio(parts, gold_parts)


def _times(given: str, gold: str) -> bool | None:
    """Compare two times of day; None where one answer is none."""
    one, other = clock_time(given), clock_time(gold)
    if not (one and other):
        return None
    return one[:3] == other[:3] and (one[3] == other[3] or not (one[3] and other[3]))


def _digits(given: str, gold: str) -> bool | None:
    """Compare the digits of two numbers, of which one has a base; None where none has."""
    bases = split_base(given), split_base(gold)
    if not (bases[0] or bases[1]):
        return None
    digits = [base[0] if base else text for base, text in zip(bases, (given, gold), strict=True)]
    return digits[0] == digits[1] and (bases[0] is None or bases[1] is None or bases[0][1] == bases[1][1])


def _regions(given: str, gold: str) -> bool | None:
    """Compare two answers as sets of real numbers; None where one is no set, or both may be something else."""
    if not all(_MAY_BE_REGION.search(text) for text in (given, gold)):
        return None
    with _limited(LIMIT_S):
        try:
            one, other = (read_region(text, _read_exactly) for text in (given, gold))
            if one is None or other is None or (one.plain and other.plain):
                return None
            return same_regions(other, one, same_value)
        except _OutOfTime:
            return False
        except Exception:  # sympy may raise anything on arbitrary text
            logging.getLogger(__name__).debug("%r and %r cannot be compared as sets", given, gold, exc_info=True)
            return None


def _read_exactly(text: str) -> Any:
    expression = _parse(text)
    return None if expression is None else tamed(expression)


def _ratio(text: str) -> tuple[str, list[str]]:
    """Return the names and the parts of a ratio of three or more, such as 1:2:3 or a:b:c = 1:2:3; no parts for any
    other text."""
    names, equals, parts = text.rpartition("=")
    if ("-" in parts and _DATE.fullmatch(text)) or (
        equals and not re.fullmatch(r"\s*[A-Za-z](?:\s*:\s*[A-Za-z])+\s*", names)
    ):
        return "", []
    found = [part.strip() for part in re.split(r"\\colon(?![a-z])|:", parts)]
    is_ratio = len(found) > 2 and all(re.search(r"[0-9A-Za-z]", part) for part in found)
    return "".join(names.split()), found if is_ratio else []


def _same_ratio(given: list[str], gold: list[str]) -> bool:
    """Return True if all parts of one ratio are the same multiple of those of the other."""
    if len(given) != len(gold):
        return False
    with _limited(LIMIT_S):
        try:
            rows = [[_read_exactly(part) for part in parts] for parts in (given, gold)]
            if not all(isinstance(part, sympy.Expr) for parts in rows for part in parts):
                return False
            one, other = rows
            if any(same_value(part, Integer(0)) for part in (*one, *other)):
                return False
            return all(same_value(x * other[0], y * one[0]) for x, y in zip(one, other, strict=True))
        except Exception:  # sympy may raise anything on arbitrary text
            logging.getLogger(__name__).debug("%r and %r are no ratios", given, gold, exc_info=True)
    return False


def _same_quantity(given: Quantity, gold: Quantity) -> bool:
    if not same_unit(given.unit, gold.unit) or not given.body or not gold.body or _DATE.fullmatch(given.body):
        return False
    factors = [Fraction(10) ** quantity.power for quantity in (given, gold)]
    values = [parse_number(quantity.body) for quantity in (given, gold)]
    shares = {(given.unit == "%") - (gold.unit == "%")}
    if values[0] is not None and values[1] is not None:
        one, other = values[0] * factors[0], values[1] * factors[1]
        percent = (shares == {1} and one == 100 * other) or (shares == {-1} and 100 * one == other)
        if one == other or percent or not any(_DECIMAL.fullmatch(quantity.body) for quantity in (given, gold)):
            return one == other or percent
    return _same_expression(given, gold)


def _same_expression(given: Quantity, gold: Quantity) -> bool:
    """Compare two answers as LaTeX expressions, within `LIMIT_S`. False if one cannot be parsed or compared."""
    with _limited(LIMIT_S):
        try:
            read = [_parse(quantity.body) for quantity in (given, gold)]
            if read[0] is None or read[1] is None:
                return False
            one, other = (tamed(side * 10**quantity.power if quantity.power else side)
                          for side, quantity in zip(read, (given, gold), strict=True))  # fmt: skip
            if same(other, one):
                return True
            for decimal, value in ((given.body, other), (gold.body, one)):
                if _DECIMAL.fullmatch(decimal) and not getattr(value, "free_symbols", True):
                    return rounds_to(value, decimal)
        except (UnreadableError, RecursionError):
            return False
        except Exception:  # sympy may raise anything on arbitrary text
            logging.getLogger(__name__).debug("%r and %r cannot be compared", given, gold, exc_info=True)
    return False


class _OutOfTime(Exception):
    pass


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Limit the CPU time of the enclosed code by a signal. Has no effect outside the main thread and cannot interrupt a
    call in C; for those the worker pool's time limit applies."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _OutOfTime:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _bare(text: str) -> str:
    """Remove LaTeX markup that does not change the meaning: fonts, sizes, spacing, `$`."""
    text = re.sub(r"\\(?:text|mathrm|mbox|textrm|textbf|mathbf|mathit|operatorname)\s*\{([^{}]*)\}", r"\1", fold(text))
    text = re.sub(
        rf"{_SIZES}|\\displaystyle|\\[!,;: ]|~|(?<![0-9A-Za-z)])\*\*|\*\*(?![0-9A-Za-z({{+-])|\$", " ", text
    ).replace("\\dfrac", "\\frac")
    text = re.sub(r"\\tfrac", r"\\frac", text).replace("\\{", "{").replace("\\}", "}")
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9\s])", "", text).removesuffix(".").strip("{} ").casefold()


def _tidy(text: str) -> str:
    """Normalise LaTeX: remove surrounding markup, fonts, colors and sizes, and write systems of equations as lists."""
    text = re.sub(
        r"^(?:=|≈|\\approx|\\[,;: !]|\\q?quad\b|~|\s)+|(?:\\[,;: !]|\\q?quad\b|~|\s)+$", "", fold(text)
    ).strip("*")
    text = re.sub(r"(?<=[0-9A-Za-z)])\*\*(?=[0-9A-Za-z({+-])", "^", text)
    text = re.sub(r"\\(?:text)?color\s*\{[A-Za-z]+\}|\\tag\s*\{[^{}]*\}", "", text)
    text = re.sub(r"^\\text\s*\{\s*([+-]?\\?[$€£]?[0-9][0-9.,]*(?:\s+[A-Za-z]+)*)\.?\s*\}$", r"\1", text)
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = re.sub(r"\\left\s*\\\{(.*)\\right\s*\.", r"\1", text, flags=re.DOTALL)
    text = re.sub(rf"\\left\s*\\?\.|\\right\s*\.|{_SIZES}|\\displaystyle|\\!|\*\*|\\\(|\\\)|(?<!\\)\$", "", text)
    text = re.sub(r"\\(?:mathbf|textbf|boldsymbol|mathit|textit|mathsf|bm|underline)\s*\{([^{}]*)\}", r"\1", text)
    # A letter in \text, such as a choice; not after a number or in a rate, where it is a unit: 5 \text{ m}.
    text = re.sub(
        r"(?<![0-9/])(?<![0-9]\})(?<!\}\{)(?<![0-9}][ ~])(?<!\\[,; ])\\text\s*\{\s*([A-Za-z0-9])\s*\}|"
        r"\\text\s*\{\s*\(([A-Z])\)\s*\}",
        r"\1\2",
        text,
    )
    text = re.sub(r"\\begin\{(array|cases|aligned)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}", _rows, text, flags=re.DOTALL)
    return re.sub(r"(?<!\.)[.,;]$", "", text.strip()).strip()


def _listed(text: str) -> str:
    """Separate the items of a list by commas, also where they were separated by `and` or `or`."""
    return re.sub(
        r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or|和|或)\s*,?\s*\}|\\quad|(?<=[\s\d])(?:and|or|和|或)(?=[\s\d]))\s*",
        ", ",
        text,
    )


def _rows(match: re.Match[str]) -> str:
    """Convert the rows of a system of equations to a list; leave an array with columns unchanged."""
    rows = [row.strip().strip(",") for row in match[2].split("\\\\") if row.strip()]
    return match[0] if "&" in match[2].replace("&=", "") else ", ".join(rows).replace("&", "")


def _is_text(truth: str) -> bool:
    """Return True for a ground truth that is compared as text only: words, points, a date, a range, dots."""
    plain = truth.replace(" ", "")
    words = _WORDS.fullmatch(truth) is not None and not (plain == truth and _PRODUCT.fullmatch(truth))
    inner = re.search(r"\\text\s*\{[^{}]*[A-Za-z]{2,}[^{}]*\}", split_unit(truth).body)
    return bool(words or inner or _NAMES.fullmatch(truth) or _DATE.fullmatch(truth) or _DOTS.search(_repeating(truth)))


def _repeating(text: str) -> str:
    r"""Convert repeating decimals to fractions: `0.\overline{3}`, `0.1\dot{6}`, `0.333\ldots`."""

    def fraction(match: re.Match[str]) -> str:
        whole, first, period = match["whole"] or "0", match["first"], match["period"]
        value = int(whole + first + period) - int(whole + first)
        return rf"{{\frac{{{value}}}{{{(10 ** len(period) - 1) * 10 ** len(first)}}}}}"

    number = r"(?P<whole>[0-9]{0,30})\.(?P<first>[0-9]{0,30}?)"
    text = re.sub(number + r"\\(?:overline|dot|bar)\s*\{(?P<period>[0-9]{1,30})\}", fraction, text)
    return re.sub(number + r"(?P<period>[0-9]{1,6})(?P=period){2,}\s*(?:\\[lcd]?dots|\.\.\.|…)", fraction, text)


def _latex(text: str) -> str:
    """Rewrite LaTeX so that math-verify parses numbers exactly: decimals as fractions, symbols as commands."""
    text = re.sub(r"(?:√|\\sqrt(?![A-Za-z]))\s*(?:([0-9]+)|\(([^()]*)\))", r"\\sqrt{\1\2}", _repeating(text))
    text = re.sub(r"\\[dtc]?frac\s*(\\pi|[0-9])\s*(\\pi|[0-9])(?![A-Za-z])", r"\\frac{\1}{\2}", text)
    text = text.replace(";", ",").replace("√", "\\sqrt").replace("π", "\\pi ").replace("×", "\\times ")
    text = text.replace("÷", "\\div ").replace("·", "\\cdot ").replace("∞", "\\infty ").replace("°", "^\\circ ")
    text = text.replace("≤", "\\le ").replace("≥", "\\ge ").replace("≠", "\\ne ").replace("∪", "\\cup ")
    for marks, sign in (("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "^"), ("₀₁₂₃₄₅₆₇₈₉", "_")):
        text = re.sub(f"[{marks}]+", lambda match, sign=sign: f"{sign}{{{_plain(match[0])}}}", text)  # type: ignore[misc]
    text = re.sub(r"\\mathbb\s*([A-Z])(?![a-z])", r"\\mathbb{\1}", text.replace("\\varnothing", "\\emptyset"))
    text = re.sub(r"(?<=[0-9])(?:\{,\}|\\,|\\ |~)(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<=[0-9.])\s*[xX]\s*(?=10\s*\^)", r"\\times ", text)
    text = re.sub(r"(?<![0-9.])([0-9]{1,3}) ([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<=[0-9])[eE]([+-]?[0-9]{1,3})(?![0-9.])", r"\\times 10^{\1}", text)
    text = re.sub(r"([0-9.]+)\s*\^\s*\{?\s*\\circ\s*\}?", r"{(\\frac{\\pi}{180}\\cdot \1)}", text)
    return re.sub(r"([0-9]*)\.([0-9]+)", _decimal, text)


def _plain(marks: str) -> str:
    return fold(unicodedata.normalize("NFKC", marks))


def _decimal(match: re.Match[str]) -> str:
    return rf"{{\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}}}"


def _parse(text: str) -> Any:
    """Parse LaTeX to a sympy expression, or None. math-verify's plain-text parser is never used: it evaluates text."""
    require("boxed", "math_verify", "math")
    text = _latex(text)
    return _parsed(text) if _is_computable(text) and not _INDEX_OF_NUMBER.search(text) else None


def _is_computable(text: str) -> bool:
    """Return False for huge powers and factorials: the parser computes them in C, which no signal can interrupt."""

    def value(match: re.Match[str]) -> str:
        base, exponent = int(match[1][:40]), int((match[2] or match[3] or match[4])[:40])
        if exponent > 10**5 and base > 1:
            raise OverflowError
        return str(base**exponent) if exponent * base.bit_length() < 60 else large

    def factorial(match: re.Match[str]) -> str:
        if len(match[1]) > 5:
            raise OverflowError
        return str(math.factorial(int(match[1]))) if int(match[1]) < 20 else large

    large = "1" + "0" * 18
    if re.search(r"(?:\^\s*\{[^{}^]*){4}", text):
        return False
    before = None
    try:
        while before != text and len(text) < 10 * MAX_CHARS:
            before = text
            text = re.sub(r"\(\s*([0-9]+)\s*\)(?=\s*[!^])", r"\1", text)
            text = re.sub(r"(?<![0-9])([0-9]+)\s*!", factorial, text)
            text = _POWER.sub(value, text)
    except OverflowError:
        return False
    return not re.search(r"\^\s*(?:[0-9]{7}|\{[^{}]*[0-9]{7})|\\[dt]?binom\s*\{[^{}]*[0-9]{6}", text)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time limit is the caller's
    # its units would make 2ab of 2
    reading = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last")
    config = [LatexExtractionConfig(normalization_config=reading)]
    expressions = parse("\\boxed{" + text + "}", config, fallback_mode="no_fallback", parsing_timeout=None)
    return expressions[0] if expressions else None


def warm_up() -> None:
    """Import math-verify and let it build its tables, which takes a second, before the first time limit starts."""
    for answer in (r"\frac{1}{2}", r"x=\sqrt{2}^3", "(1, 2)", r"\{1, 2\}", r"50\%", r"2x+\pi"):
        _equal(answer, r"\frac{1}{3}+x")
