"""What moves between the stages of a step: one frozen type per stage, each adding fields to the one before.

    list[Sample] -> PromptBatch -> RolloutBatch -> RewardBatch -> RowBatch -> AdvantageBatch -> TrainingBatch

Axes: P prompts, G completions per prompt, B rows (one per completion that has a reward), T tokens, V vocabulary.
Up to `RewardBatch` everything is ragged, in plain Python; from `RowBatch` on it is tensors `[B, T]`.

A token tensor is indexed by the token itself: `logprobs[b, t] = log p(tokens[b, t] | tokens[b, <t])`, and position
0 is always masked. Rows are right-padded, so a causal model needs no attention mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One problem, as the data source gave it.

    Example:
        >>> Sample(sample_id="train.jsonl:1", prompt="2+2=", ground_truth="4", columns={"level": 1}).data_source
        'default'
    """

    sample_id: str
    """Unique within its data set, and the same in every run."""
    prompt: str | tuple[Message, ...]
    ground_truth: Any
    data_source: str = "default"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row; rewards receive them by name."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are drawn.

    Log-probs that an engine returns are of `logits / temperature` (of `logits` where the temperature is 0), over the
    whole vocabulary before top-p and top-k cut it, unless `logprobs_over` says otherwise.
    """

    completions_per_prompt: int = 1
    max_completion_tokens: int = 256
    min_completion_tokens: int = 0
    """No end-of-sequence and no stop before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the token that completes one is kept, and so is the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion beside the model's end-of-sequence tokens; the token is kept."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence tokens (fixed-length measurements)."""
    logprobs_over: Literal["vocabulary", "kept"] = "vocabulary"
    """`kept`: log-probs are over the tokens that top-p and top-k keep, and completions tell which those were."""
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.completions_per_prompt < 1 or self.max_completion_tokens < 1:
            raise ValueError("completions_per_prompt and max_completion_tokens must be at least 1")
        if not 0 <= self.min_completion_tokens <= self.max_completion_tokens:
            raise ValueError("min_completion_tokens must be between 0 and max_completion_tokens")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError("temperature must be >= 0, top_p in (0, 1], top_k >= 0")
        if self.logprobs_over == "kept" and self.temperature > 0 and self.top_p == 1 and not self.top_k:
            raise ValueError("logprobs_over=kept, but neither top_p nor top_k cuts anything")


def completion_seed(seed: int, step: int, prompt_id: str, index: int) -> int:
    """The seed of one completion: a hash, so that the order in which completions arrive cannot matter.

    Returns:
        A non-negative integer below 2**63.
    """
    key = f"{seed}/{step}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """P prompts as token ids, ragged."""

    samples: tuple[Sample, ...]
    """[P]"""
    prompt_ids: tuple[str, ...]
    """[P] unique in the batch: the sample's id and the epoch it was drawn in."""
    prompt_token_ids: tuple[tuple[int, ...], ...]
    """[P][tokens of the prompt]"""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion: exactly the tokens that were sampled.

    Example: "4</s>" sampled from token ids 17 and 2:
        >>> Completion(token_ids=(17, 2), text="4", logprobs=(-0.1, -0.2), finish_reason="stop").loss_mask
        (True, True)
    """

    token_ids: tuple[int, ...]
    """Including the end-of-sequence or stop token that ended it."""
    text: str
    """Decoded without special tokens."""
    logprobs: tuple[float, ...] | None
    """Of the sampled tokens; None where the engine returns tokens alone."""
    finish_reason: FinishReason
    loss_mask: tuple[bool, ...] = ()
    """True where the model wrote the token; all True unless an environment wrote some."""
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    """The tokens that top-p and top-k left each token to be drawn from, itself among them, and over which `logprobs`
    are; empty where the model did not write it. None: `logprobs` are over the whole vocabulary."""

    def __post_init__(self) -> None:
        if not self.loss_mask:
            object.__setattr__(self, "loss_mask", (True,) * len(self.token_ids))
        parts = [part for part in (self.loss_mask, self.logprobs, self.kept_ids) if part is not None]
        if any(len(part) != len(self.token_ids) for part in parts):
            raise ValueError("a completion's token_ids, logprobs, loss_mask and kept_ids must have the same length")


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(PromptBatch):
    """G completions for each prompt."""

    completions: tuple[tuple[Completion, ...], ...]
    """[P][G]"""
    policy_version: int
    """The number of weight updates that the engine's weights had seen."""


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """A completion to which a reward could give no usable value."""

    reward: str
    """The name of the part."""
    kind: Literal["timeout", "error", "crash", "invalid"]
    """Took too long; raised an exception; ended its process; returned what is no finite number, or too many or few."""
    message: str
    prompt_id: str
    completion_index: int


