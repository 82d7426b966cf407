"""Interfaces between algorithms, rollout engines, training back ends, weight transfers and rewards."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from atomrl.atoms.logprobs import chunk_size, head_logits
from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch
from atomrl.common.metrics import Metrics
from atomrl.types import GenerationOutput, GenerationRequest, Trajectory

NOTHING: Mapping[str, float] = MappingProxyType({})
ModelInput = Literal[
    "old_logprobs", "old_entropy", "old_squared_probs", "ref_logprobs", "teacher_logprobs", "values", "scores"
]
RowUnit = Literal["row", "group", "pair"]
Output = Literal["logprobs", "entropy", "squared_probs", "values", "scores", "distributions", "teacher_distributions"]


@dataclass(frozen=True)
class Adapter:
    """LoRA adapter of one linear layer: its output is `x W^T + scale (x A^T) B^T`."""

    a: Tensor
    """[rank, in] float32."""
    b: Tensor
    """[out, rank] float32."""
    scale: float
    """alpha / rank"""
    transposed: bool = False
    """The layer stores its weight as [in, out] (GPT-2)."""


@dataclass(frozen=True)
class WeightUpdate:
    """New weights of a trainer for an engine."""

    version: int
    """Number of the training step that made the weights; 0: the initial weights."""
    tensors: Iterable[tuple[str, Tensor]] = ()
    """`(name, tensor)` pairs, named as in the published Hugging Face checkpoint. May be lazy; is read once."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """Adapters by the name of the layer's weight (`model.layers.0.self_attn.q_proj.weight`); replace earlier ones."""
    outline: Sequence[tuple[str, Tensor]] | None = None
    """`(name, meta tensor)` pairs, for updates whose tensors are gathered lazily; None: `tensors` has the shapes."""

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all `(name, tensor)` pairs: the weights, then A and scale x B of each adapter, as `NAME.lora_A` and
        `NAME.lora_B`."""
        yield from self.tensors
        for name, adapter in self.adapters.items():
            yield f"{name}.lora_A", adapter.a
            yield f"{name}.lora_B", adapter.b * adapter.scale


class WeightHash(NamedTuple):
    """Hash of one weight, read back from an engine."""

    name: str
    dtype: torch.dtype
    """The dtype that the engine computes with."""
    value: int | None
    """`tensor_hash` of the weight in that dtype; None: this engine cannot read it back."""
    holder: str = "the engine"
    """Name of the engine, for messages, if there are several."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from a copy of the policy: requests go in, outputs come out as they finish.

    Only `poll` computes, so a caller may submit, abort, pause and update weights between any two tokens.
    """

    seeded: bool
    """Completions depend only on their own seed (Hugging Face generate cannot promise that)."""
    exact: bool
    """Log-probs equal the trainer's up to the rounding of sums."""
    returns_candidates: bool
    """It can return the tokens that top-p and top-k left (`SamplingParams.logprobs_over=kept`)."""
    version: int
    """Version of the current weights, with which new tokens are marked."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests.

        Raises:
            ValueError: a prompt is empty or too long for the model, or an id is in use.
        """

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Decode until at least one request has finished, and return the finished ones.

        Args:
            wait_s: return after this many seconds even if none has finished; the step under way is completed first.

        Returns:
            An empty list after `wait_s`, or at once without requests, or if the engine is paused or asleep.

        Raises:
            ValueError: the model's logits are not finite.
        """

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Cancel requests (None: all) and return their tokens so far, with the finish reason `abort`."""

    def pause(self) -> None:
        """Stop sampling until `resume`; requests are kept."""

    def resume(self) -> None:
        """Continue sampling; running requests continue with the current weights."""

    def sleep(self) -> None:
        """Free memory that can be rebuilt (the KV cache) while others need it. There must be no requests."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights that an update may contain, named as in the published Hugging Face checkpoint."""

    def update_weights(self, update: WeightUpdate) -> None:
        """Copy new weights in place and set their version. Called by a weight transfer, which has checked them."""

    def weight_hashes(self) -> list[WeightHash]:
        """Hash all weights that the engine computes with, as they are now.

        Weights have their published names, adapters those of `WeightUpdate.parts`. A weight that is stored twice (a
        head tied to its embedding, replicas) is listed twice under the same name.
        """

    def close(self) -> None:
        """Free the engine's memory and processes."""


