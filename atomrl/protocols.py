"""The interfaces between the parts, and the record that is all the loop and the back ends know of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from atomrl.metrics import Metrics
from atomrl.stages import (
    AdvantageBatch,
    PromptBatch,
    RewardBatch,
    RolloutBatch,
    RowBatch,
    SamplingParams,
    TrainingBatch,
)

Annotation = Literal["old_logprobs", "old_entropy", "ref_logprobs", "teacher_logprobs", "values", "scores"]
Output = Literal["logprobs", "entropy", "values", "scores", "distributions", "teacher_distributions"]


@runtime_checkable
class RolloutEngine(Protocol):
    """Draws completions from a copy of the policy."""

    seeded: bool
    """Whether a completion depends on its own seed alone (Hugging Face generate cannot promise it)."""
    returns_kept: bool
    """Whether it can tell which tokens top-p and top-k kept (`SamplingParams.logprobs_over`)."""

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """`sampling.completions_per_prompt` completions of each prompt, in the order of the prompts."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights, named as in the model's Hugging Face state dict."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


@dataclass(frozen=True)
class ModelOutputs:
    """What the forward pass gives the loss: what the algorithm's `outputs` names, and nothing else.

    What is `[B, T]` is indexed by the token itself and 0 off the mask.
    """

    logprobs: Tensor | None = None
    """[B, T]"""
    entropy: Tensor | None = None
    """[B, T]"""
    values: Tensor | None = None
    """[B, T] of the critic: what it expects before each token."""
    scores: Tensor | None = None
    """[B] of a reward model: what it gives the whole row."""
    distributions: Tensor | None = None
    """[N, V] log-probs of every token of the vocabulary in the place of each of the N trained tokens, row by row."""
    teacher_distributions: Tensor | None = None
    """[N, V] the teacher's, without gradient."""


@dataclass(frozen=True)
class LossOutput:
    """`loss` is summed over micro-batches, not averaged; `metrics` are mergeable."""

    loss: Tensor
    metrics: Metrics


class Forward(Protocol):
    """The forward pass of a micro-batch: what is `wanted` of it, with gradient unless under `no_grad`.

    `plain` outputs are made of operations that autograd differentiates forward and more than once; slower otherwise,
    and the same but for rounding.
    """

    def __call__(self, micro: TrainingBatch, wanted: frozenset[Output], plain: bool = False) -> ModelOutputs: ...


class Update(Protocol):
    """A step of the policy that is not the optimizer's. It changes the parameters in place, or leaves them as they are
    bit for bit, also where it raises: a back end that runs out of memory calls it again with smaller micro-batches.
    Where a gradient is not finite, it says so by `actor/skipped_updates`."""

    def __call__(
        self, parameters: Sequence[Tensor], micro_batches: Sequence[TrainingBatch], outputs: Forward
    ) -> Metrics: ...


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm as the loop and the back ends see it: data and functions, no class to inherit from."""

    name: str
    advantages: Callable[[RowBatch], AdvantageBatch]
    """Reward shaping and credit. Statistics over the batch are taken here, before any split; no gradient."""
    weights: Callable[..., Tensor]
    """loss mask [B, T] of one optimizer step (and group ids [B] where `row_unit` is "group") -> loss weights [B, T]."""
    loss: Callable[[ModelOutputs, TrainingBatch], LossOutput]
    needs: frozenset[Annotation] = frozenset()
    """What the back end annotates before the advantages."""
    advantages_read: frozenset[Annotation] = frozenset()
    """Those of `needs` that `advantages` reads. `old_logprobs` are left out on a step with a single update otherwise,
    since the loss then has them anyhow."""
    outputs: frozenset[Output] = frozenset({"logprobs"})
    """What the forward pass gives the loss."""
    row_unit: Literal["row", "group", "pair"] = "row"
    """What a split into updates or micro-batches keeps together."""
    accept_group: Callable[[Sequence[float]], bool] | None = None
    """Which groups count, by their rewards; the loop refills the batch with others."""
    extra_rollouts: Mapping[str, Any] | None = None
    """Completions of the same prompts that are scored and not trained on, as changes of the `SamplingParams`; their
    mean reward by prompt is in `baseline_rewards`."""
    state: dict[str, float] = field(default_factory=dict)
    """What persists from step to step (an adaptive coefficient); `advantages` changes it, and checkpoints hold it."""
    update: Update | None = None
    """How gradients become a step of the policy; None is the optimizer's. A critic keeps its optimizer."""


class TrainingBackend(Protocol):
    """Holds the policy that is trained, its optimizer and its reference."""

    def annotate(self, rows: RowBatch, needs: frozenset[Annotation]) -> RowBatch:
        """Add what the algorithm needs, without gradient."""
        ...

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """One optimizer step on the whole batch, in micro-batches."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, adapters merged, named as in its Hugging Face state dict."""
        ...

    def save(self, folder: Path) -> None:
        """Model (loadable by transformers), optimizer, schedule and random state."""
        ...

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`."""
        ...

    def close(self) -> None:
        """Free what the back end holds."""
        ...


class RewardFunction(Protocol):
    """Scores completions; `columns` are ground_truth, data_source and all other columns, each a list."""

    def __call__(self, prompts: list[Any], completions: list[str], **columns: list[Any]) -> list[float | None]: ...


class RewardComputer(Protocol):
    """All rewards of a run together."""

    def __call__(self, rollouts: RolloutBatch) -> RewardBatch: ...


class Tracker(Protocol):
    """A sink for metrics and samples."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None: ...

    def close(self) -> None: ...
