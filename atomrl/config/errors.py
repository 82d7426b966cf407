"""Errors of a config: one line for each, with its key and the nearest valid one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from atomrl.common.errors import ConfigError
from atomrl.common.secrets import mask_secrets
from atomrl.config.keys import foreign_names, known_elsewhere, known_keys, suggestion
from atomrl.config.schema import FORMS, BackendConfig, ResourceConfig


def config_error(error: ValidationError, source: str) -> ConfigError:
    """Convert a pydantic error into a ConfigError, with one line per error."""
    return ConfigError("\n  ".join([f"{source}:", *map(_error_line, error.errors())]))


def _error_line(item: Mapping[str, Any]) -> str:
    """Format one error of pydantic's, with its dotted key first; several unknown keys take several lines."""
    path = [str(part) for part in item["loc"]]
    if path[:1] == ["backend"] and len(path) > 2:
        del path[1]  # the tag of the union, which is not a key
    if path[-1:] == ["[key]"]:  # pydantic's mark for an invalid key of a dict
        del path[-1]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        valid = known_keys()
        if path[:2] == ["cluster", "resources"]:  # the part after it is a role, so its keys are not in `known_keys`
            valid = [".".join([*path[:3], name]) for name in ResourceConfig.model_fields]
        inner = known_elsewhere(path, item["input"]) if isinstance(item["input"], Mapping) else []
        unknown = [path] if not inner or len(path) == 1 else []
        return "\n  ".join(_unknown(parts, valid) for parts in [*unknown, *inner])
    if item["type"] == "union_tag_invalid":
        return f"{key}.type: {item['ctx']['tag']!r} is not one of {item['ctx']['expected_tags']}"
    if item["type"] == "union_tag_not_found":
        unknown = [[key, str(name)] for name in item["input"] if f"{key}.{name}" not in known_keys()]
        return "\n  ".join([f"{key}.type: is required", *(_unknown(parts, known_keys()) for parts in unknown)])
    if item["type"] == "missing":
        return f"{key}: is required"
    if item["type"] == "model_type":
        first = next((own for own in known_keys() if own.startswith(f"{key}.")), None)
        example = f", such as {first}" if first else ""
        return f"{key}: must be a mapping of keys (got {_shown(path, item['input'])!r}){example}"
    if path == ["algorithm"] and isinstance(item["input"], Mapping):
        # An axis that is a name of another library: give its name here, instead of the nearest axis.
        valid, foreign = known_keys(), foreign_names()
        axes = [str(axis) for axis in item["input"] if str(axis) in foreign and f"algorithm.{axis}" not in valid]
        if axes:
            return "\n  ".join(_unknown([*path, axis], valid) for axis in axes)
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch":
        message = FORMS.get(item["ctx"]["pattern"], message)
    if not key or item["type"] == "value_error":
        return message
    return f"{key}: {message} (got {_shown(path, item['input'])!r})"


def _shown(path: list[str], value: Any) -> Any:
    """Return a value without secrets, as a message may show it."""
    if path[0] == "tools" and "env" in path:
        return type(value).__name__
    if path[0] in ("tools", "reward", "environment") and isinstance(value, str | list):
        return mask_secrets({"mcp": value})["mcp"]
    return mask_secrets(value, path[-1])


def _unknown(path: list[str], valid: list[str]) -> str:
    """Format the error of an unknown key."""
    if path[0] == "backend" and (key := ".".join(path)) in valid:
        fields = [kind.model_fields for kind in get_args(BackendConfig)]
        kinds = [get_args(own["type"].annotation)[0] for own in fields if path[1] in own]
        return f"unknown key {key!r} for this backend.type; it is an option of {' and '.join(kinds)}"
    hint = suggestion(path, valid)
    return f"unknown key {'.'.join(path)!r}" + (f"; {hint}" if hint else "")
