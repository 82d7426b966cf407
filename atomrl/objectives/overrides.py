"""Overrides: the choice of an axis after a config's change."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.common.functions import may_import
from atomrl.objectives.choice import Choice, Custom

Model = TypeVar("Model", bound=BaseModel)


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

    choices = [_choice_after(where, kinds, names, current, item) for item in (change if is_list else [change])]
    return tuple(choices) if several else choices[0]


def _choice_after(
    where: str, kinds: Mapping[str, type[Choice]], names: Sequence[str], current: Choice | None, change: Any
) -> Choice:
    """Return a choice after a change of its type, of its fields, or of both.

    Args:
        kinds: classes of the axis by type.
        names: valid types, with that which switches the axis off.
        current: the choice before; None: there is none.

    Raises:
        ValueError: as `changed`.
    """
    # Find the class by its type.
    values = {"type": change} if isinstance(change, str) else change
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a type or a mapping of parameters, got {change!r}")
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
        hint = did_you_mean(str(name), valid, "valid:", cutoff=0.5) if valid else "it has no parameters"
        raise ValueError(f"{where}: unknown name {name!r}; {hint}")
