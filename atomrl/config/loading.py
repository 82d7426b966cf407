"""Load a run's config: from a file of either layout, from a config, or from a dict; with overrides."""

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


def load_config(given: str | Path | RunConfig | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config, and apply overrides.

    Args:
        given: a YAML file in AtomRL's own or the six-section layout, which its keys tell apart; or a config; or a dict
            of what a file would say.
        overrides: `key=value`, as on the command line.

    Raises:
        ConfigError: any mistake, with its key.

    Example:
        >>> tree = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "chain", "train_size": 10}}
        >>> load_config(tree, ["train.steps=3"]).train.steps
        3
    """
    if isinstance(given, str | Path):
        return _whole(build_config(read_tree(given, parse_overrides(overrides)), str(given)))
    if isinstance(given, RunConfig) and not overrides:
        return given
    if not isinstance(given, RunConfig | Mapping):
        raise ConfigError(f"config={given!r}: give the path of a YAML file, a RunConfig, or a dict of a config's keys")
    tree = given.to_tree(secrets=True) if isinstance(given, RunConfig) else dict(given)
    return _whole(build_config(merge_trees(tree, parse_overrides(overrides))))


def read_tree(path: str | Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config file, apply changes, and return a tree in AtomRL's own layout.

    From then on functions are also looked for beside the file; for a run's own config, which is a copy, also where the
    run found them.

    Changes to a six-section file may name its own keys (`train_config.learning_rate`) and, for what that layout has no
    key for, AtomRL's (`data.prompt_field`). Notes about keys without effect go to stderr.

    Raises:
        ConfigError: the file cannot be read, or (six sections) a key is wrong.
    """
    folder = Path(path).resolve().parent
    for place in (str(folder), *_functions_of_run(folder)):
        search_in(place)  # a config's own rewards and environments
    tree = read_yaml(path)
    if is_alternative_layout(tree):
        own = {key: value for key, value in changes.items() if key in SECTIONS}
        tree, notes = translate(merge_trees(tree, own), str(path), default_run_name=Path(path).stem)
        changes = {key: value for key, value in changes.items() if key not in SECTIONS}
        for note in notes:
            print(note, file=sys.stderr)
    return merge_trees(tree, changes)


def _functions_of_run(folder: Path) -> list[str]:
    """The folders in which a run found its functions, by its `env.json`; none for a folder that is not a run's."""
    try:
        with open_file(folder / "env.json") as file:
            environment = json.load(file)
    except (OSError, ValueError, RecursionError):
        return []
    found = environment.get("functions_in") if isinstance(environment, dict) else None
    return [str(place) for place in found if place] if isinstance(found, list) else []


def _whole(config: RunConfig) -> RunConfig:
    """The config; refused where a secret was left out of it, unless it is only looked at."""
    if may_import():
        try:
            check_whole(config.to_tree(secrets=True))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return config
