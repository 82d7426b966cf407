"""Configs as plain dicts, before they are validated: YAML files, `key=value` overrides, and merging."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from atomrl.config.base import ConfigError


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`a.b=1` as a nested dict; values are YAML.

    Example:
        >>> parse_overrides(["train.steps=3", "model.path=m"])
        {'train': {'steps': 3}, 'model': {'path': 'm'}}
    """
    tree: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is no override; write key=value, as in train.steps=100")
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {argument!r}: {parent} was already given a value")
        node[leaf] = scalar(text)
    return tree


def scalar(text: str) -> Any:
    """A value as YAML reads it, and as a number what is one: `1e-6`. What is in quotes is text.

    Example:
        >>> scalar("1e-6"), scalar("[1, a]"), scalar("null"), scalar("a: b: c"), scalar('"7"')
        (1e-06, [1, 'a'], None, 'a: b: c', '7')
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and text.strip()[:1] not in ("'", '"'):  # YAML reads 1e-6 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def merge_trees(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, dict by dict. A name (`clip: cispo`) whose fields are changed is the dict's `type`.

    Example:
        >>> merge_trees({"clip": "cispo", "ratio": {"clamp": 9.0}}, {"clip": {"high": 4.0}, "ratio": "sequence"})
        {'clip': {'type': 'cispo', 'high': 4.0}, 'ratio': 'sequence'}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, str) and isinstance(value, Mapping):
            old = {"type": old}  # else the change alone would be left, of the default type
        merged[key] = merge_trees(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def nest(key: str, value: Any) -> dict[str, Any]:
    """A dotted key as a nested dict.

    Example:
        >>> nest("a.b", 1)
        {'a': {'b': 1}}
    """
    first, _, rest = key.partition(".")
    return {first: nest(rest, value) if rest else value}


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is written twice, of which YAML would take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if key in seen:
                raise yaml.YAMLError(f"{key!r} is given twice, in lines {seen[key]} and {line}")
            seen[key] = line
        return cast(dict[Any, Any], super().construct_mapping(node, deep))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file as a dict.

    Raises:
        ConfigError: it is absent, no YAML (with the line), no mapping, or has a key twice.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} {'is not a file' if path.exists() else 'does not exist'}")
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Likewise the text of one.

    Args:
        source: its name, for messages.
    """
    try:
        tree: Any = _UniqueKeyLoader(text).get_single_data()
    except yaml.YAMLError as error:
        said = str(error).replace('in "<unicode string>"', f"in {source}")
        raise ConfigError(f"{source} is not valid YAML: {said}") from None
    if tree is None:
        raise ConfigError(f"{source} is empty; a config has at least run_name, model and data (configs/ has examples)")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source} must hold a mapping of sections (run_name, model, data, ...), not {type(tree).__name__}"
        )
    return tree
