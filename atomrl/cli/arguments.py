"""Arguments that several commands share: a config with overrides, and a model with sampling options."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.common.errors import nearest

if TYPE_CHECKING:
    from atomrl.config import RunConfig  # pydantic is imported in functions: a command's help does not wait for it

FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
"""Suffixes of data files; names of tasks and of data sets of the hub have none of them."""
KEYS = Path(__file__).parents[1] / "tools" / "ui" / "static" / "keys.json"
"""Descriptions of all config keys, which `make keys` writes from the schema; quicker to read than the schema."""
NO_LIMIT = 1_000_000
"""Default of `data.max_prompt_tokens` for commands that must not drop prompts."""


def add_config(parser: argparse.ArgumentParser, metavar: str = "CONFIG") -> None:
    """Add the arguments CONFIG (or `--config CONFIG`) and overrides (`key=value` or `--key value`)."""
    parser.add_argument("config", nargs="?", metavar=metavar, help="a YAML file or a run's folder; or --config CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in train.steps=10; also --train.steps 10")
    parser.set_defaults(prepare=partial(join_overrides, parser))


def check_config(arguments: argparse.Namespace) -> None:
    """Read the file of a config, so that a missing or broken one is named at once: the libraries that check its keys
    take seconds to import.

    Raises:
        ConfigError: there is no file, or it is not YAML.
    """
    if "atomrl.config" in sys.modules:
        return  # imported already: `load_config` reads it
    from atomrl.common.yaml_files import config_file, read_yaml

    read_yaml(config_file(arguments.config))


def check_exists(path: str | Path, what: str = "data file") -> None:
    """Raise an error if a path can only be a file and does not exist, before the libraries that read it are imported.

    Raises:
        ValueError: it does not exist.
    """
    if Path(path).suffix in FILES and not Path(path).exists():
        raise ValueError(f"{what} {path} does not exist")


def join_overrides(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Rewrite `--key value` and `--key=value` as `key=value`, and move the value of `--config` to the front.

    Only the parser's own options keep their dashes.

    Raises:
        ValueError: a key has no value, or looks like a misspelt option.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> _ = parser.add_argument("--resume", action="store_true")
        >>> join_overrides(parser, ["--train.steps", "3", "--resume", "seed=1", "--config", "c.yaml"])
        ['c.yaml', 'train.steps=3', '--resume', 'seed=1']
    """
    takes_value = {option: action.nargs != 0 for action in parser._actions for option in action.option_strings}
    joined, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or takes_value.get(argument) is False:
            joined.append(argument)
            continue
        key, equals, value = argument[2:].partition("=")
        is_known = key == "config" or f"--{key}" in takes_value or "." in key
        if not is_known and (near := near_option(f"--{key}", takes_value)):
            raise ValueError(f"--{key} is not an option of this command; did you mean {near}?")
        if not equals:
            if not rest or rest[0].startswith("--"):
                unknown = "" if key == "config" else f"{argument} is not an option of this command; an override "
                raise ValueError(f"{unknown or f'{argument} '}needs a value: {argument} VALUE")
            value = rest.pop(0)
        if key == "config":
            joined.insert(0, value)
        elif f"--{key}" in takes_value:
            joined.append(f"--{key}={value}")
        else:
            joined.append(f"{key}={value}")
    return joined


def near_option(name: str, options: Iterable[str]) -> str | None:
    """Return the option that a misspelt or shortened one means; None if none is similar.

    Example:
        >>> near_option("--resum", ["--resume", "--verbose"]), near_option("--seed", ["--resume"])
        ('--resume', None)
    """
    options = [option for option in options if option.startswith("--")]
    return nearest(name, options, cutoff=0.8) or next((each for each in options if each.startswith(name)), None)


def key_help(key: str) -> str:
    """Return the description of a config key, with its default, for the help of an option.

    Example:
        >>> key_help("eval.top_k")
        'sample from the k most likely tokens; 0 keeps all (default 0)'
    """
    item = _described()[key]
    about, default = item["about"], item.get("default")
    text = f"{about[:1].lower()}{about[1:]}" + (f" (default {default})" if default is not None else "")
    return text.replace("%", "%%")


@cache
def _described() -> dict[str, Any]:
    return {item["key"]: item for item in json.loads(KEYS.read_text(encoding="utf-8"))}


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C within the block, so that a command closes its workers."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and sampling options, each of which sets a config key if it is given."""
    parser.add_argument("model.path", metavar="MODEL", help="a run, a folder in Hugging Face layout, or a hub name")
    add = partial(add_option, parser)
    add("--engine", "rollout.engine", "NAME", "native (default) or hf")
    add("--dtype", "model.dtype", "NAME", "auto (default), float32 or bfloat16")
    add("--temperature", "eval.temperature", "X")
    add("--top-p", "eval.top_p", "X")
    add("--top-k", "eval.top_k", "N")
    add("--max-tokens", "eval.max_completion_tokens", "N", "(default 256, or the rest of the context)")
    add("--stop", "rollout.stop", "TEXT", "string that ends a completion; repeatable", action="append")
    add("--seed", "seed", "N")
    add("--chat-template", "data.chat_template", "NAME")
    add("--system-prompt", "data.system_prompt", "TEXT")


def add_option(
    parser: argparse.ArgumentParser, flag: str, key: str, metavar: str, text: str | None = None, **more: Any
) -> None:
    """Add an option that sets a config key; errors in its value name the option (`config_over`).

    Args:
        text: its help; None: the description and default of the key.
    """
    parser.add_argument(flag, dest=key, metavar=metavar, help=text or key_help(key), **more)
    parser.set_defaults(options={**(parser.get_default("options") or {}), key: flag})


def config_over(base: dict[str, Any], arguments: argparse.Namespace) -> RunConfig:
    """Build a config from a tree and the options on the command line.

    Raises:
        ConfigError: a value is invalid.
    """
    from atomrl.config import ConfigError, known_keys, load_config, merge_trees, nest
    from atomrl.config.keys import renamed

    tree = {key: value for key, value in base.items() if key != "sft"}  # it may name another model to start from
    values = {key: value for key in known_keys() if (value := getattr(arguments, key, None)) is not None}
    for key, value in values.items():
        tree = merge_trees(tree, nest(key, value))
    try:
        return load_config(tree, name=f"atomrl {arguments.command}")
    except ConfigError as error:
        options = {key: flag for key, flag in arguments.options.items() if key in values}
        raise ConfigError(renamed(str(error), options)) from None


def within_context(config: RunConfig, longest_prompt: int) -> RunConfig:
    """Limit completions to the model's context, unless the user set `max_completion_tokens`.

    Args:
        longest_prompt: tokens of the longest prompt.
    """
    from atomrl.trainer.build import context_tokens, model_path

    context = context_tokens(model_path(config), config)
    is_set = config.eval.max_completion_tokens is not None or "max_completion_tokens" in config.rollout.model_fields_set
    if context is None or is_set or context <= longest_prompt:
        return config
    limit = min(config.rollout.max_completion_tokens, context - longest_prompt)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"max_completion_tokens": limit})})