@dataclass(frozen=True, kw_only=True)
class RewardBatch(RolloutBatch):
    """One reward per completion, and every named part of it."""

    rewards: tuple[tuple[float | None, ...], ...]
    """[P][G] weighted sum of the parts; None where no part gave a value, or one that counts failed. Such a completion
    becomes no row."""
    reward_parts: Mapping[str, tuple[tuple[float | None, ...], ...]]
    """name -> [P][G], unweighted."""
    reward_failures: tuple[RewardFailure, ...] = ()
    """Of all completions that were scored for this batch, also of groups that were refused afterwards."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """name -> weight in the sum, of the parts that enter it."""
    baseline_rewards: tuple[float | None, ...] | None = None
    """[P] of the completions that an algorithm's `extra_rollouts` asks for beside those that are trained on."""


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """Prompt and completion in one right-padded row.

    Example: prompt (5, 6), completion (7, 8, 9), padded to T=6:
        tokens    = [5, 6, 7, 8, 9, 0]
        loss_mask = [0, 0, 1, 1, 1, 0]
        lengths   = 5
    """

    tokens: Tensor
    """[B, T] int64."""
    loss_mask: Tensor
    """[B, T] bool: what the model wrote."""
    lengths: Tensor
    """[B] int64: tokens of the row without padding."""
    prompt_lengths: Tensor
    """[B] int64."""
    group_ids: Tensor
    """[B] int64: equal for completions of one prompt."""
    rewards: Tensor
    """[B] float32."""
    truncated: Tensor
    """[B] bool: the completion hit the length limit."""
    rollout_logprobs: Tensor | None = None
    """[B, T] float32, from the engine."""
    kept_ids: Tensor | None = None
    """[B, T, K] int32, padded with -1: the tokens that each token was drawn from, over which all log-probs then are."""
    old_logprobs: Tensor | None = None
    """[B, T] float32, from the trainer at the start of the step. None on a step with a single update, where they
    are the log-probs themselves."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32, from the frozen reference."""
    teacher_logprobs: Tensor | None = None
    """[B, T] float32, from the teacher."""
    values: Tensor | None = None
    """[B, T] float32, from the critic."""
    scores: Tensor | None = None
    """[B] float32, from the reward model that is trained."""
    old_entropy: Tensor | None = None
    """[B, T] float32, nats of the trainer's distributions at the start of the step."""
    reward_parts: Tensor | None = None
    """[B, K, 2] float32: value (NaN where missing) and weight of each part of the reward."""
    baseline_rewards: Tensor | None = None
    """[B] float32: of the extra rollout of the row's prompt; NaN where missing."""

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch(RowBatch):
    """Rows with an advantage per token."""

    advantages: Tensor
    """[B, T] float32, 0 off the mask, no gradient."""
    returns: Tensor | None = None
    """[B, T] float32: what a critic is fitted to."""
    selected: Tensor | None = None
    """[B, T] bool: tokens that the algorithm chose out of the whole step."""
    correction: Tensor | None = None
    """[B, T] float32: what an off-policy correction made of the whole step, a factor of each token."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch(AdvantageBatch):
    """The rows of exactly one optimizer step, with their weights in the loss."""

    loss_weights: Tensor
    """[B, T] float32: the loss is `(loss_weights * per_token).sum()` over all micro-batches."""


Rows = TypeVar("Rows", bound=RowBatch)


def select_rows(batch: Rows, index: Tensor) -> Rows:
    """The rows at `index` ([N] int64), cut to the longest of them."""
    longest = int(batch.lengths[index].max()) if len(index) else 0
    changes: dict[str, Any] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if value is not None:
            by_token = value.dim() == 2 or item.name == "kept_ids"
            changes[item.name] = value[index, :longest] if by_token else value[index]
    return replace(batch, **changes)
