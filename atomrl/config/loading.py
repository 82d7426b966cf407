"""Load a run's config from a YAML file (of either layout), a dict or a `RunConfig`, and apply overrides."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atomrl.common.files import open_file
from atomrl.common.functions import may_import, search_in
from atomrl.common.secrets import check_whole
from atomrl.config.files import SECTIONS, is_alternative_layout, merge_trees, parse_overrides, read_yaml, translate
from atomrl.config.run import RunConfig, build_config
from atomrl.config.schema import ConfigError


def load_config(source: str | Path | RunConfig | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config, and apply overrides.

    Args:
        source: a YAML file, in AtomRL's own or the six-section layout (told apart by their sections); a config; or a
            dict with the content of a file.
        overrides: `key=value`, as on the command line.

    Raises:
        ConfigError: lists all mistakes, each with its key.

    Example:
        >>> tree = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "chain", "train_size": 10}}
        >>> load_config(tree, ["train.steps=3"]).train.steps
        3
    """
    if isinstance(source, str | Path):
        return _with_secrets(build_config(read_tree(source, parse_overrides(overrides)), str(source)))
    if isinstance(source, RunConfig) and not overrides:
        return source
    if not isinstance(source, RunConfig | Mapping):
        raise ConfigError(f"config={source!r}: give the path of a YAML file, a RunConfig, or a dict of a config's keys")
    tree = source.to_tree(secrets=True) if isinstance(source, RunConfig) else dict(source)
    return _with_secrets(build_config(merge_trees(tree, parse_overrides(overrides))))


def read_tree(path: str | Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config file, apply changes, and return a dict in AtomRL's own layout.

    Adds the file's folder to the folders in which the config's functions (rewards, environments) are searched; for the
    `config.yaml` in a run's folder, which is a copy, also the folders in which that run searched.

    Changes to a six-section file may use its own keys (`train_config.learning_rate`), and AtomRL's keys for settings
    that the layout does not have (`data.prompt_field`). Notes about keys without effect go to stderr.

    Raises:
        ConfigError: the file cannot be read, or (six sections) a key is wrong.
    """
    folder = Path(path).resolve().parent
    for each in (str(folder), *_function_folders(folder)):
        search_in(each)
    tree = read_yaml(path)
    if is_alternative_layout(tree):
        own = {key: value for key, value in changes.items() if key in SECTIONS}
        tree, notes = translate(merge_trees(tree, own), str(path), default_run_name=Path(path).stem)
        changes = {key: value for key, value in changes.items() if key not in SECTIONS}
        for note in notes:
            print(note, file=sys.stderr)
    return merge_trees(tree, changes)


def _function_folders(folder: Path) -> list[str]:
    """Read from a run's `env.json` the folders in which it searched functions; empty for other folders."""
    try:
        with open_file(folder / "env.json") as file:
            environment = json.load(file)
    except (OSError, ValueError, RecursionError):
        return []
    folders = environment.get("functions_in") if isinstance(environment, dict) else None
    return [str(each) for each in folders if each] if isinstance(folders, list) else []


def _with_secrets(config: RunConfig) -> RunConfig:
    """Return the config if it still has its secrets, or is only read; a run's `config.yaml` is without them."""
    if may_import():
        try:
            check_whole(config.to_tree(secrets=True))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return config
