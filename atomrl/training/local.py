"""The reference back end: one process, one device."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from atomrl.atoms.logprobs import row_logprobs
from atomrl.config import ConfigError, ModelConfig, TrainConfig
from atomrl.metrics import Count, Mean, Metrics, merge
from atomrl.models.loading import (
    HFModel,
    Policy,
    compute_dtype,
    load_policy,
    policy_weights,
    read_safetensors,
    save_model,
)
from atomrl.models.lora import adapters_disabled, has_adapters, load_adapters, save_adapters
from atomrl.models.shared_prefix import shares_prompts, states_before
from atomrl.protocols import Algorithm, Annotation, ModelOutputs, Output
from atomrl.stages import RowBatch, TrainingBatch, select_rows
from atomrl.training.micro_batches import group_pieces, is_out_of_memory, micro_batches, padded_tokens
from atomrl.training.schedules import learning_rate

log = logging.getLogger(__name__)
STATE_FOLDER = "training_state"
"""Beside the model, so that a server that loads every *.safetensors of the folder does not meet it."""
MAX_SKIPPED_IN_A_ROW = 3
Result = TypeVar("Result")


class Diverged(RuntimeError):
    """Too many updates in a row had a gradient that is not finite."""


class LocalBackend:
    """Trains a policy on one device: AdamW on float32 weights, micro-batches by token budget.

    An algorithm with an `update` of its own is called as `update(parameters, micro_batches, outputs) -> Metrics`:
    the trained parameters, the batch in pieces that fit, and the forward pass of a piece (`ModelOutputs`, with
    gradient unless under `no_grad`). It changes the parameters in place; optimizer and learning rate take no part.

    Args:
        model: which policy, its dtype, adapters, checkpointing and compilation.
        train: optimizer, learning rate and micro-batches.
        total_updates: optimizer steps of the whole run, for the learning rate.
        tokenizer: written beside the model by `save`; None leaves it out.
        device: as torch names it.
        temperature: of sampling; all log-probs are at it (0, greedy, counts as 1).
        needs_reference: hold a frozen copy of the start, for `ref_logprobs`. With adapters it costs nothing.
        seed: of adapters' first weights and of dropout.

    Raises:
        ConfigError: the model is not there, or cannot be trained here.
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
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.train, self.tokenizer, self.total_updates = train, tokenizer, total_updates
        self.temperature = temperature or 1.0
        self.updates = 0
        self.tokens_per_micro_batch = train.micro_batch_tokens(self.device.type)  # halved where memory runs out
        self._out_of_memory = 0  # how often, since the last update
        self._skipped_in_a_row = 0
        settings = {
            "dtype": compute_dtype(model.dtype, self.device),
            "device": self.device,
            "trust_remote_code": model.trust_remote_code,
        }
        self.policy: Policy = load_policy(model.path, lora=model.lora, **settings)
        self.policy.train()
        _prepare(self.policy, model)
        self.reference: Policy | None = None
        if needs_reference and model.lora is None:
            self.reference = load_policy(model.path, trainable=False, **settings).eval()
        self.optimizer = _adamw(self._trained(), train)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self.policy.named_parameters() if weight.requires_grad}

    def annotate(self, rows: RowBatch, needs: frozenset[Annotation]) -> RowBatch:
        """Add `old_logprobs`, `old_entropy` and `ref_logprobs` where asked, without gradient.

        Raises:
            ValueError: `needs` names what this back end has not.
        """
        unknown = needs - {"old_logprobs", "old_entropy", "ref_logprobs"}
        if unknown:
            raise ValueError(f"the local back end cannot annotate {sorted(unknown)}")
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
        self.policy.train()
        return replace(rows, **added)

    @torch.no_grad()
    def _all_outputs(self, model: Policy, rows: RowBatch, wanted: dict[str, Output]) -> dict[str, Tensor]:
        """Outputs of the forward pass for all rows, by the names that they are wanted under."""
        whole = {name: torch.zeros(rows.tokens.shape) for name in wanted}

        def fill(split: list[Tensor]) -> None:
            for index in split:
                part = self._outputs(model, select_rows(rows, index), frozenset(wanted.values()))
                for name, output in wanted.items():
                    values = getattr(part, output)
                    whole[name][index, : values.shape[1]] = values.cpu()

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
            self.optimizer.zero_grad(set_to_none=True)
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
        logprobs, entropy = row_logprobs(
            states_before(model, tokens, mask, micro.prompt_lengths),
            model.head_weight,
            tokens,
            mask,
            self.temperature,
            with_entropy="entropy" in outputs,
        )
        return ModelOutputs(logprobs=logprobs, entropy=entropy)

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """One optimizer step. The loss and its gradient are sums over the rows, so no split changes them.

        Returns:
            The loss's metrics merged, `actor/grad_norm` (before clipping) and `actor/lr`. An update whose gradient is
            not finite is left out, with a warning and `actor/skipped_updates`; so is one whose gradient is exactly 0
            (`actor/empty_updates`): weights and optimizer stay. Where memory runs out, micro-batches are halved until
            they fit, with the same gradient (`actor/out_of_memory`).

        Raises:
            ValueError: the batch is empty, or the algorithm wants an output that this back end has not.
            ConfigError: not even one row fits into memory.
            Diverged: the third update in a row with a gradient that is not finite.
        """
        unknown = algorithm.outputs - {"logprobs", "entropy"}
        if unknown or not batch.rows:
            what = f"the local back end has no output {sorted(unknown)}" if unknown else "the batch has no rows"
            raise ValueError(f"{algorithm.name}: {what}")
        keep = None if algorithm.row_unit == "row" else batch.group_ids

        def outputs(micro: TrainingBatch) -> ModelOutputs:
            return self._outputs(self.policy, micro, algorithm.outputs)

        def micro_batch(index: Tensor) -> TrainingBatch:
            return _to(select_rows(batch, index), self.device)

        def accumulate(split: list[Tensor]) -> list[Metrics]:
            parts = []
            for index in split:
                micro = micro_batch(index)
                result = algorithm.loss(outputs(micro), micro)
                result.loss.backward()
                parts.append(result.metrics)
            return parts

        if algorithm.update is not None:
            micros = [micro_batch(index) for index in self._split(batch, keep)]
            metrics = algorithm.update(list(self._trained().values()), micros, outputs)
        else:
            metrics = merge([*self._in_micro_batches(batch, keep, accumulate), self._step()])
        if self._out_of_memory:
            metrics = metrics | {"actor/out_of_memory": Count(self._out_of_memory)}
            self._out_of_memory = 0
        self.updates += 1
        return metrics

    def _step(self) -> Metrics:
        """Clip, set the learning rate, step; or leave the update out, where its gradient is 0 or not finite."""
        train = self.train
        rate = learning_rate(
            self.updates,
            self.total_updates,
            train.learning_rate,
            train.schedule,
            train.warmup_ratio,
            train.min_lr_ratio,
        )
        weights = list(self._trained().values())
        total = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None], foreach=True)
        norm = total.item()
        if norm > train.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(weights, train.max_grad_norm, total, foreach=True)
        metrics: Metrics = {"actor/lr": Mean(rate)}
        if not norm < float("inf"):
            self._skipped_in_a_row += 1
            log.warning("update %d left out: its gradient norm is %s", self.updates, norm)
            metrics["actor/skipped_updates"] = Count()
            if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise Diverged(
                    f"{MAX_SKIPPED_IN_A_ROW} updates in a row, up to update {self.updates}, had a gradient that is not "
                    f"finite (norm {norm}); the weights are those of the last update that was"
                )
        else:
            self._skipped_in_a_row = 0
            metrics["actor/grad_norm"] = Mean(norm)
            if norm == 0:  # momentum and weight decay would move weights although the batch says nothing
                metrics["actor/empty_updates"] = Count()
            else:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, adapters merged, named as in its Hugging Face state dict; not copied."""
        return policy_weights(self.policy)

    def save(self, folder: Path) -> None:
        """Write model (or adapters) and tokenizer for transformers, and beside them what it takes to go on exactly."""
        from safetensors.torch import save_file

        folder = Path(folder)
        state_folder = folder / STATE_FOLDER
        state_folder.mkdir(parents=True, exist_ok=True)
        if has_adapters(self.policy):
            save_adapters(self.policy, folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
        else:
            save_model(self.policy, self.tokenizer, folder)
        tensors = {"rng/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        for name, weight in self._trained().items():
            for key, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"{key}/{name}"] = value.contiguous()
        save_file(tensors, state_folder / "optimizer.safetensors")
        state = {"updates": self.updates, "skipped_in_a_row": self._skipped_in_a_row}
        (state_folder / "trainer.json").write_text(json.dumps(state) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        from safetensors.torch import load_file

        folder = Path(folder)
        state_folder = folder / STATE_FOLDER
        if not (state_folder / "trainer.json").is_file():
            raise ConfigError(f"{folder} holds no {STATE_FOLDER}/trainer.json: it is no checkpoint of this back end")
        if has_adapters(self.policy):
            load_adapters(self.policy, folder)
        else:
            _copy_weights(self.policy, folder)
        tensors = load_file(state_folder / "optimizer.safetensors")
        torch.set_rng_state(tensors.pop("rng/cpu"))
        if "rng/cuda" in tensors:
            torch.cuda.set_rng_state(tensors.pop("rng/cuda"), self.device)
        self.optimizer.state.clear()
        trained = self._trained()
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            where = value.device if kind == "step" and self.device.type == "cpu" else self.device
            self.optimizer.state[trained[name]][kind] = value.to(where)
        state = json.loads((state_folder / "trainer.json").read_text(encoding="utf-8"))
        self.updates, self._skipped_in_a_row = state["updates"], state["skipped_in_a_row"]

    def close(self) -> None:
        """Free the model, the optimizer and the reference."""
        del self.policy, self.optimizer
        self.reference = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _prepare(policy: Policy, config: ModelConfig) -> None:
    """Checkpointing and compilation, as the config asks."""
    if isinstance(policy, HFModel):
        if config.gradient_checkpointing:
            policy.inner.gradient_checkpointing_enable({"use_reentrant": False})
        if config.compile:
            log.warning("model.compile has no effect on models that are trained through transformers")
        return
    policy.gradient_checkpointing = config.gradient_checkpointing
    if config.compile:
        policy.compile_layers()


def _adamw(trained: dict[str, torch.nn.Parameter], train: TrainConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone."""
    groups = [
        {"params": [w for w in trained.values() if w.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [w for w in trained.values() if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=train.learning_rate, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps, fused=True
    )


def _to(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    if device.type == "cpu":
        return batch
    moved = {name: value.to(device) for name, value in vars(batch).items() if value is not None}
    return replace(batch, **moved)


@torch.no_grad()
def _copy_weights(policy: Policy, folder: Path) -> None:
    own = dict(policy_weights(policy))
    found = dict(read_safetensors(folder))
    tied = {"lm_head.weight"} if policy.config.tie_word_embeddings else set()
    wrong = [name for name in found if name not in own or own[name].shape != found[name].shape]
    missing = own.keys() - found.keys() - tied
    if wrong or missing:
        raise ConfigError(f"checkpoint {folder} is of another model: {sorted([*wrong, *missing])[:5]} do not fit")
    for name, tensor in found.items():
        own[name].copy_(tensor)
