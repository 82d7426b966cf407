"""Load a config from a file, a run's folder or a dict, and dump it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from atomrl.common.errors import ConfigError
from atomrl.common.files import open_file
from atomrl.common.functions import search_in
from atomrl.common.yaml_files import config_file, read_yaml
from atomrl.config.errors import config_error
from atomrl.config.overrides import parse_overrides
from atomrl.config.run import RunConfig
from atomrl.config.six_sections import SECTIONS, is_alternative_layout, translate
from atomrl.config.texts import mark_texts
from atomrl.config.trees import merge_trees


def load_config(
    source: str | Path | RunConfig | Mapping[str, Any], overrides: Sequence[str] = (), name: str = "config"
) -> RunConfig:
    """Load a config, apply overrides, and validate it.

    Args:
        source: a YAML file, in AtomRL's own or the six-section layout (told apart by their sections); a run's folder,
            whose `config.yaml` is read; a config; or a dict with the content of a file in AtomRL's own layout.
        overrides: `key=value`, as on the command line.
        name: of a dict or a config, for messages.

    Raises:
        ConfigError: lists all errors, one per line, each with its key and, for an unknown key, the nearest valid one.

    Example:
        >>> tree = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "chain", "train_size": 10}}
        >>> load_config(tree, ["train.steps=3"]).train.steps
        3
    """
    changes = parse_overrides(overrides)
    given = changes.get("train")
    if isinstance(given, dict) and given.get("steps") is not None and given.get("total_epochs") is not None:
        raise ConfigError(
            f"train.steps={given['steps']} and train.total_epochs={given['total_epochs']} both set the length of the "
            "run: give one of them"
        )
    if isinstance(given, dict) and "steps" in given:
        given.setdefault("total_epochs", None)  # else the file's total_epochs would replace the given steps
    if isinstance(source, str | Path):
        name = str(config_file(source))
        tree = read_tree(name, changes)
    elif isinstance(source, RunConfig):
        if not overrides:
            return source
        tree = merge_trees(source.to_tree(secrets=True), changes)
    elif isinstance(source, Mapping):
        tree = merge_trees(source, changes)
    elif source is None:
        config_file(source)
    else:
        raise ConfigError(f"config={source!r}: give the path of a YAML file, a RunConfig, or a dict of a config's keys")
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, name) from None


def read_tree(path: str | Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config file, apply changes, and return a dict in AtomRL's own layout.

    Adds the file's folder to the folders in which the config's functions (rewards, environments) are searched; for the
    `config.yaml` in a run's folder, which is a copy, also the folders in which that run searched.

    Changes to a six-section file may use its own keys (`train_config.learning_rate`), and AtomRL's keys for settings
    that the layout does not have (`data.prompt_field`). Notes about keys without effect go to stderr.

    Raises:
        ConfigError: the file cannot be read, or (six sections) a key is wrong.
    """
    folder = Path(os.path.realpath(path)).parent  # `resolve` raises RuntimeError in a loop of links
    environment: Any = None
    with suppress(OSError, ValueError, RecursionError), open_file(folder / "env.json") as file:
        environment = json.load(file)
    folders = environment.get("functions_in") if isinstance(environment, dict) else None
    for each in [str(folder), *(folders if isinstance(folders, list) else ())]:
        if each:
            search_in(str(each))
    tree = read_yaml(path, mark_texts)
    # The six-section layout: overrides of its own keys apply before the translation, those of AtomRL's keys after it.
    if is_alternative_layout(tree):
        own = {key: value for key, value in changes.items() if key in SECTIONS}
        tree, notes = translate(merge_trees(tree, own), str(path), default_run_name=Path(path).stem)
        changes = {key: value for key, value in changes.items() if key not in SECTIONS}
        for note in notes:
            print(note, file=sys.stderr)
    return merge_trees(tree, changes)


def dump_config(config: RunConfig) -> str:
    """Dump the resolved config as YAML, without secrets; loading it gives the same config."""
    return yaml.safe_dump(config.to_tree(), sort_keys=False, allow_unicode=True)
