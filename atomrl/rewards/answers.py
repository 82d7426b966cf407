"""Compare answers: as exact numbers if both are numbers, else as normalised text. No model output is ever executed.

`answers_equal` is the comparison, `strict_math` and `correctness_reward` are rewards that use it. The file also has the
parts it is made of, which other rewards use too: restricted expression parsing, number parsing, text normalisation,
ground truths, and units.
"""

import ast
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any, NamedTuple

from atomrl.rewards.format import split_strict, tagged_answer

# --------------------------------------------------------------------------------------------------------------------
# Expressions: parse and evaluate arithmetic without running Python.

MAX_CHARS = 200
"""Maximum length of an expression."""
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
FUNCTIONS = {"Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "sec", "sin", "sinh",
             "sqrt", "tan", "tanh"}  # fmt: skip


def parse_expression(text: str) -> ast.expr | None:
    """Parse an expression of numbers, names, calls and `+ - * / **` to a syntax tree; None if it is anything else.

    Python's parser only sees texts of at most `MAX_CHARS` characters from a restricted alphabet. Numbers are plain
    decimals (no exponents, hexadecimal or imaginary numbers).
    """
    text = text.strip()
    if len(text) > MAX_CHARS or not re.fullmatch(r"[0-9A-Za-z+\-*/(),. ]+", text) or re.search(r"[0-9.][A-Za-z]", text):
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[int]] | None:
    """Evaluate an expression of integers, `+ - * /` and parentheses exactly.

    Returns:
        (value, the integers in their order), or None for any other text and for a division by zero. Unary minus is not
        allowed: `-3` gives None.

    Example:
        >>> evaluate_arithmetic("(7 - 3) * 25 / 2")
        (Fraction(50, 1), [7, 3, 25, 2])
        >>> evaluate_arithmetic("__import__('os')") is None
        True
    """
    numbers: list[int] = []
    try:
        return _value(parse_expression(text), numbers), numbers
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr | None, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError("no arithmetic")
    left, right = _value(node.left, numbers), _value(node.right, numbers)
    return OPERATORS[type(node.op)](left, right)


def is_tame_formula(text: str) -> bool:
    """Return True if a formula is safe to pass to a computer algebra system, which parses text by executing it.

    Allowed are numbers, one-letter names, `pi`, `FUNCTIONS`, `+ - * /`, and powers whose values stay small: constant
    exponents of at most 50 (a product of at most 100 if powers are nested), or any exponent on a variable.

    Example:
        >>> is_tame_formula("x**3/3 + sin(2*x) + C"), is_tame_formula("9**9**9"), is_tame_formula("x.func")
        (True, False, False)
    """
    try:
        return _growth(parse_expression(text)) <= 100
    except (ValueError, RecursionError):
        return False


def _growth(node: ast.expr | None) -> float:
    """Return the product of nested constant exponents, at least 1.

    Raises:
        ValueError: the formula has a part that is not allowed.
    """
    match node:
        case ast.Constant(value=int() | float()):
            return 1.0
        case ast.Name(id=name) if len(name) == 1 or name == "pi":
            return 1.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=inner):
            return _growth(inner)
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in FUNCTIONS:
            return _growth(inner)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), left=left, right=right):
            return max(_growth(left), _growth(right))
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            growth, inner_growth = _growth(base), _growth(exponent)
            if isinstance(base, ast.Name):
                return inner_growth
            constant = evaluate_arithmetic(ast.unparse(exponent).removeprefix("-"))
            if constant is not None and abs(constant[0]) <= 50:
                return growth * max(1.0, float(constant[0]))
    raise ValueError("no tame formula")


# --------------------------------------------------------------------------------------------------------------------
# Numbers, text and ground truths.

MAX_NUMBER_CHARS = 100
MAX_NFC_CHARS = 10_000
"""Longer texts are not Unicode-normalised: composing a long run of combining marks takes quadratic time."""

