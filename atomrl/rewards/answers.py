"""Compare answers: as exact numbers if both are numbers, else as normalised text. No model output is ever executed.

`answers_equal` is the comparison. Other rewards also use its parts: number parsing, text normalisation, ground truths.
"""

import math
import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from numbers import Real

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
