"""What all training back ends share: micro-batches, decisions that ranks take together, and steps of the optimizers.

A back end says where weights lie: how a role's model is loaded, saved, and sent to an engine.
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

from atomrl.batches import RowBatch, Rows, TrainingBatch, moved, select_rows
from atomrl.config import ConfigError, CriticConfig, ModelConfig, TrainConfig
from atomrl.devices import sent
from atomrl.metrics import Count, Metrics, merge
from atomrl.models.batches import group_pieces, micro_batches, micro_batches_for, padded_tokens, zero_weight_row
from atomrl.models.kernels import plain_formulas, round_once
from atomrl.models.loading import compute_dtype
from atomrl.models.memory import is_out_of_memory, tokens_without_gradient
from atomrl.models.offload import offloading
from atomrl.progress import progress
from atomrl.protocols import Algorithm, ModelInput, ModelOutputs, Output, RowUnit, UpdateOutput, needs_teacher
from atomrl.threads import unit
from atomrl.training.collective import Collective, OutOfMemory, check_launcher
from atomrl.training.optimizer import Optimizer
from atomrl.training.role_models import enable_checkpointing
from atomrl.training.roles import SOURCES, TRAINED, Role, RoleName, check_forward_mode, sources
from atomrl.training.watched import WatchedTokens

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Differentiated:
    """What an update's backward passes are of."""

    batch: TrainingBatch
    algorithm: Algorithm
    wanted: Collection[str]
    """Outputs that are asked of models."""
    watched: WatchedTokens | None
    """Tokens whose numbers are recorded, if any are."""


