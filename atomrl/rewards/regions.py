r"""Sets of real numbers in LaTeX, in any of their notations: `(-\infty,0)\cup(0,\infty)`, `x \ne 0`,
`\mathbb{R}\setminus\{0\}` and `\{x \mid x<0 \text{ or } x>0\}` are one set.

`read_region` reads a text, `same_regions` compares two of them by the ends of their intervals.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import sympy
from sympy.core.relational import Equality, Relational, Unequality

_SIGNS = {"ℝ": r"\mathbb{R}", "∈": r"\in ", "∉": r"\notin ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ",
          "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "∨": r"\lor ", "∧": r"\land "}  # fmt: skip
_SPELLINGS = [
    (r"\\R(?![A-Za-z])|\\mathbb\s*R|\\mathbf\s*\{R\}|\\mathrm\s*\{R\}", r"\\mathbb{R}"),
    (r"\\mathbb\s*\{R\}\s*(?:\^|_)\s*(?:\+|\{\s*(?:\+|>\s*0)\s*\})", r"(0,\\infty)"),
    (r"\\mathbb\s*\{R\}\s*(?:\^|_)\s*(?:-|\{\s*(?:-|<\s*0)\s*\})", r"(-\\infty,0)"),
    (r"\\mathbb\s*\{R\}\s*_\s*\{\s*\\g(?:e|eq|eqslant)\s*0\s*\}", r"[0,\\infty)"),
    (r"\\not\s*=|\\neq(?![a-z])", r"\\ne "),
    (r"\\not\s*\\in(?![a-z])", r"\\notin "),
    (r"\\backslash|\\smallsetminus|(?<=[}\])])\s*(?:-|\\(?=\s))\s*(?=\\\{)", r"\\setminus "),
    (r"\\q?quad(?![a-z])|\\[;:! ]|~", " "),
    (r"\\,", " "),
]
_REALS = re.compile(r"(?:\\text\s*\{)?\s*(?:all\s+)?real(?:s| numbers)\s*\}?", re.IGNORECASE)
_OR = re.compile(
    r",?\s*(?:\\text\s*\{\s*,?\s*(?:or|或)\s*,?\s*\}|\\lor(?![a-z])|\\vee(?![a-z])|(?<![A-Za-z\\])or(?![A-Za-z])|或)"
)
_AND = re.compile(
    r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|且)\s*,?\s*\}|\\land(?![a-z])|\\wedge(?![a-z])|"
    r"(?<![A-Za-z\\])and(?![A-Za-z])|且)"
)
_LIST = re.compile(r"[,;、]|\\text\s*\{\s*[,;]\s*\}|和")
_SET_OPERATION = re.compile(r"\\(cup|cap|setminus)(?![a-z])")
_MEMBER = re.compile(r"\s*([A-Za-z])\s*\\(in|notin)(?![a-z])\s*(.+)", re.DOTALL)
_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in(?![a-z])([^|:]+?))?\s*(?:\\mid(?![a-z])|\\middle\s*\||\\vert(?![a-z])|\\colon(?![a-z])|[|:])(.+)"
    r"\\\}",
    re.DOTALL,
)
_BRACKET = re.compile(r"\\?[{}]|[()\[\]]")


class Region(NamedTuple):
    """A set of real numbers."""

    points: Any
    """Intervals and points, as a set of sympy."""
    name: str
    """Name of the variable in inequalities; "" for none, and in a set builder, where any name will do."""
    plain: bool
    """True for one interval, one point or one list of points, which may be meant as something else: `(1, 2)`."""


class _Unreadable(ValueError):
    pass


def read_region(text: str, parse: Callable[[str], Any]) -> Region | None:
    r"""Read a set of real numbers; None for any other text, and where the ends of an interval are not numbers.

    Inequalities are read where the variable stands alone (`x > 3`, `1 < x \le 2`, not `2x > 6`). `or` means the union,
    `and` the intersection. A comma between inequalities is read as the one of the two that is neither empty nor all
    real numbers: the union in `x<-1, x>1`, the intersection in `x>-1, x<1`.

    Args:
        text: LaTeX without markup around it (fonts, sizes, `$`).
        parse: a parser of LaTeX that returns an expression with exact numbers, or None.
    """
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    for spelling, usual in _SPELLINGS:
        text = re.sub(spelling, usual, text)
    if _REALS.fullmatch(text.strip()):
        return Region(sympy.Interval(-sympy.oo, sympy.oo), "", False)
    try:
        return _read(text.strip(), parse)
    except _Unreadable:
        return None


def same_regions(one: Region, other: Region, equal: Callable[[Any, Any], bool]) -> bool:
    """Return True if two regions have the same points, and no variables of different names.

    Args:
        equal: compares two numbers.
    """
    if one.name and other.name and one.name != other.name:
        return False
    left = list(_pieces(other.points))
    for piece in _pieces(one.points):
        place = next(
            (at for at, two in enumerate(left) if piece[2:] == two[2:] and all(map(equal, piece[:2], two[:2]))), None
        )
        if place is None:
            return False
        del left[place]
    return not left


def _pieces(points: Any) -> Iterator[tuple[Any, Any, bool, bool]]:
    """Yield (start, end, True if the start is left out, True if the end is) of each interval; a point is one too."""
    for part in points.args if isinstance(points, sympy.Union) else (points,):
        if isinstance(part, sympy.Interval):
            yield part.start, part.end, bool(part.left_open), bool(part.right_open)
        else:
            yield from ((point, point, False, False) for point in part.args)


def _read(text: str, parse: Callable[[str], Any]) -> Region:
    """Read a condition or a set: first what binds least."""
    if len(parts := _split(text, _OR)[0]) > 1:
        regions = [_read(part, parse) for part in parts]
        if any(region.plain and not re.search(r"\\infty|[\[\]]|[=<>]", part)
               for region, part in zip(regions, parts, strict=True)):  # fmt: skip
            raise _Unreadable  # (1, 2) or (3, 4) may be points
        return Region(sympy.Union(*(region.points for region in regions)), _name(regions), False)
    for mark in (_LIST, _AND):
        if len(parts := _split(text, mark)[0]) > 1:
            regions = [_read(part, parse) for part in parts]
            if not all(_MEMBER.match(part) or re.search(r"[=<>]|\\[gln]eq?", part) for part in parts):
                raise _Unreadable  # a list of numbers, points or intervals
            return Region(_joined(regions, mark is _LIST), _name(regions), False)
    if member := _MEMBER.fullmatch(text):
        region = _read(member[3], parse)
        inside = region.points if member[2] == "in" else sympy.S.Reals - region.points
        return Region(_known(inside), member[1], region.plain and member[2] == "in")
    parts, signs = _split(text, _SET_OPERATION)
    if len(parts) > 1:
        if len(set(signs)) > 1:
            raise _Unreadable  # without parentheses, A - B + C has two readings
        function = {"cup": sympy.Union, "cap": sympy.Intersection, "setminus": sympy.Complement}[signs[0]]
        regions = [_read(part, parse) for part in parts]
        return Region(_known(functools.reduce(function, (region.points for region in regions))), _name(regions), False)
    if builder := _BUILDER.fullmatch(text):
        region = _read(builder[3], parse)
        if region.name not in ("", builder[1]):
            raise _Unreadable
        domain = _read(builder[2], parse).points if builder[2] else sympy.S.Reals
        return Region(_known(sympy.Intersection(region.points, domain)), "", False)
    if text.startswith("(") and text.endswith(")") and len(_split(text[1:-1], re.compile(","))[0]) == 1:
        return _read(text[1:-1].strip(), parse)
    if signed := re.fullmatch(r"\s*([A-Za-z])\s*\\ne\s*\\pm(?![a-z])(.+)", text, re.DOTALL):
        return _read(rf"{signed[1]}\ne {signed[2]} , {signed[1]}\ne -({signed[2]})", parse)
    return _single(parse(text))


def _split(text: str, mark: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split a text at the marks that are outside of all brackets. Return (parts, first groups of the marks)."""
    parts, found, start, depth, at = list[str](), list[str](), 0, 0, 0
    while at < len(text):
        if depth == 0 and (match := mark.match(text, at)):
            parts.append(text[start:at].strip())
            found.append(match[1] if mark.groups else match[0])
            start = at = match.end()
        elif bracket := _BRACKET.match(text, at):
            depth += 1 if bracket[0][-1] in "([{" else -1
            at = bracket.end()
        else:
            at += 1
    parts.append(text[start:].strip())
    if len(parts) > 1 and not all(parts):
        raise _Unreadable
    return parts, found


