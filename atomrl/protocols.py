"""The interfaces between the parts."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from atomrl.atoms.logprobs import head_logits
from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch
from atomrl.common.metrics import Metrics
from atomrl.types import GenerationOutput, GenerationRequest, Trajectory

NOTHING: Mapping[str, float] = MappingProxyType({})
ModelInput = Literal["old_logprobs", "old_entropy", "ref_logprobs", "teacher_logprobs", "values", "scores"]
RowUnit = Literal["row", "group", "pair"]
Output = Literal["logprobs", "entropy", "values", "scores", "distributions", "teacher_distributions"]


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of one linear layer: its output is `x W^T + scale (x A^T) B^T`."""

    a: Tensor
    """[rank, in] float32."""
    b: Tensor
    """[out, rank] float32."""
    scale: float
    """alpha / rank"""
    transposed: bool = False
    """The layer keeps its weight as [in, out] (GPT-2)."""


@dataclass(frozen=True)
class WeightUpdate:
    """Weights on their way from a trainer to an engine."""

    version: int
    tensors: Iterable[tuple[str, Tensor]] = ()
    """Named as in the published Hugging Face checkpoint; may be lazy, and is read once."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """By the name of the layer's weight (`model.layers.0.self_attn.q_proj.weight`). They replace those from before."""
    outline: Sequence[tuple[str, Tensor]] | None = None
    """Where tensors are not here yet and gathered as they are read: their names, and what has their shapes alone."""

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that travels, by name: the weights, then A and scale x B of each adapter, as `NAME.lora_A` and
        `NAME.lora_B`."""
        yield from self.tensors
        for name, adapter in self.adapters.items():
            yield f"{name}.lora_A", adapter.a
            yield f"{name}.lora_B", adapter.b * adapter.scale


class WeightHash(NamedTuple):
    """What an engine has read back of one weight."""

    name: str
    dtype: torch.dtype
    """What it rounds the weight to."""
    value: int | None
    """`tensor_hash` of the values in that dtype; None: this engine cannot read the weight back."""
    holder: str = "the engine"
    """Which of several engines."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Draws completions from a copy of the policy: requests go in, outputs come out as they finish.

    Nothing is computed but in `poll`, so that a caller may take in, abort and pause between any two tokens.
    """

    seeded: bool
    """Whether a completion depends on its own seed alone (Hugging Face generate cannot promise it)."""
    exact: bool
    """Whether its log-probs are the trainer's but for rounding of the sums."""
    returns_candidates: bool
    """Whether it can tell which tokens top-p and top-k left (`SamplingParams.logprobs_over`)."""
    version: int
    """Of the weights it has: what new tokens are marked with."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests in.

        Raises:
            ValueError: a prompt is empty or too long for the model, or an id is in use.
        """

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Go on until at least one request has finished, but no longer than `wait_s` seconds and what cannot be
        interrupted; those that have. Empty also where there is none, or it is paused or asleep.

        Raises:
            ValueError: the model's logits are not finite.
        """

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Give up requests (None: all), and return what they have so far, with the finish reason `abort`."""

    def pause(self) -> None:
        """Draw no token until `resume`; requests stay."""

    def resume(self) -> None:
        """Go on; a request under way continues with the weights there are now."""

    def sleep(self) -> None:
        """Free what can be made again (the cache) while others need the memory. There must be no request."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every weight that an update may bring, named as in the published Hugging Face checkpoint."""

    def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights, in place, and their version. Called by a weight transfer, which has checked them."""

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of all that it computes with, read back now: every published weight under its name, and adapters as
        `WeightUpdate.parts` names them. A weight that is held twice (a tied head beside its embedding, replicas) comes
        twice under the same name."""

    def close(self) -> None:
        """Free what the engine holds."""


WeightTransfer = Callable[[int], None]
"""Brings a trainer's weights as they are now to an engine, with their version, and makes sure that they are there.

It raises ValueError where names or shapes do not fit; the engine then keeps what it has. It raises
`atomrl.weight_sync.WeightMismatch` where the engine has other weights afterwards.
"""


def _as_it_is(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, eq=False)
class Distributions:
    """A model's next-token distributions in the places of N trained tokens, as what they are made of: [N, V] numbers
    of a large vocabulary need not be there at once. For the time of the loss: ranks then let go of the matrix."""

    hidden: Tensor
    """[n, H] what the output matrix multiplies: of the N tokens, or of this rank's, where ranks share rows."""
    head_weight: Tensor
    """[V, H]"""
    places: Tensor
    """[N] where each token is in the flattened [B * T]."""
    temperature: float = 1.0
    of_all: Callable[[Tensor], Tensor] = _as_it_is
    """[n, ...] numbers of the tokens of `hidden` -> [N, ...] of all, row by row."""

    def logprobs(self) -> Tensor:
        """[N, V] log-probs of every token of the vocabulary, with gradient."""
        return self.of_all((head_logits(self.hidden, self.head_weight) / self.temperature).log_softmax(-1))


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
    distributions: Distributions | None = None
    """In the place of each trained token, row by row."""
    teacher_distributions: Distributions | None = None
    """The teacher's, without gradient."""


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


