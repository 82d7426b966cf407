"""Configuration of one kind of run each: supervised, preferences, pretraining, and of models beside the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from atomrl.config.base import Section


class GptConfig(Section):
    """The shape of a GPT with fresh weights; its tokenizer is made for the data."""

    layers: int = Field(4, ge=1)
    hidden: int = Field(256, ge=32)
    heads: int = Field(4, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    intermediate: int | None = Field(None, ge=1)
    family: Literal["llama", "qwen2"] = "llama"
    max_tokens: int = Field(1024, ge=16)
    """The longest row that a serving engine will accept."""


class SftConfig(Section):
    """Supervised training (`atomrl sft`); steps, rows and learning rate are those of `train`."""

    completion_field: str = "completion"
    """Where a row of a file has its demonstration; a generator writes its own."""
    gpt: GptConfig | None = None
    """Start from a fresh GPT of this shape, in place of `model.path`."""


class PreferenceConfig(Section):
    """Training on preferences (`atomrl dpo`); pairs in an optimizer step are `train.rows_per_update` (64), and steps
    and learning rate are those of `train`. A generator writes its own pairs (docs/preferences.md)."""

    chosen_field: str = "chosen"
    """Where a row of a file has the better completion, or the whole conversation."""
    rejected_field: str = "rejected"
    completion_field: str = "completion"
    """Of rows that are labelled one by one."""
    label_field: str = "label"
    """true: a good completion."""


class CriticConfig(Section):
    """The critic, for algorithms that have one (PPO, A2C, TRPO); otherwise without effect."""

    path: str | None = None
    """Where its weights start from: a causal or a reward model; None is `model.path`."""
    learning_rate: float = Field(1e-5, gt=0)
    """Schedule, Adam's constants and clipping are those of `train`."""


class TeacherConfig(Section):
    """Whom the policy is distilled from."""

    path: str
    """A folder in Hugging Face layout, or a hub name; its vocabulary must be the policy's."""


class PretrainConfig(Section):
    """Training on plain text (`atomrl pretrain`); `data.train` is a folder of `atomrl data prepare`. Steps, windows in
    an optimizer step (`rows_per_update`, 64), learning rate and micro-batches are those of `train`, and the loss on
    the validation split is computed every `eval.every_steps`."""

    gpt: GptConfig | None = None
    """Start from a fresh GPT of this shape, in place of `model.path`."""
    window_tokens: int = Field(256, ge=2)
    """Tokens of a row, cut from the text at a random place."""
    eval_windows: int = Field(64, ge=1)
    """Windows of the validation split, the same at every step."""
    sample_every_steps: int = Field(0, ge=0)
    """Write samples, and at the end; 0: none."""
    samples: int = Field(2, ge=1)
    sample_tokens: int = Field(128, ge=1)
    sample_prompt: str = Field("\n", min_length=1)
    sample_temperature: float = Field(0.8, ge=0)
