"""Base class of objectives, and the report of an objective: equation, atoms with their lines and papers, warnings.

Equations and warnings are those of the choices, papers those of the atoms. So the report covers policy, preference,
supervised and reward-model objectives alike.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, get_args, get_origin

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)
from pydantic.fields import FieldInfo
from torch import Tensor

from atomrl.atoms import Formula, source_of
from atomrl.atoms.policy_losses import sequence_mean
from atomrl.batches import AdvantageBatch, RowBatch
from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.common.functions import UNNAMED, find_function, may_import
from atomrl.protocols import NOTHING, ModelInput, Output, RowUnit, Update

# --------------------------------------------------------------------------------------------------------------------
# Base classes of the choices on an objective's axes, and their overrides from a config.
#
# A choice is a frozen record: its fields are the config's keys, its call computes the equation with atoms. An axis is a
# union of such classes, selected by `type`. A class also states its equation (text and LaTeX), its atoms, its inputs
# and its known problems, so everything about a choice is in one place.

Atoms = tuple[Callable[..., Any], ...]
"""Functions of `atomrl.atoms`."""
Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")
_DTYPES = {"bool": "torch.bool", "float": "torch.float32", "number": "torch.float32"}
FROZEN = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, protected_namespaces=())


def default(function: Callable[..., Any], parameter: str) -> Any:
    """Return the default of an atom's parameter, for a field that passes it on.

    Example:
        >>> from atomrl.atoms.policy_losses import clipped_policy_loss
        >>> default(clipped_policy_loss, "clip_low")
        0.2
    """
    return inspect.signature(function).parameters[parameter].default


def not_none(value: Value | None) -> Value:
    """Return an input that `needs` requests, and that is therefore never None."""
    assert value is not None, "the back end computes the inputs that `needs` names"
    return value


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Context of a choice for its warnings: the other axes, and related values of the config."""

    axes: Mapping[str, Any]
    """Choices of the objective by axis."""
    completions_per_prompt: int = 8
    updates_per_step: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logprobs_over: str = "vocabulary"
    """Tokens that log-probs are normalised over: `vocabulary`, or `kept` (those that top-p and top-k keep)."""
    reward_parts: int = 1
    """Number of reward functions with a weight."""
    max_completion_tokens: int = 48