WeightTransfer = Callable[[int], None]
"""Copies a trainer's current weights to an engine under a version, and verifies them there.

Raises ValueError if names or shapes do not match; the engine then keeps its weights. Raises
`atomrl.weight_sync.WeightMismatch` if the engine's hashes differ afterwards.
"""


def _identity(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, eq=False)
class Distributions:
    """Next-token distributions at N trained tokens, stored as hidden states and output matrix.

    The [N, V] log-probs of a large vocabulary need not exist at once. Valid only during the loss: sharded back ends
    free the matrix afterwards.
    """

    hidden: Tensor
    """[n, H] input of the output matrix: n = N tokens, or this rank's share of them under sequence parallelism."""
    head_weight: Tensor
    """[V, H]"""
    places: Tensor
    """[N] index of each token in the flattened [B * T]."""
    temperature: float = 1.0
    of_all: Callable[[Tensor], Tensor] = _identity
    """Gathers values of this rank's tokens from all ranks, row by row: [n, ...] -> [N, ...]."""

    def logprobs(self) -> Tensor:
        """Compute the log-probs [N, V] of the whole vocabulary, with gradient."""
        return self.of_all(self._logprobs(self.hidden))

    def _logprobs(self, hidden: Tensor) -> Tensor:
        return (head_logits(hidden, self.head_weight) / self.temperature).log_softmax(-1)

    @torch.no_grad()
    def squared_probs(self, mask: Tensor) -> Tensor:
        """Compute the sum of the squared probabilities of the vocabulary, in chunks of tokens.

        Args:
            mask: [B, T] bool: the trained tokens; on any device.

        Returns:
            [B, T] float32 on the model's device, 0 off the mask, without gradient.
        """
        chunks = self.hidden.split(chunk_size(self.head_weight))
        sums = [(2 * self._logprobs(chunk).float()).exp().sum(-1) for chunk in chunks]
        squared = self.of_all(torch.cat(sums) if sums else self.hidden.new_zeros(0, dtype=torch.float32))
        return squared.new_zeros(mask.numel()).index_copy(0, self.places, squared).view(mask.shape)


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of a forward pass for the loss: those named in the algorithm's `outputs`; the others are None.

    `[B, T]` outputs are indexed by the token itself and 0 off the mask.
    """

    logprobs: Tensor | None = None
    """[B, T]"""
    entropy: Tensor | None = None
    """[B, T]"""
    values: Tensor | None = None
    """[B, T], of the critic: expected return before each token."""
    scores: Tensor | None = None
    """[B], of a reward model: score of the row."""
    distributions: Distributions | None = None
    """At each trained token, row by row."""
    teacher_distributions: Distributions | None = None
    """Likewise of the teacher, without gradient."""


@dataclass(frozen=True)
class LossOutput:
    """Loss of a micro-batch, to be summed over micro-batches (not averaged), with mergeable metrics."""

    loss: Tensor
    metrics: Metrics
    token_records: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values [B, T] by name, without gradient, for the token records: ratio and clip."""


class Forward(Protocol):
    """Forward pass of a micro-batch: computes the outputs in `wanted`, with gradient unless under `no_grad`.

    `plain=True` uses only operations that support forward-mode and double differentiation: the same up to rounding,
    but slower.
    """

    def __call__(self, micro: TrainingBatch, wanted: frozenset[Output], plain: bool = False) -> ModelOutputs: ...


@dataclass(frozen=True)
class UpdateOutput:
    """Result of a policy update. `finite=False`: a gradient was not finite, and the weights are unchanged."""

    metrics: Metrics
    finite: bool = True


