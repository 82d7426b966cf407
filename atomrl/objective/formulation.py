"""An objective as an equation: goals, each a sum of terms, and the lines that say what its symbols are.

Written once; `explain.py` renders it for the terminal and for print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atomrl.objective.choice import Formula


class Goal(NamedTuple):
    """What is maximised or minimised."""

    verb: Formula
    over: Formula
    """The sum or the mean that is taken of the terms."""
    terms: tuple[Formula, ...]
    """Of a sum; one that is taken off begins with a minus."""


class Formulation(NamedTuple):
    """An objective's equation. A line whose text or LaTeX is empty is left out of that form."""

    goals: tuple[Goal, ...]
    where: tuple[Formula, ...]


MAXIMISE = Formula("maximise", r"\max_\theta")
MINIMISE = Formula("minimise", r"\min_\theta")


def product(factors: Sequence[Formula]) -> Formula:
    """Formulas side by side."""
    return Formula(" ".join(item.text for item in factors), r"\, ".join(item.latex for item in factors))
