"""A tool of `tools.yaml`."""

from atomrl.rewards.expressions import evaluate_arithmetic


def calculate(expression: str) -> str:
    """Calculates the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / and parentheses, such as "3 * (4 + 5)"
    """
    result = evaluate_arithmetic(expression)
    if result is None:
        raise ValueError(f"{expression!r} is no arithmetic expression")
    return str(result[0])
