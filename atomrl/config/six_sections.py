"""The six-section layout, another layout of a config file.

Its sections are `model_config`, `generation_config`, `advantage_config`, `train_config`, `loss_config` and
`wandb_config`. `six_sections.yaml` maps each key to its key here, `docs/reference/config.md` describes the mapping. A
key that is absent or null keeps AtomRL's own default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atomrl.common.errors import ConfigError
from atomrl.common.yaml_files import read_yaml
from atomrl.config.errors import config_error
from atomrl.config.keys import nearest_key, renamed
from atomrl.config.run import RunConfig
from atomrl.config.schema import RolloutConfig
from atomrl.config.trees import merge_trees, nest

SECTIONS: dict[str, dict[str, str | None]] = read_yaml(Path(__file__).with_name("six_sections.yaml"))
TABLE = {f"{section}.{name}": target for section, keys in SECTIONS.items() for name, target in keys.items()}
"""Key of the layout -> key here that takes the value unchanged; None: the value is converted (`_Converted`)."""
PLACEMENT = ("model_num_gpus", "rollout_num_gpus")


class _Converted(BaseModel):
    """Keys whose values have to be converted, and keys that a conversion depends on."""

    model_config = ConfigDict(alias_generator={key.partition(".")[2]: key for key in TABLE}.__getitem__, frozen=True)

    use_lora: bool = False
    model_num_gpus: int | None = Field(None, ge=0)
    """GPUs of the trainer, one rank on each; null: 1."""
    rollout_num_gpus: int | None = Field(None, ge=0)
    """GPUs of the engines, one engine on each; null or 0: the engine shares the trainer's GPU."""
    group_size: int = Field(RolloutConfig().completions_per_prompt, ge=1)
    stop_tokens: list[str] | list[int] = []
    """Texts, or token ids."""
    mode: Literal["raw", "grpo", "grpo_no_std"] = "grpo"
    truncate_max_length: int | None = Field(None, ge=2)
    rollout_batch_size: int | None = Field(None, ge=1)
    """Completions per step: prompts times `group_size`."""
    micro_train_batch_size: int | None = Field(None, ge=1)
    """Completions per forward pass."""
    loss_level: Literal["token", "sequence"] = "token"
    enabled: bool = False


def is_alternative_layout(tree: Mapping[str, Any]) -> bool:
    """Return True if a config is in the six-section layout: any top-level key is one of its sections.

    Example:
        >>> is_alternative_layout({"train_config": {}}), is_alternative_layout({"train": {}})
        (True, False)
    """
    return any(key in SECTIONS for key in tree)


def translate(tree: Mapping[str, Any], source: str, default_run_name: str) -> tuple[dict[str, Any], list[str]]:
    """Translate the six sections into a dict for `load_config`.

    Args:
        tree: the file's content with overrides of its own keys.
        source: name of the file, for messages.
        default_run_name: used if `wandb_config.run_name` is absent.

    Returns:
        The dict, and notes for the user about keys that have no effect here.

    Raises:
        ConfigError: lists all errors, one per line; an unknown key with the nearest valid one.
    """
    source = f"{source} (six-section layout)"
    values = _values(tree, source)
    try:
        converted = _Converted.model_validate(values)
    except ValidationError as error:
        raise config_error(error, source) from None
    result: dict[str, Any] = {"run_name": default_run_name}
    for key, target in TABLE.items():
        if target is not None and key in values:
            result = merge_trees(result, nest(target, values[key]))
    if not converted.use_lora:
        result["model"].pop("lora", None)
    if converted.mode != "grpo":  # the other modes do not divide by a standard deviation
        result["algorithm"]["advantage"].pop("eps", None)
    for key, value in _conversions(converted, source):
        result = merge_trees(result, nest(key, value))
    try:
        RunConfig.model_validate(result)
    except ValidationError as error:
        names = {target: key for key, target in TABLE.items() if target}
        raise ConfigError(renamed(str(config_error(error, source)), names)) from None
    ignored = any(getattr(converted, name) for name in PLACEMENT) and not torch.cuda.device_count()
    keys = " and ".join(f"model_config.{name}" for name in PLACEMENT)
    note = f"note: {keys}: this machine has no GPU, so trainer and rollout engine share its CPU"
    return result, [note] if ignored else []


def _values(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values that are not null, by dotted key; raise ConfigError for unknown and missing keys."""
    errors, values = [], {}
    for section, keys in tree.items():
        if section in SECTIONS and not isinstance(keys, Mapping | None):
            errors.append(f"{section}: must be a mapping of keys (got {keys!r})")
            continue
        for path in [[section, str(key)] for key in keys or ()] if section in SECTIONS else [[section]]:
            if (key := ".".join(path)) not in TABLE:
                near = nearest_key(path, [*SECTIONS, *TABLE])
                errors.append(f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
            elif keys[path[1]] is not None:
                values[key] = keys[path[1]]
    required = ("model_config.model_name_or_path", "train_config.train_dataset")
    errors += [f"{key}: is required" for key in required if key not in values]
    if errors:
        raise ConfigError("\n  ".join([f"{source}:", *errors]))
    return values


def _conversions(converted: _Converted, source: str) -> Iterator[tuple[str, Any]]:
    """Yield (key here, value) for the keys that are converted."""
    rows, group, longest = converted.rollout_batch_size, converted.group_size, converted.truncate_max_length
    if rows is not None:
        if rows % group:
            raise ConfigError(
                f"{source}: train_config.rollout_batch_size={rows} (completions) is not a multiple of "
                f"generation_config.group_size={group}"
            )
        yield "rollout.prompts_per_step", rows // group
    if longest is not None:
        yield "data.max_prompt_tokens", longest - 1  # a longer prompt would leave nothing to train on
        if converted.micro_train_batch_size is not None:
            # This layout limits a forward pass by rows only, so the limit in tokens must never be the tighter one.
            yield "train.tokens_per_micro_batch", converted.micro_train_batch_size * longest
    yield from _placement(converted)
    if converted.use_lora:
        yield "model.lora", {}
    if converted.stop_tokens:
        ids = isinstance(converted.stop_tokens[0], int)
        yield "rollout.stop_token_ids" if ids else "rollout.stop", converted.stop_tokens
    yield "algorithm.loss_agg.type", f"{converted.loss_level}_mean"
    if converted.enabled:
        yield "tracking.sinks", ["wandb"]


def _placement(converted: _Converted) -> Iterator[tuple[str, Any]]:
    """Yield the keys that place trainer and engines on GPUs; none on a machine without GPUs."""
    trainer, engines = converted.model_num_gpus, converted.rollout_num_gpus
    if not torch.cuda.device_count():
        return
    if trainer is not None and trainer > 1:
        yield "backend", {"type": "fsdp", "ranks": trainer}
    if engines:
        yield "cluster.replicas", engines
        yield "cluster.resources", {"trainer": {"num_gpus": 0 if trainer == 0 else 1}, "rollout": {"num_gpus": 1}}
    elif trainer is not None:
        yield "model.device", "cuda" if trainer else "cpu"
