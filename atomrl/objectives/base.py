"""Base class of objectives, and the report of an objective: equation, atoms with their lines and papers, warnings.

Equations and warnings are those of the choices, papers those of the atoms. So the report covers policy, preference,
supervised and reward-model objectives alike.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from atomrl.atoms import Formula, source_of
from atomrl.atoms.reductions import sequence_mean
from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch
from atomrl.common.functions import may_import
from atomrl.objectives.choice import (
    FROZEN,
    Choice,
    Custom,
    Setting,
    changed,
    check_name,
    choices_of,
    imported,
    validated,
)
from atomrl.protocols import NOTHING, ModelInput, ModelOutputs, Output, RowUnit, Update


class Goal(NamedTuple):
    """A sum of terms that is maximised or minimised."""

    verb: Formula
    over: Formula
    """Sum or mean over which the terms are taken."""
    terms: tuple[Formula, ...]
    """Terms of the sum; a term that is subtracted begins with a minus."""


class Formulation(NamedTuple):
    """An objective as an equation: goals, and lines that define their symbols.

    `equation` renders its text, `latex` its LaTeX; both leave out empty formulas.
    """

    goals: tuple[Goal, ...]
    where: tuple[Formula, ...]


MINIMISE = Formula("minimise", r"\min_\theta")


class Objective(BaseModel):
    """Base class of objectives: a `protocols.Algorithm` that is plain data.

    By default it has no advantages, and all rows have the same weight.
    """

    model_config = FROZEN

    name: str = "objective"
    """Name in messages."""
    report_entropy: bool = Field(False, exclude=True)
    """Also log the mean entropy of the policy's next-token distributions."""

    @property
    def axes(self) -> dict[str, Any]:
        """Choices by axis, under the config's keys."""
        fields = type(self).model_fields.items()
        return {field.alias or name: getattr(self, name) for name, field in fields if choices_of(field.annotation)}

    def off_axes(self) -> set[str]:
        """Return the axes whose choice has no effect with the current settings."""
        return set()

    def used_axes(self) -> dict[str, tuple[Choice, ...]]:
        """Return the choices of each axis that have an effect; none for an axis that is switched off."""
        off = self.off_axes()
        return {name: () if name in off else as_tuple(choice) for name, choice in self.axes.items()}

    def override(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with a config's changes, by axis; a plain string sets an axis's type.

        Raises:
            ValueError: an unknown axis, parameter or type, each with the nearest valid name; an invalid value; or axes
                that cannot be combined.

        Example:
            >>> from atomrl.objectives import PolicyObjective
            >>> PolicyObjective().override({"clip": {"high": 0.28}, "advantage": "raw"}).clip
            PPOClip(low=0.2, high=0.28, dual=None)
        """
        fields = {field.alias or name: (name, field) for name, field in type(self).model_fields.items()}
        # Pass on only fields that were set, so `model_fields_set` still tells them from defaults.
        values = {key: getattr(self, name) for key, (name, _) in fields.items() if name in self.model_fields_set}
        valid = [key for key, (name, field) in fields.items() if name != "name" and not field.exclude]
        for key, change in changes.items():
            check_name("algorithm", key, valid)
            name, field = fields[key]
            is_axis = bool(choices_of(field.annotation))
            values[key] = changed(f"algorithm.{key}", field, getattr(self, name), change) if is_axis else change
        return validated(type(self), "algorithm", values)

    def resolved(self, *, max_completion_tokens: int | None = None, report_entropy: bool = False) -> Self:
        """Return the objective of a run, with lengths that were not set taken from `max_completion_tokens`."""
        return self.model_copy(update={"report_entropy": report_entropy})

    def formulation(self) -> Formulation:
        """Return the objective as an equation."""
        raise NotImplementedError

    def warnings(self, setting: Setting) -> Iterator[str]:
        """Yield known problems: bias, instability, options without effect."""
        for choice in self.axes.values():
            for part in as_tuple(choice):
                yield from part.warnings(setting)

    @property
    def needs(self) -> frozenset[ModelInput]:
        return self.advantage_inputs

    @property
    def advantage_inputs(self) -> frozenset[ModelInput]:
        return frozenset()

    @property
    def outputs(self) -> frozenset[Output]:
        return frozenset({"logprobs", "entropy"} if self.report_entropy else {"logprobs"})

    @property
    def row_unit(self) -> RowUnit:
        return "row"

    @property
    def extra_rollouts(self) -> Mapping[str, Any] | None:
        return None

    @property
    def keeps_group(self) -> Callable[[Sequence[float]], bool] | None:
        return getattr(self, "group_filter", None)

    def advantages(self, rows: RowBatch, state: Mapping[str, float] = NOTHING) -> AdvantageBatch:
        """Return the rows with advantages of 0."""
        return AdvantageBatch(**vars(rows), advantages=torch.zeros(rows.loss_mask.shape), state={**state})

    def loss_weights(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        """Loss mask [B, T] and group ids [B] of an optimizer step -> weights [B, T]."""
        return sequence_mean(mask)

    def by_token(self, outputs: ModelOutputs, batch: TrainingBatch) -> Mapping[str, Tensor]:
        """Return no further values per token."""
        return {}


def as_tuple(choice: Choice | tuple[Choice, ...] | None) -> tuple[Choice, ...]:
    """Return the choices of an axis, which may have one, several or none, as a tuple."""
    return choice if isinstance(choice, tuple) else () if choice is None else (choice,)


class SupervisedObjective(Objective):
    """Base class of objectives on data instead of rollouts; they use the optimizer's step."""

    @property
    def update(self) -> Update | None:
        return None


# --------------------------------------------------------------------------------------------------------------------
# Report of an objective, for `atomrl explain`, the documentation and the web interface.

ROOT = Path(__file__).parents[2]


def page(objective: Objective, setting: Setting) -> str:
    """Return the output of `atomrl explain`: equation, table of the axes, warnings."""
    messages = [f"! {message}" for message in dict.fromkeys(objective.warnings(setting))]
    warnings = "\n".join(messages) or "nothing is known to go wrong with this"
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
