"""Base classes of the choices on an objective's axes, and their overrides from a config.

A choice is a frozen record: its fields are the config's keys, its call computes the equation with atoms. An axis is a
union of such classes, selected by `type`. A class also states its equation (text and LaTeX), its atoms, its inputs and
its known problems, so everything about a choice is in one place.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_args, get_origin

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
from atomrl.common.errors import did_you_mean, said_as
from atomrl.common.functions import GIVEN, find_function, may_import
from atomrl.protocols import ModelInput

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
    logprobs_over: str = "vocabulary"
    """Tokens that log-probs are normalised over: `vocabulary`, or `kept` (those that top-p and top-k keep)."""
    reward_parts: int = 1
    """Number of reward functions with a weight."""
    max_completion_tokens: int = 48


class Choice(BaseModel):
    """A choice on one axis. Frozen; two are equal if type and fields are.

    A choice that is a single atom names it as `atom`, and takes equation and defaults from there:

        class K2(KLPenalty, type="k2"):
            atom = staticmethod(k2_kl)
    """

    model_config = FROZEN

    type: ClassVar[str] = ""
    """Its name in a config: `class PPOClip(Choice, type="ppo")`."""
    text: ClassVar[str] = ""
    """Equation for the terminal; by default that of `atom`. Empty if it adds nothing to the objective."""
    latex: ClassVar[str] = ""
    """Equation for print; by default that of `atom`."""
    atom: ClassVar[Callable[..., Tensor]]
    """The atom, if there is a single one; most base classes call it with the fields as keywords."""
    made_of: ClassVar[Atoms] = ()
    """Its atoms, if there are several."""
    needs: ClassVar[frozenset[ModelInput]] = frozenset()
    """Model outputs that the back end computes, without gradient, before the choice is called on a whole step."""
    keeps_fields: ClassVar[bool] = False
    """Another type of the axis keeps the values of the fields, since all types have the same fields."""

    def __init_subclass__(cls, type: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.type = type
        if "atom" in vars(cls):
            source = source_of(cls.atom)
            cls.text, cls.latex = vars(cls).get("text", source.text), vars(cls).get("latex", source.latex)

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
        return self.function.removeprefix(f"{GIVEN}:")

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
            raise ValueError(f"{must} on {shapes[0].device}, where its inputs are, but returned it on {tensor.device}")

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
    """Marks an axis that can be switched off (None, or an empty tuple), and the name of that in a config."""

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

    Raises:
        ValueError: an unknown type or field, with the nearest valid name; or an invalid value.
    """
    kinds = choices_of(field.annotation)
    off = next((item.name for item in field.metadata if isinstance(item, Off)), None)
    several = get_origin(field.annotation) is tuple
    if several and isinstance(change, list | tuple):
        return tuple(_changed_one(where, kinds, None, item) for item in change)
    if off is not None and change in (None, off, {"type": off}):
        return () if several else None
    if several and isinstance(change, Mapping) and "type" not in change and len(current) != 1:
        raise ValueError(f"{where} is a list here; give all of it, or one choice with its type")
    one = (current[0] if len(current) == 1 else None) if several else current
    choice = _changed_one(where, kinds, one, change, [off] if off else [])
    return (choice,) if several else choice


def _changed_one(
    where: str, kinds: Mapping[str, type[Choice]], current: Choice | None, change: Any, off: Sequence[str] = ()
) -> Choice:
    values = {"type": change} if isinstance(change, str) else change
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} takes a type or a mapping of parameters, got {change!r}")
    type_name = values.get("type", current.type if current else None)
    if type_name is None:
        raise ValueError(f"{where}.type is missing; valid are {', '.join(kinds)}")
    if "custom" in kinds and type_name not in kinds and ":" in str(type_name):
        raise ValueError(f"{where}: a function of your own is given as {{type: custom, function: {str(type_name)!r}}}")
    check_name(f"{where}.type", type_name, [*kinds, *off])
    if type_name not in kinds:  # switched off, but with fields
        raise ValueError(f"{where} of type {type_name} has no parameters, got {dict(values)}; give {where}={type_name}")
    kind = kinds[type_name]
    fields = {key: value for key, value in values.items() if key != "type"}
    for key in fields:
        check_name(f"{where} of type {type_name}", key, list(kind.model_fields))
    base = dict(current) if current is not None and (isinstance(current, kind) or kind.keeps_fields) else {}
    choice = validated(kind, where, base | fields)
    if isinstance(choice, Custom) and may_import():
        with said_as(ValueError, f"{where}.function", ValueError):
            choice.check_arguments()
    return choice


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
        hint = did_you_mean(str(name), valid, "valid are", cutoff=0.5) if valid else "it has no parameters"
        raise ValueError(f"{where}: unknown name {name!r}; {hint}")