@dataclass(frozen=True)
class UpdateOutput:
    """What a step of the policy did. `finite` is False where a gradient was not, and the weights stayed."""

    metrics: Metrics
    finite: bool = True


Update = Callable[["Algorithm", Sequence[Tensor], Sequence[TrainingBatch], Forward], UpdateOutput]
"""What replaces the optimizer's step of the policy, of algorithm, parameters, micro-batches and the forward pass.

It changes the parameters in place, or leaves them as they are bit for bit, also where it raises: a back end that runs
out of memory calls it again with smaller micro-batches.
"""


class Algorithm(Protocol):
    """What the loop and the back ends know of an algorithm. Plain data: it can be pickled and sent to another process.

    What persists from step to step goes in and out of `advantages` as `state`, travels in the batch, and is in every
    checkpoint.
    """

    @property
    def name(self) -> str:
        """What it is called in messages."""

    @property
    def needs(self) -> frozenset[ModelInput]:
        """What the back end computes, without gradient, before the advantages and the loss."""

    @property
    def advantage_inputs(self) -> frozenset[ModelInput]:
        """Those of `needs` that `advantages` reads. On a step with a single update `old_logprobs` are left out
        otherwise, since the loss then has them anyhow."""

    @property
    def outputs(self) -> frozenset[Output]:
        """What the forward pass gives the loss, with gradient."""

    @property
    def row_unit(self) -> RowUnit:
        """What a split into updates or micro-batches keeps together."""

    @property
    def extra_rollouts(self) -> Mapping[str, Any] | None:
        """Completions of the same prompts that are scored and not trained on, as changes of the `SamplingParams`; their
        mean reward is each trajectory's `baseline_reward`."""

    @property
    def update(self) -> Update | None:
        """How gradients become a step of the policy; None is the optimizer's. A critic keeps its optimizer."""

    @property
    def keeps_group(self) -> Callable[[Sequence[float]], bool] | None:
        """Whether a group with these rewards is trained on, or another is drawn in its place; None: all are."""

    def advantages(self, rows: RowBatch, state: Mapping[str, float] = NOTHING) -> AdvantageBatch:
        """Reward shaping and advantages. Statistics over the batch are taken here, before any split; no gradient."""

    def loss_weights(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        """Loss mask [B, T] and group ids [B] of one optimizer step -> weights [B, T] of each token in the loss."""

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        """The loss of a micro-batch: weighted sums, so that micro-batches add up to the whole step."""

    def by_token(self, outputs: ModelOutputs, batch: TrainingBatch) -> Mapping[str, Tensor]:
        """What else is worth knowing of each token of a micro-batch, [B, T] by name, for records of tokens."""


def needs_teacher(algorithm: Algorithm) -> bool:
    """Whether an algorithm looks at a teacher."""
    return any(name.startswith("teacher") for name in algorithm.needs | algorithm.outputs)


class TrainingBackend(Protocol):
    """Holds the policy that is trained, its optimizer and its reference."""

    concurrent: bool
    """Whether its models compute at the same time, so that what they give is best asked for at once."""

    def forward_only(self, rows: RowBatch, needs: frozenset[ModelInput]) -> RowBatch:
        """The rows with the log-probs, entropies, values or scores that are asked for, computed without gradient."""

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """One optimizer step on the whole batch, in micro-batches."""

    def token_numbers(self) -> Mapping[str, Tensor]:
        """Of the last `train_step` what the update saw of the tokens of the batch's `recorded` rows, by name, [R, T] in
        the order of their numbers: `logprobs` and `entropy` of the forward pass; `loss`, each token's part of it, and
        `gradient`, that of the loss in the token's log-prob; and the algorithm's `by_token`. No forward pass is made
        for it; empty where no row is recorded, or the algorithm takes an update of its own."""

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine, adapters apart. `adapters_alone`: it has the base's from before."""

    def free_memory(self) -> None:
        """Give the device what is kept for later, which others on it cannot take otherwise; nothing on a CPU."""

    def save(self, folder: Path) -> Callable[[], None] | None:
        """Model (loadable by transformers), optimizer, schedule and random state, as they are now. What is returned
        waits until all is written, and steps may be taken before; None: it is."""

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`."""

    def close(self) -> None:
        """Free what the back end holds."""


class RewardFunction(Protocol):
    """Scores completions; `columns` are ground_truth, data_source and all other columns, each a list."""

    def __call__(self, prompts: list[Any], completions: list[str], **columns: list[Any]) -> list[float | None]: ...


RewardComputer = Callable[[Sequence[Trajectory]], list[Trajectory]]
"""All rewards of a run together: the same trajectories, with their rewards, in the same order."""
