"""Parse and evaluate arithmetic expressions without running Python."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

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