Update = Callable[["Algorithm", Sequence[Tensor], Sequence[TrainingBatch], Forward], UpdateOutput]
"""Replacement for the optimizer step of the policy: `update(algorithm, parameters, micro_batches, forward)`.

Changes the parameters in place or leaves them bit for bit as they were, also if it raises: after an out-of-memory error
a back end calls it again with smaller micro-batches.
"""


class Algorithm(Protocol):
    """Interface of an algorithm for the training loop and the back ends.

    An algorithm is plain data that can be pickled. State that persists between steps goes in and out of `advantages` as
    `state`; it travels in the batch and is saved in every checkpoint.
    """

    @property
    def name(self) -> str:
        """Name for messages."""

    @property
    def needs(self) -> frozenset[ModelInput]:
        """Inputs that the back end computes before the advantages and the loss, without gradient."""

    @property
    def advantage_inputs(self) -> frozenset[ModelInput]:
        """The subset of `needs` that `advantages` reads.

        In a step with a single update, `old_logprobs` are computed only if they are listed here: for the loss the
        policy's own log-probs, detached, are the same.
        """

    @property
    def outputs(self) -> frozenset[Output]:
        """Outputs of the forward pass that the loss needs, with gradient."""

    @property
    def row_unit(self) -> RowUnit:
        """Unit of rows that stays together in a split into updates or micro-batches."""

    @property
    def extra_rollouts(self) -> Mapping[str, Any] | None:
        """Changes of `SamplingParams` for extra completions of each prompt that are scored but not trained on.

        Their mean reward becomes the `baseline_reward` of the prompt's trajectories. None: no extra completions.
        """

    @property
    def update(self) -> Update | None:
        """Replacement for the policy's optimizer step; None: the optimizer. A critic always uses its optimizer."""

    @property
    def keeps_group(self) -> Callable[[Sequence[float]], bool] | None:
        """Filter of groups by their rewards (dynamic sampling): groups for which it returns False are replaced by newly
        sampled ones. None: keep all."""

    def advantages(self, rows: RowBatch, state: Mapping[str, float] = NOTHING) -> AdvantageBatch:
        """Shape the rewards and compute advantages, without gradient.

        All statistics over the batch are computed here, before any split.
        """

    def loss_weights(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        """Compute the weights [B, T] of each token in the loss, from loss mask [B, T] and group ids [B] of one
        optimizer step."""

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        """Compute the loss of a micro-batch: weighted sums, so that micro-batches add up to the whole step."""


def needs_teacher(algorithm: Algorithm) -> bool:
    """Return True if an algorithm needs a teacher model."""
    return any(name.startswith("teacher") for name in algorithm.needs | algorithm.outputs)


class FrozenBase:
    """Frozen weights below a policy's adapters, which an engine in the same process uses without a copy of its own.

    The trainer owns the values, the engine the layout: `place` moves a weight into the engine's memory, and the
    trainer's parameter becomes a view of it.

    Args:
        modules: published name of a weight without `.weight` -> the trainer's module that holds it.
        ranks: published name of an adapted weight -> rank of its adapters. They must not change.
    """

    def __init__(self, modules: Mapping[str, nn.Module], ranks: Mapping[str, int]) -> None:
        self.modules, self.ranks = modules, ranks
        self.bytes = 0
        """Bytes that the engine would need for a copy of its own of what it uses."""
        self._placed: list[tuple[nn.Parameter, int]] = []

    def parameter(self, name: str) -> nn.Parameter:
        """Return the trainer's parameter of a published name."""
        module, _, own = name.rpartition(".")
        return cast(nn.Parameter, getattr(self.modules[module], own))

    def use(self, name: str) -> Tensor:
        """Return a weight itself, for an engine that needs it in the trainer's layout."""
        parameter = self.parameter(name)
        self._remember(parameter)
        return parameter.data

    def place(self, name: str, view: Tensor) -> None:
        """Move a weight into the engine's memory; `view` has the weight's shape."""
        parameter = self.parameter(name)
        view.copy_(parameter.data)
        parameter.data = view  # keeps the version counter, so the engine may write beside it between two passes
        self._remember(parameter)

    def _remember(self, parameter: nn.Parameter) -> None:
        self._placed.append((parameter, parameter.data_ptr()))
        self.bytes += parameter.nbytes

    def check(self) -> None:
        """Check that trainer and engine still share all weights.

        Raises:
            RuntimeError: something has moved the trainer's weights elsewhere, such as `Module.to`.
        """
        if any(parameter.data_ptr() != address for parameter, address in self._placed):
            raise RuntimeError(
                "the trainer's frozen weights are no longer those of the rollout engine: they were moved or replaced "
                "(Module.to, load_state_dict(assign=True)) while the run trains"
            )


class RoundedWeights:
    """Memory of an engine in this process, into which updates round the trained weights.

    The engine's weights are the trained ones in the dtype of the forward pass, which the trainer needs as well.
    Only for engines that do not sample while the trainer computes: an update may round weights of a later version.

    Args:
        parameters: published name -> the trainer's parameter, in float32.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.places: dict[tuple[int, ...], Tensor] = {}
        """Addresses of parameters -> their rounded values, concatenated."""

    def offer(self, names: Sequence[str], memory: Tensor) -> None:
        """Let these weights be rounded into `memory`, [sum of out, in] in the engine's dtype."""
        self.places[tuple(self.parameters[name].data_ptr() for name in names)] = memory

    @property
    def bytes(self) -> int:
        """Bytes that are held once."""
        return sum(memory.nbytes for memory in self.places.values())


class TrainingBackend(Protocol):
    """Holds the trained policy, its optimizer, and the other models of a run (reference, critic, teacher)."""

    concurrent: bool
    """Its models compute at the same time, so all inputs should be requested in one `forward_only`."""

    def forward_only(self, rows: RowBatch, needs: frozenset[ModelInput]) -> RowBatch:
        """Return the rows with the requested log-probs, entropies, values or scores, computed without gradient."""

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """Make one optimizer step on the whole batch, in micro-batches."""

    def token_numbers(self) -> Mapping[str, Tensor]:
        """Per-token values of the last `train_step`, [R, T] by name, for the R rows marked in `batch.recorded`.

        - `logprobs`, `entropy`: from the forward pass
        - `loss`: the token's term of the loss
        - `gradient`: derivative of the loss by the token's log-prob
        - the values of `LossOutput.token_records`

        They come from the update itself, without another forward pass. Empty if no row is recorded, or if the algorithm
        replaces the optimizer step.
        """

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """Return the policy's weights for an engine, adapters separate.

        Args:
            adapters_alone: leave out the base weights, which the engine already has.
        """

    def frozen_base(self) -> FrozenBase | None:
        """Return the frozen weights that an engine in this process may share; None: there are none."""

    def rounded_weights(self) -> RoundedWeights | None:
        """Return the trained weights that may be rounded into an engine in this process; None: there are none."""

    def free_memory(self) -> None:
        """Release cached GPU memory for other processes on the device; no effect on a CPU."""

    def save(self, folder: Path) -> Callable[[], None] | None:
        """Save model (loadable by transformers), optimizer, schedule and random state.

        Returns:
            A function that waits until everything is written; training may continue before. None: it is written.
        """

    def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote."""

    def close(self) -> None:
        """Free the back end's memory and processes."""


class RewardFunction(Protocol):
    """Scores completions. `columns` are ground_truth, data_source and all other columns, each a list."""

    def __call__(self, prompts: list[Any], completions: list[str], **columns: list[Any]) -> list[float | None]: ...


RewardComputer = Callable[[Sequence[Trajectory]], list[Trajectory]]
"""Computes all rewards of a run: returns the trajectories with their rewards, in the same order."""
