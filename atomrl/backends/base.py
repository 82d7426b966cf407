"""What all training back ends share: micro-batches, decisions that ranks take together, and steps of the optimizers.

A back end says where weights lie: how a role's model is loaded, saved, and sent to an engine.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from atomrl.backends.optimizer import Optimizer
from atomrl.backends.roles import (
    SHARDS,
    SOURCES,
    STATE_FOLDER,
    TRAINED,
    Role,
    RoleName,
    check_forward_mode,
    enable_checkpointing,
    load_role,
    role_prefix,
    save_role,
    sources,
)
from atomrl.batches import RowBatch, Rows, TrainingBatch, moved, select_rows
from atomrl.common.metrics import Count, Metrics, merge
from atomrl.common.processes import launched, progress
from atomrl.common.threads import sent, unit
from atomrl.config import ConfigError, CriticConfig, ModelConfig, TrainConfig
from atomrl.models.batches import (
    group_pieces,
    micro_batches,
    micro_batches_for,
    offloading,
    padded_tokens,
    zero_weight_row,
)
from atomrl.models.kernels import plain_formulas, round_once
from atomrl.models.loading import compute_dtype, fill_weights, model_weights
from atomrl.models.lora import adapter_state, adapter_weights, has_adapters
from atomrl.models.memory import is_out_of_memory, tokens_without_gradient
from atomrl.protocols import (
    Algorithm,
    ModelInput,
    ModelOutputs,
    Output,
    RowUnit,
    UpdateOutput,
    WeightUpdate,
    needs_teacher,
)

# --------------------------------------------------------------------------------------------------------------------
# What the ranks of a back end agree on: decisions, sums and metrics.
#
# Every rank makes the same calls in the same order. A single process agrees with itself at no cost; several have
# `group.Ranks`.


class Collective:
    """The collective operations of a single process: the identity.

    Example:
        >>> Collective().max(3), Collective().any(False)
        (3, False)
    """

    rank, world = 0, 1
    writing: Any = None
    """The group of the threads that write checkpoints."""

    def max(self, number: int) -> int:
        """The largest number that a rank gave."""
        return number

    def any(self, condition: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.max(int(condition)))

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return tensor

    def union(self, names: Iterable[str]) -> list[str]:
        """The names that a rank gave, sorted."""
        return sorted(names)

    def sum(self, metrics: Metrics) -> Metrics:
        """Metrics of all ranks merged; called once per step."""
        return metrics


class OutOfMemory(ConfigError):
    """A micro-batch did not fit on a rank; the message has the setting with which to begin again.

    Args:
        size: padded tokens of the micro-batch.
        reason: what the allocator said.
        tokens: padded tokens of a micro-batch with which to begin again; None: with `model.gradient_checkpointing`.

    Example:
        >>> str(OutOfMemory(28, "CUDA", 14))
        'out of memory with 28 padded tokens in a micro-batch (CUDA); go on with train.tokens_per_micro_batch=14'
    """

    def __init__(self, size: int, reason: str, tokens: int | None) -> None:
        self.tokens = tokens
        setting = "model.gradient_checkpointing=true" if tokens is None else f"train.tokens_per_micro_batch={tokens}"
        super().__init__(f"out of memory with {size} padded tokens in a micro-batch ({reason}); go on with {setting}")


def check_launcher(world: int) -> None:
    """Raise ConfigError where a launcher (torchrun, accelerate) started another number of processes than `world`."""
    started = launched()
    if world == 1 and started is not None:
        raise ConfigError(
            f"this back end is a single process, and a launcher started {started.world} of it "
            f"(WORLD_SIZE={started.world}), each of which would train a model of its own: give the section backend "
            "(`backend.type=fsdp`), or start it without torchrun or accelerate"
        )


# --------------------------------------------------------------------------------------------------------------------
# What an update sees of the tokens of some rows, kept as it goes by: no second forward pass, and no second loss.


class WatchedTokens:
    """Numbers of the tokens of a batch's `recorded` rows.

    The loss is linear in its weights, so a token's part of it is its weight times the loss's derivative in that weight;
    this and the derivative in the log-probs come with the backward pass that is made anyhow.

    Args:
        batch: with `recorded`.
        device: of its micro-batches.
    """

    def __init__(self, batch: TrainingBatch, device: torch.device) -> None:
        assert batch.recorded is not None
        self.recorded, self.device = batch.recorded, device
        self.shape = int(batch.recorded.max()) + 1, batch.tokens.shape[1]
        self._kept: dict[str, Tensor] = {}

    def begin(self, micro: TrainingBatch, outputs: ModelOutputs) -> TrainingBatch:
        """The micro-batch as the loss is to take it."""
        if outputs.logprobs is not None and outputs.logprobs.requires_grad:
            outputs.logprobs.retain_grad()
        return replace(micro, loss_weights=micro.loss_weights.detach().requires_grad_())

    def end(self, index: Tensor, micro: TrainingBatch, outputs: ModelOutputs, algorithm: Algorithm) -> None:
        """Keep what there is after the backward pass.

        Args:
            index: the rows of the micro-batch in the batch; none where it only keeps other ranks company.
        """
        chosen = (self.recorded[index] >= 0).nonzero()[:, 0]
        places, rows = (sent(part, self.device) for part in (self.recorded[index][chosen], chosen))
        found = {**self._found(micro, outputs), **algorithm.by_token(outputs, micro)}
        for name, values in found.items():
            whole = self._kept.setdefault(name, torch.zeros(self.shape, device=self.device))
            if len(chosen):
                whole[places, : values.shape[1]] = values.detach()[rows].float()

    def _found(self, micro: TrainingBatch, outputs: ModelOutputs) -> dict[str, Tensor]:
        weights, logprobs, found = micro.loss_weights, outputs.logprobs, dict[str, Tensor]()
        assert logprobs is not None
        found["logprobs"] = logprobs
        found["gradient"] = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
        if weights.grad is not None:  # else the loss is not one by token
            found["loss"] = weights * weights.grad
        if outputs.entropy is not None:
            found["entropy"] = outputs.entropy
        return found

    def numbers(self, collective: Collective) -> dict[str, Tensor]:
        """Those of all ranks, by name, [R, T] in the order of the rows' numbers; of a pipeline the last has any."""
        nothing = torch.zeros(self.shape, device=self.device)
        names = collective.union(self._kept)
        if not names:
            return {}
        found = torch.stack([self._kept.get(name, nothing) for name in names])
        return dict(zip(names, collective.total(found).cpu(), strict=True))


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


