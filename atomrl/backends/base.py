"""The training step that all back ends share.

`BaseBackend` splits a batch into micro-batches, accumulates gradients, steps the optimizers and retries with smaller
micro-batches when memory runs out. A subclass decides where weights are stored: how the model of a role is loaded,
saved, and sent to an engine (`local.LocalBackend`: on one device).
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from atomrl.atoms.logprobs import head_logits, row_logprobs
from atomrl.atoms.natural_gradient import fisher_vector_product, flat
from atomrl.backends.collective import Collective
from atomrl.backends.optimizer import Optimizer
from atomrl.backends.roles import SOURCES, TRAINED, Role, RoleName, enable_checkpointing, paths_of_roles, sources
from atomrl.backends.token_recorder import TokenRecorder
from atomrl.batches import (
    RowBatch,
    Rows,
    TrainingBatch,
    batch_to_device,
    group_pieces,
    micro_batches,
    padded_tokens,
    select_rows,
    zero_weight_row,
)
from atomrl.common.devices import to_device
from atomrl.common.hangs import progress
from atomrl.common.launchers import launched
from atomrl.common.metrics import Count, Metrics, merge
from atomrl.common.threads import unit
from atomrl.config import ConfigError, CriticConfig, ModelConfig, TrainConfig
from atomrl.models.kernel_switches import plain_formulas, round_once
from atomrl.models.loading import compute_dtype
from atomrl.models.lora import adapters_disabled
from atomrl.models.memory import tokens_without_gradient
from atomrl.models.offloading import offloading
from atomrl.models.process_memory import is_out_of_memory
from atomrl.models.sequence_parallel import total
from atomrl.models.stream import states_before
from atomrl.models.vision import Patches, Vision
from atomrl.protocols import (
    Algorithm,
    Distributions,
    FrozenBase,
    ModelInput,
    ModelOutputs,
    Output,
    RoundedWeights,
    RowUnit,
    UpdateOutput,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def _gather_tokens(values: Tensor, own: Tensor, mask: Tensor, sharing: Any) -> Tensor:
    """Gather values [n, ...] of this rank's tokens into [N, ...] for all tokens of the mask."""
    if sharing is None:
        return values
    at = to_device(own[:, 1:][mask[:, 1:]].nonzero()[:, 0], values.device)
    gathered = values.new_zeros(int(mask[:, 1:].sum()), *values.shape[1:])
    return total(gathered.index_copy(0, at, values), sharing)


def check_forward_mode(policy: Role, device: torch.device) -> None:
    """Raise ConfigError if the policy has no forward-mode derivative, which a trust region needs."""
    assert policy.optimizer is not None
    model, weights = policy.model, list(policy.optimizer.weights.values())
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)

    def distributions(forward: bool) -> Tensor:
        with plain_formulas():
            return head_logits(model.forward_hidden(tokens)[0], model.head_weight).log_softmax(-1)

    try:
        fisher_vector_product(distributions, torch.ones(2, device=device), weights, flat(weights))
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            "algorithm.update: a trust region needs forward-mode differentiation, which this model does not support "
            f"({reason}); use another model, or update: optimizer"
        ) from None


class OutOfMemory(ConfigError):
    """A micro-batch did not fit into a rank's memory; the message names the setting to retry with.

    Args:
        size: padded tokens of the micro-batch.
        reason: message of the allocator.
        tokens: padded tokens per micro-batch to retry with; None: retry with `model.gradient_checkpointing`.

    Example:
        >>> str(OutOfMemory(28, "CUDA", 14))
        'out of memory with 28 padded tokens in a micro-batch (CUDA); use train.tokens_per_micro_batch=14'
    """

    def __init__(self, size: int, reason: str, tokens: int | None) -> None:
        self.tokens = tokens
        setting = "model.gradient_checkpointing=true" if tokens is None else f"train.tokens_per_micro_batch={tokens}"
        super().__init__(f"out of memory with {size} padded tokens in a micro-batch ({reason}); use {setting}")


