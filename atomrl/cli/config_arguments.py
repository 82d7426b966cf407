"""From a config file and overrides to a `RunConfig`: the one place where layouts are told apart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atomrl.config import RunConfig  # pydantic is imported in functions: a command's help does not wait for it

FLAGS = ("--dry-run", "--verbose", "--resume", "--allow-changes", "--traceback", "--latex", "--help", "-h")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file in AtomRL's own or the six-section layout (recognised by its keys) and apply overrides.

    Raises:
        ConfigError: any mistake, with its key.
    """
    from atomrl.config import build_config, parse_overrides

    return _whole(build_config(read_tree(path, parse_overrides(overrides)), str(path)))


def _whole(config: RunConfig) -> RunConfig:
    """A config from which no secret was left out, unless it is only looked at."""
    from atomrl.config import ConfigError
    from atomrl.functions import may_import
    from atomrl.secrets import check_whole

    if may_import():
        try:
            check_whole(config.to_tree(secrets=True))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return config


def config_of(given: str | Path | RunConfig | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A config with overrides, from whatever a script has: a file's path, a config, or what a file would say.

    Raises:
        ConfigError: any mistake, with its key; it is something else.
    """
    from atomrl.config import ConfigError, RunConfig, build_config, merge_trees, parse_overrides

    if isinstance(given, str | Path):
        return load_config(given, overrides)
    if isinstance(given, RunConfig) and not overrides:
        return given
    if not isinstance(given, RunConfig | Mapping):
        raise ConfigError(f"config={given!r}: give the path of a YAML file, a RunConfig, or a dict of a config's keys")
    tree = given.to_tree(secrets=True) if isinstance(given, RunConfig) else dict(given)
    return _whole(build_config(merge_trees(tree, parse_overrides(overrides))))


def read_tree(path: str | Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config file with changes, as a tree in AtomRL's own layout. What stands beside it is found from then on; of a
    run's own config, which is a copy, also what the run found.

    Changes to a six-section file may name its own keys (`train_config.learning_rate`) and, for what that layout has no
    key for, AtomRL's (`data.prompt_field`). Notes about keys without effect go to stderr.

    Raises:
        ConfigError: the file cannot be read, or (six sections) a key is wrong.
    """
    from atomrl.config import merge_trees, read_yaml
    from atomrl.config.alternative_layout import SECTIONS, is_alternative_layout, translate
    from atomrl.functions import search_in
    from atomrl.reading.lines import read_mapping
    from atomrl.reading.state import home_of

    folder = Path(path).resolve().parent
    for place in (str(folder), *home_of(read_mapping(folder / "env.json", [])).functions_in):
        search_in(place)  # a config's own rewards and environments
    tree = read_yaml(path)
    if is_alternative_layout(tree):
        own = {key: value for key, value in changes.items() if key in SECTIONS}
        tree, notes = translate(merge_trees(tree, own), str(path), default_run_name=Path(path).stem)
        changes = {key: value for key, value in changes.items() if key not in SECTIONS}
        for note in notes:
            print(note, file=sys.stderr)
    return merge_trees(tree, changes)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG (or `--config CONFIG`), then `key=value` or `--key value`, as `join_overrides` leaves them."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a YAML file; also --config CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in train.steps=10; also --train.steps 10")


def join_overrides(arguments: Sequence[str], options: Collection[str] = ()) -> list[str]:
    """`--key value` and `--key=value` as `key=value`, and `--config CONFIG` as CONFIG in front, so that only the
    command's own options are left with dashes: `FLAGS`, and `options`, which take a value.

    Example:
        >>> join_overrides(["--train.steps", "3", "--resume", "seed=1", "--config", "c.yaml"])
        ['c.yaml', 'train.steps=3', '--resume', 'seed=1']
    """
    joined, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in FLAGS or not argument.startswith("--"):
            joined.append(argument)
            continue
        key, equals, value = argument[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                unknown = "" if key == "config" else f"{argument} is no option of this command; an override "
                raise ValueError(f"{unknown or f'{argument} '}needs a value: {argument} VALUE")
            value = rest.pop(0)
        if key == "config":
            joined.insert(0, value)
        elif f"--{key}" in options:
            joined.append(f"--{key}={value}")
        else:
            joined.append(f"{key}={value}")
    return joined


def config_from(arguments: argparse.Namespace) -> RunConfig:
    """The config that the command line names; of a run's folder its own."""
    if arguments.config is None:
        raise ValueError("name a config file, as in: atomrl train configs/quickstart.yaml")
    if (own := Path(arguments.config, "config.yaml")).is_file():
        arguments.config = str(own)
    return load_config(arguments.config, arguments.overrides)
