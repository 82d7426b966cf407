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
    from atomrl.protocols import RolloutEngine

KEYS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "engine": "rollout.engine",
    "n": "eval.samples_per_prompt",
    "temperature": "eval.temperature",
    "top_p": "eval.top_p",
    "top_k": "eval.top_k",
    "max_tokens": "eval.max_completion_tokens",
    "stop": "rollout.stop",
    "seed": "seed",
    "chat_template": "data.chat_template",
    "system_prompt": "data.system_prompt",
}
"""Option -> the config key that it sets."""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Options without a value leave the config's."""
    parser.add_argument("model", metavar="MODEL", help="a folder in Hugging Face layout, or a hub name")
    parser.add_argument("--engine", help="native (default) or hf")
    parser.add_argument("--dtype", help="auto (default), float32 or bfloat16")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default 1.0)")
    parser.add_argument("--top-p", type=float, help="(default 1.0)")
    parser.add_argument("--top-k", type=int, help="(default 0: all)")
    parser.add_argument("--max-tokens", type=int, help="tokens of a completion (default 256, or what the context has)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="ends a completion; repeatable")
    parser.add_argument("--seed", type=int, help="(default 0)")
    parser.add_argument("--chat-template", help="auto (default), or none: take the prompt as it is")
    parser.add_argument("--system-prompt", help="goes before the prompt")


def config_over(base: dict[str, Any], options: dict[str, Any], keys: dict[str, str], source: str) -> RunConfig:
    """A config tree with the options that were given.

    Raises:
        ConfigError: a value that its key does not take.
    """
    from atomrl.config import build_config, merge_trees, nest

    tree = {key: value for key, value in base.items() if key != "sft"}  # it may name another model to start from
    for option, key in keys.items():
        if options.get(option) is not None:
            tree = merge_trees(tree, nest(key, options[option]))
    return build_config(tree, source)


def within_context(config: RunConfig, longest_prompt: int) -> RunConfig:
    """Where nobody said how long a completion may be: as long as the default, or as the model's context leaves room."""
    from atomrl.models.loading import model_config_only
    from atomrl.runs.build import model_path

    context = getattr(
        model_config_only(model_path(config), config.model.trust_remote_code), "max_position_embeddings", None
    )
    said = config.eval.max_completion_tokens is not None or "max_completion_tokens" in config.rollout.model_fields_set
    if context is None or said or context <= longest_prompt:
        return config
    room = min(config.rollout.max_completion_tokens, context - longest_prompt)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"max_completion_tokens": room})})


def open_engine(config: RunConfig, tokenizer: Any) -> RolloutEngine:
    """The engine of a config with the weights of its model."""
    from atomrl.runs.build import build_engine, model_path

    return build_engine(model_path(config), tokenizer, config.rollout, config.model)


@contextmanager
def model_folder(model: str) -> Iterator[str]:
    """A folder that the engines load: the model's own, or that of a checkpoint of adapters merged for the while."""
    if not (Path(model) / "adapter_config.json").is_file():
        yield model
        return
    from atomrl.models.lora import export

    with TemporaryDirectory() as folder:
        export(model, folder)
        yield folder
