"""Equality of two sympy expressions: numbers exactly, formulas at sample points, lists by their elements.

math-verify's own comparison rounds to six decimals and drops values below 1e-15, so that 1/2^98 equals 1/2^99.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
from sympy import Basic, Integer, MatrixBase, Pow, Rational, factorial
from sympy.core.relational import Equality, Relational, Unequality

MAX_BITS = 200_000
"""Size limit of computed numbers, in bits."""
MAX_DIGITS = 1000
"""Irrational numbers that agree in this many digits count as equal."""
_POINTS = [Rational(p, q) for p, q in ((17, 7), (-31, 11), (53, 13), (-5, 19), (37, 29), (-71, 3), (11, 41), (2, 61))]


class UnreadableError(ValueError):
    """An expression that is undefined, or too large to be computed."""


def tamed(expression: Any) -> Any:
    """Evaluate the parts of an expression that have one exact value, from the inside out.

    Raises:
        UnreadableError: it is undefined (1/0), or needs a number with more than `MAX_BITS` bits (9^9^9^9).
    """
    if not isinstance(expression, Basic | MatrixBase):
        return expression
    if isinstance(expression, MatrixBase):
        return expression.applyfunc(tamed)
    if isinstance(
        expression, sympy.Symbol
    ):  # the parser reads i as a variable, and assumes that the others are complex
        return sympy.I if expression.name == "i" else sympy.Symbol(expression.name, real=True)
    if isinstance(expression, sympy.Float):
        return Rational(str(expression))
    if not expression.args or (isinstance(expression, sympy.Set) and not isinstance(expression, sympy.FiniteSet)):
        return _defined(expression)
    args = [tamed(arg) for arg in _elements(expression)]
    if isinstance(expression, sympy.UnevaluatedExpr):
        return args[0]
    if isinstance(expression, Pow):
        _check_power(*args)
    if isinstance(expression, factorial) and args[0].is_Integer and args[0] > 15_000:
        raise UnreadableError("a factorial of too large a number")
    if isinstance(expression, sympy.Tuple | sympy.FiniteSet):
        return sympy.Tuple(*args) if isinstance(expression, sympy.Tuple) else expression.func(*args)
    if isinstance(expression, Relational):
        return expression.func(*args, evaluate=False)
    if isinstance(expression, sympy.And):
        return type(expression)(*args, evaluate=False)
    rebuilt = expression.func(*args)
    if isinstance(rebuilt, sympy.Sum | sympy.Product | sympy.Integral | sympy.Derivative | sympy.Limit):
        rebuilt = rebuilt.doit()
    return _defined(rebuilt)


def _defined(expression: Any) -> Any:
    """Return an expression unless it is undefined (NaN or complex infinity)."""
    if expression in (sympy.zoo, sympy.nan):
        raise UnreadableError("an undefined expression")
    return expression


def _elements(expression: Any) -> Sequence[Any]:
    """Return the arguments of an expression; those of a set in the order in which they were written."""
    arguments: Sequence[Any] = getattr(expression, "_unsorted_args", expression.args)
    return arguments


def _check_power(base: Any, exponent: Any) -> None:
    if not (base.is_Rational and exponent.is_Rational):
        return
    bits = max(abs(int(base.p)).bit_length(), int(base.q).bit_length())
    if abs(base) != 1 and abs(exponent) * bits > MAX_BITS:
        raise UnreadableError("a power with too many digits")


def same(gold: Any, given: Any) -> bool:
    """Return True if an answer equals the ground truth. Both must be `tamed`.

    `x = 5` equals 5. Sets and lists are compared in any order, tuples in their order.

    Raises:
        UnreadableError: a number becomes too large in the comparison.
    """
    if gold == given and not isinstance(gold, sympy.FiniteSet):  # as lists, 1, 1, 2 and 1, 2 differ
        return True
    if _is_equation(given) and not _is_relation(gold):
        given = _right_side(given)
    elif _is_equation(gold) and not _is_relation(given):
        gold = _right_side(gold)
    if gold is None or given is None:
        return False
    if _is_relation(gold) and _is_relation(given):
        return _same_relations(_relations(gold), _relations(given))
    if _is_relation(gold) != _is_relation(given):
        return isinstance(gold, sympy.Set) | isinstance(given, sympy.Set) and _as_set(gold) == _as_set(given)
    if isinstance(gold, MatrixBase) or isinstance(given, MatrixBase):
        return _same_matrices(gold, given)
    if isinstance(gold, sympy.Set | sympy.Tuple) or isinstance(given, sympy.Set | sympy.Tuple):
        return _same_collections(gold, given)
    return same_value(gold, given)


def _is_relation(expression: Any) -> bool:
    return isinstance(expression, Relational | sympy.And)


def _is_equation(expression: Any) -> bool:
    parts = _relations(expression) if _is_relation(expression) else []
    return bool(parts) and all(isinstance(part, Equality) for part in parts)


def _relations(expression: Any) -> list[Any]:
    return list(_elements(expression)) if isinstance(expression, sympy.And) else [expression]


def _right_side(equation: Any) -> Any:
    """Return the value of x = 5, f(x) = 5, x = 2 + 3 = 5 or 2 + 3 = 5; None for any other equation."""
    first, last = _relations(equation)[0], _relations(equation)[-1]
    name = isinstance(first.lhs, sympy.Symbol | sympy.core.function.AppliedUndef) or (
        first.lhs.args and all(isinstance(part, sympy.Symbol) for part in first.lhs.args)
    )
    sums = isinstance(first.lhs, sympy.Expr) and not first.lhs.free_symbols and same_value(first.lhs, last.rhs)
    return last.rhs if name or sums else None


def _as_set(expression: Any) -> Any:
    return expression.as_set() if _is_relation(expression) else expression


def _same_relations(gold: list[Any], given: list[Any]) -> bool:
    if len(gold) > 1 and _is_assignment_chain(gold) and _is_assignment_chain(given):
        gold, given = (
            [Equality(gold[0].lhs, gold[-1].rhs, evaluate=False)],
            [Equality(given[0].lhs, given[-1].rhs, evaluate=False)],
        )
    return _matched(gold, given, _same_relation)


def _is_assignment_chain(relations: list[Any]) -> bool:
    return all(isinstance(one, Equality) for one in relations) and isinstance(relations[0].lhs, sympy.Symbol)


def _same_relation(gold: Any, given: Any) -> bool:
    if isinstance(gold.rhs, sympy.Set | sympy.Tuple | MatrixBase) or isinstance(
        given.rhs, sympy.Set | sympy.Tuple | MatrixBase
    ):
        return type(gold) is type(given) and same(gold.lhs, given.lhs) and same(gold.rhs, given.rhs)
    (kind, one), (other_kind, other) = _standard(gold), _standard(given)
    if kind is not other_kind:
        return False
    if same_value(one, Integer(0)) or same_value(other, Integer(0)):
        return same_value(one, other)
    ratio = sympy.cancel(one / other) if one.free_symbols == other.free_symbols else None
    if ratio is None or ratio.free_symbols:
        return same_value(one, other) or (kind in (Equality, Unequality) and same_value(one, -other))
    return bool(ratio > 0) if kind not in (Equality, Unequality) and ratio.is_real else True


def _standard(relation: Any) -> tuple[type, Any]:
    """Return (type, left side - right side) of a relation, with < and <= turned into > and >=."""
    if isinstance(relation, sympy.StrictLessThan):
        return sympy.StrictGreaterThan, relation.rhs - relation.lhs
    if isinstance(relation, sympy.LessThan):
        return sympy.GreaterThan, relation.rhs - relation.lhs
    return type(relation), relation.lhs - relation.rhs


def _matched(gold: Sequence[Any], given: Sequence[Any], equal: Any) -> bool:
    """Return True if the items of two lists can be matched one to one."""
    if len(gold) != len(given):
        return False
    left = list(given)
    for one in gold:
        place = next((index for index, other in enumerate(left) if equal(one, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _same_matrices(gold: Any, given: Any) -> bool:
    if not (isinstance(gold, MatrixBase) and isinstance(given, MatrixBase)):
        return False
    return gold.shape == given.shape and all(map(same, gold.flat(), given.flat()))


def _same_collections(gold: Any, given: Any) -> bool:
    if isinstance(gold, sympy.FiniteSet) and isinstance(given, sympy.FiniteSet):
        return _matched(_elements(gold), _elements(given), same)
    ordered = [_in_order(gold), _in_order(given)]
    if isinstance(gold, sympy.Interval) and isinstance(given, sympy.Interval):
        return (gold.left_open, gold.right_open) == (given.left_open, given.right_open) and all(
            map(same, (gold.start, gold.end), (given.start, given.end))
        )
    if ordered[0] is not None and ordered[1] is not None:
        return len(ordered[0]) == len(ordered[1]) and all(map(same, ordered[0], ordered[1]))
    if isinstance(gold, sympy.Union) and isinstance(given, sympy.Union):
        return _matched(gold.args, given.args, same)
    return bool(gold == given)


def _in_order(expression: Any) -> Sequence[Any] | None:
    """Return the elements of a tuple or of a list as written. (1, 2), which the parser reads as an interval, is a tuple
    too. None if the expression has no such order."""
    if isinstance(expression, sympy.Interval):
        return (expression.start, expression.end) if expression.is_open else None
    if isinstance(expression, sympy.Tuple | sympy.FiniteSet):
        return _elements(expression)
    return None if isinstance(expression, sympy.Set) else (expression,)


def same_value(one: Any, other: Any) -> bool:
    """Return True if two numbers or formulas are equal. Formulas are compared at several points where both are real."""
    if one == other:
        return True
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return False
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    if not names:
        return _same_number(one, other)
    if one.has(sympy.core.function.AppliedUndef) or other.has(sympy.core.function.AppliedUndef):
        return bool(sympy.simplify(one - other) == 0)
    points = 0
    for start in range(len(_POINTS)):
        values = {name: _POINTS[(start + index) % len(_POINTS)] + index for index, name in enumerate(names)}
        try:
            here, there = (tamed(side.xreplace(values)) for side in (one, other))
        except UnreadableError:
            continue
        if not (one.has(sympy.I) or other.has(sympy.I)) and False in (here.is_extended_real, there.is_extended_real):
            continue
        if not _same_number(here, there):
            return False
        points += 1
    if points > 1:
        return True
    positive = {name: sympy.Dummy(positive=True) for name in names}
    return bool(sympy.simplify(one.xreplace(positive) - other.xreplace(positive)) == 0)


def _same_number(one: Any, other: Any) -> bool:
    if (one.is_Rational and other.is_Rational) or one.is_infinite or other.is_infinite:
        return bool(one == other)
    here, there = sympy.N(one, 30), sympy.N(other, 30)
    size = max(abs(here), abs(there))
    if not size.is_number or not here.is_number or not there.is_number:
        return bool(sympy.simplify(one - other) == 0)
    if abs(here - there) > size * Rational(1, 10**20):
        return False
    difference = one - other
    if difference == 0:
        return True
    try:
        return bool(difference.evalf(5, maxn=MAX_DIGITS, strict=True) == 0)
    except sympy.core.evalf.PrecisionExhausted:
        return True  # equal in MAX_DIGITS digits


def rounds_to(value: Any, digits: str) -> bool:
    """Return True if `digits` are `value` rounded to at least six decimals, and `value` is not a finite decimal.

    Example:
        >>> rounds_to(Rational(1, 3), "0.333333"), rounds_to(Rational(1, 3), "0.333")
        (True, False)
    """
    whole, _, decimals = digits.lstrip("+-").partition(".")
    if len(decimals) < 6 or len((whole + decimals).lstrip("0")) < 6 or not value.is_real:
        return False
    if value.is_Rational and value.q < 10**12 and set(sympy.primefactors(value.q)) <= {2, 5}:
        return False
    exact = Rational(digits)
    return bool(abs(sympy.N(value - exact, 30)) <= Rational(1, 2 * 10 ** len(decimals))) and not math.isinf(
        float(exact)
    )
