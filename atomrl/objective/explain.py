"""An objective read back from its choices: the equation, the atoms with their lines and papers, and known faults.

Nothing here knows an algorithm: a policy, a preference, a demonstration's or a reward model's objective is the same
to it. Equations and warnings are the choices' own; papers are in the atoms' docstrings.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atomrl.functions import may_import
from atomrl.objective.base import Goal, Objective
from atomrl.objective.choice import Choice, Custom, Setting, imported

ROOT = Path(__file__).parents[2]


def page(objective: Objective, setting: Setting) -> str:
    """What `atomrl explain` prints."""
    found = [f"! {message}" for message in dict.fromkeys(objective.warnings(setting))]
    warnings = "\n".join(found) if found else "nothing is known to go wrong with this"
    parts = (f"{objective.name}: {equation(objective)}", table(objective), warnings)
    return "\n\n".join(part for part in parts if part)


def equation(objective: Objective) -> str:
    """The objective as text: what is maximised or minimised, and then each symbol of it.

    Example:
        >>> from atomrl.objective import PolicyObjective
        >>> print(equation(PolicyObjective()))
        maximise  sum_{i,t} w_{i,t} min(rho A, clip(rho, 1 - low, 1 + high) A)
        where
          w_{i,t} = 1 / sum_j |o_j|
          rho_{i,t} = pi(a_t) / pi_old(a_t)
          A_i = (r_i - mean_group r) / (std_group r + eps)
    """
    found = objective.formulation()
    goals = [f"{goal.verb.text}  {goal.over.text} {_sum(goal, 0, '[ ', ' ]')}" for goal in found.goals]
    return "\n".join([*goals, "where", *(f"  {line.text}" for line in found.where if line.text)])


def latex(objective: Objective) -> str:
    r"""The objective for print, as an `aligned` block.

    Example:
        >>> from atomrl.objective import PolicyObjective
        >>> print(latex(PolicyObjective()).splitlines()[-2])
        & \hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{std}_{g(i)} r + \epsilon}
    """
    found, left, right = objective.formulation(), r"\Big[ ", r" \Big]"
    lines = [rf"{goal.verb.latex} \;& {goal.over.latex} {_sum(goal, 1, left, right)}" for goal in found.goals]
    lines += [f"& {line.latex}" for line in found.where if line.latex]
    return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"


def _sum(goal: Goal, form: int, left: str, right: str) -> str:
    signed = " + ".join(term[form] for term in goal.terms).replace(" + - ", " - ")
    return f"{left}{signed}{right}" if len(goal.terms) > 1 or signed.startswith("- ") else signed


def table(objective: Objective) -> str:
    """Each axis with its fields (`*` marks what is not the type's default), its atoms, lines and papers."""
    lines = []
    for axis, choices in objective.used_axes().items():
        lines += [] if choices else [f"{axis}: none"]
        for choice in choices:
            defaults = changed_fields(choice)
            shown = ", ".join(f"{k}={v}{'*' if k in defaults else ''}" for k, v in choice)
            lines.append(f"{axis}: {choice.type}{f' ({shown})' if shown else ''}")
            lines.append(f"    {summary(choice)}")
            own = [imported(choice.function)] if isinstance(choice, Custom) and may_import() else []
            atoms = [atom for atom in [*own, *choice.atoms()] if inspect.isfunction(atom)]
            lines += dict.fromkeys("    " + "  ".join(filter(None, atom_place(atom))) for atom in atoms)
    return "\n".join(lines)


def summary(choice: Choice) -> str:
    """The first line of a choice's documentation, or of that of the user's function that it is."""
    own = inspect.getdoc(imported(choice.function)) if isinstance(choice, Custom) and may_import() else None
    return (own or inspect.getdoc(type(choice)) or "").partition("\n")[0]


def changed_fields(choice: Choice) -> dict[str, Any]:
    """The fields that are not the type's default."""
    fields = type(choice).model_fields
    return {name: value for name, value in choice if value != fields[name].default}


def atom_place(atom: Callable[..., Any]) -> tuple[str, str, str]:
    """An atom's name, `atomrl/atoms/kl.py:137`, and the paper that its docstring cites; '' where it cites none."""
    plain = inspect.unwrap(atom)
    path = Path(plain.__code__.co_filename).resolve()
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    found = re.search(
        r"Paper: (?!none)(.*?)(?<!Dr)(?<!al)(?:\.\s|\.$|;|\n\s*\n)", (inspect.getdoc(plain) or "") + "\n\n", re.DOTALL
    )
    paper = " ".join(found[1].split()) if found else ""
    return plain.__name__, f"{shown}:{plain.__code__.co_firstlineno}", paper
