"""The six-section config layout, translated once into a tree for `build_config`.

The sections are `model_config`, `generation_config`, `advantage_config`, `train_config`, `loss_config` and
`wandb_config`. `six_sections.yaml` says for each key what it becomes; `docs/reference/config.md` has it in words. A key
that is absent or null keeps AtomRL's own default.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atomrl.config.base import ConfigError
from atomrl.config.files import merge_trees, nest, read_yaml
from atomrl.config.names import nearest_key, renamed
from atomrl.config.run import build_config, config_error
from atomrl.config.schema import RolloutConfig

SECTIONS: dict[str, dict[str, str | None]] = read_yaml(Path(__file__).with_name("six_sections.yaml"))
TABLE = {f"{section}.{name}": target for section, keys in SECTIONS.items() for name, target in keys.items()}
"""Key -> the one that takes its value as it is; None: see `_Worked`."""
PLACEMENT = ("model_num_gpus", "rollout_num_gpus")


class _Worked(BaseModel):
    """The keys that do not move as they are, and those that others depend on."""

    model_config = ConfigDict(alias_generator={key.partition(".")[2]: key for key in TABLE}.__getitem__, frozen=True)

    use_lora: bool = False
    model_num_gpus: int | None = Field(None, ge=0)
    """Of the trainer: a rank on each of several; null: 1."""
    rollout_num_gpus: int | None = Field(None, ge=0)
    """An engine on each; null or 0: they share the trainer's."""
    group_size: int = Field(RolloutConfig().completions_per_prompt, ge=1)
    stop_tokens: list[str] | list[int] = []
    """Texts, or token ids."""
    mode: Literal["raw", "grpo", "grpo_no_std"] = "grpo"
    truncate_max_length: int | None = Field(None, ge=2)
    rollout_batch_size: int | None = Field(None, ge=1)
    """Completions in a step: prompts times `group_size`."""
    micro_train_batch_size: int | None = Field(None, ge=1)
    """Completions in a forward pass."""
    loss_level: Literal["token", "sequence"] = "token"
    enabled: bool = False


def is_alternative_layout(tree: Mapping[str, Any]) -> bool:
    """Whether a config file is in this layout: any top-level key is one of its sections.

    Example:
        >>> is_alternative_layout({"train_config": {}}), is_alternative_layout({"train": {}})
        (True, False)
    """
    return any(key in SECTIONS for key in tree)


def translate(tree: Mapping[str, Any], source: str, default_run_name: str) -> tuple[dict[str, Any], list[str]]:
    """The six sections as a tree for `atomrl.config.build_config`.

    Args:
        tree: the file's content with overrides of its own keys.
        source: its name, for messages.
        default_run_name: where `wandb_config.run_name` is absent.

    Returns:
        The tree, and lines that a person should read (keys that have no effect here).

    Raises:
        ConfigError: all problems, one a line; an unknown key with the nearest valid one.
    """
    source = f"{source} (six-section layout)"
    given = _given(tree, source)
    try:
        worked = _Worked.model_validate(given)
    except ValidationError as error:
        raise config_error(error, source) from None
    result: dict[str, Any] = {"run_name": default_run_name}
    for key, target in TABLE.items():
        if target is not None and key in given:
            result = merge_trees(result, nest(target, given[key]))
    if not worked.use_lora:
        result["model"].pop("lora", None)
    if worked.mode != "grpo":  # which divide by no standard deviation
        result["algorithm"]["advantage"].pop("eps", None)
    for key, value in _worked_out(worked, source):
        result = merge_trees(result, nest(key, value))
    try:
        build_config(result, source)
    except ConfigError as error:
        raise ConfigError(renamed(str(error), {target: key for key, target in TABLE.items() if target})) from None
    placed = any(getattr(worked, name) for name in PLACEMENT) and not torch.cuda.device_count()
    keys = " and ".join(f"model_config.{name}" for name in PLACEMENT)
    note = f"note: {keys}: this machine has no GPU, so trainer and rollout engine share its processors"
    return result, [note] if placed else []


def _given(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values that are not null, by their keys."""
    problems, given = [], {}
    for section, keys in tree.items():
        if section in SECTIONS and not isinstance(keys, Mapping | None):
            problems.append(f"{section}: must be a mapping of keys (got {keys!r})")
            continue
        for path in [[section, str(key)] for key in keys or ()] if section in SECTIONS else [[section]]:
            if (key := ".".join(path)) not in TABLE:
                near = nearest_key(path, [*SECTIONS, *TABLE])
                problems.append(f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
            elif keys[path[1]] is not None:
                given[key] = keys[path[1]]
    required = ("model_config.model_name_or_path", "train_config.train_dataset")
    problems += [f"{key}: is required" for key in required if key not in given]
    if problems:
        raise ConfigError("\n  ".join([f"{source}:", *problems]))
    return given


def _worked_out(worked: _Worked, source: str) -> Iterator[tuple[str, Any]]:
    """What the keys become that do not move as they are: keys of AtomRL's with their values."""
    rows, group, longest = worked.rollout_batch_size, worked.group_size, worked.truncate_max_length
    if rows is not None:
        if rows % group:
            raise ConfigError(
                f"{source}: train_config.rollout_batch_size={rows} (completions) is no multiple of "
                f"generation_config.group_size={group}"
            )
        yield "rollout.prompts_per_step", rows // group
    if longest is not None:
        yield "data.max_prompt_tokens", longest - 1  # a longer prompt would leave nothing to train on
        if worked.micro_train_batch_size is not None:
            # Rows alone limit a forward pass: this layout has no limit in tokens.
            yield "train.tokens_per_micro_batch", worked.micro_train_batch_size * longest
    yield from _placed(worked)
    if worked.use_lora:
        yield "model.lora", {}
    if worked.stop_tokens:
        ids = isinstance(worked.stop_tokens[0], int)
        yield "rollout.stop_token_ids" if ids else "rollout.stop", worked.stop_tokens
    yield "algorithm.loss_agg.type", f"{worked.loss_level}_mean"
    if worked.enabled:
        yield "tracking.sinks", ["wandb"]


def _placed(worked: _Worked) -> Iterator[tuple[str, Any]]:
    """Trainer and engines on GPUs of their own, on a machine that has any."""
    trainer, engines = worked.model_num_gpus, worked.rollout_num_gpus
    if not torch.cuda.device_count():
        return
    if trainer is not None and trainer > 1:
        yield "backend", {"type": "fsdp", "ranks": trainer}
    if engines:
        yield "cluster.replicas", engines
        yield "cluster.resources", {"trainer": {"num_gpus": 0 if trainer == 0 else 1}, "rollout": {"num_gpus": 1}}
    elif trainer is not None:
        yield "model.device", "cuda" if trainer else "cpu"
