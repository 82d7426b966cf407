"""Base class of objectives: one choice on each axis, which together implement `protocols.Algorithm`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from atomrl.atoms import Formula
from atomrl.atoms.policy_losses import sequence_mean
from atomrl.batches import AdvantageBatch, RowBatch
from atomrl.objectives.choice import FROZEN, Choice, Setting
from atomrl.objectives.overrides import changed, check_name, choices_of, validated
from atomrl.protocols import NOTHING, ModelInput, Output, RowUnit, Update

MINIMISE = Formula("minimise", r"\min_\theta")


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


def as_tuple(choice: Choice | tuple[Choice, ...] | None) -> tuple[Choice, ...]:
    """Return the choices of an axis, which may have one, several or none, as a tuple."""
    return choice if isinstance(choice, tuple) else () if choice is None else (choice,)


class SupervisedObjective(Objective):
    """Base class of objectives on data instead of rollouts; they use the optimizer's step."""

    @property
    def update(self) -> Update | None:
        return None
