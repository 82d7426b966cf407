"""Dicts of a config: merged, and made from dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_trees(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `base` recursively. A name (`clip: cispo`) whose fields are changed becomes the `type`.

    Example:
        >>> merge_trees({"clip": "cispo", "ratio": {"clamp": 9.0}}, {"clip": {"high": 4.0}, "ratio": "sequence"})
        {'clip': {'type': 'cispo', 'high': 4.0}, 'ratio': 'sequence'}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        name = "name" if key == "algorithm" else "type"
        if isinstance(old, str) and isinstance(value, Mapping):
            old = {name: old}  # replacing the name would reset the type to its default
        merged[key] = merge_trees(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def nest(key: str, value: Any) -> dict[str, Any]:
    """Convert a dotted key and its value into a nested dict.

    Example:
        >>> nest("a.b", 1)
        {'a': {'b': 1}}
    """
    first, _, rest = key.partition(".")
    return {first: nest(rest, value) if rest else value}
