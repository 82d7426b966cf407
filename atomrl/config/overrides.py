"""Overrides such as `train.steps=3`: their keys, and their values by the types of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import BaseModel

from atomrl.common.errors import ConfigError
from atomrl.config.run import RunConfig
from atomrl.config.texts import are_text, kinds_at, mark_node


def parse_overrides(arguments: Sequence[str], section: type[BaseModel] | None = RunConfig) -> dict[str, Any]:
    """Parse overrides such as `a.b=1` into a nested dict; values are YAML. A number where the key takes text is text.

    Args:
        section: the section whose keys they are; None: arguments of a function, whose types are unknown.

    Raises:
        ConfigError: one is not `key=value`, or sets a key below another that has a value.

    Example:
        >>> parse_overrides(["train.steps=3", "model.path=m", "run_name=007", "algorithm=dapo"])
        {'train': {'steps': 3}, 'model': {'path': 'm'}, 'run_name': '007', 'algorithm': {'name': 'dapo'}}
    """
    tree: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not an override; write key=value, as in train.steps=100")
        node = tree
        *parents, leaf = key.split(".")
        kinds: Sequence[Any] = (section,)
        for parent in parents:
            node, kinds = node.setdefault(parent, {}), kinds_at(kinds, parent)
            if not isinstance(node, dict):
                raise ConfigError(f"override {argument!r}: {parent} already has a value")
        value = scalar(text, kinds_at(kinds, leaf))
        if key == "algorithm" and section is RunConfig and isinstance(value, str):
            value = {**node.get(leaf, {}), "name": value}
        node[leaf] = value
    return tree


def scalar(text: str, kinds: Sequence[Any] = ()) -> Any:
    """Parse a value as YAML; unquoted floats that YAML takes for text, such as `1e-6`, become numbers.

    Args:
        kinds: types of the key; where all of them are text, a value without quotes is text, whatever it looks like.

    Example:
        >>> scalar("1e-6"), scalar("[1, a]"), scalar("null"), scalar("a: b: c"), scalar('"7"'), scalar("7", [str])
        (1e-06, [1, 'a'], None, 'a: b: c', '7', '7')
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        mark_node(node, kinds)
        value = loader.construct_document(node)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and text.strip()[:1] not in ("'", '"') and not are_text(kinds):  # as text by YAML 1.1
        try:
            return float(value)
        except ValueError:
            return value
    return value
