"""The data of a training step up to the trajectory, ragged and plain Python: one frozen type per stage.

    Sample -> Prompt -> GenerationRequest -> GenerationOutput -> Trajectory

From there on it is tensors: `atomrl/batches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------------------------
# An episode: what a model and an environment say in turns, and what came of it.

FailureKind = Literal["timeout", "error", "crash", "invalid", "away"]
"""Took too long; raised an exception; ended its process; returned what is no finite number, or too many or few; a
service that it asks is away (which is waited for, so that no trajectory has this failure)."""
Role = Literal["", "tool", "user"]
Ended = Literal["environment", "turns", "length", "abort", "failed"]
"""The environment ended it; the limit on turns or on tokens did; the caller called it off; the environment failed."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answers to what the model wrote.

    Example:
        >>> Reply(text="<information>Paris</information>", label="search").role
        ''
    """

    text: str
    role: Role = ""
    """Whose message it is in the chat template; the empty one is no message: the text follows what the model wrote, in
    the same turn of the conversation."""
    reward: float | None = None
    """Of what the model wrote before it, beside the outcome."""
    label: str = ""
    """What kind of answer it is, such as `search` or `invalid`: counted in `environment/replies/LABEL`."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model wrote until the environment answered, and the answer."""

    model_tokens: int
    reply_tokens: int = 0
    """0 where it did not answer, since it ended the episode or was not asked."""
    seconds: float = 0.0
    """That the environment took."""
    reward: float | None = None
    """Of what the model wrote."""
    labels: tuple[str, ...] = ()
    """Of the messages of the reply, in their order: where the model called tools, one for each call."""
    text: str = ""
    """What the model wrote, decoded without special tokens."""
    reply: str = ""
    """What the environment answered, as far as it is in the row."""
    sees_from: int = 0
    """The first turn that the model still saw when it wrote this one, with what it saw before all turns: those between
    had been dropped (`environment.when_full`)."""


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
    """That the environment wrote before the model began."""
    outcome: float | None = None
    """What the environment returned."""
    failure: FailureKind | None = None
    message: str = ""
    """Of the failure."""
    opening: str = ""
    """What the environment wrote before the model began."""

    @property
    def turn_rewards(self) -> tuple[tuple[int, float], ...]:
        """(place in the response of the last token of the model's turn, its reward)."""
        found, place = [], self.opening_tokens
        for turn in self.turns:
            place += turn.model_tokens
            if turn.reward is not None:
                found.append((place - 1, turn.reward))
            place += turn.reply_tokens
        return tuple(found)


FinishReason = Literal["stop", "length", "abort", "environment"]
"""The model ended it; the limit on tokens cut it; the caller called it off; the environment ended it."""


class Message(TypedDict):
    """One turn of a conversation. It may have other fields that a chat template reads, such as `tool_calls`."""

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
    logprobs_over: Literal["vocabulary", "kept", "none"] = "vocabulary"
    """`none`: an engine may leave them out. `kept`: over what top-p and top-k keep; completions tell what that was."""
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


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """That a reward could give a trajectory no usable value."""

    reward: str
    """The name of the part."""
    kind: FailureKind
    message: str


Origin = Literal["prompt", "model", "environment"]