def _name(regions: list[Region]) -> str:
    names = {region.name for region in regions if region.name}
    if len(names) > 1:
        raise _Unreadable  # a plane
    return names.pop() if names else ""


def _joined(regions: list[Region], either: bool) -> Any:
    """Return the intersection of conditions. `either` allows their union too, where only that makes sense."""
    both = _known(sympy.Intersection(*(region.points for region in regions)))
    if not either:
        return both
    union = _known(sympy.Union(*(region.points for region in regions)))
    if both == sympy.S.EmptySet:
        return union
    if union == sympy.S.Reals:
        return both
    raise _Unreadable


def _single(expression: Any) -> Region:
    """Convert one parsed set, inequality or chain of inequalities."""
    if isinstance(expression, sympy.And) and all(isinstance(part, Relational) for part in expression.args):
        regions = [_single(part) for part in expression.args]
        return Region(_known(sympy.Intersection(*(region.points for region in regions))), _name(regions), False)
    if isinstance(expression, Relational):
        left, right, kind = expression.lhs, expression.rhs, type(expression)
        if not isinstance(left, sympy.Symbol):
            left, right, kind = right, left, type(expression.reversed)
        if not isinstance(left, sympy.Symbol) or not isinstance(right, sympy.Expr):
            raise _Unreadable
        end = _end(right)
        points = {
            sympy.StrictLessThan: lambda: sympy.Interval.open(-sympy.oo, end),
            sympy.LessThan: lambda: sympy.Interval(-sympy.oo, end),
            sympy.StrictGreaterThan: lambda: sympy.Interval.open(end, sympy.oo),
            sympy.GreaterThan: lambda: sympy.Interval(end, sympy.oo),
            Unequality: lambda: sympy.S.Reals - sympy.FiniteSet(end),
            Equality: lambda: sympy.FiniteSet(end),
        }[kind]()
        return Region(points, str(left), kind is Equality)
    if expression == sympy.S.Reals or expression == sympy.S.EmptySet:
        return Region(expression, "", False)
    if isinstance(expression, sympy.Interval):
        ends = _end(expression.start), _end(expression.end)
        interval = sympy.Interval(*ends, expression.left_open, expression.right_open)
        return Region(interval, "", not any(end.is_infinite for end in ends))
    if isinstance(expression, sympy.FiniteSet):
        return Region(sympy.FiniteSet(*map(_end, expression.args)), "", True)
    raise _Unreadable


def _end(number: Any) -> Any:
    if not isinstance(number, sympy.Expr) or number.free_symbols or not number.is_extended_real:
        raise _Unreadable
    return number


def _known(points: Any) -> Any:
    """Return a set that sympy could work out to intervals and points."""
    parts = points.args if isinstance(points, sympy.Union) else (points,)
    if not all(part is sympy.S.EmptySet or isinstance(part, sympy.Interval | sympy.FiniteSet)
               or part == sympy.S.Reals for part in parts):  # fmt: skip
        raise _Unreadable
    return sympy.Interval(-sympy.oo, sympy.oo) if points == sympy.S.Reals else points
