"""The configuration: one YAML file, then `key=value` overrides. Unknown keys are errors that name the nearest one.

`RunConfig` is the whole of it; each section is a class below, and each key has its meaning beside it. Nothing is
written into a config after it is loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atomrl.sections import CriticConfig as CriticConfig
from atomrl.sections import GptConfig as GptConfig
from atomrl.sections import PreferenceConfig as PreferenceConfig
from atomrl.sections import PretrainConfig as PretrainConfig
from atomrl.sections import Section
from atomrl.sections import SftConfig as SftConfig
from atomrl.sections import TeacherConfig as TeacherConfig
from atomrl.trees import ConfigError as ConfigError
from atomrl.trees import merge_trees as merge_trees
from atomrl.trees import nest as nest
from atomrl.trees import parse_overrides as parse_overrides
from atomrl.trees import read_yaml as read_yaml


class LoraConfig(Section):
    """Low-rank adapters (needs the `lora` extra)."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class ModelConfig(Section):
    """The policy."""

    path: str | None = None
    """A folder in Hugging Face layout, or a hub name. Required, but where `sft.gpt` makes a fresh model."""
    tokenizer: str | None = None
    """Where its tokenizer is, if not beside the model: a folder or a hub name."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where trainer and engine compute: `cpu`, `cuda`, `cuda:1`, ...; `auto` is a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the forward pass computes in; master weights are float32 in either case. `auto` is bfloat16 where the
    hardware multiplies it fast."""
    gradient_checkpointing: bool = False
    compile: bool = False
    """Compile each layer once (pays after some tens of steps)."""
    lora: LoraConfig | None = None
    trust_remote_code: bool = False


class DataConfig(Section):
    """Where problems come from and how a row becomes a prompt."""

    train: str
    """A JSONL file, or a generator: `countdown`, `reasoning_gym:NAME`, ... (`atomrl data make --help`)."""
    eval: str | None = None
    train_size: int | None = Field(None, ge=1)
    """Problems to draw from a generator, or rows to keep of a file."""
    eval_size: int | None = Field(None, ge=1)
    generator_args: dict[str, Any] = {}
    prompt_field: str = "prompt"
    answer_field: str | None = "ground_truth"
    """null: the rows have no ground truth (demonstrations, or rewards that need none)."""
    data_source_field: str = "data_source"
    answer_pattern: str | None = None
    """A regular expression; its first group in the answer field is the ground truth (GSM8K: `####\\s*(.+)`)."""
    system_prompt: str | None = None
    system_prompt_file: str | None = None
    chat_template: Literal["auto", "none"] = "auto"
    """`auto` applies the tokenizer's template to messages, and to text when it has one; `none` takes the text as
    it is, for prompts that carry their template."""
    max_prompt_tokens: int = Field(512, ge=1)
    overlong_prompt: Literal["drop", "truncate"] = "drop"
    """`truncate` keeps the last tokens."""
    on_bad_row: Literal["error", "skip"] = "error"
    """`error` lists every problem with file and line and stops; `skip` counts them."""
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_system_prompt(self) -> DataConfig:
        if self.system_prompt is not None and self.system_prompt_file is not None:
            raise ValueError("give system_prompt or system_prompt_file, not both")
        return self