class BaseBackend(ABC):
    """Trains a policy, or a reward model, with the models that its algorithm needs beside it.

    Each rank is given the same batch, and computes its share of the micro-batches. All methods are collective: every
    rank calls them alike, takes the same decisions and returns the same.

    An algorithm with an `update` of its own (`protocols.Update`) changes the policy's parameters itself; optimizer
    and learning rate then take no part in it. A critic is trained by its own optimizer nevertheless.

    Args:
        model: which policy, its dtype, adapters, checkpointing and compilation.
        train: optimizer, learning rate and micro-batches.
        algorithm: says by what it needs which models there are: a reward model in the policy's place (`scores`), a
            frozen copy of the start (`ref_logprobs`; with adapters it costs nothing), a critic (`values`), a teacher.
        total_updates: optimizer steps of the whole run, for the learning rate.
        tokenizer: written beside the model by `save`; None leaves it out.
        device: as torch names it.
        temperature: of sampling; all log-probs are at it (0, greedy, counts as 1).
        critic: where it starts, and its learning rate.
        teacher: a model's folder or hub name.
        seed: of adapters' first weights and of dropout.
        roles: those of the algorithm's models that are here, where others are in back ends of their own; None: all.
        collective: what the ranks agree through.

    Raises:
        ConfigError: a model is not there, or cannot be trained here, or has no forward-mode derivative; or a
            launcher started several processes, and this is a single one.
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
    ) -> None:
        self.device, self.collective = torch.device(device), collective or Collective()
        check_launcher(self.collective.world)
        on_cpu = self.device.type == "cpu"
        if model.pack_rows and not on_cpu and compute_dtype(model.dtype, self.device) == torch.float32:
            raise ConfigError("model.pack_rows=true needs model.dtype=bfloat16 on a GPU: its attention has no float32")
        torch.manual_seed(seed)
        self.train, self.tokenizer, self.temperature = train, tokenizer, temperature or 1.0
        self.updates = 0
        self.tokens_per_micro_batch = train.micro_batch_tokens(self.device.type)  # halved where memory runs out
        self.activation_offload = model.activation_offload
        self._out_of_memory = 0  # how often, since the last update
        self._may_checkpoint = model.gradient_checkpointing == "auto"
        self._token_numbers: dict[str, Tensor] = {}
        self.roles: dict[RoleName, Role] = {}
        self.here = roles
        needs, critic = algorithm.needs | algorithm.outputs, critic or CriticConfig()
        paths: dict[RoleName, str | None] = {
            "reward_model" if "scores" in needs else "policy": model.path,
            "reference": model.path if "ref_logprobs" in needs and model.lora is None else None,
            "teacher": teacher if needs_teacher(algorithm) else None,
            "critic": (critic.path or model.path) if "values" in needs else None,
        }
        for name, path in paths.items():
            if path is not None and (roles is None or name in roles):
                loaded, optimizer = self.load_model(name, path, model), None
                if name in TRAINED:
                    rate = critic.learning_rate if name == "critic" else train.learning_rate
                    optimizer = self.make_optimizer(name, loaded, rate, total_updates)
                self.roles[name] = Role(loaded, optimizer)
        self.trained = {name: role.optimizer for name, role in self.roles.items() if role.optimizer}
        self.policy = next(iter(self.roles.values()))
        """Or what is in its place: the reward model; of a back end without either, its first model."""
        self.tokens_without_gradient: int | None = None
        """Padded tokens of a micro-batch without gradient; None: as many as of others."""
        if not on_cpu and self.begins_again:
            size = compute_dtype(model.dtype, self.device).itemsize
            settings = self.policy.model.config, self.tokens_per_micro_batch, size, model.checkpoints_layers
            self.tokens_without_gradient = tokens_without_gradient(*settings)
        if model.lora is not None and "policy" in self.roles:
            self.roles["reference"] = Role(self.policy.model, without_adapters=True)
        if algorithm.update is not None and "policy" in self.roles:
            check_forward_mode(self.policy, self.device)

    concurrent = False
    """Its models compute one after the other."""
    whole_weights = True
    """Whether its weights are plain tensors, which an algorithm's own update can work on."""
    together = 1
    """Ranks that compute the same rows, each its share of the tokens."""
    begins_again = True
    """Whether a step in which memory ran out can begin again with smaller micro-batches."""

    @abstractmethod
    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> torch.nn.Module:
        """The model of a role, its weights where this back end keeps them."""

    def make_optimizer(self, name: RoleName, model: torch.nn.Module, rate: float, total_updates: int) -> Optimizer:
        """Of a role that is trained."""
        return Optimizer(TRAINED[name], model, self.train, rate, total_updates)

    def close(self) -> None:
        """Free the models and their optimizers."""
        self.roles, self.trained = {}, {}
        del self.policy
        self.free_memory()

    def free_memory(self) -> None:
        """Give the device what the allocator keeps for later; nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def before_backward(self, last: bool) -> None:
        """Called before each micro-batch of an update."""
        del last  # of interest where gradients are summed over ranks

    @torch.no_grad()
    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """Add what is asked for, without gradient.

        Raises:
            ValueError: `needs` names what this back end has not.
        """
        # Sorted: the order of a set differs between processes, and ranks add these up one after the other.
        shapes = {name: rows.tokens.shape[: 1 if name == "scores" else 2] for name in sorted(needs)}
        whole = {name: torch.zeros(shape, device=self.device) for name, shape in shapes.items()}

        def fill(split: list[Tensor]) -> None:
            for index, found in self._forward_outputs(rows, split, needs):
                if not self._says:
                    continue
                at = sent(index, self.device)
                for name, tensor in whole.items():
                    values = found[name][: len(index)].float()
                    tensor[at if values.dim() == 1 else (at, slice(values.shape[1]))] = values

        if not needs:
            return rows
        for role in self.roles.values():
            role.model.eval()
        self._in_micro_batches(rows, "row", fill, gradient=False)
        for name in self.trained:
            self.roles[name].model.train()
        added: dict[str, Any] = {name: self.collective.total(tensor).cpu() for name, tensor in whole.items()}
        return replace(rows, **added)

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """One optimizer step. The loss and its gradient are sums over the rows, so no split changes them.

        Returns:
            The loss's metrics merged, `actor/grad_norm` (before clipping) and `actor/lr`, and the same of the critic
            where there is one, which has an optimizer of its own. An update whose gradient is not finite is left out,
            with a warning and `actor/skipped_updates`; so is one whose gradient is exactly 0
            (`actor/empty_updates`): weights and optimizer stay. Where memory runs out, micro-batches are halved until
            they fit, with the same gradient (`actor/out_of_memory`).

        Raises:
            ValueError: the batch is empty, or the algorithm wants an output that this back end has not.
            ConfigError: not even one row fits into memory.
            Diverged: the third update in a row with a gradient that is not finite.
        """
        if not batch.rows:
            raise ValueError(f"{algorithm.name}: the batch has no rows")
        if algorithm.update is None or "policy" not in self.roles:
            metrics = [self.gradients(batch, algorithm, self.here)]
            metrics += [optimizer.step(self.updates, self.collective.any) for optimizer in self.trained.values()]
        else:
            metrics = self._own_update(batch, algorithm)
        if self._out_of_memory:
            metrics.append({"actor/out_of_memory": Count(self._out_of_memory)})
            self._out_of_memory = 0
        self.updates += 1
        return merge(metrics)

    def gradients(self, batch: TrainingBatch, algorithm: Algorithm, of: Collection[RoleName] | None = None) -> Metrics:
        """Add the gradient of the loss to the weights of the roles that are trained; with `of`, of the part of the loss
        that the outputs of those roles make.

        Returns:
            The loss's metrics, of all ranks.
        """

        wanted = {name for name in algorithm.outputs if of is None or SOURCES[name][0] in of}

        recorded = batch.recorded is not None and "logprobs" in wanted
        watched = WatchedTokens(batch, self.device) if recorded else None

        accumulate = partial(self._accumulate, Differentiated(batch, algorithm, wanted, watched))
        metrics = self._in_micro_batches(batch, algorithm.row_unit, accumulate)
        self._token_numbers = watched.numbers(self.collective) if watched else {}
        return self.collective.sum(merge(metrics))

    def _accumulate(self, what: Differentiated, split: list[Tensor]) -> list[Metrics]:
        """Add the gradients of this rank's micro-batches; their metrics."""
        parts: list[Metrics] = []
        for number, index in enumerate(split, 1):
            self.before_backward(last=number == len(split))
            with unit("learning", _tokens(what.batch, index)):
                micro = self._micro(what.batch, index)
                with offloading(self.activation_offload):
                    outputs = ModelOutputs(**self._outputs(micro, what.wanted))
                micro = moved(micro, self.device)
                if what.watched:
                    micro = what.watched.begin(micro, outputs)
                result = what.algorithm.loss(outputs, micro)
                torch.autograd.backward(result.loss)
                if what.watched:
                    what.watched.end(index if self._says else index[:0], micro, outputs, what.algorithm)
            parts += [result.metrics] * (len(index) > 0 and self._says)
        return parts

    def token_numbers(self) -> dict[str, Tensor]:
        """What the last update saw of the tokens that are recorded (`protocols.TrainingBackend`)."""
        return self._token_numbers

    def _own_update(self, batch: TrainingBatch, algorithm: Algorithm) -> list[Metrics]:
        """The algorithm's step of the policy, and before it the critic's."""
        assert algorithm.update is not None
        if self.collective.world > 1 or not self.whole_weights:
            raise ConfigError(
                f"algorithm.update: that of {algorithm.name} needs whole weights in one process, not in several ranks"
            )
        update, parts = algorithm.update, []
        actor = self.trained["policy"]
        if "critic" in self.trained and "values" in algorithm.outputs:
            parts = [self.gradients(batch, algorithm, {"critic"}), self.trained["critic"].step(self.updates)]

        def outputs(micro: TrainingBatch, wanted: frozenset[Output], plain: bool = False) -> ModelOutputs:
            with plain_formulas() if plain else nullcontext():
                return ModelOutputs(**self._outputs(micro, wanted))

        def step(split: list[Tensor]) -> UpdateOutput:
            micros = [moved(self._micro(batch, index), self.device) for index in split]
            return update(algorithm, list(actor.weights.values()), micros, outputs)

        done = self._in_micro_batches(batch, algorithm.row_unit, step)
        actor.count_finite(self.updates, done.finite)
        return [*parts, done.metrics]

    @property
    def _says(self) -> bool:
        """Whether this rank speaks for those that compute the same rows."""
        return self.collective.rank % self.together == 0

    def _outputs(self, micro: RowBatch, names: Collection[str]) -> dict[str, Any]:
        """Outputs of all roles for a micro-batch, which is on the host, by name."""
        found: dict[str, Any] = {}
        for role, asked in sources(names, self.roles).items():
            outputs = self.roles[role].outputs(micro, asked.values(), self.temperature)
            found |= {name: outputs[output] for name, output in asked.items()}
        return found

    def _forward_outputs(
        self, rows: RowBatch, split: list[Tensor], names: Collection[str]
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """This rank's micro-batches, and their outputs without gradient."""
        for index in split:
            with unit("scoring", _tokens(rows, index)):
                found = self._outputs(self._micro(rows, index), names)
            yield index, found

    def _micro(self, rows: Rows, index: Tensor) -> Rows:
        """The rows of a micro-batch, on the host; where there are none, one without weight in the loss."""
        progress()
        return select_rows(rows, index) if len(index) else zero_weight_row(rows)

    def _split(self, rows: RowBatch, group_ids: Tensor | None, tokens: int) -> list[Tensor]:
        """The rows of each micro-batch of all ranks."""
        ranks = self.collective.world // self.together
        most = self.train.rows_per_micro_batch
        if group_ids is None and self.policy.model.shares_prompts:
            together = min(most or rows.rows, -(-rows.rows // ranks))
            group_ids = group_pieces(rows.lengths, rows.group_ids, tokens, together)
        if ranks == 1:
            return micro_batches(rows.lengths, group_ids, tokens, most)
        return micro_batches_for(ranks, rows.lengths, group_ids, tokens, most)

    def _in_micro_batches(
        self, rows: RowBatch, unit: RowUnit, compute: Callable[[list[Tensor]], Result], gradient: bool = True
    ) -> Result:
        """`compute(this rank's micro-batches)`; where memory runs out on any rank, again on all with smaller ones.

        All ranks compute equally many, so that those with fewer rows do not leave the others waiting.

        Raises:
            ConfigError: what does not fit is a single row, or a group that has to stay together.
        """
        group_ids = rows.unit_ids(unit)
        while True:
            without = None if gradient else self.tokens_without_gradient
            split, reason = self._split(rows, group_ids, without or self.tokens_per_micro_batch), ""
            mine = split[self.collective.rank // self.together :: self.collective.world // self.together]
            mine += [torch.tensor([], dtype=torch.long)] * (self.collective.max(len(mine)) - len(mine))
            try:
                with round_once():
                    result = compute(mine)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0] or type(error).__name__
                if not self.begins_again:
                    filled = [index for index in mine if len(index)] or split  # a rank without rows has one of others
                    raise self._too_large(rows.lengths, filled, group_ids, reason) from error
            # The error is gone here, and with it the tensors that its traceback held.
            if not self.collective.any(bool(reason)):
                return result
            for optimizer in self.trained.values():
                optimizer.zero_grad()
            self.free_memory()
            if without is not None and without > self.tokens_per_micro_batch:
                self.tokens_without_gradient = max(self.tokens_per_micro_batch, without // 2)
                log.warning(
                    "out of memory in a pass without gradient (%s): from here on with at most %d padded tokens in a "
                    "micro-batch", reason or "on another rank", self.tokens_without_gradient,
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
            log.warning("%s, which sets it from the start", smaller)

    def _too_large(self, lengths: Tensor, split: list[Tensor], group_ids: Tensor | None, reason: str) -> OutOfMemory:
        """Say with what to begin again: half of the largest micro-batch; where that is a single row, or a group that
        has to stay together, `model.gradient_checkpointing` if it is `auto`.

        Raises:
            ConfigError: neither can be done.
        """
        largest = max(split, key=lambda index: padded_tokens(lengths, index))
        size = padded_tokens(lengths, largest)
        single = len(largest if group_ids is None else set(group_ids[largest].tolist())) == 1
        if single and not self._may_checkpoint:
            what = "a single row" if len(largest) == 1 else f"a group of {len(largest)} rows, which stay together,"
            raise ConfigError(
                f"out of memory: {what} of {size} padded tokens does not fit ({reason}). Set "
                "model.gradient_checkpointing=true or model.lora={rank: 16}; or lower train.max_row_tokens, "
                "rollout.max_completion_tokens or data.max_prompt_tokens; or take a smaller model"
            )
        return OutOfMemory(size, reason, None if single else size // 2)


def _tokens(rows: RowBatch, index: Tensor) -> float:
    """Of some rows."""
    return float(rows.lengths[index].sum())
