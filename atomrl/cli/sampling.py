"""What `eval` and `generate` share: a model and how completions are drawn from it, as options over a config."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atomrl.config import RunConfig

NO_LIMIT = 1_000_000
"""Tokens of a prompt: none is dropped for its length unless a config says so."""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that set the config key of their `dest`; without a value they leave the config's."""
    parser.add_argument("model.path", metavar="MODEL", help="a folder in Hugging Face layout, or a hub name")
    add = partial(add_option, parser)
    add("--engine", "rollout.engine", "NAME", "native (default) or hf")
    add("--dtype", "model.dtype", "NAME", "auto (default), float32 or bfloat16")
    add("--temperature", "eval.temperature", "X", "0 is greedy (default 1.0)")
    add("--top-p", "eval.top_p", "X", "(default 1.0)")
    add("--top-k", "eval.top_k", "N", "(default 0: all)")
    add("--max-tokens", "eval.max_completion_tokens", "N", "(default 256, or what the context has)")
    add("--stop", "rollout.stop", "TEXT", "ends a completion; repeatable", action="append")
    add("--seed", "seed", "N", "(default 0)")
    add("--chat-template", "data.chat_template", "NAME", "auto (default); none: the prompt as it is; FILE.jinja")
    add("--system-prompt", "data.system_prompt", "TEXT", "goes before the prompt")


def add_option(parser: argparse.ArgumentParser, flag: str, key: str, metavar: str, text: str, **more: Any) -> None:
    """An option that sets a key of a config; mistakes in its value are named by the option (`config_over`)."""
    parser.add_argument(flag, dest=key, metavar=metavar, help=text, **more)
    parser.set_defaults(options={**(parser.get_default("options") or {}), key: flag})


def config_over(base: dict[str, Any], arguments: argparse.Namespace) -> RunConfig:
    """A config tree with the options that were given.

    Raises:
        ConfigError: a value that its key does not take.
    """
    from atomrl.config import ConfigError, build_config, known_keys, merge_trees, nest
    from atomrl.config.names import renamed

    tree = {key: value for key, value in base.items() if key != "sft"}  # it may name another model to start from
    given = {key: value for key in known_keys() if (value := getattr(arguments, key, None)) is not None}
    for key, value in given.items():
        tree = merge_trees(tree, nest(key, value))
    try:
        return build_config(tree, f"atomrl {arguments.command}")
    except ConfigError as error:
        options = {key: flag for key, flag in arguments.options.items() if key in given}
        raise ConfigError(renamed(str(error), options)) from None


def within_context(config: RunConfig, longest_prompt: int) -> RunConfig:
    """Where nobody said how long a completion may be: as long as the default, or as the model's context leaves room."""
    from atomrl.runs.build import context_tokens, model_path

    context = context_tokens(model_path(config), config)
    said = config.eval.max_completion_tokens is not None or "max_completion_tokens" in config.rollout.model_fields_set
    if context is None or said or context <= longest_prompt:
        return config
    room = min(config.rollout.max_completion_tokens, context - longest_prompt)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"max_completion_tokens": room})})