def check_launcher(world: int) -> None:
    """Raise ConfigError if torchrun or accelerate started several processes of a single-process back end."""
    started = launched()
    if world == 1 and started is not None:
        raise ConfigError(
            f"this back end is a single process, and a launcher started {started.world} of it "
            f"(WORLD_SIZE={started.world}), each of which would train its own model: set the section backend "
            "(`backend.type=fsdp`), or start it without torchrun or accelerate"
        )


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The batch and algorithm that gradients are accumulated for."""

    batch: TrainingBatch
    algorithm: Algorithm
    outputs: Collection[str]
    """Outputs of the forward pass that the loss reads."""
    recorder: TokenRecorder | None
    """None: no per-token values are recorded."""


class BaseBackend(ABC):
    """Base class of back ends: trains a policy or reward model, and runs the other models of its algorithm.

    Every rank receives the same batch and computes its share of the micro-batches. All methods are collective: every
    rank calls them in the same order and gets the same result.

    An algorithm with its own `update` (`protocols.Update`) changes the policy's parameters without optimizer and
    learning rate. A critic still has its optimizer.

    Args:
        model: path of the policy, dtype, adapters, checkpointing and compilation.
        train: optimizer, learning rate and micro-batches.
        algorithm: its needs and outputs determine the models: `scores` means a reward model in place of the policy,
            `ref_logprobs` a frozen copy of the initial policy (with adapters it takes no memory), `values` a critic,
            `teacher_logprobs` or `teacher_distributions` a teacher.
        total_updates: optimizer steps of the whole run, for the learning-rate schedule.
        tokenizer: saved with the model by `save`; None: not saved.
        device: a torch device.
        temperature: sampling temperature; all log-probs are computed at it (0, greedy, counts as 1).
        critic: initial weights and learning rate of the critic.
        teacher: folder or hub name of the teacher.
        seed: seed of the adapters' initial weights and of dropout.
        roles: load only these models, because other back ends have the rest; None: load all.
        collective: collective operations of the ranks; None: a single process.
        images: reads the patches of pictures; None: rows have none.

    Raises:
        ConfigError: a model does not exist, cannot be trained, or lacks a forward-mode derivative that the algorithm
            needs; or a launcher started several processes of a single-process back end.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        algorithm: Algorithm,
        *,
        total_updates: int,
        tokenizer: Any = None,
        device: str | torch.device = "cpu",
        temperature: float = 1.0,
        critic: CriticConfig | None = None,
        teacher: str | None = None,
        seed: int = 0,
        roles: Collection[RoleName] | None = None,
        collective: Collective | None = None,
        images: Patches | None = None,
    ) -> None:
        self.device, self.collective = torch.device(device), collective or Collective()
        check_launcher(self.collective.world)
        on_cpu = self.device.type == "cpu"
        if model.pack_rows and not on_cpu and compute_dtype(model.dtype, self.device) == torch.float32:
            raise ConfigError(
                "model.pack_rows=true needs model.dtype=bfloat16 on a GPU: its attention does not support float32"
            )
        torch.manual_seed(seed)
        self.train, self.tokenizer, self.temperature = train, tokenizer, temperature or 1.0
        self.updates = 0
        self.tokens_per_micro_batch = train.micro_batch_tokens(self.device.type)  # halved where memory runs out
        self.activation_offload = model.activation_offload
        self._out_of_memory = 0  # retries since the last update
        self._may_checkpoint = model.gradient_checkpointing == "auto"
        self._token_numbers: dict[str, Tensor] = {}
        self.roles: dict[RoleName, Role] = {}
        self.loaded_roles = roles
        critic = critic or CriticConfig()
        for name, path in paths_of_roles(algorithm, model, critic, teacher).items():
            if path is not None and (roles is None or name in roles):
                loaded, optimizer = self.load_model(name, path, model), None
                if name in TRAINED:
                    rate = critic.learning_rate if name == "critic" else train.learning_rate
                    optimizer = self.make_optimizer(name, loaded, rate, total_updates)
                self.roles[name] = Role(loaded, optimizer)
        if images is not None:
            for role in self.roles.values():
                role.model.vision = Vision(role.model.inner, images)
        self.trained = {name: role.optimizer for name, role in self.roles.items() if role.optimizer}
        self.policy = next(iter(self.roles.values()))
        """The policy or the reward model; in a back end with neither, its first model."""
        self.rounded = RoundedWeights({})
        """Memory of the engine's weights, into which updates round; only `LocalBackend` may have some."""
        self.tokens_without_gradient: int | None = None
        """Padded tokens per micro-batch of a pass without gradient; None: `tokens_per_micro_batch`."""
        if not on_cpu and self.retries_out_of_memory:
            size = compute_dtype(model.dtype, self.device).itemsize
            settings = self.policy.model.config, self.tokens_per_micro_batch, size, model.checkpoints_layers
            self.tokens_without_gradient = tokens_without_gradient(*settings)
        if model.lora is not None and "policy" in self.roles:
            self.roles["reference"] = Role(self.policy.model, without_adapters=True)
        if algorithm.update is not None and "policy" in self.roles:
            check_forward_mode(self.policy, self.device)

    concurrent = False
    """False: the models of different roles compute one after the other."""
    has_full_weights = True
    """True if parameters are unsharded tensors, as an algorithm's own update requires."""
    supports_images = True
    """True if rows may have pictures."""
    ranks_per_row = 1
    """Ranks that compute the same rows: each its share of the tokens, of the layers or of their matrices."""
    retries_out_of_memory = True
    """True if a step that ran out of memory can be retried with smaller micro-batches."""

    @property
    def is_replica_leader(self) -> bool:
        """True on one rank of each group that computes the same rows; this rank's outputs and metrics count."""
        return self.collective.rank % self.ranks_per_row == 0

    @abstractmethod
    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> torch.nn.Module:
        """Load the model of a role and place or shard its weights."""

    def make_optimizer(self, name: RoleName, model: torch.nn.Module, rate: float, total_updates: int) -> Optimizer:
        """Create the optimizer of a trained role; `rate` is its peak learning rate."""
        return Optimizer(TRAINED[name], model, self.train, rate, total_updates)

    def close(self) -> None:
        """Free the models and their optimizers."""
        self.roles, self.trained, self.rounded = {}, {}, RoundedWeights({})
        del self.policy
        self.free_memory()

    def frozen_base(self) -> FrozenBase | None:
        """Return None; `LocalBackend` may have one."""
        return None

    def rounded_weights(self) -> RoundedWeights | None:
        """Return None; `LocalBackend` may have some."""
        return None

    def free_memory(self) -> None:
        """Return the allocator's cached memory to the GPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def before_backward(self, last: bool) -> None:
        """Hook before each micro-batch of an update; `last` is True at the last one."""
        del last  # for back ends that reduce gradients over ranks

    @torch.no_grad()
    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """Compute log-probs, values or scores without gradient and add them to the rows.

        Args:
            needs: fields of `RowBatch` to fill: [B, T] each, `scores` [B].

        Raises:
            ValueError: a need belongs to a role that this back end does not have.
        """
        # Sorted, because ranks all-reduce one field after the other, and a set's order differs between processes.
        shapes = {name: rows.tokens.shape[: 1 if name == "scores" else 2] for name in sorted(needs)}
        fields = {name: torch.zeros(shape, device=self.device) for name, shape in shapes.items()}

        def fill(split: list[Tensor]) -> None:
            for index, outputs in self._forward_outputs(rows, split, needs):
                if not self.is_replica_leader:
                    continue
                at = to_device(index, self.device)
                for name, tensor in fields.items():
                    values = outputs[name][: len(index)].float()
                    tensor[at if values.dim() == 1 else (at, slice(values.shape[1]))] = values

        if not needs:
            return rows
        for role in self.roles.values():
            role.model.eval()
        self._in_micro_batches(rows, "row", fill, gradient=False)
        for name in self.trained:
            self.roles[name].model.train()
        summed: dict[str, Any] = {name: self.collective.total(tensor).cpu() for name, tensor in fields.items()}
        return replace(rows, **summed)

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """Take one optimizer step on the batch.

        The loss and its gradient are sums over rows, so the split into micro-batches does not change them.

        An update with a non-finite gradient is skipped with a warning (`actor/skipped_updates`), one with a zero
        gradient silently (`actor/empty_updates`): weights and optimizer state stay as they are. If memory runs out,
        a back end with `retries_out_of_memory` halves micro-batches until they fit, with the same gradient
        (`actor/out_of_memory`).

        Returns:
            Merged metrics of the loss, `actor/grad_norm` (before clipping) and `actor/lr`; with a critic, the same
            under `critic/`.

        Raises:
            ValueError: the batch is empty, or the algorithm needs an output that this back end does not have.
            ConfigError: a single row does not fit into memory.
            OutOfMemory: a micro-batch does not fit, and this back end does not retry.
            Diverged: third update in a row with a non-finite gradient.
        """
        if not batch.rows:
            raise ValueError(f"{algorithm.name}: the batch has no rows")
        if algorithm.update is None or "policy" not in self.roles:
            metrics = [self.gradients(batch, algorithm, self.loaded_roles)]
            metrics += [optimizer.step(self.updates, self.collective.any) for optimizer in self.trained.values()]
        else:
            metrics = self._own_update(batch, algorithm)
        if self._out_of_memory:
            metrics.append({"actor/out_of_memory": Count(self._out_of_memory)})
            self._out_of_memory = 0
        self.updates += 1
        return merge(metrics)

    def gradients(self, batch: TrainingBatch, algorithm: Algorithm, of: Collection[RoleName] | None = None) -> Metrics:
        """Accumulate the gradient of the loss in the weights of the trained roles.

        Args:
            of: use only the part of the loss that depends on the outputs of these roles; None: the whole loss.

        Returns:
            Metrics of the loss, merged over ranks.
        """
        outputs = {name for name in algorithm.outputs if of is None or SOURCES[name][0] in of}
        records = batch.recorded is not None and "logprobs" in outputs
        recorder = TokenRecorder(batch, self.device) if records else None
        accumulate = partial(self._accumulate, LossInputs(batch, algorithm, outputs, recorder))
        metrics = self._in_micro_batches(batch, algorithm.row_unit, accumulate)
        self._token_numbers = recorder.gather(self.collective) if recorder else {}
        return self.collective.sum(merge(metrics))

    def _accumulate(self, inputs: LossInputs, split: list[Tensor]) -> list[Metrics]:
        """Run forward and backward on this rank's micro-batches; return the metrics of each."""
        metrics: list[Metrics] = []
        algorithm, recorder = inputs.algorithm, inputs.recorder
        for number, index in enumerate(split, 1):
            self.before_backward(last=number == len(split))
            with unit("learning", _token_count(inputs.batch, index)):
                micro = self._micro(inputs.batch, index)
                with offloading(self.activation_offload):
                    outputs = ModelOutputs(**self.forward(micro, inputs.outputs))
                micro = batch_to_device(micro, self.device)
                if recorder:
                    micro = recorder.before_loss(micro, outputs)
                result = algorithm.loss(outputs, micro)
                torch.autograd.backward(result.loss)
                if recorder:
                    rows = index if self.is_replica_leader else index[:0]
                    recorder.after_backward(rows, micro, outputs, result)
            if len(index) and self.is_replica_leader:
                metrics.append(result.metrics)
        return metrics

    def token_numbers(self) -> dict[str, Tensor]:
        """Return the per-token values that the last update recorded (`protocols.TrainingBackend`)."""
        return self._token_numbers

    def _own_update(self, batch: TrainingBatch, algorithm: Algorithm) -> list[Metrics]:
        """Step the critic by its optimizer, then the policy by the algorithm's own update."""
        assert algorithm.update is not None
        if self.collective.world > 1 or not self.has_full_weights:
            raise ConfigError(
                f"algorithm.update: that of {algorithm.name} needs all weights in one process, not sharded over ranks"
            )
        update, parts = algorithm.update, []
        actor = self.trained["policy"]
        if "critic" in self.trained and "values" in algorithm.outputs:
            parts = [self.gradients(batch, algorithm, {"critic"}), self.trained["critic"].step(self.updates)]

        def outputs(micro: TrainingBatch, wanted: frozenset[Output], plain: bool = False) -> ModelOutputs:
            with plain_formulas() if plain else nullcontext():
                return ModelOutputs(**self.forward(micro, wanted))

        def step(split: list[Tensor]) -> UpdateOutput:
            micros = [batch_to_device(self._micro(batch, index), self.device) for index in split]
            return update(algorithm, list(actor.weights.values()), micros, outputs)

        done = self._in_micro_batches(batch, algorithm.row_unit, step)
        actor.count_finite(self.updates, done.finite)
        return [*parts, done.metrics]

    def forward(self, micro: RowBatch, names: Collection[str]) -> dict[str, Any]:
        """Run the forward passes of a micro-batch, one per role; return the named outputs.

        Args:
            micro: rows on the CPU. Shapes depend on their values, and reading these from a GPU would force a sync.
            names: keys of `SOURCES`.

        Returns:
            Log-probs, entropies and values [B, T], scores [B] and `Distributions` on the model's device, with gradient
            if the role is trained.
        """
        named: dict[str, Any] = {}
        tokens, mask = micro.tokens, micro.loss_mask
        for name, requested in sources(names, self.roles).items():
            role, wanted = self.roles[name], set(requested.values())
            model, outputs = role.model, dict[Output, Any]()
            grad = nullcontext() if role.optimizer else torch.no_grad()
            adapters = adapters_disabled(model) if role.without_adapters else nullcontext()
            with grad, adapters:
                if "scores" in wanted:
                    outputs["scores"] = model.scores(tokens, micro.lengths)
                if "values" in wanted:
                    outputs["values"] = model.values(tokens, mask, micro.prompt_lengths)
                if not outputs.keys() >= wanted:
                    images = () if micro.images is None or not any(micro.images.rows) else micro.images.rows
                    states, own = states_before(model, tokens, mask, micro.prompt_lengths, images)
                if "logprobs" in wanted or "entropy" in wanted:
                    candidates = micro.rollout.candidates
                    lists = (None, None) if candidates is None else (candidates.ids, candidates.counts)
                    logprobs, entropy = row_logprobs(
                        states, model.head_weight, tokens, own, self.temperature, None, "entropy" in wanted, *lists
                    )
                    outputs["logprobs"] = total(logprobs, model.sharing)
                    if entropy is not None:
                        outputs["entropy"] = total(entropy, model.sharing)
                if wanted & {"distributions", "squared_probs"}:
                    gather = partial(_gather_tokens, own=own, mask=mask, sharing=model.sharing)
                    places = to_device(mask.flatten().nonzero()[:, 0], states.device)
                    made = Distributions(states, model.head_weight, places, self.temperature, gather)
                    outputs["distributions"] = made
                    if "squared_probs" in wanted:
                        outputs["squared_probs"] = made.squared_probs(mask)
            named |= {key: outputs[output] for key, output in requested.items()}
        return named

    def _forward_outputs(
        self, rows: RowBatch, split: list[Tensor], names: Collection[str]
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield each of this rank's micro-batches with its outputs, without gradient."""
        for index in split:
            with unit("scoring", _token_count(rows, index)):
                outputs = self.forward(self._micro(rows, index), names)
            yield index, outputs

    def _micro(self, rows: Rows, index: Tensor) -> Rows:
        """Return the rows of a micro-batch on the CPU; for an empty index, one row with loss weight 0."""
        progress()
        return select_rows(rows, index) if len(index) else zero_weight_row(rows)

    def _costs(self, rows: RowBatch) -> Tensor:
        """Return [B] what each row counts in the budget of a micro-batch: its tokens; with a trained vision tower,
        whose activations are kept, also its patches."""
        vision = getattr(self.policy.model, "vision", None)
        if rows.images is None or vision is None or not vision.trained:
            return rows.lengths
        patches = [sum(vision.read.patches(image) for image in row) for row in rows.images.rows]
        return rows.lengths + torch.tensor(patches)

    def _in_micro_batches(
        self, rows: RowBatch, row_unit: RowUnit, compute: Callable[[list[Tensor]], Result], gradient: bool = True
    ) -> Result:
        """Return `compute(micro-batches of this rank)`.

        All ranks get the same number of micro-batches, empty ones included, because forward passes may be collective.
        If memory runs out, a back end with `retries_out_of_memory` retries with smaller ones. FSDP and Megatron do
        not: the other ranks wait inside of a layer, so new ranks continue from the newest checkpoint.

        Raises:
            ConfigError: a single row, or a group that must stay together, does not fit.
            OutOfMemory: a micro-batch does not fit, and this back end does not retry.
        """
        group_ids, max_rows = rows.unit_ids(row_unit), self.train.rows_per_micro_batch
        replicas, replica = self.collective.world // self.ranks_per_row, self.collective.rank // self.ranks_per_row
        costs = self._costs(rows)
        while True:
            # Split the rows into micro-batches for all ranks, and take those of this rank.
            no_grad_tokens = None if gradient else self.tokens_without_gradient
            tokens, units, reason = no_grad_tokens or self.tokens_per_micro_batch, group_ids, ""
            if units is None and self.policy.model.shares_prompts:
                # Keep the rows of a group together, so that their prompt is computed once.
                rows_per_piece = min(max_rows or rows.rows, -(-rows.rows // replicas))
                units = group_pieces(costs, rows.group_ids, tokens, rows_per_piece)
            split = micro_batches(costs, units, tokens, max_rows, replicas)
            mine = split[replica::replicas]
            mine += [torch.tensor([], dtype=torch.long)] * (self.collective.max(len(mine)) - len(mine))
            # `round_once` lets micro-batches share one rounded copy of the weights.
            try:
                with round_once(self.rounded.places):
                    result = compute(mine)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0] or type(error).__name__
                if not self.retries_out_of_memory:
                    filled = [index for index in mine if len(index)] or split
                    raise self._too_large(rows.lengths, filled, group_ids, reason) from error
            # Outside the except block: the traceback is released, and with it the tensors of the failed pass.
            if not self.collective.any(bool(reason)):
                return result
            for optimizer in self.trained.values():
                optimizer.zero_grad()
            self.free_memory()
            if no_grad_tokens is not None and no_grad_tokens > self.tokens_per_micro_batch:
                self.tokens_without_gradient = max(self.tokens_per_micro_batch, no_grad_tokens // 2)
                log.warning(
                    "out of memory in a pass without gradient (%s): using at most %d padded tokens in a "
                    "micro-batch from now on", reason or "on another rank", self.tokens_without_gradient,
                )  # fmt: skip
                continue
            smaller = self._too_large(rows.lengths, split, group_ids, reason or "on another rank")
            if smaller.tokens is None:
                self._may_checkpoint = False
                for name in self.trained:
                    enable_checkpointing(self.roles[name].model)
            else:
                self.tokens_per_micro_batch = smaller.tokens
            self._out_of_memory += 1
            log.warning("%s; this run continues with that", smaller)

    def _too_large(self, lengths: Tensor, split: list[Tensor], group_ids: Tensor | None, reason: str) -> OutOfMemory:
        """Return the error with the setting to retry with.

        The setting is half of the largest micro-batch. If that is a single row, or a group that must stay together, it
        is `model.gradient_checkpointing`, where the config has it as `auto`.

        Raises:
            ConfigError: neither is possible.
        """
        largest = max(split, key=lambda index: padded_tokens(lengths, index))
        size = padded_tokens(lengths, largest)
        single = len(largest if group_ids is None else set(group_ids[largest].tolist())) == 1
        if single and not self._may_checkpoint:
            what = "a single row" if len(largest) == 1 else f"a group of {len(largest)} rows, which stay together,"
            raise ConfigError(
                f"out of memory: {what} of {size} padded tokens does not fit ({reason}). Set "
                "model.gradient_checkpointing=true or model.lora={rank: 16}; or lower train.max_row_tokens, "
                "rollout.max_completion_tokens or data.max_prompt_tokens; or use a smaller model"
            )
        return OutOfMemory(size, reason, None if single else size // 2)


def _token_count(rows: RowBatch, index: Tensor) -> float:
    return float(rows.lengths[index].sum())
