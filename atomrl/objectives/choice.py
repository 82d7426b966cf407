"""One choice on an axis of an objective: a typed record whose fields are the config's keys and whose call is the atom.

An axis is a union of such classes, told apart by `type`. The class holds all there is to say of a choice: its equation
as text and as LaTeX, the atoms it is made of, what it reads, and what is known to go wrong with it. So a new one is
written in one place.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

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

from atomrl.common.errors import did_you_mean, said_as
from atomrl.common.functions import GIVEN, find_function, may_import
from atomrl.protocols import ModelInput

Atoms = tuple[Callable[..., Any], ...]
"""Functions of `atomrl.atoms`."""
Model = TypeVar("Model", bound=BaseModel)
_DTYPES = {"bool": "torch.bool", "float": "torch.float32", "number": "torch.float32"}
FROZEN = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, protected_namespaces=())


class Formula(NamedTuple):
    """An equation, or a part of one, for the terminal and for print."""

    text: str
    latex: str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a choice is made beside: the other axes, and what the config says beside the objective."""

    axes: Mapping[str, Any]
    """Every axis of the objective by its name."""
    completions_per_prompt: int = 8
    updates_per_step: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprobs_over: str = "vocabulary"
    """The tokens that log-probs are over: `kept` are those that top-p and top-k keep."""
    reward_parts: int = 1
    """Parts that enter the sum."""
    max_completion_tokens: int = 48