class Choice(BaseModel):
    """A choice on one axis. Frozen; two are equal if type and fields are.

    A choice that is a single atom names it as `atom`, and takes equation, defaults and call from there:

        class K2(KLPenalty, type="k2"):
            atom = staticmethod(k2_kl)
    """

    model_config = FROZEN

    type: ClassVar[str] = ""
    """Its name in a config: `class PPOClip(Choice, type="ppo")`."""
    text: ClassVar[str] = ""
    """Equation for the terminal; by default that of `atom`. Set it to '' if the choice adds nothing."""
    latex: ClassVar[str] = ""
    """Equation for print; by default that of `atom`."""
    atom: ClassVar[Callable[..., Tensor]]
    """The atom, if there is a single one."""
    made_of: ClassVar[Atoms] = ()
    """Its atoms, if there are several."""
    needs: ClassVar[frozenset[ModelInput]] = frozenset()
    """Model outputs that the back end computes, without gradient, before the choice is called on a whole step."""
    keeps_fields: ClassVar[bool] = False
    """Another type of the axis keeps the values of the fields, since all types have the same fields."""

    def __init_subclass__(cls, type: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.type, adds_nothing = type, vars(cls).get("text") == ""
        if "atom" in vars(cls):
            source = source_of(cls.atom)
            cls.text, cls.latex = vars(cls).get("text", source.text), vars(cls).get("latex", source.latex)
        if type and not (cls.text or adds_nothing) and cls.equation is Choice.equation:
            raise TypeError(
                f"{cls.__name__} has no equation, which `atomrl explain` prints: set `atom` to a function with "
                "@atom, or `text` and `latex` (`text = ''` if it adds nothing to the objective)"
            )

    def __call__(self, *inputs: Any) -> Any:
        """Compute the equation: call `atom` with the inputs of the axis, and the fields as keywords."""
        return self.atom(*inputs, **self.settings)

    def atoms(self) -> Atoms:
        """Return the functions of `atomrl.atoms` that it uses with its current fields."""
        return self.made_of or ((self.atom,) if hasattr(self, "atom") else ())

    @property
    def by_completion(self) -> bool:
        """The loss has one value per completion, so all tokens of a completion have to be in one row."""
        return False

    def required(self) -> frozenset[ModelInput]:
        """Return `needs`, plus the inputs that its fields request."""
        return self.needs

    @model_serializer(mode="wrap")
    def _with_type(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"type": self.type, **fields(self)}

    @property
    def settings(self) -> dict[str, Any]:
        """The fields as keywords of an atom, without `weight`, which is a factor in a sum of losses."""
        return {name: value for name, value in self if name != "weight"}

    def equation(self) -> Formula:
        """Return `text` and `latex`; subclasses adapt them to their fields."""
        return Formula(self.text, self.latex)

    def where(self) -> tuple[Formula, ...]:
        """Return further lines of the equation, which define its symbols."""
        return ()

    def warnings(self, setting: Setting) -> Iterator[str]:
        """Yield known problems of the choice in this setting: bias, instability, options without effect."""
        return iter(())


class Custom(Choice):
    """A user's function, `my_module:my_function` or `./my_file.py:my_function`.

    It is called with the inputs of the axis, and `args` as keywords.
    """

    function: str
    args: dict[str, Any] = {}
    reads: tuple[ModelInput, ...] = Field((), strict=False)
    """Fields of the inputs that the back end computes for it (`[values]` adds a critic)."""
    inputs: ClassVar[Callable[..., Any]]
    """Class of the inputs of the axis."""

    @field_validator("reads")
    @classmethod
    def _reads_fields(cls, reads: tuple[ModelInput, ...]) -> tuple[ModelInput, ...]:
        fields = inspect.signature(cls.inputs).parameters
        for name in reads:
            if name not in fields:
                valid = [each for each in get_args(ModelInput) if each in fields]
                raise ValueError(f"{cls.inputs.__name__} has no {name}; it can have {', '.join(valid)}")
        return reads

    @property
    def shown(self) -> str:
        """Name of the function in messages."""
        return self.function.removeprefix(f"{UNNAMED}:")

    def required(self) -> frozenset[ModelInput]:
        return frozenset(self.reads)

    def equation(self) -> Formula:
        name = self.function.replace("_", r"\_")
        return Formula(f"{self.text}{self.function}(...)", rf"{self.latex}\texttt{{{name}}}(\ldots)")

    def __call__(self, inputs: Any) -> Any:
        result = imported(self.function)(inputs, **self.args)
        self.check(result, inputs)
        return result

    def check(self, result: Any, inputs: Any) -> None:
        """Check the function's result, which could otherwise broadcast silently.

        Raises:
            ValueError: wrong type, shape, dtype or device.
        """
        raise NotImplementedError

    def check_tensor(self, tensor: Any, shapes: Sequence[Tensor], kind: str, name: str = "") -> None:
        """Check the shape, dtype and device of a tensor that the function returned.

        Args:
            shapes: tensors of the valid shapes, on the required device.
            kind: dtype: `float`, `number` (floats or integers) or `bool`.
            name: of the tensor, if the function returns several.

        Raises:
            ValueError: one of them is wrong.
        """
        valid = " or ".join(str(list(each.shape)) for each in shapes)
        must = f"{self.shown} must return {name or 'a tensor'} {valid}"
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{must}, but returned {type(tensor).__name__}")
        if tensor.shape not in [each.shape for each in shapes]:
            raise ValueError(f"{must}, but returned {list(tensor.shape)}")
        is_bool, is_float = tensor.dtype == torch.bool, tensor.is_floating_point()
        if not {"bool": is_bool, "float": is_float, "number": not is_bool and not tensor.is_complex()}[kind]:
            raise ValueError(f"{must} of dtype {_DTYPES[kind]}, but its dtype is {tensor.dtype}")
        if tensor.device != shapes[0].device:
            raise ValueError(
                f"{must} on {shapes[0].device}, the device of its inputs, but returned it on {tensor.device}"
            )

    def check_arguments(self) -> None:
        """Check that the function exists and takes the inputs and `args`.

        Raises:
            ValueError: it does not.
        """
        function = imported(self.function)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some built-in functions have no signature
            return
        try:
            signature.bind(None, **self.args)
        except TypeError as error:
            call = ", ".join(["inputs", *(f"{name}=..." for name in self.args)])
            raise ValueError(f"{self.function!r} takes {signature}, not ({call}): {error}") from error


imported = functools.cache(find_function)


# --------------------------------------------------------------------------------------------------------------------
# Overrides: the choice of an axis after a config's change.


class Off:
    """Marker of an axis that can be switched off: to None, or an empty tuple. `name` stands for that in a config."""

    def __init__(self, name: str) -> None:
        self.name = name


def choices_of(annotation: Any) -> dict[str, type[Choice]]:
    """Return the classes of an axis by type, from a field's annotation; empty if the field is not an axis."""
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        return {annotation.type: annotation}
    return {name: kind for part in get_args(annotation) for name, kind in choices_of(part).items()}


def changed(where: str, field: FieldInfo, current: Any, change: Any) -> Any:
    """Return the value of an axis after a config's change.

    A change is a type, a mapping of fields, or, for an axis with several choices, a list of these. Fields that it does
    not name keep their current values; a change of type resets them to the defaults, except for `Choice.keeps_fields`.

    Args:
        where: config key of the axis, for messages.
        field: the axis, whose annotation lists the valid choices.
        current: its choice, or a tuple of them.
        change: value of the key in the config.

    Raises:
        ValueError: an unknown type or field, with the nearest valid name; or an invalid value.
    """
    kinds = choices_of(field.annotation)
    off = next((item.name for item in field.metadata if isinstance(item, Off)), None)
    several = get_origin(field.annotation) is tuple
    is_list = several and isinstance(change, list | tuple)

    # Switch the axis off.
    if off is not None and change in (None, off, {"type": off}):
        return () if several else None

    # A list replaces all choices. Anything else changes the only one, whose fields it then keeps.
    if several and isinstance(change, Mapping) and "type" not in change and len(current) != 1:
        raise ValueError(f"{where} is a list; give the whole list, or one choice with its type")
    if several:
        current = current[0] if len(current) == 1 and not is_list else None
    names = [*kinds] if is_list or off is None else [*kinds, off]

    choices: list[Choice] = []
    for item in change if is_list else [change]:
        # Find the class by its type.
        values = {"type": item} if isinstance(item, str) else item
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} must be a type or a mapping of parameters, got {item!r}")
        name = values.get("type", current.type if current else None)
        if name is None:
            raise ValueError(f"{where}.type is missing; valid: {', '.join(kinds)}")
        if "custom" in kinds and name not in kinds and ":" in str(name):
            raise ValueError(f"{where}: give your own function as {{type: custom, function: {str(name)!r}}}")
        check_name(f"{where}.type", name, names)
        if name not in kinds:  # switched off, but with fields
            raise ValueError(f"{where} of type {name} has no parameters, got {dict(values)}; give {where}={name}")

        # Set its fields, over the current ones if the type stays.
        kind = kinds[name]
        fields = {key: value for key, value in values.items() if key != "type"}
        for key in fields:
            check_name(f"{where} of type {name}", key, list(kind.model_fields))
        base = dict(current) if current is not None and (isinstance(current, kind) or kind.keeps_fields) else {}
        choice = validated(kind, where, base | fields)
        if isinstance(choice, Custom) and may_import():
            with reraise_as(ValueError, f"{where}.function", ValueError):
                choice.check_arguments()
        choices.append(choice)
    return tuple(choices) if several else choices[0]


def validated(kind: type[Model], where: str, values: Mapping[str, Any]) -> Model:
    """Validate values with a pydantic model.

    Raises:
        ValueError: an invalid value, in one line: key, reason, value.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
    key = ".".join([where, *(str(part) for part in first["loc"])])
    if first["type"] == "literal_error":
        check_name(key, first["input"], re.findall(r"'([^']*)'", first["ctx"]["expected"]))
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    raise ValueError(f"{key}: {message}, got {first['input']!r}" if first["loc"] else f"{where}: {message}")


def check_name(where: str, name: object, valid: Sequence[str]) -> None:
    """Check a name.

    Raises:
        ValueError: it is not valid; the message has the nearest valid name.
    """
    if name not in valid:
        hint = did_you_mean(str(name), valid, "valid:", cutoff=0.5) if valid else "it has no parameters"
        raise ValueError(f"{where}: unknown name {name!r}; {hint}")


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