_FOLDED = (
    {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
    | dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63"), "-")
    | dict.fromkeys(map(ord, "\u2018\u2019\u02bc\u2032"), "'")
    | dict.fromkeys(map(ord, "\u201c\u201d"), '"')
    | {0x3000: " ", 0xFFE5: "¥", 0xFFE1: "£", 0x3001: ",", 0x3002: ".", 0x2044: "/"}
)
_CURRENCIES = "$€£¥₹₩₽₫₺฿¢元円圆圓원"
_GROUPED = (  # 0,123 may be 0.123
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}|[1-9][0-9]{0,2}(?:'[0-9]{3})+|"
    r"[1-9][0-9]{0,2}(?: [0-9]{3})+)"
)
_DECIMAL = rf"(?:{_GROUPED}|[0-9]{{1,3}}(?:\.[0-9]{{3}}){{2,}}|[0-9]+)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{{1,3}})?"
NUMERAL = (
    rf"(?:[0-9]+ [0-9]+/[0-9]+|(?:{_GROUPED}|[0-9]+(?=[.,/:'0-9]*)|(?=\.[0-9]))[0-9.,/:']*(?:[eE][+-]?[0-9]{{1,3}})?)"
)
"""Regular expression for numbers in a text processed by `as_written`. It also matches times, ratios and lists, which
`parse_number` rejects."""
_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*(?P<top>{_DECIMAL})(?:\s*/\s*(?P<bottom>{_DECIMAL}))?")
_MIXED = re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>[0-9]+)\s+(?P<top>[0-9]+)/(?P<bottom>[0-9]+)")
_SIGN_BEFORE = re.compile(rf"([+-]?)\s*([{_CURRENCIES}])\s*")
_SIGN_BEHIND = re.compile(rf"\s*(%|°|\^\s*\{{?\s*\\circ\s*\}}?|\\degree|[{_CURRENCIES}])$")
_PART = r"\s*(?:\{\s*([+-]?[0-9.,]+)\s*\}|([0-9]))"
_LATEX_FRACTION = re.compile(rf"\\[dtc]?frac{_PART}{_PART}")
_POWER_OF_TEN = re.compile(
    r"(?<=[0-9.])\s*(?:\\times|\\cdot|×|·|\*|[xX])\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([+-]?[0-9]{1,3}))"
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_WRAPPERS = re.compile(
    r"\\(?:boxed|fbox|text|mathrm|mathbf|mathit|mathsf|textbf|textit|textrm|mbox|boldsymbol|operatorname)\s*"
    r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_CHOICE = re.compile(r"[(\[]?\s*([a-z])\s*[)\].:]?")
_CHOICES = re.compile(r"[A-J](?:(?:[\s,;&+/]|\band\b|[和与])*[A-J])+")


def fold(text: str) -> str:
    """Replace full-width characters, minus signs, short dashes and apostrophes by their ASCII forms.

    Example:
        >>> fold("−１８ don’t")
        "-18 don't"
    """
    return text.translate(_FOLDED)


def ascii_digits(text: str) -> str:
    """Replace digits of other scripts, and the Arabic decimal point, thousands separator and percent sign, by ASCII.

    Example:
        >>> ascii_digits("١٢٫٥ or १८")
        '12.5 or 18'
    """
    if text.isascii():
        return text
    text = text.replace("\u066b", ".").replace("\u066c", ",").replace("\u066a", "%")
    return re.sub(r"\d", lambda match: str(unicodedata.decimal(match[0])), text)


def as_written(text: str) -> str:
    r"""Convert numbers in LaTeX to plain text; leave the rest unchanged.

    Example:
        >>> as_written(r"1{,}234 or 1\,234 or 1\frac12 or \$5\% or 2 \times 10^{-3}")
        '1,234 or 1 234 or 1 1/2 or $5% or 2e-3'
    """
    text = (
        re.sub(r"\b[Rr]s\.?\s?(?=[0-9])", "₹", fold(text))
        .replace("\\!", "")
        .replace("{,}", ",")
        .replace("\\%", "%")
        .replace("\\$", "$")
    )
    text = re.sub(r"(?<=[0-9])(?:\\[,;: ]|~|[\u00a0\u2002-\u200a\u202f]|\\thinspace)+(?=[0-9])", " ", text)
    text = re.sub(r"(?<=[0-9)])\*\*(?=[0-9(+-])", "^", text)
    text = re.sub(
        rf"(?<=10)([{_SUPERSCRIPTS}]+)", lambda match: "^{" + fold(unicodedata.normalize("NFKC", match[1])) + "}", text
    )
    text = re.sub(r" ?[¼-¾⅐-⅞]", lambda match: " " + fold(unicodedata.normalize("NFKC", match[0].strip())), text)
    text = _LATEX_FRACTION.sub(lambda match: f" {match[1] or match[2]}/{match[3] or match[4]}", text)
    return _POWER_OF_TEN.sub(lambda match: f"e{match[1] or match[2]}", text)


def parse_number(text: str) -> Fraction | None:
    r"""Parse a number exactly; return None if the text is not a number.

    Accepted: signs (also the Unicode minus), thousands separators in the right places (`1,234`, `1{,}234`, `1\,234`,
    `1 234`, `1'234`, `12,34,567`, `1.234.567`), decimals, exponents of up to three digits and `\times 10^{3}`, `a/b`,
    `\frac{a}{b}`, `\frac12`, `1 1/2`, `1½`; full-width digits; a currency sign before or after; a percent or degree
    sign after it, which is dropped (50% is 50, not 0.5); one full stop at the end. Not accepted: units, words,
    expressions, several numbers, times, digits of other scripts, and more than 100 characters.

    Example:
        >>> parse_number("$1,234.50"), parse_number("-3/4"), parse_number("18 dollars")
        (Fraction(2469, 2), Fraction(-3, 4), None)
    """
    quantity = _quantity(text)
    return None if quantity is None else quantity[0]


def _quantity(text: str) -> tuple[Fraction, str] | None:
    """Parse a number and its currency, percent or degree sign ("" without one)."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text, unit = as_written(text).strip(), ""
    if sign := _SIGN_BEHIND.search(text):
        text, unit = text[: sign.start()], "°" if "\\" in sign[1] else sign[1]
    elif sign := _SIGN_BEFORE.match(text):
        text, unit = sign[1] + text[sign.end() :], sign[2]
    if match := _MIXED.fullmatch(text):
        whole, top, bottom = (Fraction(int(match[name])) for name in ("whole", "top", "bottom"))
        value = whole + top / bottom if bottom else None
    elif match := _NUMBER.fullmatch(text):
        above, below = _decimal(match["top"]), _decimal("1" if match["bottom"] is None else match["bottom"])
        value = above / below if above is not None and below else None
    else:
        return None
    return None if value is None else (-value if match["sign"] == "-" else value, unit)


def _decimal(text: str) -> Fraction | None:
    text = text.strip()
    if not re.fullmatch(_DECIMAL, text) or not re.match(r"\.?[0-9]", text):
        return None
    mantissa, _, exponent = re.sub(r"[,' ]", "", text.lower()).partition("e")
    if mantissa.count(".") > 1:
        mantissa = mantissa.replace(".", "")
    whole, _, decimals = mantissa.partition(".")
    return Fraction(int(whole + decimals or "0"), 10 ** len(decimals)) * Fraction(10) ** int(exponent or 0)


def normalise_text(text: str) -> str:
    r"""Normalise a text for comparison.

    The result has canonical Unicode, `fold`, lower case, single spaces, no final full stop, and no markup around all of
    it (`\boxed{}`, `\text{}`, `\mathbf{}`, `$`, `\( \)`, `**`, braces).

    Example:
        >>> normalise_text(r" \boxed{New  York}."), normalise_text(r"\(\textbf{B}\)")
        ('new york', 'b')
    """
    if len(text) <= MAX_NFC_CHARS:
        text = unicodedata.normalize("NFC", text)
    text = " ".join(fold(text).split()).removesuffix(".").rstrip()
    for _ in range(5):
        if match := _WRAPPERS.fullmatch(text):
            text = match[1].strip()
        for start, end in (
            ("$$", "$$"),
            ("$", "$"),
            ("\\(", "\\)"),
            ("\\[", "\\]"),
            ("**", "**"),
            ("*", "*"),
            ("{", "}"),
        ):
            inner = text[len(start) : -len(end)]
            around = len(text) > len(start + end) and text.startswith(start) and text.endswith(end)
            if around and not any(mark in inner.replace("\\$", "") for mark in (start, end)):
                text = inner.strip().removesuffix(".").rstrip()
    return text.casefold()


def truth_text(truth: object) -> str:
    """Convert a ground truth to text. 42.0 becomes "42": pandas stores integers as floats if the column has gaps.

    Raises:
        TypeError: it is neither text nor a number.
        ValueError: it is empty or not finite.

    Example:
        >>> truth_text(42.0), truth_text(0.5), truth_text("42.0")
        ('42', '0.5', '42.0')
    """
    if getattr(truth, "ndim", None) == 0:
        truth = truth.item()  # type: ignore[attr-defined]  # of numpy
    if not isinstance(truth, str | Real | Decimal):
        value = "it is missing" if truth is None else repr(truth)[:200]
        raise TypeError(f"ground_truth must be text or a number, not {type(truth).__name__}: {value}")
    if not isinstance(truth, str) and not math.isfinite(truth):
        raise ValueError(f"ground_truth is {truth}")
    if isinstance(truth, str) and not truth.strip():
        raise ValueError("ground_truth is empty")
    if not isinstance(truth, str | int) and (whole := math.trunc(truth)) == truth:
        return str(whole)
    return str(truth)


def require_truth(truth: object) -> str:
    r"""Normalise a ground truth for `answers_equal`.

    Raises:
        TypeError: it is neither text nor a number.
        ValueError: nothing is left after normalisation.

    Example:
        >>> require_truth("$$")
        Traceback (most recent call last):
            ...
        ValueError: ground_truth is empty: '$$'
    """
    text = normalise_text(truth_text(truth))
    if not text.strip("$*{}. "):
        raise ValueError(f"ground_truth is empty: {truth!r:.100}")
    return text


def answers_equal(answer: str, truth: object) -> bool:
    """Return True if an answer equals the ground truth: as numbers if the truth is one, else as normalised text.

    A missing currency, percent or degree sign on one side is ignored; different ones are not. The letters of several
    choices (`read_choices`) may come in any order.

    Args:
        answer: the model's answer.
        truth: text or a number.

    Raises:
        TypeError: the truth is neither.
        ValueError: the truth is empty.

    Example:
        >>> answers_equal("1,200.0", 1200), answers_equal("0.333", "1/3"), answers_equal("paris.", "Paris")
        (True, False, True)
        >>> answers_equal("€5", "$5"), answers_equal("5 €", "5"), answers_equal("(B)", "B")
        (False, True, True)
    """
    text, expected = normalise_text(answer), require_truth(truth)
    number = _quantity(expected)
    if number is not None:
        quantity = _quantity(text)
        if quantity is None or quantity[0] != number[0]:
            return False
        return quantity[1] == number[1] or not (quantity[1] and number[1])
    if text == expected:
        return True
    choice, letter = _CHOICE.fullmatch(text), _CHOICE.fullmatch(expected)
    if choice is not None and letter is not None:
        return choice[1] == letter[1]
    letters = read_choices(truth_text(truth))
    if letters != "".join(sorted(letters)) or letters != "".join(dict.fromkeys(letters)):
        return False
    given = read_choices(answer)
    # AB may also be the product of two matrices, which BA is not.
    return bool(letters) and "".join(sorted(given)) == letters and (given == letters or text != "ba")


def read_choices(text: str) -> str:
    r"""Return the letters of several choices (A to J) in the order of a text; "" for any other text.

    Example:
        >>> read_choices("C, A"), read_choices(r"\text{(A) and (C)}"), read_choices("ABC"), read_choices("A cat")
        ('CA', 'AC', 'ABC', '')
    """
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|boxed|rm)(?![A-Za-z])|\\[,;: ]|[$*{}()\[\]]", " ", fold(text)[:200])
    text = text.strip().removesuffix(".").strip()
    return "".join(re.findall("[A-J]", text)) if _CHOICES.fullmatch(text) else ""


def require_truths(ground_truth: Iterable[object]) -> None:
    """Check ground truths: a missing one is an error, not a reason to score a completion with 0.

    Raises:
        TypeError: a ground truth is neither text nor a number.
        ValueError: one is empty.

    Example:
        >>> require_truths(["18", None])
        Traceback (most recent call last):
            ...
        TypeError: ground_truth must be text or a number, not NoneType: it is missing
    """
    for truth in ground_truth:
        truth_text(truth)


# --------------------------------------------------------------------------------------------------------------------
# Rewards that compare the answer in a completion with the ground truth.


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


# --------------------------------------------------------------------------------------------------------------------
# Units, multiples, bases and clock times.

_NAMES = {
    "mm": "millimeter millimetre 毫米",
    "cm": "centimeter centimetre 厘米 公分",
    "m": "meter metre 米",
    "km": "kilometer kilometre 千米 公里",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram 毫克",
    "g": "gram gm 克",
    "kg": "kilogram kilo 千克 公斤",
    "lb": "pound",
    "oz": "ounce",
    "t": "ton tonne 吨",
    "ml": "milliliter millilitre 毫升",
    "l": "liter litre 升",
    "s": "second sec 秒",
    "min": "minute 分钟",
    "h": "hour hr 小时",
    "day": "天 日",
    "week": "周 星期",
    "month": "月",
    "year": "yr 年",
    "%": "percent percentage pct",
    "°": "degree deg circ 度",
    "$": "dollar usd buck 美元",
    "¢": "cent",
    "€": "euro eur 欧元",
    "£": "gbp",
    "¥": "yuan rmb cny yen jpy 元 円 圆 圓 块",
    "₹": "rupee rs inr",
    "₩": "won 원",
    "mi/h": "mph",
    "km/h": "kmh kph kmph",
    "pm": "p.m",
    "am": "a.m",
    "": "unit",
    "rad": "radian 弧度",
    "n": "newton",
    "j": "joule",
    "w": "watt",
    "v": "volt",
    "hz": "hertz",
    "pa": "pascal",
    "c": "celsius",
    "f": "fahrenheit",
    "k": "kelvin",
    "mol": "mole",
}
UNITS = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}
MULTIPLES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12,
             "百": 2, "千": 3, "万": 4, "萬": 4, "亿": 8, "億": 8, "만": 4, "억": 8}  # fmt: skip
_NUMBERS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = {name: number for number, name in enumerate(_NUMBERS.split(), start=2)}
_SHORT = "m/s|mm|cm|dm|km|ft|in|yd|mi|mg|kg|lb|oz|ml|mph|kmh|min|hr|sec|usd|eur|hz|kw|mol|pm|am|[ap]\\.m\\.?"
_CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_POWER = r"(?:\s*\^\s*\{?-?[23]\}?|[²³])?"
_TEXT = r"\\(?:text|mathrm|mbox|textrm|rm|operatorname)\s*\{[^{}]*\}"
_SYMBOL = r"°\s*[CF]?|[%¢€£¥₹₩]|\\%|\\\$|\^\s*\{?\s*\\circ\s*\}?\s*[CF]?|\\degree"
_WORD = rf"(?:(?<![A-Za-z\\])(?:[A-Za-z]{{3,}}|{_SHORT})|[{_CJK}]+|{_SYMBOL})\.?"
_PIECE = rf"(?:{_TEXT}|{_WORD}){_POWER}"
_MORE = rf"(?:(?:(?:\s|\\[,;: ]|~|/|\\cdot|·|-)*{_PIECE})|/\s*[A-Za-z]{_POWER}(?![A-Za-z]))*"
_RATE = re.compile(rf"\\[dt]?frac\s*\{{((?:[^{{}}]|{_TEXT})*)\}}\s*\{{\s*({_TEXT})\s*\}}")
_LETTER = rf"(?<![A-Za-z\\])[mgshlLJNWVK]{_POWER}(?![A-Za-z])"
_TAIL, _LOOSE_TAIL = (
    re.compile(
        rf"(?P<body>.*?[0-9)\]}}A-Za-z°])(?:\s|\\[,;: ]|~)*(?P<unit>(?:/\s*)?{piece}{_MORE})\s*",
        re.DOTALL | re.IGNORECASE,
    )
    for piece in (_PIECE, rf"(?:{_PIECE}|{_LETTER})")
)
_BASE = re.compile(
    r"\(?([0-9A-Z]+)\)?\s*(?:_\s*\{?\s*\(?(?:\\text\s*\{\s*)?(?:base\s*\}?\s*)?([a-z]+|[0-9]{1,2})\}?\)?\}?|"
    r"\(?(?:\\text\s*\{)?\s*\(?\s*base\s*\}?\s*([a-z]+|[0-9]{1,2})\)?\}?\)?)"
)
_CLOCK = re.compile(r"([01]?[0-9]|2[0-4])\s*:\s*([0-5][0-9])\s*(?::\s*([0-5][0-9]))?\s*(?:(a|p)\.?\s?m\.?)?")
_NO_UNITS = frozenset(["squared", "cubed", "factorial", "halve", "third", "fourth", "fifth", "以上", "以下"])
_FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "max", "gcd", "lcm", "det", "mod", "pi"]
)


class Quantity(NamedTuple):
    """An answer without its unit, the unit, and a power of ten."""

    body: str
    unit: str
    """In canonical spelling: `cm`, `m^2`, `km/h`, `apple`; "" for none."""
    power: int = 0
    """Exponent of ten: 6 for `million`."""


def split_unit(text: str, letters: bool = False) -> Quantity:
    r"""Split the unit at the end of an answer in LaTeX, or the currency sign in front, from the answer.

    Args:
        letters: take a single letter behind a number for a unit (5 m), not for a variable.

    Example:
        >>> split_unit(r"5 \text{ square meters}"), split_unit("3 million dollars")
        (Quantity(body='5', unit='m^2', power=0), Quantity(body='3', unit='$', power=6))
    """
    text, front = _RATE.sub(r"\1/\2", text.strip()), ""
    if prefix := re.match(r"([+-]?)\s*(\\?\$|[€£¥₹₩]|US\\?\$|(?:USD|EUR|GBP|INR|Rs\.?|RMB|CNY)\s)\s*(?=[0-9.])", text):
        text, front = (
            prefix[1] + text[prefix.end() :],
            canonical(prefix[2].removeprefix("US\\").removeprefix("US$") or "$")[0],
        )
    match = (_LOOSE_TAIL if letters else _TAIL).fullmatch(text)
    if match is None or not re.search(r"[0-9]|\\pi|\\sqrt|\\frac|^[a-z]$", match["body"]):
        return Quantity(text, front)
    unit, power = canonical(match["unit"])
    plain = re.match(r"/\s*[A-Za-z]", match["unit"]) is not None
    if unit.startswith("/") and ((plain and unit[1:] not in _NAMES) or not re.fullmatch(r"/[^\W\d_].*", unit)):
        return Quantity(text, front)  # 12/abc is an expression
    if _NO_UNITS & {*unit.split()}:
        return Quantity("", front)
    if any(word in _FUNCTIONS for word in unit.split()) or (
        unit == "°" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text)
    ):
        return Quantity(text, front)
    return Quantity(match["body"].strip(), front + unit if not unit or unit.startswith("/") else unit, power)


def canonical(text: str) -> tuple[str, int]:
    r"""Return the canonical spelling of a unit, and the power of ten of the multiples in it.

    Example:
        >>> canonical(r"\text{square centimeters}"), canonical(r"\mathrm{cm}^2"), canonical("million apples")
        (('cm^2', 0), ('cm^2', 0), ('apple', 6))
    """
    text = re.sub(r"\\(?:text|mathrm|mbox|textrm|rm|operatorname)\s*|\\[,;: ]|~", " ", fold(text).lower())
    text = text.replace("²", "^2").replace("³", "^3").replace("\\circ", "°").replace("\\degree", "°")
    text = re.sub(r"\^\s*\{?\s*°\s*\}?", "°", text)
    text = re.sub(r"平方(\w+)", r"\1^2", re.sub(r"立方(\w+)", r"\1^3", text))
    text = re.sub(r"[\\{}]|\s*\^\s*|(?<=\w)\.(?!\w)", lambda match: "^" if "^" in match[0] else "", text)
    text = re.sub(r"\b(?:sq|square)\.?\s+(\w+)", r"\1^2", re.sub(r"\b(?:cu|cubic)\.?\s+(\w+)", r"\1^3", text))
    text = re.sub(r"(\w+) squared", r"\1^2", re.sub(r"(\w+) cubed", r"\1^3", text))
    text = re.sub(r"\s*(?:/|\bper\b)\s*", " / ", text)
    words, power = list[str](), 0
    for word in re.split(rf"\s+|-|(?<=[百万萬亿億만억])(?=[{_CJK}])|(?<=千)(?=[{_CJK}])(?![克米瓦])", text.strip()):
        name, _, exponent = word.partition("^")
        if name in MULTIPLES and not words:
            power += MULTIPLES[name]
            continue
        name = name.strip(".,()")
        single = name[:-1] if len(name) > 2 and name.endswith("s") and not name.endswith("ss") else name
        name = UNITS.get(name, UNITS.get(single, single))
        if name and name not in ("of", "the", "a", "old", "long", "away"):
            words.append(f"{name}^{exponent}" if exponent else name)
    return re.sub(" ?/ ?", "/", " ".join(words)), power


def same_unit(one: str, other: str) -> bool:
    """Return True where two canonical units are compatible: equal, one of them absent, or one more precise (`apple` and
    `red apple`, `/h` and `km/h`).

    Example:
        >>> same_unit("cm", "m"), same_unit("cm", ""), same_unit("apple", "red apple"), same_unit("/h", "km/h")
        (False, True, True, True)
    """
    if one.startswith("/") or other.startswith("/"):
        return not one or not other or one.partition("/")[2] == other.partition("/")[2]
    return set(one.split()) <= set(other.split()) or set(other.split()) <= set(one.split())


def split_base(text: str) -> tuple[str, int] | None:
    r"""Return (digits, base) of a number that is written with its base, or None.

    Example:
        >>> split_base("1010_{2}"), split_base(r"1010_{\text{two}}"), split_base("x_2")
        (('1010', 2), ('1010', 2), None)
    """
    match = _BASE.fullmatch(text.replace("$", "").strip())
    if match is None:
        return None
    named = match[2] or match[3]
    base = int(named) if named.isdigit() else _BASES.get(named, 0)
    try:
        int(match[1], base if 2 <= base <= 36 else 2)
    except ValueError:
        return None
    return (match[1].lstrip("0") or "0", base) if 2 <= base <= 36 else None


def clock_time(text: str) -> tuple[int, int, int, str] | None:
    """Return (hour, minute, second, "a", "p" or "") of a clock time, or None.

    Example:
        >>> clock_time("2:30 p.m."), clock_time("2:4")
        ((2, 30, 0, 'p'), None)
    """
    match = _CLOCK.fullmatch(re.sub(r"\\(?:text|mathrm)\s*|\\[!,;: ]|[{}$]", "", fold(text).lower()).strip())
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0), match[4] or "")
