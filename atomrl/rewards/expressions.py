"""Reading expressions that a model wrote, without ever running them."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

MAX_CHARS = 200
FUNCTIONS = {"Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "sec", "sin", "sinh",
             "sqrt", "tan", "tanh"}  # fmt: skip


def parse_expression(text: str) -> ast.expr | None:
    """The syntax tree of an expression of numbers, names, calls and `+ - * / **`, or None.

    Only characters that such an expression needs are let through to the parser, and at most 200 of them; numbers
    are plain decimals (no exponents, hexadecimal or imaginary numbers).
    """
    text = text.strip()
    if len(text) > MAX_CHARS or not re.fullmatch(r"[0-9A-Za-z+\-*/(),. ]+", text) or re.search(r"[0-9.][A-Za-z]", text):
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression of whole numbers, `+ - * /` and parentheses, and the numbers in it.

    Returns:
        (value, numbers in the order of the text), or None for anything else and for a division by zero. A minus sign
        is an operator between two numbers only: `-3` is none.

    Example:
        >>> evaluate_arithmetic("(7 - 3) * 25 / 2")
        (Fraction(50, 1), [7, 3, 25, 2])
        >>> evaluate_arithmetic("__import__('os')") is None
        True
    """
    tree = parse_expression(text)
    numbers: list[int] = []
    try:
        value = None if tree is None else _value(tree, numbers)
    except RecursionError:
        return None
    return None if value is None else (value, numbers)


def _value(node: ast.expr, numbers: list[int]) -> Fraction | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left, numbers), _value(node.right, numbers)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    return left / right if isinstance(node.op, ast.Div) and right else None


def is_tame_formula(text: str) -> bool:
    """Whether a formula in one-letter variables can be handed to a computer algebra system.

    Such systems read text by running it. So this lets through nothing but numbers, one-letter names, `pi`, the usual
    functions, `+ - * /` and powers; and of powers only those that cannot grow out of hand: a constant exponent of at
    most 50 (100 in all where powers are nested), or any exponent on a variable.

    Example:
        >>> is_tame_formula("x**3/3 + sin(2*x) + C"), is_tame_formula("9**9**9"), is_tame_formula("x.func")
        (True, False, False)
    """
    tree = parse_expression(text)
    try:
        return tree is not None and 0 <= _growth(tree) <= 100
    except RecursionError:
        return False


def _growth(node: ast.expr) -> float:
    """The product of nested constant exponents, at least 1; -1 for what is not let through."""
    if isinstance(node, ast.Constant):
        return 1 if type(node.value) in (int, float) else -1
    if isinstance(node, ast.Name):
        return 1 if len(node.id) == 1 or node.id == "pi" else -1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        return _growth(node.operand)
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        return _growth(node.args[0]) if named and len(node.args) == 1 and not node.keywords else -1
    if not isinstance(node, ast.BinOp):
        return -1
    left, right = _growth(node.left), _growth(node.right)
    if min(left, right) < 0:
        return -1
    if isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        return max(left, right)
    if not isinstance(node.op, ast.Pow):
        return -1
    if isinstance(node.left, ast.Name):
        return right
    exponent = evaluate_arithmetic(ast.unparse(node.right).removeprefix("-"))
    return left * max(1, float(exponent[0])) if exponent is not None and abs(exponent[0]) <= 50 else -1