class Choice(BaseModel):
    """A choice on one axis. Frozen; two are equal if type and fields are."""

    model_config = FROZEN

    type: ClassVar[str] = ""
    """What a config calls it: `class PPOClip(Choice, type="ppo")`."""
    text: ClassVar[str] = ""
    """Its equation; empty where it adds nothing to the objective. It may stand in the docstring, indented."""
    latex: ClassVar[str] = ""
    """For print. It may stand in the docstring, after `LaTeX:`."""
    atom: ClassVar[Callable[..., Tensor]]
    """Where one atom is the whole of it: that atom, which takes the fields as keywords."""
    made_of: ClassVar[Atoms] = ()
    """Where several are: those."""
    needs: ClassVar[frozenset[ModelInput]] = frozenset()
    """What the back end must have computed before it is called on a whole step."""
    keeps_fields: ClassVar[bool] = False
    """Whether another type of the axis keeps the fields that are set, since all types have the same."""

    def __init_subclass__(cls, type: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.type = type
        before, _, after = inspect.cleandoc(cls.__doc__ or "").partition("LaTeX:")
        indented = re.findall(r"^    (\S.*)$", before, re.MULTILINE)
        if indented and "text" not in vars(cls):
            cls.text = " ".join(indented)
        if after and "latex" not in vars(cls):
            cls.latex = " ".join(after.split())

    def atoms(self) -> Atoms:
        """The functions of `atomrl.atoms` that it is made of, with its fields as they are."""
        return self.made_of or ((self.atom,) if hasattr(self, "atom") else ())

    @property
    def by_completion(self) -> bool:
        """Whether the loss has one number for all tokens of a completion, which then have to stand in one row."""
        return False

    def required(self) -> frozenset[ModelInput]:
        """`needs`, with what its fields ask for."""
        return self.needs

    @model_serializer(mode="wrap")
    def _with_type(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"type": self.type, **fields(self)}

    @property
    def settings(self) -> dict[str, Any]:
        """The fields, as keywords of an atom. A weight is of a sum, and no atom's."""
        return {name: value for name, value in self if name != "weight"}

    def equation(self) -> Formula:
        """`text` and `latex`, with what its fields make of them."""
        return Formula(self.text, self.latex)

    def where(self) -> tuple[Formula, ...]:
        """Further lines of the equation."""
        return ()

    def warnings(self, setting: Setting) -> Iterator[str]:
        """What is known to be biased, unstable or without effect, of this choice in its setting."""
        return iter(())


class Custom(Choice):
    """Your own function, `my_module:my_function` or `./my_file.py:my_function`, called with the inputs of the axis and
    `args` as keywords."""

    function: str
    args: dict[str, Any] = {}
    reads: tuple[ModelInput, ...] = Field((), strict=False)
    """Fields of the inputs that the back end must compute for it (`[values]` brings a critic)."""
    inputs: ClassVar[Callable[..., Any]]
    """The class of the inputs of the axis."""

    @field_validator("reads")
    @classmethod
    def _reads_fields(cls, reads: tuple[ModelInput, ...]) -> tuple[ModelInput, ...]:
        fields = inspect.signature(cls.inputs).parameters
        for name in reads:
            if name not in fields:
                known = [each for each in get_args(ModelInput) if each in fields]
                raise ValueError(f"{cls.inputs.__name__} has no {name}; it can have {', '.join(known)}")
        return reads

    @property
    def shown(self) -> str:
        """The function's name in messages."""
        return self.function.removeprefix(f"{GIVEN}:")

    def required(self) -> frozenset[ModelInput]:
        return frozenset(self.reads)

    def equation(self) -> Formula:
        name = self.function.replace("_", r"\_")
        return Formula(f"{self.text}{self.function}(...)", rf"{self.latex}\texttt{{{name}}}(\ldots)")

    def __call__(self, inputs: Any) -> Any:
        found = imported(self.function)(inputs, **self.args)
        self.check(found, inputs)
        return found

    def check(self, found: Any, inputs: Any) -> None:
        """Check the function's result.

        Raises:
            ValueError: it is not what the axis takes; it might broadcast unseen.
        """
        raise NotImplementedError

    def check_tensor(self, found: Any, shapes: Sequence[Tensor], kind: str, what: str = "") -> None:
        """Check the shape, dtype and device of a tensor that the function returned.

        Args:
            shapes: tensors that have the shapes it may have, on the device where it has to be.
            kind: of its numbers: `float`, `number` (floats or integers) or `bool`.
            what: the name of the tensor, where the function returns several.

        Raises:
            ValueError: one of them is wrong.
        """
        wanted = " or ".join(str(list(each.shape)) for each in shapes)
        must = f"{self.shown} must return {what or 'a tensor'} {wanted}"
        if not isinstance(found, Tensor):
            raise ValueError(f"{must}, but returned {type(found).__name__}")
        if found.shape not in [each.shape for each in shapes]:
            raise ValueError(f"{must}, but returned {list(found.shape)}")
        is_bool, is_float = found.dtype == torch.bool, found.is_floating_point()
        if not {"bool": is_bool, "float": is_float, "number": not is_bool and not found.is_complex()}[kind]:
            raise ValueError(f"{must} of dtype {_DTYPES[kind]}, but its dtype is {found.dtype}")
        if found.device != shapes[0].device:
            raise ValueError(f"{must} on {shapes[0].device}, where its inputs are, but returned it on {found.device}")

    def check_arguments(self) -> None:
        """
        Raises:
            ValueError: there is no such function, or it does not take the inputs and `args`.
        """
        function = imported(self.function)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some built-in functions have none to check
            return
        try:
            signature.bind(None, **self.args)
        except TypeError as error:
            given = ", ".join(["inputs", *(f"{name}=..." for name in self.args)])
            raise ValueError(f"{self.function!r} takes {signature}, not ({given}): {error}") from error


imported = functools.cache(find_function)


class Off:
    """Marks a field that may be left out (None, or no item), and what a config calls that."""

    def __init__(self, name: str) -> None:
        self.name = name


def choices_of(annotation: Any) -> dict[str, type[Choice]]:
    """The classes of an axis by type, from a field's annotation; empty where it is no axis."""
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        return {annotation.type: annotation}
    return {name: kind for part in get_args(annotation) for name, kind in choices_of(part).items()}


def changed(where: str, field: FieldInfo, current: Any, change: Any) -> Any:
    """The value of an axis after a config's change: a type, a mapping of fields, or where several go together, a list.

    Another type starts from its own defaults, but where the axis says otherwise (`Choice.keeps_fields`).

    Raises:
        ValueError: an unknown type or field, with the nearest valid name; or a value that the field does not take.
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
    if type_name not in kinds:  # `off`, with fields of another type beside it
        raise ValueError(f"{where} of type {type_name} has no parameters, got {dict(values)}; give {where}={type_name}")
    kind = kinds[type_name]
    given = {key: value for key, value in values.items() if key != "type"}
    for key in given:
        check_name(f"{where} of type {type_name}", key, list(kind.model_fields))
    kept = dict(current) if current is not None and (isinstance(current, kind) or kind.keeps_fields) else {}
    choice = validated(kind, where, kept | given)
    if isinstance(choice, Custom) and may_import():
        with said_as(ValueError, f"{where}.function", ValueError):
            choice.check_arguments()
    return choice


def validated(kind: type[Model], where: str, values: Mapping[str, Any]) -> Model:
    """A model of these values.

    Raises:
        ValueError: the key, what is wrong with its value, and the value.
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
    """Raises ValueError, with the nearest valid name, where `name` is not valid."""
    if name not in valid:
        hint = did_you_mean(str(name), valid, "valid are", cutoff=0.5) if valid else "it has no parameters"
        raise ValueError(f"{where}: unknown name {name!r}; {hint}")
