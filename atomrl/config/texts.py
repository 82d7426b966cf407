"""Text keys: a name that looks like a number (`run_name: 2024`) is text, by the types of the keys and not by YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from atomrl.config.run import RunConfig
from atomrl.config.six_sections import SECTIONS

_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "timestamp"))


def mark_texts(node: yaml.Node) -> None:
    """Mark the values of text keys as text in the parsed YAML of a config of either layout."""
    mark_node(node, (RunConfig,))
    for key, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        for name, value in inner.value if key.value in SECTIONS and isinstance(inner, yaml.MappingNode) else ():
            kinds: Sequence[Any] = (RunConfig,)
            for part in (SECTIONS[key.value].get(name.value) or "").split("."):
                kinds = kinds_at(kinds, part)
            mark_node(value, kinds)


def mark_node(node: yaml.Node, kinds: Sequence[Any]) -> None:
    """Mark scalars as text where all types of a key are text, also in lists and mappings.

    Args:
        kinds: the types, without unions.
    """
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.tag in _PLAIN and are_text(kinds):
            node.tag = "tag:yaml.org,2002:str"
    elif isinstance(node, yaml.SequenceNode):
        items = [item for kind in kinds for item in get_args(kind) if get_origin(kind) in (list, tuple)]
        for item in node.value if items else ():
            mark_node(item, _united(items))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if inner := kinds_at(kinds, key.value):
                mark_node(value, inner)


def are_text(kinds: Sequence[Any]) -> bool:
    """Return True if a scalar of these types is text, or null. A scalar is no list and no section."""
    given = [kind for kind in kinds if kind is not type(None) and get_origin(kind) not in (list, tuple, dict)
             and not (isinstance(kind, type) and issubclass(kind, BaseModel))]  # fmt: skip
    names = [each for kind in given if get_origin(kind) is Literal for each in get_args(kind)]
    texts = [kind is str or kind is Path or get_origin(kind) is Literal for kind in given]
    return bool(texts) and all(texts) and all(isinstance(each, str) for each in names)


def kinds_at(kinds: Sequence[Any], key: Any) -> list[Any]:
    """Return the types of a key of a section or a dict; [] if they are unknown."""
    found = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields:
            found.append(kind.model_fields[key].annotation)
        elif get_origin(kind) is dict:
            found.append(get_args(kind)[1])
    return _united(found)


def _united(kinds: Sequence[Any]) -> list[Any]:
    """Return the parts of unions and of annotated types."""
    parts: list[Any] = []
    for kind in kinds:
        if get_origin(kind) in (Union, UnionType):
            parts += _united(get_args(kind))
        else:
            parts += _united(get_args(kind)[:1]) if get_origin(kind) is Annotated else [kind]
    return [part for part in parts if part is not Ellipsis]
