"""The reference back end: one process, one device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from atomrl.atoms.logprobs import row_logprobs
from atomrl.atoms.natural_gradient import fisher_vector_product, flat
from atomrl.config import ConfigError, CriticConfig, ModelConfig, TrainConfig
from atomrl.metrics import Count, Metrics, merge
from atomrl.models.kernels import plain_formulas
from atomrl.models.loading import HFModel, Policy, compute_dtype, load_policy, policy_weights
from atomrl.models.lora import adapters_disabled, has_adapters
from atomrl.models.scalar import GPTScalar, HFScalar, ScalarModel, load_scalar
from atomrl.models.shared_prefix import shares_prompts, states_before
from atomrl.protocols import Algorithm, Annotation, ModelOutputs, Output
from atomrl.stages import RowBatch, TrainingBatch, select_rows
from atomrl.training.micro_batches import group_pieces, is_out_of_memory, micro_batches, padded_tokens
from atomrl.training.optimizer import Diverged as Diverged
from atomrl.training.optimizer import Optimizer
from atomrl.training.state import State

log = logging.getLogger(__name__)
OF_A_POLICY = {"logprobs", "entropy", "distributions", "old_logprobs", "old_entropy", "ref_logprobs"}
OWNER = {"values": "critic", "teacher_logprobs": "teacher", "teacher_distributions": "teacher"}
Result = TypeVar("Result")


class LocalBackend:
    """Trains a policy on one device: AdamW on float32 weights, micro-batches by token budget.

    An algorithm with an `update` of its own (`protocols.Update`) changes the policy's parameters itself; optimizer
    and learning rate then take no part in it. A critic is trained by its own optimizer nevertheless.

    Args:
        model: which policy, its dtype, adapters, checkpointing and compilation.
        train: optimizer, learning rate and micro-batches.
        total_updates: optimizer steps of the whole run, for the learning rate.
        tokenizer: written beside the model by `save`; None leaves it out.
        device: as torch names it.
        temperature: of sampling; all log-probs are at it (0, greedy, counts as 1).
        needs_reference: hold a frozen copy of the start, for `ref_logprobs`. With adapters it costs nothing.
        scores: what is trained is a reward model, whose output is `scores`, and no language model.
        critic: hold a critic, trained beside the policy, for `values`.
        teacher: a model's folder or hub name, held frozen, for `teacher_logprobs` and `teacher_distributions`.
        forward_mode: an algorithm's own update will ask for plain outputs, to differentiate them forward.
        seed: of adapters' first weights and of dropout.

    Raises:
        ConfigError: the model is not there, or cannot be trained here, or has no forward-mode derivative.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        *,
        total_updates: int,
        tokenizer: Any = None,
        device: str | torch.device = "cpu",
        temperature: float = 1.0,
        needs_reference: bool = False,
        scores: bool = False,
        critic: CriticConfig | None = None,
        teacher: str | None = None,
        forward_mode: bool = False,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.train, self.tokenizer, self.total_updates = train, tokenizer, total_updates
        self.temperature = temperature or 1.0
        self.updates = 0
        self.tokens_per_micro_batch = train.micro_batch_tokens(self.device.type)  # halved where memory runs out
        self._out_of_memory = 0  # how often, since the last update
        settings = {
            "dtype": compute_dtype(model.dtype, self.device),
            "device": self.device,
            "trust_remote_code": model.trust_remote_code,
        }
        if scores:
            self.policy: Any = _reward_model(model, settings)
        else:
            self.policy = load_policy(model.path, lora=model.lora, **settings)
        _prepare(self.policy, model)
        self.policy.train()
        self.reference: Policy | None = None
        if needs_reference and model.lora is None:
            self.reference = load_policy(model.path, trainable=False, **settings).eval()
        self.teacher: Policy | None = None
        if teacher is not None:
            self.teacher = load_policy(teacher, trainable=False, **settings).eval()
            _check_vocabulary(self.policy, self.teacher, teacher)
        self.critic: ScalarModel | None = None
        if forward_mode:
            self._check_forward_mode()
        self.optimizers = [Optimizer("actor", _trained(self.policy), train, train.learning_rate, total_updates)]
        if critic is not None:
            self.critic = load_scalar(critic.path or model.path, **settings).train()
            _prepare(self.critic, model)
            self.optimizers.append(
                Optimizer("critic", _trained(self.critic), train, critic.learning_rate, total_updates)
            )

    def _check_forward_mode(self) -> None:
        weights = list(_trained(self.policy).values())
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)

        def distributions(forward: bool) -> Tensor:
            with plain_formulas():
                return self._distributions(self.policy.forward_hidden(tokens)[0], self.policy)

        try:
            fisher_vector_product(distributions, torch.ones(2, device=self.device), weights, flat(weights))
        except (NotImplementedError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                "algorithm.update: a trust region differentiates the policy forward, which this model cannot "
                f"({reason}); take another model, or update: optimizer"
            ) from None

    def annotate(self, rows: RowBatch, needs: frozenset[Annotation]) -> RowBatch:
        """Add what is asked for, without gradient.

        Raises:
            ValueError: `needs` names what this back end has not.
        """
        self._require(needs)
        if "ref_logprobs" in needs and self.reference is None and not has_adapters(self.policy):
            raise ValueError("ref_logprobs are needed, but the back end was made without needs_reference=True")
        old = {f"old_{name}": name for name in ("logprobs", "entropy") if f"old_{name}" in needs}
        added = {}
        self.policy.eval()
        if old:
            added |= self._all_outputs(self.policy, rows, old)
        if "ref_logprobs" in needs:
            with nullcontext() if self.reference else adapters_disabled(self.policy):
                added |= self._all_outputs(self.reference or self.policy, rows, {"ref_logprobs": "logprobs"})
        if "teacher_logprobs" in needs:
            added |= self._all_outputs(self.teacher, rows, {"teacher_logprobs": "logprobs"})
        for name in needs & {"values", "scores"}:
            added |= self._all_outputs(self.policy, rows, {name: name})
        self.policy.train()
        return replace(rows, **added)

    def _require(self, names: frozenset[str]) -> None:
        """Raise ValueError where a model is missing that gives one of these."""
        for name in sorted(names & OWNER.keys()):
            if getattr(self, OWNER[name]) is None:
                raise ValueError(f"{name} are needed, but the back end was made without a {OWNER[name]}")
        wrong = names & OF_A_POLICY if isinstance(self.policy, ScalarModel) else names & {"scores"}
        if wrong:
            raise ValueError(f"the back end's model gives no {', '.join(sorted(wrong))}")

    @torch.no_grad()
    def _all_outputs(self, model: Policy, rows: RowBatch, wanted: dict[str, Output]) -> dict[str, Tensor]:
        """Outputs of the forward pass for all rows, by the names that they are wanted under."""
        shape = rows.tokens.shape
        whole = {name: torch.zeros(shape[:1] if output == "scores" else shape) for name, output in wanted.items()}

        def fill(split: list[Tensor]) -> None:
            for index in split:
                part = self._outputs(model, select_rows(rows, index), frozenset(wanted.values()))
                for name, output in wanted.items():
                    values = getattr(part, output).cpu()
                    if output == "scores":
                        whole[name][index] = values
                    else:
                        whole[name][index, : values.shape[1]] = values

        self._in_micro_batches(rows, None, fill)
        return whole

    def _split(self, rows: RowBatch, group_ids: Tensor | None) -> list[Tensor]:
        limits = self.tokens_per_micro_batch, self.train.rows_per_micro_batch
        if group_ids is None and shares_prompts(self.policy):
            group_ids = group_pieces(rows.lengths, rows.group_ids, *limits)
        return micro_batches(rows.lengths, group_ids, *limits)

    def _in_micro_batches(
        self, rows: RowBatch, group_ids: Tensor | None, compute: Callable[[list[Tensor]], Result]
    ) -> Result:
        """`compute(the rows of each micro-batch)`; where memory runs out, again from its start with smaller ones.

        Raises:
            ConfigError: what does not fit is a single row, or a group that has to stay together.
        """
        while True:
            split = self._split(rows, group_ids)
            try:
                return compute(split)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0] or type(error).__name__
            # The error is gone here, and with it the tensors that its traceback held.
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            largest = max(split, key=lambda index: padded_tokens(rows.lengths, index))
            size = padded_tokens(rows.lengths, largest)
            if len(largest if group_ids is None else group_ids[largest].unique()) == 1:
                what = "a single row" if len(largest) == 1 else f"a group of {len(largest)} rows, which stay together,"
                raise ConfigError(
                    f"out of memory: {what} of {size} padded tokens does not fit ({reason}). Set "
                    "model.gradient_checkpointing=true or model.lora={rank: 16}; or lower train.max_row_tokens, "
                    "rollout.max_completion_tokens or data.max_prompt_tokens; or take a smaller model"
                )
            self.tokens_per_micro_batch = size // 2
            self._out_of_memory += 1
            log.warning(
                "out of memory with %d padded tokens in a micro-batch (%s): from here on at most %d; "
                "train.tokens_per_micro_batch=%d sets it from the start",
                size, reason, size // 2, size // 2,
            )  # fmt: skip

    def _outputs(self, model: Policy, micro: RowBatch, outputs: frozenset[Output]) -> ModelOutputs:
        tokens, mask = micro.tokens.to(self.device), micro.loss_mask.to(self.device)
        found: dict[str, Tensor | None] = {}
        if "scores" in outputs:
            found["scores"] = model.scores(tokens, micro.lengths.to(self.device))
        if "values" in outputs:
            found["values"] = self.critic.values(tokens, mask, micro.prompt_lengths)
        if outputs & {"logprobs", "entropy", "distributions"}:
            states = states_before(model, tokens, mask, micro.prompt_lengths)
        if outputs & {"logprobs", "entropy"}:
            kept_ids = None if micro.kept_ids is None else micro.kept_ids.to(self.device)
            found["logprobs"], found["entropy"] = row_logprobs(
                states, model.head_weight, tokens, mask, self.temperature, None, "entropy" in outputs, kept_ids
            )
        if "distributions" in outputs:
            found["distributions"] = self._distributions(states, model)
        if "teacher_distributions" in outputs:
            with torch.no_grad():
                theirs = states_before(self.teacher, tokens, mask, micro.prompt_lengths)
                found["teacher_distributions"] = self._distributions(theirs, self.teacher)
        return ModelOutputs(**found)

    def _distributions(self, states: Tensor, model: Policy) -> Tensor:
        logits = F.linear(states, model.head_weight.to(states.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.log_softmax(logits / self.temperature, dim=-1)

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """One optimizer step. The loss and its gradient are sums over the rows, so no split changes them.

        Returns:
            The loss's metrics merged, `actor/grad_norm` (before clipping) and `actor/lr`, and the same of the critic
            where there is one, which has an optimizer of its own. An update whose gradient is
            not finite is left out, with a warning and `actor/skipped_updates`; so is one whose gradient is exactly 0
            (`actor/empty_updates`): weights and optimizer stay. Where memory runs out, micro-batches are halved until
            they fit, with the same gradient (`actor/out_of_memory`).

        Raises:
            ValueError: the batch is empty, or the algorithm wants an output that this back end has not.
            ConfigError: not even one row fits into memory.
            Diverged: the third update in a row with a gradient that is not finite.
        """
        if not batch.rows:
            raise ValueError(f"{algorithm.name}: the batch has no rows")
        self._require(algorithm.outputs)
        keep = None if algorithm.row_unit == "row" else batch.group_ids

        def accumulate(split: list[Tensor]) -> list[Metrics]:
            parts = []
            for index in split:
                micro = _to(select_rows(batch, index), self.device)
                result = algorithm.loss(self._outputs(self.policy, micro, algorithm.outputs), micro)
                result.loss.backward()
                parts.append(result.metrics)
            return parts

        if algorithm.update is not None:
            metrics = self._own_update(batch, algorithm, keep)
        else:
            parts = self._in_micro_batches(batch, keep, accumulate)
            metrics = merge([*parts, *(optimizer.step(self.updates) for optimizer in self.optimizers)])
        if self._out_of_memory:
            metrics = metrics | {"actor/out_of_memory": Count(self._out_of_memory)}
            self._out_of_memory = 0
        self.updates += 1
        return metrics

    def _own_update(self, batch: TrainingBatch, algorithm: Algorithm, keep: Tensor | None) -> Metrics:
        """The algorithm's step of the policy, and before it the critic's: of `critic/` metrics alone, as the policy's
        part of the loss is counted by its own step."""
        actor, *critics = self.optimizers

        def outputs(micro: TrainingBatch, wanted: frozenset[Output], plain: bool = False) -> ModelOutputs:
            with plain_formulas() if plain else nullcontext():
                return self._outputs(self.policy, micro, wanted)

        def criticise(split: list[Tensor]) -> list[Metrics]:
            parts = []
            for index in split:
                micro = _to(select_rows(batch, index), self.device)
                with torch.no_grad():
                    policys = outputs(micro, algorithm.outputs - {"values"})
                values = outputs(micro, frozenset({"values"})).values
                result = algorithm.loss(replace(policys, values=values), micro)
                result.loss.backward()
                parts.append({name: metric for name, metric in result.metrics.items() if name.startswith("critic/")})
            return parts

        def step(split: list[Tensor]) -> Metrics:
            micros = [_to(select_rows(batch, index), self.device) for index in split]
            return algorithm.update(list(actor.weights.values()), micros, outputs)

        parts = []
        if critics and "values" in algorithm.outputs:
            parts = [*self._in_micro_batches(batch, keep, criticise), critics[0].step(self.updates)]
        metrics = self._in_micro_batches(batch, keep, step)
        if "actor/skipped_updates" in metrics:
            actor.leave_out(self.updates, float("nan"))
        else:
            actor.skipped_in_a_row = 0
        return merge([*parts, metrics])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, adapters merged, named as in its Hugging Face state dict; not copied."""
        if isinstance(self.policy, ScalarModel):
            return iter(self.policy.state().items())
        return policy_weights(self.policy)

    def save(self, folder: Path) -> None:
        """Write model (or adapters) and tokenizer for transformers, and beside them what it takes to go on exactly."""
        state = State(self.policy, self.critic, self.optimizers, self.device)
        state.save(Path(folder), self.tokenizer, self.updates)

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        self.updates = State(self.policy, self.critic, self.optimizers, self.device).load(Path(folder))

    def close(self) -> None:
        """Free the models and their optimizers."""
        del self.policy, self.optimizers
        self.reference = self.teacher = self.critic = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _reward_model(model: ModelConfig, settings: dict[str, Any]) -> ScalarModel:
    if model.lora is not None:
        raise ConfigError("model.lora: reward models are trained whole; leave it out")
    return load_scalar(model.path, **settings)


def _check_vocabulary(policy: Policy, teacher: Policy, path: str) -> None:
    ours, theirs = policy.head_weight.shape[0], teacher.head_weight.shape[0]
    if ours != theirs:
        raise ConfigError(
            f"teacher.path: {path} has {theirs} tokens and the policy {ours}; they must share a vocabulary"
        )


def _prepare(policy: Policy | ScalarModel, config: ModelConfig) -> None:
    """Checkpointing and compilation, as the config asks."""
    if isinstance(policy, GPTScalar):
        policy = policy.trunk
    if isinstance(policy, HFModel | HFScalar):
        if config.gradient_checkpointing:
            policy.inner.gradient_checkpointing_enable({"use_reentrant": False})
        if config.compile:
            log.warning("model.compile has no effect on models that are trained through transformers")
        return
    policy.gradient_checkpointing = config.gradient_checkpointing
    if config.compile:
        policy.compile_layers()


def _to(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    if device.type == "cpu":
        return batch
    moved = {name: value.to(device) for name, value in vars(batch).items() if value is not None}
    return replace(batch, **moved)
