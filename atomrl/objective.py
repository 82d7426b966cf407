"""The axes of a policy objective as data, and the one composer that turns them into an `Algorithm`.

An axis names an atom and its parameters. `Objective` puts one on each axis; `compose` makes the functions that the
loop and the back ends call. A config overrides any axis (`override`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from atomrl.atoms import advantages as advantage_atoms
from atomrl.atoms import kl as kl_atoms
from atomrl.atoms import reductions
from atomrl.atoms.masks import masked_sum
from atomrl.atoms.policy_losses import clipped_policy_loss, clipped_tokens
from atomrl.atoms.ratios import token_log_ratio
from atomrl.metrics import Max, Mean, Metrics, Sum
from atomrl.protocols import Algorithm, LossOutput, ModelOutputs
from atomrl.stages import AdvantageBatch, RowBatch, TrainingBatch

ADVANTAGES = {
    "grpo": advantage_atoms.group_zscore,
    "grpo_no_std": advantage_atoms.group_mean_baseline,
    "raw": advantage_atoms.raw_reward,
}
KL_ESTIMATORS = {"k1": kl_atoms.k1_kl, "k2": kl_atoms.k2_kl, "k3": kl_atoms.k3_kl}
AGGREGATES = {
    "token_mean": reductions.token_mean,
    "sequence_mean": reductions.sequence_mean,
    "constant_length": reductions.constant_length,
}


@dataclass(frozen=True)
class Advantage:
    """How rewards become credit: `grpo`, `grpo_no_std` or `raw`."""

    type: str = "grpo"
    eps: float = 1e-6
    """Added to the standard deviation (`grpo` alone has one)."""

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        parameters = {"eps": self.eps} if self.type == "grpo" else {}
        return ADVANTAGES[self.type](rewards, group_ids, **parameters)


@dataclass(frozen=True)
class Clip:
    """How far the ratio may move from 1 before its gradient stops."""

    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True)
class Kl:
    """A penalty for leaving the reference, in the loss. A coefficient of 0 loads no reference."""

    type: str = "k3"
    coefficient: float = 0.0

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        return KL_ESTIMATORS[self.type](logprobs, ref_logprobs, mask)


@dataclass(frozen=True)
class Aggregate:
    """What the loss is a mean of: `token_mean`, `sequence_mean` or `constant_length`."""

    type: str = "token_mean"
    length: int | None = None
    """In tokens; of `constant_length` alone."""

    def __call__(self, mask: Tensor) -> Tensor:
        parameters = {"length": self.length} if self.type == "constant_length" else {}
        return AGGREGATES[self.type](mask, **parameters)


@dataclass(frozen=True)
class Objective:
    """One setting on each axis.

    maximise  sum_{i,t} w_{i,t} [ min(rho A, clip(rho, 1 - low, 1 + high) A) - beta KL ]
    """

    advantage: Advantage = Advantage()
    clip: Clip = Clip()
    kl: Kl = Kl()
    aggregate: Aggregate = Aggregate()
    accept_group: Callable[[Sequence[float]], bool] | None = None
    """Not for a config: which groups an algorithm keeps."""


TYPES = {"advantage": ADVANTAGES, "kl": KL_ESTIMATORS, "aggregate": AGGREGATES}


def override(objective: Objective, axes: Mapping[str, Any]) -> Objective:
    """The objective with some axes changed; a plain string sets an axis's type.

    Raises:
        ValueError: an unknown axis, parameter or type, each with the nearest valid name.

    Example:
        >>> override(Objective(), {"clip": {"high": 0.28}, "advantage": "raw"}).clip
        Clip(low=0.2, high=0.28)
    """
    valid = [item.name for item in fields(objective) if item.name != "accept_group"]
    for name, change in axes.items():
        _check_name("algorithm", name, valid)
        axis = getattr(objective, name)
        parameters = {"type": change} if isinstance(change, str) else change
        if not isinstance(parameters, Mapping):
            raise ValueError(f"algorithm.{name} takes a mapping of parameters, got {change!r}")
        for key, value in parameters.items():
            _check_name(f"algorithm.{name}", key, [item.name for item in fields(axis)])
            _check_value(f"algorithm.{name}.{key}", value)
        axis = replace(axis, **parameters)
        if name in TYPES:
            _check_name(f"algorithm.{name}.type", axis.type, list(TYPES[name]))
        objective = replace(objective, **{name: axis})
    if objective.aggregate.type == "constant_length" and objective.aggregate.length is None:
        raise ValueError("algorithm.aggregate.length: constant_length needs a length in tokens")
    return objective


def _check_name(where: str, name: str, valid: Sequence[str]) -> None:
    if name not in valid:
        near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(valid)}"
        raise ValueError(f"{where}: unknown name {name!r}; {hint}")


def _check_value(where: str, value: Any) -> None:
    if where.endswith(".type"):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{where} must be a number of at least 0, got {value!r}")


def compose(name: str, objective: Objective, *, report_entropy: bool = False) -> Algorithm:
    """The record of an objective.

    Args:
        name: what the algorithm is called in messages.
        objective: its axes.
        report_entropy: also log the mean entropy of the policy's next-token distributions.
    """

    def advantages(rows: RowBatch) -> AdvantageBatch:
        credit = objective.advantage(rows.rewards, rows.group_ids)
        return AdvantageBatch(**vars(rows), advantages=advantage_atoms.per_token(credit, rows.loss_mask))

    def loss(outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        return policy_loss(objective, outputs, batch)

    return Algorithm(
        name=name,
        advantages=advantages,
        weights=objective.aggregate,
        loss=loss,
        needs=frozenset({"old_logprobs"} | ({"ref_logprobs"} if objective.kl.coefficient else set())),
        outputs=frozenset({"logprobs"} | ({"entropy"} if report_entropy else set())),
        accept_group=objective.accept_group,
    )


def policy_loss(objective: Objective, outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
    """The objective on one micro-batch: weighted sums, so that micro-batches add up to the whole step."""
    mask, clip = batch.loss_mask, objective.clip
    # On a step with one update the policy still is the old one, so its own log-probs serve, without gradient.
    old = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = token_log_ratio(outputs.logprobs, old, mask)
    ratio = log_ratio.exp()
    pg_loss = (batch.loss_weights * clipped_policy_loss(ratio, batch.advantages, clip.low, clip.high)).sum()
    loss = pg_loss
    tokens = float(mask.sum())
    clipped = clipped_tokens(ratio, batch.advantages, clip.low, clip.high) & mask
    metrics: Metrics = {
        "actor/pg_loss": Sum(pg_loss.item()),
        "actor/pg_clipfrac": Mean(float(clipped.sum()), tokens),
        "actor/ppo_kl": Mean(-log_ratio.detach().sum().item(), tokens),
    }
    if objective.kl.coefficient:
        assert batch.ref_logprobs is not None, "the back end annotates what `needs` names"
        per_token = objective.kl(outputs.logprobs, batch.ref_logprobs, mask)
        loss = loss + objective.kl.coefficient * (batch.loss_weights * per_token).sum()
        metrics["actor/kl_loss"] = Mean(per_token.detach().sum().item(), tokens)
    if outputs.entropy is not None:
        metrics["actor/entropy"] = Mean(masked_sum(outputs.entropy.detach(), mask).item(), tokens)
    if batch.rollout_logprobs is not None:
        metrics |= rollout_gap(old, batch.rollout_logprobs, mask)
    return LossOutput(loss=loss, metrics=metrics)


@torch.no_grad()
def rollout_gap(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Metrics:
    """How far the engine's probabilities are from the trainer's: 0 but for rounding when the weights are the same."""
    zeros = torch.zeros_like(old_logprobs)
    difference = (torch.where(mask, old_logprobs, zeros).exp() - torch.where(mask, rollout_logprobs, zeros).exp()).abs()
    return {
        "training/rollout_probs_diff_mean": Mean(difference.sum().item(), float(mask.sum())),
        "training/rollout_probs_diff_max": Max(difference.max().item() if difference.numel() else 0.0),
    }
