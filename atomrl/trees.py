"""Configs as plain trees, before they are validated: YAML files, overrides, and merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """A mistake in a config; the message says which key, what is wrong and what to do."""


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`a.b=1`, `--a.b=1` and `--a.b 1` as a nested dict; values are YAML.

    Example:
        >>> parse_overrides(["train.steps=3", "--model.path", "m"])
        {'train': {'steps': 3}, 'model': {'path': 'm'}}
    """
    tree: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            if not argument.startswith("--") or not rest:
                raise ConfigError(f"{argument!r} is no override; write key=value, as in train.steps=100")
            text = rest.pop(0)
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {argument!r}: {parent} was already given a value")
        node[leaf] = _scalar(text)
    return tree


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # YAML reads 1e-6 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def merge_trees(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, dict by dict."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge_trees(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def nest(key: str, value: Any) -> dict[str, Any]:
    """A dotted key as a nested dict.

    Example:
        >>> nest("a.b", 1)
        {'a': {'b': 1}}
    """
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file as a dict.

    Raises:
        ConfigError: it is absent, no YAML (with the line), or no mapping.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(tree).__name__}")
    return tree
