"""Units, multiples, bases and clock times in an answer."""

import re
from typing import NamedTuple

from atomrl.rewards.answers import fold

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
