"""`GRPOArgs`: arguments of GRPO, checked when they are set. Each knows the config key that it sets, and error messages
use the argument's name. TRL's metric names are here, too."""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from atomrl.common.errors import did_you_mean
from atomrl.config import ConfigError, known_keys, merge_trees, nest
from atomrl.config.keys import foreign_names, renamed

LOSS_TYPES = {"dapo": "token_mean", "bnpo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant_length"}
"""TRL's loss types -> `algorithm.loss_agg.type`. TRL's `bnpo` is a mean over a micro-batch; here no loss depends on the
size of micro-batches, so it is `dapo`'s mean over the optimizer step."""


class GRPOArgs(BaseModel):
    """Arguments of a GRPO run. Set them by keyword or one by one; each is checked when it is set.

    A step samples `num_generations` completions for each of `batch_size * gradient_accumulation_steps` prompts, and
    makes `num_iterations` optimizer steps, each on all of them. The `serialization_alias` of an argument is the config
    key that it sets.

    Raises:
        AttributeError: the argument is unknown; the message suggests the nearest.
        ConfigError: the value is invalid.

    Example:
        >>> args = GRPOArgs(lr=2e-6)
        >>> args.num_generations = 4
        >>> args.learning_rate = 1e-5
        Traceback (most recent call last):
            ...
        AttributeError: GRPOArgs has no argument 'learning_rate'; did you mean 'lr'?
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False)

    output_dir: Annotated[str | None, BeforeValidator(lambda v: str(v) if isinstance(v, Path) else v)] = None
    """Folder of the run. None: `runs/grpo`, or the first of `runs/grpo-2`, ... that does not exist."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", serialization_alias="model.device")
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` is a GPU if there is one."""
    lr: float = Field(1e-6, gt=0, serialization_alias="train.learning_rate")
    """Constant learning rate."""
    save_steps: int = Field(100, ge=0, serialization_alias="checkpoint.every_steps")
    """Save a checkpoint every N steps; 0: only at the end."""
    epoch: float = Field(1, gt=0, serialization_alias="train.total_epochs")
    """Passes over the data; the last step is filled up from the next pass."""
    num_generations: int = Field(8, ge=2, serialization_alias="rollout.completions_per_prompt")
    """Group size: completions per prompt."""
    max_prompt_length: int = Field(256, ge=1, serialization_alias="data.max_prompt_tokens")
    """Maximum prompt tokens; longer prompts are dropped and counted."""
    max_generate_length: int = Field(256, ge=1, serialization_alias="rollout.max_completion_tokens")
    """Maximum tokens of a completion."""
    reward_weights: list[float] | None = None
    """Weight of each reward function; None: 1 each."""
    beta: float = Field(0.0, ge=0, serialization_alias="algorithm.kl.coefficient")
    """Coefficient of the KL penalty to the initial model; 0 loads no reference model."""
    clip_eps: float = Field(0.2, ge=0, serialization_alias="algorithm.clip.low")
    """Clip range of the ratio: 1 - clip_eps to 1 + clip_eps."""
    gradient_accumulation_steps: int = Field(2, ge=1)
    """Forward passes per optimizer step, of `batch_size` prompts each."""
    num_iterations: int = Field(1, ge=1, serialization_alias="train.epochs_per_step")
    """Optimizer steps on the same completions."""
    batch_size: int = Field(1, ge=1)
    """Prompts per forward pass, with all their completions."""
    temperature: float = Field(1.0, gt=0, serialization_alias="rollout.temperature")
    """Temperature of sampling and of the trained log-probs."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of sampling and of the order of the problems."""
    max_steps: int = Field(-1, serialization_alias="train.steps")
    """Number of steps, each with new completions, instead of `epoch`; -1: use `epoch`."""
    loss_type: Literal["dapo", "bnpo", "grpo", "dr_grpo"] = Field("dapo", serialization_alias="algorithm.loss_agg.type")
    """Loss aggregation: `dapo` and `bnpo` average over all tokens, `grpo` over the tokens of each completion and then
    over completions; `dr_grpo` averages token sums over completions and divides by `max_generate_length`."""
    scale_rewards: bool = True
    """Divide advantages by the standard deviation of the group; Dr. GRPO does not."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        names = list(type(self).model_fields)
        if name not in names:
            raise AttributeError(f"GRPOArgs has no argument {name!r}; {_suggestion(name, names)}")
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            lines = [f"GRPOArgs.{name}: {item['msg']} (got {item['input']!r})" for item in error.errors()]
            raise ConfigError("\n".join(lines)) from None

    def to_tree(self) -> dict[str, Any]:
        """Convert the arguments into config sections, without model, data, rewards and run folder.

        Example:
            >>> GRPOArgs(clip_eps=0.3).to_tree()["algorithm"]["clip"]
            {'low': 0.3, 'high': 0.3}
        """
        rows = self.batch_size * self.num_generations
        values = {key: value for key, value in self.model_dump(by_alias=True).items() if key in NAMES} | {
            "seed": self.seed,
            "rollout.prompts_per_step": self.batch_size * self.gradient_accumulation_steps,
            "algorithm.name": "grpo",
            "algorithm.clip.high": self.clip_eps,
            "algorithm.loss_agg.type": LOSS_TYPES[self.loss_type],
            "algorithm.advantage.type": "grpo" if self.scale_rewards else "grpo_no_std",
            # Only rows limit a forward pass, because no argument limits its tokens.
            "train.rows_per_micro_batch": rows,
            "train.tokens_per_micro_batch": rows * (self.max_prompt_length + self.max_generate_length),
        }
        if self.max_steps > 0:
            values["train.total_epochs"] = None
        else:
            del values["train.steps"]
        return functools.reduce(merge_trees, (nest(key, value) for key, value in values.items()))


NAMES = {info.serialization_alias: name for name, info in GRPOArgs.model_fields.items() if info.serialization_alias} | {
    "model.lora.rank": "GRPOTrainer(peft_config=...)",
    "model.tokenizer": "tokenizer",
    "rollout.prompts_per_step": "batch_size (prompts; TRL counts completions)",
    "train.rows_per_micro_batch": "batch_size (prompts; TRL counts completions)",
}
"""Config key -> argument of `GRPOArgs`."""
WITH_TRAINER = {**NAMES, "reward.functions": "reward_funcs", "data.train": "train_dataset"}
"""Config key -> argument of `GRPOArgs` or `GRPOTrainer`."""


def _suggestion(name: str, arguments: list[str]) -> str:
    """Suggest an argument, else a config key, for an unknown name."""
    keys = [key for key in known_keys() if key.endswith(f".{name}")]
    keys = [foreign_names()[name][0]] if name in foreign_names() else sorted(keys, key=lambda key: key not in NAMES)
    if not keys:
        return did_you_mean(name, arguments)
    if keys[0] in WITH_TRAINER:
        argument = WITH_TRAINER[keys[0]]
        return f"did you mean {argument!r}?" if keys[0] in NAMES else f"it is an argument of GRPOTrainer: {argument}"
    return f"not an argument here; use {keys[0]} in a config for `atomrl train`"


def hint(message: str) -> str:
    """Rewrite a hint of the doctor with the names of arguments; config keys without an argument are listed at the end.

    Example:
        >>> print(hint("Try: a lower train.learning_rate, or train.max_grad_norm."))
        Try: a lower lr, or train.max_grad_norm.
          (not arguments here; keys of a config for `atomrl train`: train.max_grad_norm)
    """
    message = renamed(message, WITH_TRAINER)
    dotted = (key for key in dict.fromkeys(known_keys()) if "." in key)
    keys = [key for key in dotted if re.search(rf"(?<![\w.]){re.escape(key)}(?!\.?\w)", message)]
    note = f"\n  (not arguments here; keys of a config for `atomrl train`: {', '.join(keys)})" if keys else ""
    return message + note


# --------------------------------------------------------------------------------------------------------------------
# TRL's names of metrics

LOGGED = {
    "reward": "critic/score/mean", "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr", "entropy": "actor/entropy", "kl": "actor/kl_loss",
    "completions/mean_length": "response_length/mean", "completions/max_length": "response_length/max",
    "completions/min_length": "response_length/min", "completions/clipped_ratio": "response_length/clip_ratio",
    "step_time": "timing_s/step", "num_tokens": "perf/total_num_tokens",
}  # fmt: skip
"""TRL's names in `log_history` -> metric here."""
LOSSES = {
    "loss": ("actor/pg_loss", "sft/nll_per_token", "preference/loss", "reward_model/loss"),
    "eval_loss": ("eval/nll_per_token",),
}
"""TRL's names of losses in `log_history` -> metric here, by kind of run."""


def in_trl_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Add TRL's names to a row of metrics.

    Example:
        >>> in_trl_names({"step": 1, "critic/score/mean": 0.5, "reward/brevity/mean": -1.0})["reward"]
        0.5
    """
    return {**row, **dict(_named(row))}


def _named(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for theirs, ours in LOGGED.items():
        if ours in row:
            yield theirs, row[ours]
    for theirs, metrics in LOSSES.items():
        yield from ((theirs, row[ours]) for ours in metrics if ours in row)
    for name, value in row.items():
        if name.startswith("reward/") and name.endswith("/mean"):
            yield f"rewards/{name.removeprefix('reward/')}", value
    if (mixed := row.get("by_group/frac_mixed")) is not None:
        yield "frac_reward_zero_std", 1 - mixed
