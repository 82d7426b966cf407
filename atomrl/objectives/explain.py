"""Report of an objective: equation, atoms with their lines and papers, warnings.

For `atomrl explain`, the documentation and the web interface. Equations and warnings are those of the choices, papers
those of the atoms, so the report covers policy, preference, supervised and reward-model objectives alike.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atomrl.atoms import source_of
from atomrl.common.functions import may_import
from atomrl.objectives.choice import Choice, Custom, Setting, imported
from atomrl.objectives.objective import Goal, Objective

ROOT = Path(__file__).parents[2]


def page(objective: Objective, setting: Setting) -> str:
    """Return the output of `atomrl explain`: equation, table of the axes, warnings."""
    messages = [f"! {message}" for message in dict.fromkeys(objective.warnings(setting))]
    warnings = "\n".join(messages) or "no known problems"
    parts = (f"{objective.name}: {equation(objective)}", table(objective), warnings)
    return "\n\n".join(part for part in parts if part)


def equation(objective: Objective) -> str:
    """Return the objective as text: goals, then a line for each symbol.

    Example:
        >>> from atomrl.objectives import PolicyObjective
        >>> print(equation(PolicyObjective()))
        maximise  sum_{i,t} w_{i,t} min(rho A, clip(rho, 1 - low, 1 + high) A)
        where
          w_{i,t} = 1 / sum_j |o_j|
          rho_{i,t} = pi(a_t) / pi_old(a_t)
          A_i = (r_i - mean_group r) / (std_group r + eps)
    """
    goals, where = objective.formulation()
    lines = [f"{goal.verb.text}  {goal.over.text} {_sum(goal, 0, '[ ', ' ]')}" for goal in goals]
    return "\n".join([*lines, "where", *(f"  {line.text}" for line in where if line.text)])


def latex(objective: Objective) -> str:
    r"""Return the objective as LaTeX, in an `aligned` block.

    Example:
        >>> from atomrl.objectives import PolicyObjective
        >>> print(latex(PolicyObjective()).splitlines()[-2])
        & \hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{std}_{g(i)} r + \epsilon}
    """
    goals, where = objective.formulation()
    left, right = r"\Big[ ", r" \Big]"
    lines = [rf"{goal.verb.latex} \;& {goal.over.latex} {_sum(goal, 1, left, right)}" for goal in goals]
    lines += [f"& {line.latex}" for line in where if line.latex]
    return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"


def _sum(goal: Goal, form: int, left: str, right: str) -> str:
    signed = " + ".join(term[form] for term in goal.terms).replace(" + - ", " - ")
    return f"{left}{signed}{right}" if len(goal.terms) > 1 or signed.startswith("- ") else signed


def table(objective: Objective) -> str:
    """Return each axis with its fields (`*` marks values that are not the type's default) and its atoms."""
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
    """Return the first line of a choice's docstring, or of that of the user's function."""
    own = inspect.getdoc(imported(choice.function)) if isinstance(choice, Custom) and may_import() else None
    return (own or inspect.getdoc(type(choice)) or "").partition("\n")[0]


def changed_fields(choice: Choice) -> dict[str, Any]:
    """Return the fields whose values are not the type's default."""
    fields = type(choice).model_fields
    return {name: value for name, value in choice if value != fields[name].default}


def atom_place(atom: Callable[..., Any]) -> tuple[str, str, str]:
    """Return an atom's name, its place (`atomrl/atoms/kl.py:137`) and its paper, '' if it has none."""
    plain = inspect.unwrap(atom)
    path = Path(plain.__code__.co_filename).resolve()
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    return plain.__name__, f"{shown}:{plain.__code__.co_firstlineno}", source_of(atom).paper
