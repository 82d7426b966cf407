"""The arguments of `GRPOTrainer`, checked as they are set, and what each becomes in a config."""

import functools
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from atomrl.config import ConfigError, known_keys, merge_trees, nest
from atomrl.config.names import foreign_names, renamed
from atomrl.hints import did_you_mean

LOSS_TYPES = {"dapo": "token_mean", "bnpo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant_length"}
"""TRL's names of loss aggregations. `bnpo` is a mean over a micro-batch there; no loss here depends on their size."""


class GRPOArgs(BaseModel):
    """The arguments of a GRPO run. Set them by keyword or one by one; each is checked when it is set. Its
    `serialization_alias` is the key of a config that takes it.

    A step draws `num_generations` completions for each of `batch_size * gradient_accumulation_steps` prompts, makes
    one optimizer step on all of them, and repeats that optimizer step `num_iterations` times.

    Raises:
        AttributeError: there is no argument of this name; the message has the nearest.
        ConfigError: a value that the argument does not take.

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
    """The folder of the run. None: `runs/grpo`, or `runs/grpo-2`, ... where that exists."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", serialization_alias="model.device")
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` is a GPU where there is one."""
    lr: float = Field(1e-6, gt=0, serialization_alias="train.learning_rate")
    """Learning rate, constant."""
    save_steps: int = Field(100, ge=0, serialization_alias="checkpoint.every_steps")
    """A checkpoint every so many steps; 0 saves at the end alone."""
    epoch: float = Field(1, gt=0, serialization_alias="train.total_epochs")
    """Passes over the data; the last step is filled up from the next pass."""
    num_generations: int = Field(8, ge=2, serialization_alias="rollout.completions_per_prompt")
    """Completions of a prompt: the group within which they are compared."""
    max_prompt_length: int = Field(256, ge=1, serialization_alias="data.max_prompt_tokens")
    """In tokens; longer prompts are left out, and counted."""
    max_generate_length: int = Field(256, ge=1, serialization_alias="rollout.max_completion_tokens")
    """Tokens of a completion."""
    reward_weights: list[float] | None = None
    """One for each reward function; None is 1 for all."""
    beta: float = Field(0.0, ge=0, serialization_alias="algorithm.kl.coefficient")
    """Weight of the KL penalty towards the model at the start; 0 loads no second model."""
    clip_eps: float = Field(0.2, ge=0, serialization_alias="algorithm.clip.low")
    """The ratio's gradient stops beyond 1 - clip_eps and 1 + clip_eps."""
    gradient_accumulation_steps: int = Field(2, ge=1)
    """Forward passes, of `batch_size` prompts each, in an optimizer step."""
    num_iterations: int = Field(1, ge=1, serialization_alias="train.epochs_per_step")
    """Optimizer steps on the same completions."""
    batch_size: int = Field(1, ge=1)
    """Prompts in a forward pass, with all their completions."""
    temperature: float = Field(1.0, gt=0, serialization_alias="rollout.temperature")
    """Of sampling, and of the log-probs that are trained."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of sampling and of the order of the problems."""
    max_steps: int = Field(-1, serialization_alias="train.steps")
    """Optimizer steps on new completions, in place of `epoch`; -1 leaves it to `epoch`."""
    loss_type: Literal["dapo", "bnpo", "grpo", "dr_grpo"] = Field("dapo", serialization_alias="algorithm.loss_agg.type")
    """What the loss is a mean of: `dapo` and `bnpo` over all tokens, `grpo` over completions and their tokens,
    `dr_grpo` over completions, their sums divided by `max_generate_length`."""
    scale_rewards: bool = True
    """Whether advantages are divided by the standard deviation of the group; Dr. GRPO does not."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        known = list(type(self).model_fields)
        if name not in known:
            raise AttributeError(f"GRPOArgs has no argument {name!r}; {_instead_of(name, known)}")
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            lines = [f"GRPOArgs.{name}: {item['msg']} (got {item['input']!r})" for item in error.errors()]
            raise ConfigError("\n".join(lines)) from None

    def to_tree(self) -> dict[str, Any]:
        """The arguments as a part of a config's tree; `output_dir` and rewards need more than arguments.

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
            # Rows alone limit a forward pass: there is no argument that limits its tokens.
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
"""What a key of a config is called here."""
WITH_TRAINER = {**NAMES, "reward.functions": "reward_funcs", "data.train": "train_dataset"}
"""The same, with what `GRPOTrainer` itself takes."""


def _instead_of(name: str, arguments: list[str]) -> str:
    """What to say of an unknown argument: what it is called here, or the key of a config where it is no argument."""
    keys = [key for key in known_keys() if key.endswith(f".{name}")]
    keys = [foreign_names()[name][0]] if name in foreign_names() else sorted(keys, key=lambda key: key not in NAMES)
    if not keys:
        return did_you_mean(name, arguments)
    if keys[0] in WITH_TRAINER:
        meant = WITH_TRAINER[keys[0]]
        return f"did you mean {meant!r}?" if keys[0] in NAMES else f"it is an argument of GRPOTrainer: {meant}"
    return f"it is no argument here; a config for `atomrl train` has {keys[0]}"


def hint(message: str) -> str:
    """A hint of the doctor in the terms of `GRPOTrainer`; where a key of the config has no argument, it says so.

    Example:
        >>> print(hint("Try: a lower train.learning_rate, or train.max_grad_norm."))
        Try: a lower lr, or train.max_grad_norm.
          (no argument here, but keys of a config for `atomrl train`: train.max_grad_norm)
    """
    message = renamed(message, WITH_TRAINER)
    dotted = (key for key in dict.fromkeys(known_keys()) if "." in key)
    left = [key for key in dotted if re.search(rf"(?<![\w.]){re.escape(key)}(?!\.?\w)", message)]
    note = f"\n  (no argument here, but keys of a config for `atomrl train`: {', '.join(left)})" if left else ""
    return message + note