class RolloutConfig(Section):
    """How completions are drawn during training."""

    engine: str = "native"
    prompts_per_step: int = Field(16, ge=1)
    completions_per_prompt: int = Field(8, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_completion_tokens: int = Field(0, ge=0)
    max_completion_tokens: int = Field(256, ge=1)
    stop: list[str] = []
    stop_token_ids: list[int] = []
    logprobs_over: Literal["vocabulary", "kept"] = "vocabulary"
    """`kept`: all log-probs, of the engine and of the trainer, are over the tokens that top-p and top-k kept, as they
    were sampled. Needs the native engine, and `K` numbers for each token, of the largest number of kept ones."""
    max_concurrent_completions: int = Field(256, ge=1)
    """Rows that an engine decodes at once."""

    @model_validator(mode="after")
    def _something_is_cut(self) -> RolloutConfig:
        if self.logprobs_over == "kept" and (self.temperature == 0 or (self.top_p == 1 and not self.top_k)):
            raise ValueError(
                "logprobs_over=kept needs a temperature above 0, and top_p below 1 or a top_k: nothing is cut"
            )
        return self


class RewardRoute(Section):
    """A reward and how it is called."""

    function: str
    """A built-in name, or a dotted path to a function of the same signature, to verl's `compute_score`, or to a class
    that is called with a `RolloutBatch`."""
    args: dict[str, Any] = {}
    timeout_s: float = Field(10.0, gt=0)
    """For one completion, in rewards that run in worker processes (all but the cheap built-in ones)."""


class RewardItem(RewardRoute):
    """One reward and its weight in the sum."""

    weight: float = 1.0


class RewardConfig(Section):
    """What a completion earns."""

    functions: list[RewardItem] = [RewardItem(function="strict_math")]
    """For every completion. Empty unless given where there is a table `by_data_source`."""
    by_data_source: dict[str, RewardRoute] = {}
    """data source -> the reward of its completions; a name alone is enough: `openai/gsm8k: gsm8k`."""
    workers: int = Field(2, ge=1)
    """Processes that rewards run in."""

    @model_validator(mode="before")
    @classmethod
    def _short_routes(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping) or not isinstance(tree.get("by_data_source"), Mapping):
            return tree
        routes = {
            source: {"function": route} if isinstance(route, str) else route
            for source, route in tree["by_data_source"].items()
        }
        return {**({"functions": []} if routes else {}), **tree, "by_data_source": routes}

    @model_validator(mode="after")
    def _at_least_one(self) -> RewardConfig:
        if not self.functions and not self.by_data_source:
            raise ValueError("reward.functions is empty and there is no reward.by_data_source: nothing gives a reward")
        return self


class AlgorithmConfig(BaseModel):
    """A named algorithm; every other key overrides one of its axes (checked when the algorithm is built)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "grpo"

    @property
    def axes(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """How the policy is updated."""

    steps: int = Field(100, ge=1)
    epochs_per_step: int = Field(1, ge=1)
    """Passes over the rows of a step."""
    rows_per_update: int | None = Field(None, ge=1)
    """Completions in one optimizer step; None takes all rows of the step."""
    tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Padded tokens in one forward pass; changes speed and memory, never the gradient. None: `micro_batch_tokens`."""
    rows_per_micro_batch: int | None = Field(None, ge=1)
    """A further limit on a forward pass, in rows."""
    max_row_tokens: int | None = Field(None, ge=2)
    """Rows are cut to this many tokens, prompt and completion together."""
    learning_rate: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The cosine's end, as a fraction of `learning_rate`."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    report_entropy: bool = True
    """Log `actor/entropy` (costs one more reduction over the vocabulary)."""

    def micro_batch_tokens(self, device_type: str) -> int:
        """`tokens_per_micro_batch`, or by device: 3072 on a CPU (docs/benchmarks/training.md), 8192 elsewhere."""
        return self.tokens_per_micro_batch or (3072 if device_type == "cpu" else 8192)


class EvalConfig(Section):
    """Evaluation on held-out problems."""

    every_steps: int = Field(0, ge=0)
    """0: only before and after."""
    before: bool = True
    after: bool = True
    samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    """None takes the rollout's."""


class CheckpointConfig(Section):
    """When the state is saved and what stays; the end of a run is always saved (docs/recovery.md)."""

    every_steps: int = Field(20, ge=0)
    """0: only at the end."""
    keep: int = Field(2, ge=1)
    """How many of the newest ones."""
    keep_best: str | None = None
    """A metric, as `critic/score/mean`: the checkpoint with the best value of it stays too (`RUN/best`)."""
    best_is: Literal["max", "min"] = "max"


class TrackingConfig(Section):
    """Where metrics go beside `metrics.jsonl`."""

    sinks: list[Literal["tensorboard", "wandb"]] = []
    wandb_project: str = "atomrl"
    wandb_entity: str | None = None
    wandb_tags: list[str] = []
    log_every_steps: int = Field(1, ge=1)
    """Of the sinks; `metrics.jsonl` has every step."""
    save_rollouts: bool = True


class RunConfig(Section):
    """Everything that decides a run."""

    run_name: str = Field(pattern=r"^[^/\\.][^/\\]*$")
    """Names the folder of the run: no slashes, and no dot in front."""
    output_dir: str = "runs"
    seed: int = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    sft: SftConfig | None = None
    pretrain: PretrainConfig | None = None
    preference: PreferenceConfig | None = None
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig | None = None

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> RunConfig:
        rollout, rows = self.rollout, self.train.rows_per_update
        total = rollout.prompts_per_step * rollout.completions_per_prompt
        kinds = [name for name in ("sft", "pretrain", "preference") if getattr(self, name) is not None]
        if rows is not None and total % rows and not kinds:  # which draw no rollouts
            raise ValueError(
                f"train.rows_per_update={rows} does not divide the {total} rows of a step "
                f"(rollout.prompts_per_step={rollout.prompts_per_step} x "
                f"rollout.completions_per_prompt={rollout.completions_per_prompt})"
            )
        if len(kinds) > 1:
            raise ValueError(f"{' and '.join(kinds)} are {len(kinds)} kinds of run; give one")
        supervised = self.sft or self.pretrain
        if (self.model.path is None) == (supervised is None or supervised.gpt is None):
            raise ValueError(
                "model.path: is required (a folder or a hub name)"
                if self.model.path is None
                else f"model.path and {'sft' if self.sft else 'pretrain'}.gpt are two places to start from; give one"
            )
        if rollout.min_completion_tokens > rollout.max_completion_tokens:
            raise ValueError("rollout.min_completion_tokens is larger than rollout.max_completion_tokens")
        if rollout.min_completion_tokens > (self.eval.max_completion_tokens or rollout.max_completion_tokens):
            raise ValueError("rollout.min_completion_tokens holds in evaluation too: over eval.max_completion_tokens")
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.run_name


def build_config(tree: Mapping[str, Any], source: str = "config") -> RunConfig:
    """Validate a tree.

    Raises:
        ConfigError: all problems, one a line, each with its key and, for an unknown key, the nearest valid one.
    """
    try:
        return RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        lines = [_problem(item) for item in error.errors()]
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from None


def _problem(item: Mapping[str, Any]) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        near = nearest_key(path)
        return f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else "")
    if item["type"] == "missing":
        return f"{key}: is required"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message} (got {item['input']!r})" if key and item["type"] != "value_error" else message


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """All keys with dots, sections before their keys."""
    keys = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        parts = () if get_origin(info.annotation) is dict else get_args(info.annotation)  # a table has keys of its own
        for kind in (info.annotation, *parts):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
    return keys


def nearest_key(path: Sequence[str]) -> str | None:
    """The valid key most like `path`: in the same section first, then by its last part anywhere."""
    keys = known_keys()
    section = ".".join(path[:-1])
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    near = difflib.get_close_matches(".".join(path), siblings, n=1, cutoff=0.75)
    if near:
        return near[0]
    leaves: dict[str, str] = {key.rpartition(".")[2]: key for key in reversed(keys)}  # the first section counts
    near = difflib.get_close_matches(path[-1], list(leaves), n=1, cutoff=0.6)
    return leaves[near[0]] if near else None


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; loading it gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
