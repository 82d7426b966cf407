"""One choice on an axis of an objective: a typed record whose fields are the config's keys and whose call is the atom.

An axis is a union of such classes, told apart by `type`. The class holds all there is to say of a choice: its equation
as text and as LaTeX, the atoms it is made of, what it reads, and what is known to go wrong with it. So a new one is
written in one place.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from atomrl.protocols import ModelInput

Model = TypeVar("Model", bound=BaseModel)
FROZEN = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, protected_namespaces=())


class Formula(NamedTuple):
    """An equation, or a part of one, for the terminal and for print."""

    text: str
    latex: str


class Choice(BaseModel):
    """A choice on one axis. Frozen; two are equal if type and fields are."""

    model_config = FROZEN

    text: ClassVar[str] = ""
    """Its equation; empty where it adds nothing to the objective. It may stand in the docstring, indented."""
    latex: ClassVar[str] = ""
    """For print. It may stand in the docstring, after `LaTeX:`."""
    atom: ClassVar[Callable[..., Any]]
    """Where one atom is the whole of it: that atom, which takes the fields as keywords."""
    switches: ClassVar[Mapping[Callable[..., Any], Callable[[Any], Any]]] = {}
    """Atoms that its methods name and not every choice of fields uses: whether this one does."""
    needs: ClassVar[frozenset[ModelInput]] = frozenset()
    """What the back end must have computed before it is called on a whole step."""
    keeps_fields: ClassVar[bool] = False
    """Whether another type of the axis keeps the fields that are set, since all types have the same."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        before, _, after = inspect.cleandoc(cls.__doc__ or "").partition("LaTeX:")
        indented = re.findall(r"^    (\S.*)$", before, re.MULTILINE)
        if indented and "text" not in vars(cls):
            cls.text = " ".join(indented)
        if after and "latex" not in vars(cls):
            cls.latex = " ".join(after.split())

    def required(self) -> frozenset[ModelInput]:
        """`needs`, with what its fields ask for."""
        return self.needs

    @property
    def settings(self) -> dict[str, Any]:
        """The fields, as keywords of an atom. A weight is of a sum, and no atom's."""
        return self.model_dump(exclude={"type", "weight"})

    def equation(self) -> Formula:
        """`text` and `latex`, with what its fields make of them."""
        return Formula(self.text, self.latex)

    def where(self) -> tuple[Formula, ...]:
        """Further lines of the equation."""
        return ()

    def warnings(self, setting: Setting) -> Iterator[str]:
        """What is known to be biased, unstable or without effect, of this choice in its setting."""
        return iter(())


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


class Custom(Choice):
    """Your own function, `my_module:my_function`, called with the inputs of the axis and `args` as keywords."""

    function: str
    args: dict[str, Any] = {}
    reads: tuple[ModelInput, ...] = Field((), strict=False)
    """What the back end must compute for it (`[values]` brings a critic)."""

    def required(self) -> frozenset[ModelInput]:
        return frozenset(self.reads)

    def equation(self) -> Formula:
        name = self.function.replace("_", r"\_")
        return Formula(f"{self.text}{self.function}(...)", rf"{self.latex}\texttt{{{name}}}(\ldots)")

    def __call__(self, inputs: Any) -> Any:
        return imported(self.function)(inputs, **self.args)


@functools.cache
def imported(path: str) -> Callable[..., Any]:
    """A function by its path, `my_module:my_function`; modules are also looked for in the working directory.

    Raises:
        ValueError: the module cannot be imported, or has no such function.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module:
        raise ValueError(f"{path!r} names no module; write my_module:my_function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that nothing there hides an installed module
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        raise ValueError(f"{path!r}: module {module!r} cannot be imported: {error!r}") from error
    if not callable(function):
        raise ValueError(f"{path!r}: module {module!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]  # what it returns is seen when it is called


class Off:
    """Marks a field that may be left out (None, or no item), and what a config calls that."""

    def __init__(self, name: str) -> None:
        self.name = name


def type_of(choice: Choice | type[Choice]) -> str:
    """What a config calls it.

    Example:
        >>> from atomrl.objective.clip import PPOClip
        >>> type_of(PPOClip), type_of(PPOClip(low=0.1))
        ('ppo', 'ppo')
    """
    kind = choice if isinstance(choice, type) else type(choice)
    return str(kind.model_fields["type"].default)


def choices_of(annotation: Any) -> dict[str, type[Choice]]:
    """The classes of an axis by type, from a field's annotation; empty where it is no axis."""
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        return {type_of(annotation): annotation}
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
    type_name = values.get("type", type_of(current) if current else None)
    if type_name is None:
        raise ValueError(f"{where}.type is missing; valid are {', '.join(kinds)}")
    check_name(f"{where}.type", type_name, [*kinds, *off])
    kind = kinds[type_name]
    for key in values:
        check_name(f"{where} of type {type_name}", key, ["type", *(key for key in kind.model_fields if key != "type")])
    kept: dict[str, Any] = {}
    if current is not None and (isinstance(current, kind) or kind.keeps_fields):
        kept = {name: getattr(current, name) for name in type(current).model_fields if name != "type"}
    choice = validated(kind, where, kept | dict(values))
    if isinstance(choice, Custom):
        try:
            imported(choice.function)
        except ValueError as error:
            raise ValueError(f"{where}.function: {error}") from error
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
        near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.4)
        valid = [item for item in valid if item != "type"]
        hint = f"valid are {', '.join(valid)}" if valid else "it has no parameters"
        raise ValueError(f"{where}: unknown name {name!r}; " + (f"did you mean {near[0]!r}?" if near else hint))
