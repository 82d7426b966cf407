"""YAML files, read into dicts before the libraries are imported that a config's sections need."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import yaml

from atomrl.common.errors import ConfigError

DATA_FILES = (".jsonl", ".parquet", ".csv")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys; YAML itself would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if key in seen:
                raise yaml.YAMLError(f"duplicate key {key!r}, in lines {seen[key]} and {line}")
            seen[key] = line
        return cast(dict[Any, Any], super().construct_mapping(node, deep))


def read_yaml(path: str | Path, prepare: Callable[[yaml.Node], None] | None = None) -> dict[str, Any]:
    """Read a YAML file into a dict.

    Args:
        prepare: called with the parsed tree of nodes, before values are made of them; it may change their tags.

    Raises:
        ConfigError: the file is missing, not valid YAML (with the line), not a mapping, or has a key twice.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} {'is not a file' if path.exists() else 'does not exist'}")
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path), prepare)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def parse_yaml(text: str, source: str, prepare: Callable[[yaml.Node], None] | None = None) -> dict[str, Any]:
    """Parse the text of a YAML file into a dict; as `read_yaml`.

    Args:
        source: name of the file, for messages.
    """
    try:
        loader = _UniqueKeyLoader(text)
        node = loader.get_single_node()
        if node is not None and prepare is not None:
            prepare(node)
        tree: Any = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        message = str(error).replace('in "<unicode string>"', f"in {source}")
        raise ConfigError(f"{source} is not valid YAML: {message}") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deep") from None
    if tree is None:
        raise ConfigError(f"{source} is empty; a config has at least run_name, model and data (configs/ has examples)")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source} must be a mapping of sections (run_name, model, data, ...), not {type(tree).__name__}"
        )
    return tree


def config_file(source: str | Path | None) -> Path:
    """Return the file of a config that is given as a YAML file, or as the folder of a run.

    Raises:
        ConfigError: there is none.
    """
    if source is None or ("=" in str(source) and not Path(source).exists()):  # an override is no file
        raise ConfigError("no config file given; give one, such as configs/quickstart.yaml")
    if Path(source).suffix in DATA_FILES:
        raise ConfigError(f"{source} is a data file; give a config, and the data as data.train={source}")
    saved = Path(source, "config.yaml")
    return saved if saved.is_file() else Path(source)