# --------------------------------------------------------------------------------------------------------------------
# The reference back end: one process, one device.


class LocalBackend(BaseBackend):
    """Trains in one process on one device: AdamW on float32 weights, micro-batches by token budget."""

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> torch.nn.Module:
        """A role's model, whole, on the device."""
        return load_role(name, path, config, self.device)

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine, not copied, and its adapters apart: merged into bfloat16 weights, their
        first updates would be lost."""
        model = self.policy.model
        return WeightUpdate(version, () if adapters_alone else model_weights(model), adapter_weights(model))

    def save(self, folder: Path) -> None:
        """Write model (or adapters) and tokenizer for transformers, the critic in a folder in it, and beside them what
        it takes to go on exactly."""
        from safetensors.torch import save_file

        state = folder / STATE_FOLDER
        state.mkdir(parents=True, exist_ok=True)
        for name, optimizer in self.trained.items():
            save_role(name, self.roles[name].model, self.tokenizer, folder)
            save_file(optimizer.state(), state / f"{role_prefix(name, '_')}optimizer.safetensors")
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        own = role_prefix(next(iter(self.trained)), "_")
        save_file(random, state / f"{own}random.safetensors")
        skipped = {name: optimizer.skipped_in_a_row for name, optimizer in self.trained.items()}
        text = json.dumps({"updates": self.updates, "skipped_in_a_row": skipped}) + "\n"
        (state / f"{own}trainer.json").write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`, also where policy and critic were in one back end then and are not now, or the
        other way round; and from what several ranks saved, within rounding.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        from safetensors.torch import load_file

        state = folder / STATE_FOLDER
        if (state / SHARDS).is_dir():
            from atomrl.backends.checkpoints import load_shards  # half a second, for which no other run waits

            self.updates = load_shards(self.trained, self.collective, folder)
            return
        if not (state / "trainer.json").is_file():
            raise ConfigError(f"{folder} holds no {STATE_FOLDER}/trainer.json: it is no checkpoint of this back end")
        trainer = json.loads((state / "trainer.json").read_text(encoding="utf-8"))
        skipped = trainer["skipped_in_a_row"]
        if (apart := state / "critic_trainer.json").is_file():
            skipped |= json.loads(apart.read_text(encoding="utf-8"))["skipped_in_a_row"]
        missing, unknown = self.trained.keys() - skipped.keys(), skipped.keys() - self.trained.keys()
        if missing or (unknown and self.here is None):
            raise ConfigError(f"checkpoint {folder} was written with{'' if 'critic' in skipped else 'out'} a critic")
        for name, optimizer in self.trained.items():
            model = self.roles[name].model
            own = adapter_state(model) if has_adapters(model) else dict(model_weights(model))
            fill_weights(own, folder / role_prefix(name))
            optimizer.load(load_file(state / f"{role_prefix(name, '_')}optimizer.safetensors"), self.device)
            optimizer.skipped_in_a_row = skipped[name]
        saved = state / f"{role_prefix(next(iter(self.trained)), '_')}random.safetensors"
        random = load_file(saved if saved.is_file() else state / "random.safetensors")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)
        self.updates = trainer["updates"]
