"""Data types of a training step up to the trajectory, in plain Python: one frozen dataclass per stage.

    Problem -> Prompt -> GenerationRequest -> GenerationOutput -> Trajectory

From there on it is tensors: `atomrl/batches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------------------------
# Episodes

FailureKind = Literal["timeout", "error", "crash", "invalid", "away", "busy"]
"""Failure of a reward or an environment.

- `timeout`: the time limit passed
- `error`: it raised an exception
- `crash`: its process died
- `invalid`: a result that is not a finite number, or the wrong number of results
- `away`: a service is unavailable. If it answers other calls, the failure becomes an `error`; else the run waits for it
- `busy`: a service asks to repeat the call later, as with status 429 or 503. The run waits for it
"""
Role = Literal["", "tool", "user"]
Ended = Literal["environment", "turns", "length", "abort", "failed"]
"""Why an episode ended: by the environment, at the limit on turns or on tokens, by the caller, or by a failure of the
environment."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Reply of an environment to a model turn.

    Example:
        >>> Reply(text="<information>Paris</information>", label="search").role
        ''
    """

    text: str
    role: Role = ""
    """Role of the message in the chat template. "": no message of its own; the text continues the assistant's turn."""
    reward: float | None = None
    """Reward of the model turn before it, in addition to the outcome."""
    label: str = ""
    """Kind of reply, such as `search` or `invalid`; counted in `environment/replies/LABEL`."""
    images: Sequence[Any] = ()
    """Pictures, one for each `<image>` in the text, or before the text if it has none: images of Pillow, the bytes of
    files, or paths. `environment.images` allows them."""
    special_tokens: bool = False
    """Special tokens that the text spells, such as `<|im_end|>`, are those tokens. Leave it off for texts that you did
    not write: a document could end a turn."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One model turn and the environment's reply to it."""

    model_tokens: int
    reply_tokens: int = 0
    """0: no reply, because the environment ended the episode or was not called."""
    seconds: float = 0.0
    """Time of the environment."""
    reward: float | None = None
    """Reward of this turn."""
    labels: tuple[str, ...] = ()
    """Labels of the reply's messages, in order; with tool calls, one per call."""
    text: str = ""
    """The model's text, decoded without special tokens."""
    reply: str = ""
    """The environment's text, truncated as in the row."""
    sees_from: int = 0
    """Index of the oldest turn in the context of this one. Earlier turns had been dropped (`environment.when_full`);
    the prompt and the opening are always in the context."""
    images: tuple[Image, ...] = ()
    """Pictures of the reply, in the order of their tokens."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The turns of a trajectory with an environment.

    The model's and the environment's tokens are in the trajectory's segments, in the same order.

    Example:
        >>> two = (Turn(model_tokens=5, reply_tokens=3, reward=0.5), Turn(model_tokens=4))
        >>> Episode(turns=two, ended="environment", outcome=1.0).turn_rewards
        ((4, 0.5),)
    """

    turns: tuple[Turn, ...]
    ended: Ended
    opening_tokens: int = 0
    """Tokens of `opening`."""
    outcome: float | None = None
    """Final reward that the environment returned."""
    failure: FailureKind | None = None
    message: str = ""
    """Error message of the failure."""
    opening: str = ""
    """Text of the environment before the first model turn."""
    opening_images: tuple[Image, ...] = ()
    """Pictures of `opening`."""

    @property
    def images(self) -> tuple[Image, ...]:
        """Pictures of all replies, in order."""
        return (*self.opening_images, *(image for turn in self.turns for image in turn.images))

    @property
    def turn_rewards(self) -> tuple[tuple[int, float], ...]:
        """Rewards of turns as (index in the response of the turn's last model token, reward)."""
        rewards, position = [], self.opening_tokens
        for turn in self.turns:
            position += turn.model_tokens
            if turn.reward is not None:
                rewards.append((position - 1, turn.reward))
            position += turn.reply_tokens
        return tuple(rewards)


# --------------------------------------------------------------------------------------------------------------------
# Problems, requests, trajectories

FinishReason = Literal["stop", "length", "abort", "environment"]
"""Why a completion ended: by the model (end of sequence or stop string), at the limit on tokens, by the caller, or by
the environment."""


