"""The objective, one choice on each axis, and the composer that makes the record that loop and back ends know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from atomrl.atoms.advantages import per_token
from atomrl.atoms.kl import adaptive_coefficient, k1_kl
from atomrl.atoms.masks import masked_mean, masked_sum
from atomrl.atoms.ratios import token_log_ratio
from atomrl.atoms.reductions import weighted_sum
from atomrl.metrics import Max, Mean, Metrics, Sum
from atomrl.objective.axis import check_name
from atomrl.objective.correction import Correction, Rollout
from atomrl.objective.credit import AcceptGroup, Advantage, Credit, Scores, Shaping, extra_rollouts, with_shaping
from atomrl.objective.critic import Entropy, Value
from atomrl.objective.distillation import Distillation
from atomrl.objective.pairing import row_keys
from atomrl.objective.policy import Aggregate, Candidates, Clip, Kl, Ratio, Selection, Surrogate
from atomrl.objective.update import Step, Update
from atomrl.protocols import Algorithm, Annotation, Forward, LossOutput, ModelOutputs, Output
from atomrl.stages import AdvantageBatch, RowBatch, TrainingBatch

COEFFICIENT = "kl_coefficient"
"""Where an adaptive coefficient is kept in an algorithm's state."""


@dataclass(frozen=True)
class Objective:
    """One choice on each axis.

    maximise  sum_{i,t} w_{i,t} [c_{i,t} s_{i,t} clip(rho_{i,t}, A_{i,t}) - beta KL_{i,t} - alpha D_{i,t} + eta H_{i,t}]

    with weights w of the aggregate, correction c, selection s, and A from the rewards of a whole step; and where A is
    made with a critic, minimise its loss with the same weights.
    """

    advantage: Advantage = field(default_factory=Advantage)
    ratio: Ratio = field(default_factory=Ratio)
    clip: Clip = field(default_factory=Clip)
    kl: Kl = field(default_factory=Kl)
    aggregate: Aggregate = field(default_factory=Aggregate)
    correction: Correction = field(default_factory=Correction)
    selection: Selection = field(default_factory=Selection)
    shaping: Shaping = field(default_factory=Shaping)
    accept_group: AcceptGroup = field(default_factory=AcceptGroup)
    value: Value = field(default_factory=Value)
    entropy: Entropy = field(default_factory=Entropy)
    distillation: Distillation = field(default_factory=Distillation)
    update: Update = field(default_factory=Update)

    def algorithm(
        self, name: str, *, report_entropy: bool = False, max_completion_tokens: int | None = None
    ) -> Algorithm:
        """The record of this objective (`compose`)."""
        return compose(name, self, report_entropy=report_entropy, max_completion_tokens=max_completion_tokens)

    @property
    def kl_in(self) -> str | None:
        """`loss` or `reward`; None where there is no penalty."""
        return self.kl.place if self.kl.coefficient else None

    @property
    def has_critic(self) -> bool:
        """Whether the advantage is made with a critic's values."""
        return "values" in self.advantage.reads


def override(objective: Objective, axes: Mapping[str, Any]) -> Objective:
    """The objective with some axes changed; a plain string sets an axis's type, a list several corrections at once.

    Raises:
        ValueError: an unknown axis, parameter or type, each with the nearest valid name.

    Example:
        >>> override(Objective(), {"clip": {"high": 0.28}, "advantage": "raw"}).clip
        Clip('ppo', high=0.28)
    """
    for name, change in axes.items():
        check_name("algorithm", name, [item.name for item in fields(objective)])
        if isinstance(change, list):
            objective = replace(objective, **{name: getattr(objective, name).several(change)})
            continue
        parameters = {"type": change} if isinstance(change, str) else change
        if not isinstance(parameters, Mapping):
            raise ValueError(f"algorithm.{name} takes a mapping of parameters, got {change!r}")
        axis = getattr(objective, name)
        objective = replace(objective, **{name: axis.with_parameters(**parameters)})
    return objective


