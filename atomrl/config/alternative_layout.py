"""The six-section config layout, translated once into a `RunConfig`.

The sections are `model_config`, `generation_config`, `advantage_config`, `train_config`, `loss_config` and
`wandb_config`. `TABLE` says for each key what it becomes; `docs/config.md` has it in words. A key that is absent or
null keeps AtomRL's own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atomrl.config.base import ConfigError
from atomrl.config.files import merge_trees, nest
from atomrl.config.names import nearest_key
from atomrl.config.schema import RolloutConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(_Section):
    """`model_config` (a name that pydantic keeps for itself, so `SixSections` takes it through an alias)."""

    model_name_or_path: str
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    use_lora: bool | None = None
    lora_rank: int | None = Field(None, ge=1)
    lora_alpha: float | None = Field(None, gt=0)
    lora_dropout: float | None = Field(None, ge=0, lt=1)
    lora_target_modules: list[str] | Literal["all-linear"] | None = None
    model_num_gpus: int | None = Field(None, ge=0)
    rollout_num_gpus: int | None = Field(None, ge=0)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)


class GenerationSection(_Section):
    group_size: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    stop_tokens: list[str] | list[int] | None = None
    """Texts, or token ids."""


class AdvantageSection(_Section):
    mode: Literal["raw", "grpo", "grpo_no_std"] | None = None
    advantage_eps: float | None = Field(None, ge=0)


class TrainSection(_Section):
    n_grpo_steps: int | None = Field(None, ge=1)
    train_dataset: str
    eval_dataset: str | None = None
    truncate_max_length: int | None = Field(None, ge=2)
    learning_rate: float | None = Field(None, gt=0)
    rollout_batch_size: int | None = Field(None, ge=1)
    """Completions in a step: prompts times `group_size`."""
    epochs_per_rollout_batch: int | None = Field(None, ge=1)
    train_batch_size: int | None = Field(None, ge=1)
    """Completions in an optimizer step."""
    micro_train_batch_size: int | None = Field(None, ge=1)
    """Completions in a forward pass."""
    adam_beta1: float | None = Field(None, ge=0, lt=1)
    adam_beta2: float | None = Field(None, ge=0, lt=1)
    gradient_checkpoint: bool | None = None
    max_grad_norm: float | None = Field(None, gt=0)
    lr_scheduler_type: Literal["constant", "cosine"] | None = None
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    return_token_entropy: bool | None = None


class LossSection(_Section):
    loss_level: Literal["token", "sequence"] | None = None
    clip_range_left: float | None = Field(None, ge=0)
    clip_range_right: float | None = Field(None, ge=0)


class WandbSection(_Section):
    enabled: bool | None = None
    project: str | None = None
    entity: str | None = None
    run_name: str | None = None
    tags: list[str] | None = None
    log_interval: int | None = Field(None, ge=1)
    eval_interval: int | None = Field(None, ge=0)
    save_interval: int | None = Field(None, ge=0)


class SixSections(_Section):
    """The whole layout."""

    model_section: ModelSection = Field(alias="model_config")
    generation_config: GenerationSection = GenerationSection()
    advantage_config: AdvantageSection = AdvantageSection()
    train_config: TrainSection
    loss_config: LossSection = LossSection()
    wandb_config: WandbSection = WandbSection()


SECTIONS: dict[str, type[_Section]] = {
    "model_config": ModelSection,
    "generation_config": GenerationSection,
    "advantage_config": AdvantageSection,
    "train_config": TrainSection,
    "loss_config": LossSection,
    "wandb_config": WandbSection,
}

KEYS = [*SECTIONS, *(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields)]
TABLE = {
    "model_config.model_name_or_path": "model.path",
    "model_config.dtype": "model.dtype",
    "model_config.lora_rank": "model.lora.rank",
    "model_config.lora_alpha": "model.lora.alpha",
    "model_config.lora_dropout": "model.lora.dropout",
    "model_config.lora_target_modules": "model.lora.target_modules",
    "generation_config.group_size": "rollout.completions_per_prompt",
    "generation_config.temperature": "rollout.temperature",
    "generation_config.top_p": "rollout.top_p",
    "generation_config.min_tokens": "rollout.min_completion_tokens",
    "generation_config.max_tokens": "rollout.max_completion_tokens",
    "advantage_config.mode": "algorithm.advantage.type",
    "advantage_config.advantage_eps": "algorithm.advantage.eps",
    "train_config.n_grpo_steps": "train.steps",
    "train_config.train_dataset": "data.train",
    "train_config.eval_dataset": "data.eval",
    "train_config.truncate_max_length": "train.max_row_tokens",
    "train_config.learning_rate": "train.learning_rate",
    "train_config.epochs_per_rollout_batch": "train.epochs_per_step",
    "train_config.train_batch_size": "train.rows_per_update",
    "train_config.micro_train_batch_size": "train.rows_per_micro_batch",
    "train_config.adam_beta1": "train.adam_beta1",
    "train_config.adam_beta2": "train.adam_beta2",
    "train_config.gradient_checkpoint": "model.gradient_checkpointing",
    "train_config.max_grad_norm": "train.max_grad_norm",
    "train_config.lr_scheduler_type": "train.schedule",
    "train_config.warmup_ratio": "train.warmup_ratio",
    "train_config.min_lr_ratio": "train.min_lr_ratio",
    "train_config.return_token_entropy": "train.report_entropy",
    "loss_config.clip_range_left": "algorithm.clip.low",
    "loss_config.clip_range_right": "algorithm.clip.high",
    "wandb_config.project": "tracking.wandb_project",
    "wandb_config.entity": "tracking.wandb_entity",
    "wandb_config.run_name": "run_name",
    "wandb_config.tags": "tracking.wandb_tags",
    "wandb_config.log_interval": "tracking.log_every_steps",
    "wandb_config.eval_interval": "eval.every_steps",
    "wandb_config.save_interval": "checkpoint.every_steps",
}
"""Keys that move as they are. The others: `use_lora`, `stop_tokens`, `rollout_batch_size`, `loss_level`, `enabled` and
the placement keys, see `translate`."""

PLACEMENT = ("model_num_gpus", "rollout_num_gpus", "gpu_memory_utilization")


def is_six_section_layout(tree: Mapping[str, Any]) -> bool:
    """Whether a config file is in this layout: any top-level key is one of its sections.

    Example:
        >>> is_six_section_layout({"train_config": {}}), is_six_section_layout({"train": {}})
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
    # A section that is written but empty is null in YAML.
    filled = {key: {} if value is None and key in SECTIONS else value for key, value in tree.items()}
    try:
        sections = SixSections.model_validate(filled)
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in _problems(error))
        raise ConfigError(f"{source} (six-section layout):\n{lines}") from None
    given = sections.model_dump(by_alias=True, exclude_none=True)
    result: dict[str, Any] = {"run_name": default_run_name}
    for key, target in TABLE.items():
        section, _, name = key.partition(".")
        if name in given[section]:
            result = merge_trees(result, nest(target, given[section][name]))
    result = merge_trees(result, _batches(sections, source))
    result = merge_trees(result, _other_keys(sections))
    if not sections.model_section.use_lora:
        result["model"].pop("lora", None)
    if sections.advantage_config.mode in ("raw", "grpo_no_std"):  # which divide by no standard deviation
        result["algorithm"]["advantage"].pop("eps", None)
    return result, _notices(sections)


