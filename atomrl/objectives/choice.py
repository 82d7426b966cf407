"""Base classes of the choices on an objective's axes.

A choice is a frozen record: its fields are the config's keys, its call computes the equation with atoms. An axis is a
union of such classes, selected by `type`. A class also states its equation (text and LaTeX), its atoms, its inputs and
its known problems, so everything about a choice is in one place.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, field_validator, model_serializer
from torch import Tensor

from atomrl.atoms import Formula, source_of
from atomrl.common.functions import UNNAMED, find_function
from atomrl.protocols import ModelInput

Atoms = tuple[Callable[..., Any], ...]
"""Functions of `atomrl.atoms`."""
Value = TypeVar("Value")
_DTYPES = {"bool": "torch.bool", "float": "torch.float32", "number": "torch.float32"}
FROZEN = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, protected_namespaces=())
imported = functools.cache(find_function)


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
