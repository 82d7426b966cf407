"""What objectives have in common: axes that a config changes, and the parts of an `Algorithm` that most leave out."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from atomrl.atoms.reductions import sequence_mean
from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch
from atomrl.common.functions import may_import
from atomrl.objectives.choice import (
    FROZEN,
    Choice,
    Custom,
    Formula,
    Setting,
    changed,
    check_name,
    choices_of,
    imported,
    validated,
)
from atomrl.protocols import NOTHING, ModelInput, ModelOutputs, Output, RowUnit, Update


class Goal(NamedTuple):
    """What is maximised or minimised."""

    verb: Formula
    over: Formula
    """The sum or the mean that is taken of the terms."""
    terms: tuple[Formula, ...]
    """Of a sum; one that is taken off begins with a minus."""


class Formulation(NamedTuple):
    """An objective as an equation: goals, each a sum of terms, and the lines that say what its symbols are.

    Written once; `explain.py` renders it for the terminal and for print, and leaves out of either what is empty.
    """

    goals: tuple[Goal, ...]
    where: tuple[Formula, ...]


MINIMISE = Formula("minimise", r"\min_\theta")


class Objective(BaseModel):
    """An `Algorithm` (protocols.py), and plain data. Unless a subclass says otherwise, its loss is of the rows as they
    are: without advantages, every row weighing the same."""

    model_config = FROZEN

    name: str = "objective"
    """What it is called in messages."""
    report_entropy: bool = Field(False, exclude=True)
    """Also log the mean entropy of the policy's next-token distributions."""

    @property
    def axes(self) -> dict[str, Any]:
        """The choices on every axis, by its key in a config."""
        fields = type(self).model_fields.items()
        return {field.alias or name: getattr(self, name) for name, field in fields if choices_of(field.annotation)}

    def off_axes(self) -> set[str]:
        """Axes whose choice has no part in the objective as it is set."""
        return set()

    def used_axes(self) -> dict[str, tuple[Choice, ...]]:
        """The choices of each axis that have a part in it; none where it is switched off."""
        off = self.off_axes()
        return {name: () if name in off else as_tuple(choice) for name, choice in self.axes.items()}

    def override(self, changes: Mapping[str, Any]) -> Self:
        """With other parameters or axes, as a config has them; a plain string sets an axis's type.

        Raises:
            ValueError: an unknown axis, parameter or type, each with the nearest valid name; a value that is not
                taken; or axes that do not go together.

        Example:
            >>> from atomrl.objectives import PolicyObjective
            >>> PolicyObjective().override({"clip": {"high": 0.28}, "advantage": "raw"}).clip
            PPOClip(low=0.2, high=0.28, dual=None)
        """
        fields = {field.alias or name: (name, field) for name, field in type(self).model_fields.items()}
        # only what was said stays said, so that what nobody said may follow from the rest of a config
        values = {key: getattr(self, name) for key, (name, _) in fields.items() if name in self.model_fields_set}
        valid = [key for key, (name, field) in fields.items() if name != "name" and not field.exclude]
        for key, change in changes.items():
            check_name("algorithm", key, valid)
            name, field = fields[key]
            is_axis = bool(choices_of(field.annotation))
            values[key] = changed(f"algorithm.{key}", field, getattr(self, name), change) if is_axis else change
        return validated(type(self), "algorithm", values)

    def resolved(self, *, max_completion_tokens: int | None = None, report_entropy: bool = False) -> Self:
        """The algorithm of a run; `max_completion_tokens` is the rollout's, for axes that were not given their own."""
        return self.model_copy(update={"report_entropy": report_entropy})

    def formulation(self) -> Formulation:
        """Its equation."""
        raise NotImplementedError

    def warnings(self, setting: Setting) -> Iterator[str]:
        """What is known to be biased, unstable or without effect."""
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
        """The rows as they are."""
        return AdvantageBatch(**vars(rows), advantages=torch.zeros(rows.loss_mask.shape), state={**state})

    def loss_weights(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        """Loss mask [B, T] and group ids [B] of an optimizer step -> weights [B, T]."""
        return sequence_mean(mask)

    def by_token(self, outputs: ModelOutputs, batch: TrainingBatch) -> Mapping[str, Tensor]:
        """Nothing beside what there is of all objectives."""
        return {}


def as_tuple(choice: Choice | tuple[Choice, ...] | None) -> tuple[Choice, ...]:
    """The choices of an axis, which may take several or none."""
    return choice if isinstance(choice, tuple) else () if choice is None else (choice,)


class SupervisedObjective(Objective):
    """An objective whose rows come from data, or are labelled: its gradients are the optimizer's."""

    @property
    def update(self) -> Update | None:
        return None


# --------------------------------------------------------------------------------------------------------------------
# An objective read back from its choices: the equation, the atoms with their lines and papers, and known faults.
#
# Nothing here knows an algorithm: a policy, a preference, a demonstration's or a reward model's objective is the same
# to it. Equations and warnings are the choices' own; papers are in the atoms' docstrings.

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
        >>> from atomrl.objectives import PolicyObjective
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
        >>> from atomrl.objectives import PolicyObjective
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