def with_limit(objective: Objective, max_completion_tokens: int | None) -> Objective:
    """The rollout's limit on length, where an axis takes it and was not given its own.

    Raises:
        ValueError: there is none to take.

    Example:
        >>> with_limit(Objective(aggregate=Aggregate("constant_length")), 256).aggregate.length
        256
    """
    if objective.aggregate.parameters.get("length", 1) is None:
        if max_completion_tokens is None:
            raise ValueError("algorithm.aggregate.length: constant_length needs a length in tokens")
        objective = replace(objective, aggregate=objective.aggregate.with_parameters(length=max_completion_tokens))
    shaping = objective.shaping
    if shaping.soft_overlong and shaping.max_completion_tokens is None:
        if max_completion_tokens is None:
            raise ValueError("algorithm.shaping.max_completion_tokens: soft_overlong needs the limit it ends at")
        objective = replace(objective, shaping=shaping.with_parameters(max_completion_tokens=max_completion_tokens))
    return objective


def compose(
    name: str, objective: Objective, *, report_entropy: bool = False, max_completion_tokens: int | None = None
) -> Algorithm:
    """The record of an objective.

    Args:
        name: what the algorithm is called in messages.
        objective: its axes.
        report_entropy: also log the mean entropy of the policy's next-token distributions.
        max_completion_tokens: of the rollout, for axes that take it (`with_limit`).

    Raises:
        ValueError: an axis needs a limit that is not known, or parameters that do not go together.
    """
    objective = with_limit(objective, max_completion_tokens)
    rehearse(objective)
    state: dict[str, float] = {COEFFICIENT: objective.kl.coefficient} if objective.kl.target else {}

    def advantages(rows: RowBatch) -> AdvantageBatch:
        return credit(objective, rows, state)

    def loss(outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        return policy_loss(objective, outputs, batch, state.get(COEFFICIENT))

    reads: set[Annotation] = set(objective.selection.reads | objective.advantage.reads | objective.correction.reads)
    if objective.kl_in == "reward" or (objective.kl_in and objective.kl.target):
        reads |= {"old_logprobs", "ref_logprobs"}
    outputs: set[Output] = {"logprobs"} | ({"values"} if objective.has_critic else set())
    if report_entropy or objective.entropy.coefficient:
        outputs |= {"entropy"}
    if objective.distillation.coefficient:
        outputs |= {"distributions", "teacher_distributions"}

    def update(parameters: Sequence[Tensor], micro_batches: Sequence[TrainingBatch], forward: Forward) -> Metrics:
        return objective.update(Step(loss, frozenset(outputs - {"values"}), parameters, micro_batches, forward))

    return Algorithm(
        name=name,
        advantages=advantages,
        weights=objective.aggregate,
        loss=loss,
        needs=frozenset({"old_logprobs"} | ({"ref_logprobs"} if objective.kl_in else set()) | reads),
        advantages_read=frozenset(reads),
        outputs=frozenset(outputs),
        row_unit=getattr(objective.aggregate.function, "row_unit", "row"),
        accept_group=None if objective.accept_group.type == "all" else objective.accept_group,
        extra_rollouts=extra_rollouts(objective.advantage),
        state=state,
        update=None if objective.update.type == "optimizer" else update,
    )


def rehearse(objective: Objective) -> None:
    """Compute the objective of two short rows, so that a parameter that an atom refuses is found before a run begins.

    Raises:
        ValueError: what the atom says.
    """
    mask = torch.tensor([[False, True, True]] * 2)
    zeros = torch.zeros(2, 3)
    rows = RowBatch(
        tokens=torch.ones(2, 3, dtype=torch.long), loss_mask=mask, lengths=torch.tensor([3, 3]),
        prompt_lengths=torch.tensor([1, 1]), group_ids=torch.tensor([0, 0]), rewards=torch.tensor([0.0, 1.0]),
        truncated=torch.tensor([False, False]), rollout_logprobs=zeros, old_logprobs=zeros, ref_logprobs=zeros,
        old_entropy=zeros, reward_parts=torch.ones(2, 1, 2), baseline_rewards=torch.zeros(2), values=zeros,
        teacher_logprobs=zeros,
    )  # fmt: skip
    same = torch.full((4, 2), 0.5).log()
    outputs = ModelOutputs(
        logprobs=zeros, entropy=zeros, values=zeros, distributions=same, teacher_distributions=same
    )  # fmt: skip
    try:
        credited = credit(objective, rows, {COEFFICIENT: objective.kl.coefficient})
        weights = objective.aggregate(mask, rows.group_ids)
        policy_loss(objective, outputs, TrainingBatch(**vars(credited), loss_weights=weights))
    except ValueError as error:
        raise ValueError(f"algorithm: {error}") from None


@torch.no_grad()
def credit(objective: Objective, rows: RowBatch, state: dict[str, float] | None = None) -> AdvantageBatch:
    """Shaping, KL in the reward, advantages and the selection of tokens, over all rows of a step.

    Args:
        objective: its axes.
        rows: annotated with what they read.
        state: holds an adaptive KL coefficient, which is brought up to date from the KL of these rows.

    Raises:
        ValueError: the rows lack something, as the engine's log-probs for a correction.
    """
    if objective.correction.type != "none" and rows.rollout_logprobs is None:
        raise ValueError(f"algorithm.correction={objective.correction.type} needs log-probs that this engine lacks")
    if objective.advantage.type == "gdpo" and rows.reward_parts is None:
        raise ValueError("algorithm.advantage: gdpo needs the parts of the reward, which these rows lack")
    mask = rows.loss_mask
    if not rows.rows:
        return AdvantageBatch(**vars(rows), advantages=torch.zeros(mask.shape))
    kl, kl_penalty = _start_kl(objective, rows), None
    if kl is not None and objective.kl_in == "reward":
        kl_penalty = (state or {}).get(COEFFICIENT, objective.kl.coefficient) * kl
    if kl is not None and objective.kl.target and state is not None:
        measured, target, horizon = (
            masked_mean(kl, mask).item(),
            float(objective.kl.target),
            float(objective.kl.horizon),
        )
        state[COEFFICIENT] = adaptive_coefficient(state[COEFFICIENT], measured, target, horizon, float(rows.rows))
    rewards = objective.shaping(rows)
    parts = with_shaping(rows, rewards)
    found = objective.advantage(
        Scores(
            rewards, rows.group_ids, mask, kl_penalty, parts, rows.baseline_rewards, rows.values,
            rows.old_logprobs, rows.teacher_logprobs,
        )
    )  # fmt: skip
    advantages, returns = found if isinstance(found, Credit) else (found, None)
    if objective.shaping.mask_truncated:
        mask = mask & ~rows.truncated[:, None]
    advantages = per_token(advantages, mask) if advantages.dim() == 1 else advantages.masked_fill(~mask, 0.0)
    changes: dict[str, Any] = {"loss_mask": mask, "advantages": advantages, "returns": returns}
    if objective.selection.type != "all":
        changes["selected"] = _select(objective.selection, rows, mask, advantages)
    if objective.correction.reads:
        old = rows.old_logprobs
        assert old is not None, "annotated, as `advantages_read` asks"
        changes["correction"] = objective.correction.factor(
            Rollout(old, rows.rollout_logprobs, old, advantages, mask), whole_step=True
        )
    return AdvantageBatch(**(vars(rows) | changes))


def _start_kl(objective: Objective, rows: RowBatch) -> Tensor | None:
    """KL of the policy at the start of the step from the reference, where credit is made of it."""
    if objective.kl_in is None or not (objective.kl_in == "reward" or objective.kl.target):
        return None
    assert rows.old_logprobs is not None and rows.ref_logprobs is not None, "annotated, as `advantages_read` asks"
    return objective.kl(rows.old_logprobs, rows.ref_logprobs, rows.loss_mask)


def _select(selection: Selection, rows: RowBatch, mask: Tensor, advantages: Tensor) -> Tensor:
    """Chosen over the whole step, in an order and with random numbers that only depend on what the rows hold: so no
    order of rows and no split changes the choice, and a run that is resumed makes the same one."""
    keys = row_keys(rows)
    order = keys.argsort(stable=True)

    def ordered(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[order]

    chosen = selection(
        Candidates(
            mask[order],
            advantages[order],
            ordered(rows.old_logprobs),
            ordered(rows.old_entropy),
            torch.Generator().manual_seed(int(keys.sum()) % 2**63),
        )
    )
    return torch.empty_like(chosen).index_copy(0, order, chosen)


def policy_loss(
    objective: Objective, outputs: ModelOutputs, batch: TrainingBatch, kl_coefficient: float | None = None
) -> LossOutput:
    """The objective on one micro-batch: weighted sums, so that micro-batches add up to the whole step.

    Args:
        objective: its axes.
        outputs: of the forward pass.
        batch: rows of an optimizer step.
        kl_coefficient: in the place of the objective's own, where it adapts.
    """
    mask, logprobs = batch.loss_mask, outputs.logprobs
    # On a step with one update the policy still is the old one, so its own log-probs serve, without gradient.
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    surrogate = Surrogate(objective.ratio(logprobs, old, mask), batch.advantages, logprobs, old, mask)
    per_token_loss, clipped = objective.clip(surrogate)
    tokens = float(mask.sum())
    metrics: Metrics = {
        "actor/pg_clipfrac": Mean(float((clipped & mask).sum()), tokens),
        "actor/ppo_kl": Mean(-token_log_ratio(logprobs.detach(), old, mask).sum().item(), tokens),
    }
    if batch.selected is not None:
        per_token_loss = objective.selection.use(per_token_loss, batch.selected, surrogate)
        metrics["actor/selected_ratio"] = Mean(float((batch.selected & mask).sum()), tokens)
    factors = []
    if batch.rollout_logprobs is not None:
        metrics |= rollout_gap(old, batch.rollout_logprobs, mask)
        rollout = Rollout(old, batch.rollout_logprobs, logprobs, batch.advantages, mask)
        found = (batch.correction, objective.correction.factor(rollout, whole_step=False))
        factors = [factor for factor in found if factor is not None]
        if factors:
            factor = torch.stack(factors).prod(0)
            metrics["rollout_corr/weight_mean"] = Mean(masked_sum(factor, mask).item(), tokens)
            metrics["rollout_corr/dropped_ratio"] = Mean(float(((factor == 0) & mask).sum()), tokens)
    loss = weighted_sum(per_token_loss, batch.loss_weights, *factors)
    metrics["actor/pg_loss"] = Sum(loss.item())
    if objective.kl_in is not None:
        coefficient = objective.kl.coefficient if kl_coefficient is None else kl_coefficient
        metrics["actor/kl_coef"] = Mean(coefficient)
        if objective.kl_in == "loss":
            assert batch.ref_logprobs is not None, "the back end annotates what `needs` names"
            kl = objective.kl(logprobs, batch.ref_logprobs, mask)
            loss = loss + coefficient * weighted_sum(kl, batch.loss_weights)
            metrics["actor/kl_loss"] = Mean(kl.detach().sum().item(), tokens)
    if batch.teacher_logprobs is not None:
        metrics["actor/teacher_kl"] = Mean(k1_kl(old, batch.teacher_logprobs, mask).sum().item(), tokens)
    if outputs.entropy is not None:
        metrics["actor/entropy"] = Mean(masked_sum(outputs.entropy.detach(), mask).item(), tokens)
    # A step of the policy alone asks for no values.
    critic = objective.has_critic and outputs.values is not None
    terms = [objective.value.loss(outputs.values, batch)] if critic else []
    terms += [objective.entropy.loss(outputs.entropy, batch)] if objective.entropy.coefficient else []
    terms += [objective.distillation.loss(outputs, batch)] if objective.distillation.coefficient else []
    for term, seen in terms:
        loss = loss + term
        metrics |= seen
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