class Message(TypedDict):
    """One message of a conversation. It may have other fields that a chat template reads, such as `tool_calls`."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Image:
    """A picture of a row or of an environment's reply: a reference, never its pixels.

    Example:
        >>> Image(name="9f86d0.png", height=20, width=30, folder="runs/a/images").path
        'runs/a/images/9f86d0.png'
    """

    name: str
    """SHA-256 of the file's bytes, and the suffix of its format. Pictures of one name are the same."""
    height: int
    """Height and width in pixels, turned as EXIF says."""
    width: int
    source: str = field(default="", compare=False)
    """Origin: a path, or the place of the row that contains it."""
    folder: str = field(default="", compare=False)
    """Folder of the run's pictures."""

    @property
    def path(self) -> str:
        """Path of the file in the run's folder."""
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem: a row of the data set, before tokenization.

    Example:
        >>> Problem(problem_id="train.jsonl:1", prompt="2+2=", ground_truth="4", columns={"level": 1}).data_source
        'default'
    """

    problem_id: str
    """Unique within its data set, and the same in every run."""
    prompt: str | tuple[Message, ...]
    ground_truth: Any
    data_source: str = "default"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row; rewards receive them by name."""
    images: tuple[Image, ...] = ()
    """Pictures, one for each `<image>` in the prompt (and in the later messages of a demonstration), in order."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of completions.

    Log-probs that an engine returns are those of `logits / temperature` (of `logits` at temperature 0). They are
    normalized over the whole vocabulary, before top-p, top-k and min-p, unless `logprobs_over` is `kept`.

    Raises:
        ValueError: a value is out of range, or `logprobs_over=kept` without top-p and top-k.
    """

    completions_per_prompt: int = 1
    max_completion_tokens: int = 256
    min_completion_tokens: int = 0
    """End-of-sequence tokens and stop strings have no effect before this many tokens."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    """Leave out tokens whose probability is below this fraction of the most likely token's."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. The string stays in the text, and its last token in the tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the model's end-of-sequence tokens; the token is kept."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence tokens (for benchmarks of fixed length)."""
    logprobs_over: Literal["vocabulary", "kept", "none"] = "vocabulary"
    """Normalization of log-probs: over the whole `vocabulary`, or over the tokens that top-p and top-k `kept`
    (`Segment.candidates` has them). `none`: an engine may return no log-probs."""
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.completions_per_prompt < 1 or self.max_completion_tokens < 1:
            raise ValueError("completions_per_prompt and max_completion_tokens must be at least 1")
        if not 0 <= self.min_completion_tokens <= self.max_completion_tokens:
            raise ValueError("min_completion_tokens must be between 0 and max_completion_tokens")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError("temperature must be >= 0, top_p in (0, 1], top_k >= 0")
        if not 0 <= self.min_p < 1:
            raise ValueError("min_p must be in [0, 1)")
        if self.logprobs_over == "kept" and self.temperature > 0 and not self.cuts:
            raise ValueError("logprobs_over=kept needs top_p < 1, top_k > 0 or min_p > 0")

    @property
    def cuts(self) -> bool:
        """True if tokens are left out before sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


SAMPLING_KEYS = {item.name for item in fields(SamplingParams)}
"""Names of the fields of `SamplingParams`; sections of a config use the same names."""
DISTRIBUTION_KEYS = ("temperature", "top_p", "top_k", "min_p", "logprobs_over")
"""The fields that decide the distribution of each token and its log-prob."""


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """A reward function gave no usable value for a trajectory."""

    reward: str
    """Name of the reward function (`Trajectory.reward_parts`)."""
    kind: FailureKind
    message: str


Origin = Literal["prompt", "model", "environment"]


@dataclass(frozen=True, eq=False)
class RaggedIds:
    """Ragged lists of token ids, one list per position: the candidates that each token was sampled from.

    Example: a row of two tokens, sampled from {5, 7} and {5}:
        >>> import torch
        >>> ragged = RaggedIds(counts=torch.tensor([[2, 1]]), ids=torch.tensor([5, 7, 5]))
        >>> ragged.select(torch.tensor([0]), longest=1).ids.tolist()
        [5, 7]
    """

    counts: Tensor
    """[T] or [B, T] int32: number of ids of each position."""
    ids: Tensor
    """[counts.sum()] int32: all lists, concatenated."""

    def select(self, index: Tensor, longest: int) -> RaggedIds:
        """Select the rows at `index` of `[B, T]` counts, truncated to `longest` positions."""
        import torch

        if not len(index):
            return RaggedIds(self.counts[index, :longest], self.ids[:0])
        by_row = self.ids.split(self.counts.sum(1).tolist())
        counts = self.counts[index, :longest]
        sizes = counts.sum(1).tolist()
        ids = [by_row[row][:size] for row, size in zip(index.tolist(), sizes, strict=True)]
        return RaggedIds(counts, torch.cat(ids))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A tokenized problem. The trajectories of one prompt form a group."""

    prompt_id: str
    """Unique in the run: the epoch and the problem's id."""
    problem: Problem
    token_ids: tuple[int, ...]
    opening: str = ""
    """The end of the prompt that belongs to the assistant's turn: `<think>\\n` if the chat template opens a thought, or
    a last message of the assistant, which the model continues."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Request to an engine for one completion."""

    request_id: str
    """Unique among the engine's current requests."""
    group_id: str
    """Requests of one group have the same prompt; an engine may prefill it once."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """Its `completions_per_prompt`, `seed` and `step` are ignored: the completion's seed is the field below."""
    seed: int
    problem: Problem | None = None
    """The problem, for an environment."""
    images: tuple[Image, ...] = ()
    """Pictures of the prompt, in the order of their tokens."""
    keep_cache: bool = False
    """Another request may continue this one, so the engine may keep its KV cache."""
    continues: str | None = None
    """Id of a finished request; this prompt begins with its prompt and completion."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one origin and, if the model wrote them, of one weight version.

    Example:
        >>> Segment(origin="model", token_ids=(17, 2), logprobs=(-0.1, -0.2), policy_version=3).token_ids
        (17, 2)
    """

    origin: Origin
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Log-probs of the sampled tokens; None if the model did not write them, or the engine returns none."""
    policy_version: int | None = None
    """Weight version that sampled the tokens: the number of the training step that made it, 0 for the initial weights.
    None if the model did not write them."""
    candidates: RaggedIds | None = None
    """The tokens that top-p and top-k left at each position, the sampled one included; `logprobs` are normalized over
    them. None: over the whole vocabulary."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"a segment of {len(self.token_ids)} tokens has {len(self.logprobs)} logprobs")
        if self.candidates is not None and len(self.candidates.counts) != len(self.token_ids):
            raise ValueError(f"a segment of {len(self.token_ids)} tokens has {len(self.candidates.counts)} candidates")


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """Output of a finished request: exactly the tokens that were sampled."""

    request_id: str
    segments: tuple[Segment, ...]
    """Several if the weights changed during the completion. They include the token that ended it."""
    text: str
    """Decoded with special tokens, except the one that ended it."""
    finish_reason: FinishReason
    episode: Episode | None = None
    """Turns with an environment; its tokens are then among the segments."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A rollout with its rewards: a prompt, and the tokens of model and environment after it.

    A completion of a single turn has two segments, the prompt and the model's.

    Example:
        >>> prompt, answer = Segment(origin="prompt", token_ids=(5, 6)), Segment(origin="model", token_ids=(7, 2))
        >>> problem = Problem(problem_id="a", prompt="", ground_truth="")
        >>> one = Trajectory(prompt_id="0:a", index=0, problem=problem, segments=(prompt, answer), text="7",
        ...     finish_reason="stop")
        >>> one.token_ids, one.prompt_tokens, one.response_tokens, one.trajectory_id
        ((5, 6, 7, 2), 2, 2, '0:a/0')
    """

    prompt_id: str
    """Id of its group."""
    index: int
    """Index within its group."""
    problem: Problem
    segments: tuple[Segment, ...]
    """The first is the prompt."""
    text: str
    """The model's text, decoded with special tokens, except the one that ended it."""
    finish_reason: FinishReason
    opening: str = ""
    """The end of the prompt that belongs to the assistant's turn (`Prompt.opening`)."""
    episode: Episode | None = None
    reward: float | None = None
    """The outcome: the weighted sum of `reward_parts`. None if no reward function gave a value, or one with a weight
    failed; the trajectory is then not trained on."""
    token_rewards: tuple[tuple[int, float], ...] = ()
    """Rewards of turns, in addition to the outcome, as (index in `token_ids`, reward)."""
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    """Unweighted value of each reward function, by name."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the reward functions in the sum, by name."""
    reward_failures: tuple[RewardFailure, ...] = ()
    baseline_reward: float | None = None
    """Mean reward of the prompt's `extra_rollouts` (ReMax's greedy baseline), which are not trained on; NaN if none has
    a reward."""

    @property
    def turn(self) -> str:
        """The assistant's turn as rewards read it: `opening` and `text`."""
        return self.opening + self.text

    @property
    def images(self) -> tuple[Image, ...]:
        """Pictures of the prompt and of the environment's replies, in the order of their tokens."""
        return self.problem.images + (() if self.episode is None else self.episode.images)

    @property
    def trajectory_id(self) -> str:
        return f"{self.prompt_id}/{self.index}"

    @property
    def total_reward(self) -> float | None:
        """Total reward, as recorded and reported: the outcome plus all token rewards. None without an outcome."""
        return None if self.reward is None else self.reward + sum(reward for _, reward in self.token_rewards)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of all segments."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.origin == "prompt")

    @property
    def response_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.origin != "prompt")