def _batches(sections: SixSections, source: str) -> dict[str, Any]:
    """Sizes that mean something only together."""
    train = sections.train_config
    group = sections.generation_config.group_size or RolloutConfig().completions_per_prompt
    rows, update, longest = train.rollout_batch_size, train.train_batch_size, train.truncate_max_length
    tree: dict[str, Any] = {}
    if rows is not None:
        if rows % group:
            raise ConfigError(
                f"{source}: train_config.rollout_batch_size={rows} (completions) is no multiple of "
                f"generation_config.group_size={group}"
            )
        if update is not None and rows % update:
            raise ConfigError(
                f"{source}: train_config.train_batch_size={update} does not divide "
                f"train_config.rollout_batch_size={rows}"
            )
        tree["rollout"] = {"prompts_per_step": rows // group}
    if longest is not None:
        tree["data"] = {"max_prompt_tokens": longest - 1}  # a longer prompt would leave nothing to train on
        if train.micro_train_batch_size is not None:
            # Rows alone limit a forward pass: this layout has no limit in tokens.
            tree["train"] = {"tokens_per_micro_batch": train.micro_train_batch_size * longest}
    return tree


def _other_keys(sections: SixSections) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    if sections.model_section.use_lora:
        tree["model"] = {"lora": {}}
    stops = sections.generation_config.stop_tokens or []
    if stops:
        tree["rollout"] = {"stop_token_ids" if isinstance(stops[0], int) else "stop": stops}
    level = sections.loss_config.loss_level
    if level is not None:
        tree["algorithm"] = {"loss_agg": {"type": {"token": "token_mean", "sequence": "sequence_mean"}[level]}}
    if sections.wandb_config.enabled:
        tree["tracking"] = {"sinks": ["wandb"]}
    return tree


def _notices(sections: SixSections) -> list[str]:
    placed = [name for name in PLACEMENT if getattr(sections.model_section, name) is not None]
    if not placed:
        return []
    keys = ", ".join(f"model_config.{name}" for name in placed)
    return [f"note: {keys}: valid, but without effect so far: trainer and rollout engine share one device"]


def _problems(error: ValidationError) -> list[str]:
    """One line a key (pydantic has one for each member of a union)."""
    messages: dict[str, list[str]] = {}
    for item in error.errors():
        path = [str(part) for part in item["loc"][:2]]
        key = ".".join(path)
        if item["type"] == "extra_forbidden":
            near = nearest_key(path, KEYS)
            messages[f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else "")] = []
        elif item["type"] == "missing":
            messages[key] = ["is required"]
        else:
            messages.setdefault(f"{key}={item['input']!r}", []).append(item["msg"])
    return [f"{key}: {' or: '.join(texts)}" if texts else key for key, texts in messages.items()]
