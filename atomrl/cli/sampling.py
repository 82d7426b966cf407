"""What `eval` and `generate` share: a model and how completions are drawn from it, as options over a config."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atomrl.config import RunConfig

NO_LIMIT = 1_000_000
"""Tokens of a prompt: none is dropped for its length unless a config says so."""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that set the config key of their `dest`; without a value they leave the config's."""
    add = parser.add_argument
    add("model.path", metavar="MODEL", help="a folder in Hugging Face layout, or a hub name")
    add("--engine", dest="rollout.engine", help="native (default) or hf")
    add("--dtype", dest="model.dtype", help="auto (default), float32 or bfloat16")
    add("--temperature", dest="eval.temperature", help="0 is greedy (default 1.0)")
    add("--top-p", dest="eval.top_p", help="(default 1.0)")
    add("--top-k", dest="eval.top_k", help="(default 0: all)")
    add("--max-tokens", dest="eval.max_completion_tokens", help="(default 256, or what the context has)")
    add("--stop", dest="rollout.stop", action="append", metavar="TEXT", help="ends a completion; repeatable")
    add("--seed", help="(default 0)")
    add("--chat-template", dest="data.chat_template", help="auto (default), or none: take the prompt as it is")
    add("--system-prompt", dest="data.system_prompt", help="goes before the prompt")


def config_over(base: dict[str, Any], arguments: argparse.Namespace) -> RunConfig:
    """A config tree with the options that were given.

    Raises:
        ConfigError: a value that its key does not take.
    """
    from atomrl.config import build_config, known_keys, merge_trees, nest

    tree = {key: value for key, value in base.items() if key != "sft"}  # it may name another model to start from
    for key in known_keys():
        if (value := getattr(arguments, key, None)) is not None:
            tree = merge_trees(tree, nest(key, value))
    return build_config(tree, f"atomrl {arguments.command}")


def within_context(config: RunConfig, longest_prompt: int) -> RunConfig:
    """Where nobody said how long a completion may be: as long as the default, or as the model's context leaves room."""
    from atomrl.runs.build import context_tokens, model_path

    context = context_tokens(model_path(config), config)
    said = config.eval.max_completion_tokens is not None or "max_completion_tokens" in config.rollout.model_fields_set
    if context is None or said or context <= longest_prompt:
        return config
    room = min(config.rollout.max_completion_tokens, context - longest_prompt)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"max_completion_tokens": room})})


@contextmanager
def model_folder(config: RunConfig) -> Iterator[RunConfig]:
    """The config with a model that the engines load: its own, or a checkpoint of adapters merged for the while."""
    path = str(config.model.path)
    if not (Path(path) / "adapter_config.json").is_file():
        yield config
        return
    from atomrl.models.lora import export

    with TemporaryDirectory() as folder:
        export(path, folder)
        yield config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
