"""What an axis is: a table of functions, one of which a config names, with parameters of its own.

The keyword-only parameters of a function are the keys of the config, and its defaults are the defaults. Its docstring
holds the equation as text and, after `LaTeX:`, for print; the atoms that it calls hold the papers. So there is one
place for each choice, and `atomrl explain` reads it from there.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from atomrl.protocols import Annotation

AnySign = Annotated[float, "any sign"]
"""A parameter that may be below 0."""
Function = TypeVar("Function", bound=Callable[..., Any])


def reads(*annotations: Annotation) -> Callable[[Function], Function]:
    """Marks a function of a table with what the back end must have annotated for it."""

    def mark(function: Function) -> Function:
        function.reads = frozenset(annotations)  # type: ignore[attr-defined]
        return function

    return mark


class Axis:
    """A choice on one axis: the name of a function in the axis's table, and that function's parameters.

    Parameters are attributes, beside `type`. Two choices are equal if type and parameters are.

    Raises:
        ValueError: an unknown type or parameter, with the nearest valid name; or a value out of range.
    """

    label: ClassVar[str]
    """The axis's key in a config."""
    kinds: ClassVar[Mapping[str, Callable[..., Any]]]
    default: ClassVar[str]
    type: str

    def __init__(self, type: str | None = None, **parameters: Any) -> None:
        where = f"algorithm.{self.label}"
        type = self.default if type is None else type
        check_name(f"{where}.type", type, list(self.kinds))
        defaults = parameters_of(self.kinds[type])
        for name, value in parameters.items():
            if name not in defaults:
                check_name(f"{where} of type {type}", name, list(defaults))
            parameters[name] = checked_value(f"{where}.{name}", value, defaults[name].annotation)
        vars(self).update({"type": type, **{name: item.default for name, item in defaults.items()}, **parameters})

    @property
    def parts(self) -> tuple[Self, ...]:
        """The choices that it is made of: itself, but where an axis takes several at once."""
        return (self,)

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the function, as set or by default."""
        return {name: value for name, value in vars(self).items() if name != "type"}

    @property
    def function(self) -> Callable[..., Any]:
        """Of the axis's table, without its parameters."""
        return self.kinds[self.type]

    @property
    def reads(self) -> frozenset[Annotation]:
        """What the back end must annotate for it."""
        return getattr(self.function, "reads", frozenset())

    def with_parameters(self, **changes: Any) -> Self:
        """The same with some parameters changed. Another `type` starts from that type's own defaults.

        Example:
            >>> from atomrl.objective import Clip
            >>> Clip("ppo", low=0.1).with_parameters(high=0.3)
            Clip('ppo', low=0.1, high=0.3)
            >>> Clip("ppo", low=0.1).with_parameters(type="cispo")
            Clip('cispo')
        """
        type = changes.pop("type", self.type)
        return self.__class__(type, **((self.parameters if type == self.type else {}) | changes))

    @classmethod
    def several(cls, items: Sequence[Any]) -> Axis:
        """A config's list of choices.

        Raises:
            ValueError: the axis takes a single one.
        """
        raise ValueError(f"algorithm.{cls.label} takes a mapping of parameters, got {items!r}")

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs, **self.parameters)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self.__class__.__name__} is frozen; use with_parameters({name}=...)")

    def __eq__(self, other: object) -> bool:
        return self.__class__ is other.__class__ and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.__class__, *vars(self).items()))

    def __repr__(self) -> str:
        defaults = parameters_of(self.function)
        changed = [f", {key}={value!r}" for key, value in self.parameters.items() if value != defaults[key].default]
        return f"{self.__class__.__name__}({self.type!r}{''.join(changed)})"


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function, with annotations that are types."""
    hints = get_type_hints(function, include_extras=True)
    return {
        name: item.replace(annotation=hints.get(name, float))
        for name, item in inspect.signature(function).parameters.items()
        if item.kind is inspect.Parameter.KEYWORD_ONLY
    }


def check_name(where: str, name: object, valid: Sequence[str]) -> None:
    """Raises ValueError, with the nearest valid name, where `name` is not valid."""
    if name not in valid:
        near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.4)
        hint = f"valid are {', '.join(valid)}" if valid else "it has no parameters"
        raise ValueError(f"{where}: unknown name {name!r}; " + (f"did you mean {near[0]!r}?" if near else hint))


def checked_value(where: str, value: Any, annotation: Any) -> Any:
    """The value, a whole number as a float where the annotation wants one.

    Raises:
        ValueError: it is not one of the annotation's, or below 0 where the annotation is not `AnySign`.
    """
    options = get_args(annotation) if get_origin(annotation) not in (None, Literal, Annotated) else (annotation,)
    if value is None and type(None) in options:
        return None
    option = next(option for option in options if option is not type(None))
    if get_origin(option) is Literal:
        check_name(where, value, get_args(option))
        return value
    if option is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false, got {value!r}")
        return value
    kind = int if option is int else int | float
    signed = get_origin(option) is Annotated
    if isinstance(value, bool) or not isinstance(value, kind) or math.isnan(value) or not (signed or value >= 0):
        what = "a whole number" if option is int else "a number"
        raise ValueError(f"{where} must be {what}{'' if signed else ' of at least 0'}, got {value!r}")
    return value if option is int else float(value)
