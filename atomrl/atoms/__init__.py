"""Atoms: pure tensor functions, one equation each. `atomrl explain --atoms` lists them, `help(k3_kl)` documents one."""

import ast
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Formula(NamedTuple):
    """An equation, or a part of one."""

    text: str
    """For the terminal."""
    latex: str


class Source(NamedTuple):
    """Equation and paper of an atom, as its `@atom` states them."""

    text: str = ""
    latex: str = ""
    paper: str = ""

    def insert(self, docstring: str) -> str:
        """Return the docstring with equation and paper after its first line, where `help` shows them."""
        summary, _, rest = inspect.cleandoc(docstring).partition("\n\n")
        equation = "\n".join(f"    {line}" for line in self.text.splitlines())
        paper = self.paper and f"Paper: {self.paper}."
        return "\n\n".join(filter(None, [summary, equation, paper, rest]))


def atom(text: str = "", *, latex: str = "", paper: str = "") -> Callable[[Function], Function]:
    """Attach equation and paper to an atom, as its attribute `source` and in its docstring.

    Args:
        text: the equation for the terminal.
        latex: the equation for print, where a choice of an objective is this atom alone and shows its equation.
        paper: title or name, arXiv number, equation.

    Example:
        >>> from atomrl.atoms.kl import k3_kl
        >>> source_of(k3_kl).paper
        'DeepSeekMath, arXiv:2402.03300, equation 4'
    """
    source = Source(text, latex, paper)

    def attach(function: Function) -> Function:
        vars(function)["source"] = source
        function.__doc__ = source.insert(function.__doc__ or "")
        return function

    return attach


def source_of(function: Callable[..., Any]) -> Source:
    """Return the equation and the paper of an atom; empty for any other function."""
    source = getattr(function, "source", None)
    return source if isinstance(source, Source) else Source()