@dataclass(frozen=True, eq=False)
class RaggedIds:
    """Token ids of differing number in each place: candidates of a sampled token.

    Example: of a row with two tokens, drawn from {5, 7} and {5}:
        >>> import torch
        >>> ragged = RaggedIds(counts=torch.tensor([[2, 1]]), ids=torch.tensor([5, 7, 5]))
        >>> ragged.select(torch.tensor([0]), longest=1).ids.tolist()
        [5, 7]
    """

    counts: Tensor
    """[T] or [B, T] int32: how many ids each place has."""
    ids: Tensor
    """[counts.sum()] int32, place by place."""

    def select(self, index: Tensor, longest: int) -> RaggedIds:
        """The rows at `index` of `[B, T]` counts, cut to `longest` places."""
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
    """A problem as an engine sees it. Trajectories of one prompt are a group."""

    prompt_id: str
    """Unique in the run: the epoch it was drawn in and the sample's id."""
    sample: Sample
    token_ids: tuple[int, ...]
    opening: str = ""
    """The end of the prompt that belongs to the assistant's turn: `<think>\\n` where the chat template opens its
    thoughts, or the last message, where that is the assistant's."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One completion that is asked of an engine."""

    request_id: str
    """Unique among the requests that the engine holds."""
    group_id: str
    """Requests of one group have the same prompt; an engine may compute it once."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """Of the token; `completions_per_prompt`, `seed` and `step` take no part, as `seed` below is the completion's."""
    seed: int
    sample: Sample | None = None
    """The problem, for an environment."""
    keep_cache: bool = False
    """A request that `continues` this one may come; an engine may keep what it has computed."""
    continues: str | None = None
    """The id of a finished request; the prompt begins with its prompt and its tokens."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one origin, and of one policy version where the model wrote them.

    Example:
        >>> Segment(origin="model", token_ids=(17, 2), logprobs=(-0.1, -0.2), policy_version=3).token_ids
        (17, 2)
    """

    origin: Origin
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Of the sampled tokens; None where the model did not write them, or the engine returns tokens alone."""
    policy_version: int | None = None
    """Weight updates that the weights which wrote it had seen; None where the model did not write it."""
    candidates: RaggedIds | None = None
    """The tokens that top-p and top-k left each token to be drawn from, itself among them, and over which `logprobs`
    are. None: `logprobs` are over the whole vocabulary."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"a segment of {len(self.token_ids)} tokens has {len(self.logprobs)} logprobs")
        if self.candidates is not None and len(self.candidates.counts) != len(self.token_ids):
            raise ValueError(f"a segment of {len(self.token_ids)} tokens has {len(self.candidates.counts)} candidates")


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """A request that has finished: exactly the tokens that were sampled."""

    request_id: str
    segments: tuple[Segment, ...]
    """Several where the weights changed in between. They include the token that ended it."""
    text: str
    """Decoded, special tokens too, but for the one that ended it."""
    finish_reason: FinishReason
    episode: Episode | None = None
    """With an environment, whose tokens are then among the segments."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What a rollout gave: a prompt, and what model and environment wrote after it.

    A completion of a single turn has two segments, the prompt and the model's.

    Example:
        >>> prompt, answer = Segment(origin="prompt", token_ids=(5, 6)), Segment(origin="model", token_ids=(7, 2))
        >>> sample = Sample(sample_id="a", prompt="", ground_truth="")
        >>> one = Trajectory(prompt_id="0:a", index=0, sample=sample, segments=(prompt, answer), text="7",
        ...     finish_reason="stop")
        >>> one.token_ids, one.prompt_tokens, one.response_tokens, one.trajectory_id
        ((5, 6, 7, 2), 2, 2, '0:a/0')
    """

    prompt_id: str
    """Its group."""
    index: int
    """Within its group."""
    sample: Sample
    segments: tuple[Segment, ...]
    """The first is the prompt."""
    text: str
    """What the model wrote, special tokens too, but for the one that ended it."""
    finish_reason: FinishReason
    opening: str = ""
    """The end of the prompt that belongs to the assistant's turn (`Prompt.opening`)."""
    episode: Episode | None = None
    reward: float | None = None
    """The outcome: the weighted sum of the parts. None where no part gave a value, or one that counts failed; it then
    becomes no row."""
    token_rewards: tuple[tuple[int, float], ...] = ()
    """(place in `token_ids`, reward) beside the outcome: what an environment gave a turn."""
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    """By name, unweighted."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """Of the parts that enter the sum."""
    reward_failures: tuple[RewardFailure, ...] = ()
    baseline_reward: float | None = None
    """The mean reward of the completions that an algorithm's `extra_rollouts` asks for beside those trained on; NaN
    where none of them has one."""

    @property
    def turn(self) -> str:
        """The assistant's whole turn, which rewards read: what the prompt opened of it, and what the model wrote."""
        return self.opening + self.text

    @property
    def trajectory_id(self) -> str:
        return f"{self.prompt_id}/{self.index}"

    @property
    def earned(self) -> float | None:
        """The outcome and all token rewards: what a run records and reports as the reward. None where there is no
        outcome."""
        return None if self.reward is None else self.reward + sum(reward for _, reward in self.token_rewards)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of all segments."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.origin == "prompt")

    @property
    def response_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.origin != "prompt")


def by_group(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Trajectories by the id of their prompt, both in the order of their first appearance."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.prompt_id, []).append(trajectory)
    return groups
