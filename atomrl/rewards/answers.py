"""Whether two answers are equal: as exact numbers, else as normalised text. No model output is ever evaluated."""

import math
import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from numbers import Real

MAX_NUMBER_CHARS = 100
MAX_NFC_CHARS = 10_000
"""Longer texts are compared as they are: composing a long run of combining marks takes quadratic time."""

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
"""What people write numbers with, to be found in a text that `as_written` has gone over: also times, ratios and lists,
which `parse_number` then refuses."""
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


def fold(text: str) -> str:
    """The text with the ASCII forms of full-width characters, of minus signs and short dashes, and of apostrophes.

    Example:
        >>> fold("−１８ don’t")
        "-18 don't"
    """
    return text.translate(_FOLDED)


def as_written(text: str) -> str:
    r"""Numbers in LaTeX as they are written in plain text; the rest of the text stays.

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
        rf"(?<=10)([{_SUPERSCRIPTS}]+)", lambda found: "^{" + fold(unicodedata.normalize("NFKC", found[1])) + "}", text
    )
    text = re.sub(r" ?[¼-¾⅐-⅞]", lambda found: " " + fold(unicodedata.normalize("NFKC", found[0].strip())), text)
    text = _LATEX_FRACTION.sub(lambda found: f" {found[1] or found[2]}/{found[3] or found[4]}", text)
    return _POWER_OF_TEN.sub(lambda found: f"e{found[1] or found[2]}", text)


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of a number as people write it, or None.

    Understood: signs (also the Unicode minus), thousands in the right places (`1,234`, `1{,}234`, `1\,234`, `1 234`,
    `1'234`, `12,34,567`, `1.234.567`), decimals, exponents of up to three digits and `\times 10^{3}`, `a/b`,
    `\frac{a}{b}`, `\frac12`, `1 1/2`, `1½`; full-width digits; a sign of currency in front or behind; a percent or
    degree sign behind, which is dropped (50% is 50, not 0.5); one full stop at the end. Not understood, and so never
    equal to a number: units, words, expressions, several numbers, times, other scripts' digits, and anything over 100
    characters.

    Example:
        >>> parse_number("$1,234.50"), parse_number("-3/4"), parse_number("18 dollars")
        (Fraction(2469, 2), Fraction(-3, 4), None)
    """
    found = _quantity(text)
    return None if found is None else found[0]


def _quantity(text: str) -> tuple[Fraction, str] | None:
    """A number and its sign of currency, percent or degrees, "" without one."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text, unit = as_written(text).strip(), ""
    if found := _SIGN_BEHIND.search(text):
        text, unit = text[: found.start()], "°" if "\\" in found[1] else found[1]
    elif found := _SIGN_BEFORE.match(text):
        text, unit = found[1] + text[found.end() :], found[2]
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
    r"""Text for comparison: canonical Unicode, `fold`, lower case, single spaces, no full stop at the end, and without
    what is only form around all of it: `\boxed{}`, `\text{}`, `\mathbf{}`, `$`, `\( \)`, `**`, braces.

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
    """A truth as text; a whole number that pandas keeps as 42.0, since its column has gaps, is 42.

    Raises:
        TypeError: it is neither text nor number.
        ValueError: there is nothing in it.

    Example:
        >>> truth_text(42.0), truth_text(0.5), truth_text("42.0")
        ('42', '0.5', '42.0')
    """
    if getattr(truth, "ndim", None) == 0:
        truth = truth.item()  # type: ignore[attr-defined]  # of numpy
    if not isinstance(truth, str | Real | Decimal):
        what = "it is missing" if truth is None else repr(truth)[:200]
        raise TypeError(f"ground_truth must be text or a number, not {type(truth).__name__}: {what}")
    if not isinstance(truth, str) and not math.isfinite(truth):
        raise ValueError(f"ground_truth is {truth}")
    if isinstance(truth, str) and not truth.strip():
        raise ValueError("ground_truth is empty")
    if not isinstance(truth, str | int) and (whole := math.trunc(truth)) == truth:
        return str(whole)
    return str(truth)


def require_truth(truth: object) -> str:
    r"""The normalised text of a truth for `answers_equal`.

    Raises:
        TypeError: it is neither text nor number.
        ValueError: nothing is left of it that an answer could be equal to.

    Example:
        >>> require_truth("$$")
        Traceback (most recent call last):
            ...
        ValueError: ground_truth is empty: '$$'
    """
    wanted = normalise_text(truth_text(truth))
    if not wanted.strip("$*{}. "):
        raise ValueError(f"ground_truth is empty: {truth!r:.100}")
    return wanted


def answers_equal(answer: str, truth: object) -> bool:
    """Whether an answer equals the truth: as numbers where the truth is one, else as normalised text.

    Args:
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
    given, wanted = normalise_text(answer), require_truth(truth)
    number = _quantity(wanted)
    if number is not None:
        found = _quantity(given)
        return found is not None and found[0] == number[0] and (found[1] == number[1] or not (found[1] and number[1]))
    if given == wanted:
        return True
    choice, letter = _CHOICE.fullmatch(given), _CHOICE.fullmatch(wanted)
    return choice is not None and letter is not None and choice[1] == letter[1]


def require_truths(ground_truth: Iterable[object]) -> None:
    """Without a truth nothing can be right: that is a failure to name, not a completion worth 0.

    Raises:
        TypeError: one is neither text nor number.
        ValueError: one is empty.

    Example:
        >>> require_truths(["18", None])
        Traceback (most recent call last):
            ...
        TypeError: ground_truth must be text or a number, not NoneType: it is missing
    """
    for truth in ground_truth:
        truth_text(truth)
