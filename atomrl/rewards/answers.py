"""Whether two answers are equal: as exact numbers, else as normalised text. No model output is ever evaluated."""

import re
import unicodedata
from collections.abc import Iterable
from fractions import Fraction

MAX_NUMBER_CHARS = 100
MAX_NFC_CHARS = 10_000
"""Longer texts are compared as they are: composing a long run of combining marks takes quadratic time."""

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)(?P<top>{_DECIMAL})(?:\s*/\s*(?P<bottom>{_DECIMAL}))?")
_LATEX_FRACTION = re.compile(r"(?P<sign>[+-]?)\\[dt]?frac\{(?P<top>[^{}]*)\}\{(?P<bottom>[^{}]*)\}")
_MIXED = re.compile(r"(?P<sign>[+-]?)(?P<whole>[0-9]+)\s+(?P<top>[0-9]+)/(?P<bottom>[0-9]+)")
_WRAPPED = re.compile(r"\\(?:boxed|text|mathrm)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of a number as people write it, or None.

    Understood: signs (also the Unicode minus), thousands commas in the right places, decimals, exponents of two
    digits, `a/b`, `\frac{a}{b}`, `1 1/2`; a dollar or other currency sign in front; a percent sign behind, which is
    dropped (50% is 50, not 0.5); one full stop at the end. Not understood, and so never equal to a number: units,
    words, expressions, several numbers, other scripts' digits, and anything over 100 characters.

    Example:
        >>> parse_number("$1,234.50"), parse_number("-3/4"), parse_number("18 dollars")
        (Fraction(2469, 2), Fraction(-3, 4), None)
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = text.strip().replace("−", "-").replace("\\%", "%").replace("\\$", "$")
    text = text.removesuffix("%").rstrip()
    text = re.sub(r"^([+-]?)\s*[$€£¥]\s*", r"\1", text)
    if match := _MIXED.fullmatch(text):
        whole, top, bottom = (Fraction(int(match[name])) for name in ("whole", "top", "bottom"))
        value = whole + top / bottom if bottom else None
    elif match := _LATEX_FRACTION.fullmatch(text) or _NUMBER.fullmatch(text):
        above, below = _decimal(match["top"]), _decimal("1" if match["bottom"] is None else match["bottom"])
        value = above / below if above is not None and below else None
    else:
        return None
    return -value if value is not None and match["sign"] == "-" else value


def _decimal(text: str) -> Fraction | None:
    text = text.strip()
    if not re.fullmatch(_DECIMAL, text) or not re.match(r"\.?[0-9]", text):
        return None
    mantissa, _, exponent = text.lower().replace(",", "").partition("e")
    whole, _, decimals = mantissa.partition(".")
    return Fraction(int(whole + decimals or "0"), 10 ** len(decimals)) * Fraction(10) ** int(exponent or 0)


def normalise_text(text: str) -> str:
    r"""Text for comparison: canonical Unicode, lower case, single spaces, no full stop at the end, and without one
    `\boxed{}`, `\text{}` or pair of `$` around all of it.

    Example:
        >>> normalise_text(r" \boxed{New  York}.")
        'new york'
    """
    if len(text) <= MAX_NFC_CHARS:
        text = unicodedata.normalize("NFC", text)
    text = " ".join(text.split()).removesuffix(".").rstrip()
    for _ in range(3):
        if match := _WRAPPED.fullmatch(text):
            text = match[1].strip()
        elif len(text) > 2 and text.startswith("$") and text.endswith("$") and text.count("$") == 2:
            text = text[1:-1].strip()
    return text.casefold()


def answers_equal(answer: str, truth: object) -> bool:
    """Whether an answer equals the truth: as numbers where the truth is one, else as normalised text.

    Args:
        truth: text or a number.

    Raises:
        TypeError: the truth is neither.

    Example:
        >>> answers_equal("1,200.0", 1200), answers_equal("0.333", "1/3"), answers_equal("paris.", "Paris")
        (True, False, True)
    """
    if not isinstance(truth, (str, int, float)):
        raise TypeError(f"ground_truth must be text or a number, not {type(truth).__name__}: {truth!r}")
    given, wanted = normalise_text(answer), normalise_text(str(truth))
    number = parse_number(wanted)
    return given == wanted if number is None else parse_number(given) == number


def require_truths(ground_truth: Iterable[object]) -> None:
    """Without a truth nothing can be right: that is a failure to name, not a completion worth 0.

    Raises:
        TypeError: one is None.

    Example:
        >>> require_truths(["18", None])
        Traceback (most recent call last):
            ...
        TypeError: ground_truth must be text or a number, not None: it is missing
    """
    if any(truth is None for truth in ground_truth):
        raise TypeError("ground_truth must be text or a number, not None: it is missing")
