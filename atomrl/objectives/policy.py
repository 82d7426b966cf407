"""`PolicyObjective`: a policy-gradient objective as one choice on each axis, with its advantages and its loss."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Self

import torch
from pydantic import model_validator
from torch import Tensor

from atomrl.atoms import Formula
from atomrl.atoms.kl import adaptive_coefficient, k1_kl
from atomrl.atoms.masks import masked_mean, masked_sum
from atomrl.atoms.policy_losses import token_log_ratio, weighted_sum
from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch, flat_fields
from atomrl.common.metrics import Max, Mean, Metrics, Sum
from atomrl.objectives.advantage import (
    Advantage,
    AdvantageInputs,
    AdvantagesAndReturns,
    GroupFilter,
    GRPOAdvantage,
    Shaping,
)
from atomrl.objectives.auxiliary import K3, KL, ClippedValue, Distillation, Entropy, Value
from atomrl.objectives.choice import Setting, not_none
from atomrl.objectives.objective import Formulation, Goal, Objective
from atomrl.objectives.overrides import Off
from atomrl.objectives.policy_loss import (
    Clip,
    ConstantLength,
    LossAgg,
    PolicyInputs,
    PPOClip,
    Ratio,
    TokenMean,
    TokenRatio,
    TrustRegion,
)
from atomrl.objectives.preference_loss import row_keys
from atomrl.objectives.token_weights import (
    FilterInputs,
    RolloutInputs,
    RolloutIS,
    RolloutPolicy,
    TokenFilter,
    rollout_is_product,
)
from atomrl.protocols import NOTHING, LossOutput, ModelInput, ModelOutputs, Output, RowUnit

COEFFICIENT = "kl_coefficient"
"""Key of the adaptive KL coefficient in an algorithm's state."""
OLD, NOW = r"\pi_{\mathrm{old}}", r"\pi_\theta"
MOST_STALE = 4
"""Staleness in weight versions; higher ones share one metric."""


class PolicyObjective(Objective):
    """One choice on each axis. The defaults are GRPO, so an algorithm's file states how it differs from GRPO.

    maximise  sum_{i,t} w_{i,t} [c_{i,t} s_{i,t} clip(rho_{i,t}, A_{i,t}) - beta KL_{i,t} - alpha D_{i,t} + eta H_{i,t}]

    Weights are w of `loss_agg`, c of `rollout_is` and s of `token_filter`; advantages A use the rewards of the whole
    step. If the advantage reads `values`, the critic's loss is minimised with the same weights.

    Example:
        >>> sorted(PolicyObjective(kl=K3(coefficient=0.01)).needs)
        ['old_logprobs', 'ref_logprobs']
    """

    name: str = "policy"
    advantage: Advantage = GRPOAdvantage()
    ratio: Ratio = TokenRatio()
    clip: Clip = PPOClip()
    kl: KL = K3()
    loss_agg: LossAgg = TokenMean()
    old_policy: Annotated[RolloutPolicy | None, Off("trainer")] = None
    rollout_is: Annotated[tuple[RolloutIS, ...], Off("none")] = ()
    token_filter: Annotated[TokenFilter | None, Off("all")] = None
    shaping: Shaping = Shaping()
    group_filter: Annotated[GroupFilter | None, Off("all")] = None
    value: Value = ClippedValue()
    entropy: Entropy = Entropy()
    distillation: Distillation = Distillation()
    update: Annotated[TrustRegion | None, Off("optimizer")] = None

    @model_validator(mode="after")
    def _corrections_have_their_policy(self) -> Self:
        if self.old_policy and (parts := [part.type for part in self.rollout_is if part.whole_step]):
            raise ValueError(
                f"algorithm.old_policy: rollout compares rollouts with the policy of each update, and {parts[0]} is "
                "computed once per step: use a correction without a statistic over the step (normalised: false)"
            )
        return self

    def resolved(self, *, max_completion_tokens: int | None = None, report_entropy: bool = False) -> Self:
        """Return the objective of a run, with lengths that were not set taken from `max_completion_tokens`.

        Raises:
            ValueError: a length is missing.

        Example:
            >>> PolicyObjective(loss_agg=ConstantLength()).resolved(max_completion_tokens=256).loss_agg.length
            256
        """
        changes: dict[str, Any] = {}
        if isinstance(self.loss_agg, ConstantLength) and self.loss_agg.length is None:
            changes["loss_agg"] = {"length": max_completion_tokens}
        if self.shaping.soft_overlong and self.shaping.max_completion_tokens is None:
            changes["shaping"] = {"max_completion_tokens": max_completion_tokens}
        for axis, (field,) in changes.items():
            if max_completion_tokens is None:
                raise ValueError(f"algorithm.{axis}.{field}: {getattr(self, axis).type} needs a length in tokens")
        return super(PolicyObjective, self.override(changes)).resolved(report_entropy=report_entropy)

    @property
    def has_critic(self) -> bool:
        """The advantage reads a critic's values."""
        return "values" in self.advantage.required()

    @property
    def needs(self) -> frozenset[ModelInput]:
        always: set[ModelInput] = set() if self.old_policy else {"old_logprobs"}
        always |= {"ref_logprobs"} if self.kl.applied_to else set()
        return self.advantage_inputs | self.clip.required() | always

    @property
    def advantage_inputs(self) -> frozenset[ModelInput]:
        needs: set[ModelInput] = {"old_logprobs"} if any(part.whole_step for part in self.rollout_is) else set()
        for choice in (self.advantage, *self.rollout_is, *([self.token_filter] if self.token_filter else [])):
            needs |= choice.required()
        if self._kl_before_updates:
            needs |= {"old_logprobs", "ref_logprobs"}
        return frozenset(needs)

    @property
    def reads_rollout(self) -> str:
        """The setting that reads the engine's log-probs, for messages; "" if there is none."""
        if self.rollout_is:
            return f"rollout_is={' + '.join(part.type for part in self.rollout_is)}"
        return f"old_policy={self.old_policy.type}" if self.old_policy else ""

    @property
    def _kl_before_updates(self) -> bool:
        """The KL at the start of the step enters the reward or the adaptive coefficient."""
        return self.kl.applied_to == "reward" or bool(self.kl.applied_to and self.kl.target)

    @property
    def outputs(self) -> frozenset[Output]:
        names: set[Output] = {"values"} if self.has_critic else set()
        names |= {"entropy"} if self.entropy.coefficient else set()
        names |= {"distributions", "teacher_distributions"} if self.distillation.coefficient else set()
        return super().outputs | names

    @property
    def row_unit(self) -> RowUnit:
        return self.loss_agg.row_unit

    @property
    def extra_rollouts(self) -> Mapping[str, Any] | None:
        return self.advantage.extra_rollouts

    def loss_weights(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        return self.loss_agg(mask, group_ids)

    @torch.no_grad()
    def advantages(self, rows: RowBatch, state: Mapping[str, float] = NOTHING) -> AdvantageBatch:
        """Compute the advantages of a step, with shaping, KL in the reward, token filter and whole-step corrections.

        Args:
            rows: with the inputs that `advantage_inputs` names.
            state: contains the adaptive KL coefficient, which is updated from the KL of these rows.

        Raises:
            ValueError: an input is missing, for example the engine's log-probs for a correction.
        """
        if (reader := self.reads_rollout) and rows.rollout.logprobs is None:
            raise ValueError(f"algorithm.{reader} needs log-probs, which this engine does not return")
        new_state = ({COEFFICIENT: self.kl.coefficient} if self.kl.target else {}) | dict(state)
        mask = rows.loss_mask
        if not rows.rows:
            return AdvantageBatch(**vars(rows), advantages=torch.zeros(mask.shape), state=new_state)
        # KL in the reward. The reward is penalised with the old coefficient; the new one applies from the next step on.
        kl_penalty = None
        if self._kl_before_updates:
            kl = self.kl(not_none(rows.old_logprobs), not_none(rows.ref_logprobs), mask)
            coefficient = new_state.get(COEFFICIENT, self.kl.coefficient)
            kl_penalty = coefficient * kl if self.kl.applied_to == "reward" else None
            if self.kl.target:
                measured, completions = masked_mean(kl, mask).item(), float(rows.rows)
                new_state[COEFFICIENT] = adaptive_coefficient(
                    coefficient, measured, self.kl.target, self.kl.horizon, completions
                )

        # Rewards after shaping. Shaping and token rewards are one more part of the reward, of weight 1, so that the
        # parts add up to the total.
        rewards, parts = self.shaping(rows), rows.rollout.reward_parts
        by_token = rows.rollout.token_rewards
        if parts is not None and (self.shaping.changes_rewards or by_token is not None):
            more = rewards - rows.rewards + (0 if by_token is None else by_token.sum(1))
            parts = torch.cat([parts, torch.stack([more, torch.ones_like(more)], -1)[:, None].to(parts)], 1)

        # Advantages, per completion or per token.
        flat = flat_fields(rows)
        unchanged = {field.name: flat[field.name] for field in fields(AdvantageInputs) if field.name in flat}
        given = {"rewards": rewards, "mask": mask, "parts": parts, "kl_penalty": kl_penalty}
        result = self.advantage(AdvantageInputs(**(unchanged | given)))
        advantages, returns = result if isinstance(result, AdvantagesAndReturns) else (result, None)
        if self.shaping.mask_truncated:
            mask = mask & ~rows.truncated[:, None]
        advantages = torch.where(mask, advantages[:, None] if advantages.dim() == 1 else advantages, 0.0)
        changes: dict[str, Any] = {"loss_mask": mask, "advantages": advantages, "returns": returns, "state": new_state}

        # Filters and corrections that need the whole step.
        if self.token_filter is not None:
            changes["token_filter"] = self._select_tokens(rows, mask, advantages)
        if any(part.whole_step for part in self.rollout_is):
            old = not_none(rows.old_logprobs)
            inputs = RolloutInputs(old, not_none(rows.rollout.logprobs), old, advantages, mask)
            changes["rollout_is_weights"] = rollout_is_product(self.rollout_is, inputs, whole_step=True)
        return AdvantageBatch(**(vars(rows) | changes))

    def _select_tokens(self, rows: RowBatch, mask: Tensor, advantages: Tensor) -> Tensor:
        """Apply the token filter over the whole step -> [B, T] bool.

        Rows are sorted, and the generator seeded, by the rows' contents. So neither the order of rows, a split, nor a
        resume changes the selection.
        """
        assert self.token_filter is not None
        keys = row_keys(rows)
        order = keys.argsort(stable=True)
        generator = torch.Generator().manual_seed(int(keys.sum()) % 2**63)
        old, entropy = (None if item is None else item[order] for item in (rows.old_logprobs, rows.old_entropy))
        selected = self.token_filter(FilterInputs(mask[order], advantages[order], old, entropy, generator))
        return torch.empty_like(selected).index_copy(0, order, selected)

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        """Compute the loss of one micro-batch: weighted sums, which add up to the loss of the step."""
        if outputs.logprobs is None:  # update of a separate critic
            return LossOutput(*self.value.loss(outputs, batch))
        mask, logprobs = batch.loss_mask, outputs.logprobs

        # The policy term of each token: ratio and clip. With a single update per step the policy is still the old
        # policy, so use its own log-probs, detached.
        current = batch.old_logprobs is None or self.old_policy is not None
        trainer = logprobs.detach() if current else not_none(batch.old_logprobs)
        old = not_none(batch.rollout.logprobs) if self.old_policy else trainer
        inputs = PolicyInputs(
            log_ratio=self.ratio(logprobs, old, mask),
            advantages=batch.advantages,
            logprobs=logprobs,
            old_logprobs=old,
            mask=mask,
            rollout_logprobs=batch.rollout.logprobs,
            ref_logprobs=batch.ref_logprobs,
            teacher_logprobs=batch.teacher_logprobs,
            old_entropy=batch.old_entropy,
        )
        result = self.clip(inputs)
        term, clipped = result if isinstance(result, tuple) else (result, mask & False)
        clipped, tokens = clipped & mask, mask.sum()
        metrics: Metrics = {
            "actor/pg_clipfrac": Mean(clipped.sum(), tokens),
            "actor/ppo_kl": Mean(-token_log_ratio(logprobs.detach(), old, mask).sum(), tokens),
        }

        # Factors of each token: the filter and rollout importance sampling. Then the weighted sum.
        if batch.token_filter is not None and self.token_filter is not None:
            term = self.token_filter.use(term, batch.token_filter, inputs)
            metrics["actor/selected_ratio"] = Mean((batch.token_filter & mask).sum(), tokens)
        factors: list[Tensor] = []
        if batch.rollout.logprobs is not None:
            metrics |= rollout_gap(trainer, batch.rollout.logprobs, mask, batch.rollout.staleness)
            rollout = RolloutInputs(trainer, batch.rollout.logprobs, logprobs, batch.advantages, mask)
            by_row = rollout_is_product(self.rollout_is, rollout, whole_step=False)
            factors = [factor for factor in (batch.rollout_is_weights, by_row) if factor is not None]
        if factors:
            factor = torch.stack(factors).prod(0)
            metrics["rollout_corr/weight_mean"] = Mean(masked_sum(factor, mask), tokens)
            metrics["rollout_corr/dropped_ratio"] = Mean(((factor == 0) & mask).sum(), tokens)
        loss = weighted_sum(term, batch.loss_weights, *factors)
        metrics["actor/pg_loss"] = Sum(loss.detach())

        # Other terms: KL to the reference, value loss, entropy bonus, distillation.
        if self.kl.applied_to:
            coefficient = batch.state.get(COEFFICIENT, self.kl.coefficient)
            metrics["actor/kl_coef"] = Mean(coefficient)
            if self.kl.applied_to == "loss":
                kl = self.kl(logprobs, not_none(batch.ref_logprobs), mask)
                loss = loss + coefficient * weighted_sum(kl, batch.loss_weights)
                metrics["actor/kl_loss"] = Mean(kl.detach().sum(), tokens)
        if batch.teacher_logprobs is not None:
            metrics["actor/teacher_kl"] = Mean(k1_kl(trainer, batch.teacher_logprobs, mask).sum(), tokens)
        if outputs.entropy is not None:
            metrics["actor/entropy"] = Mean(masked_sum(outputs.entropy.detach(), mask), tokens)
        parts: list[Value | Entropy | Distillation]
        parts = [part for part in (self.entropy, self.distillation) if part.coefficient]
        if self.has_critic and outputs.values is not None:  # no values: update of the policy beside a separate critic
            parts.insert(0, self.value)
        for part in parts:
            part_loss, part_metrics = part.loss(outputs, batch)
            loss = loss + part_loss
            metrics |= part_metrics
        return LossOutput(loss, metrics, {"log_ratio": inputs.log_ratio.detach(), "clipped": clipped})

    def off_axes(self) -> set[str]:
        learns = self.advantage.type != "none"
        on = {
            "ratio": learns,
            "clip": learns,
            "kl": self.kl.applied_to is not None,
            "shaping": self.shaping != Shaping(),
            "value": self.has_critic,
            "entropy": self.entropy.coefficient > 0,
            "distillation": self.distillation.coefficient > 0,
        }
        return {name for name, part in on.items() if not part}

    def formulation(self) -> Formulation:
        used = self.used_axes()
        weights = self.loss_agg.equation()
        over, where = Formula("sum_{i,t} w_{i,t}", weights.latex), [Formula(weights.text, "")]
        factors, terms, added = [], [], []
        if self.token_filter:
            text, latex = self.token_filter.equation()
            if self.token_filter.adds:
                added = [Formula(f"- {text}", f"- {latex}")]
            else:
                factors, where = [Formula("s_{i,t}", latex)], [*where, Formula(f"s_{{i,t}} = {text}", "")]
        if used["rollout_is"]:
            correction = self.correction()
            factors.insert(0, Formula("c_{i,t}", correction.latex))
            where.append(Formula(f"c_{{i,t}} = {correction.text}", ""))
        for choice in used["clip"]:
            texts, printed = zip(*factors, choice.equation(), strict=True)
            terms.append(Formula(" ".join(texts), r"\, ".join(printed)))
        terms += added
        terms += [Formula("- beta KL_{i,t}", r"- \beta\, \mathrm{KL}_{i,t}")] if self.kl.applied_to == "loss" else []
        terms += [Formula("eta H_{i,t}", r"\eta\, \mathcal{H}_{i,t}") for _ in used["entropy"]]
        terms += [Formula("- alpha D_{i,t}", r"- \alpha\, D_{i,t}") for _ in used["distillation"]]
        goals = [Goal(Formula("maximise", r"\max_\theta"), over, tuple(terms))]
        for choice in used["value"]:
            loss = Formula(f"c_v {choice.text}", rf"c_v\, {choice.latex}")
            goals.append(Goal(Formula("minimise", r"\min_\phi"), over, (loss,)))
        rho = used["ratio"] if any("rho" in term.text for term in terms) else ()
        for choice in (*used["entropy"], *used["distillation"], *rho, self.advantage):
            where += [choice.equation(), *choice.where()]
        where += _reward_formulas(self)
        for name in ("kl", "old_policy", "shaping", "clip", "group_filter", "value", "update"):
            for choice in used[name]:
                equation = () if name in ("shaping", "clip", "value") else (choice.equation(),)
                where += [*equation, *choice.where()]
        return Formulation(tuple(goals), tuple(where))

    def correction(self) -> Formula:
        """Return the product of the corrections `rollout_is`, of which there is at least one."""
        parts = [part.equation() for part in self.rollout_is]
        if self.old_policy:
            parts = [Formula(part.text.replace("pi_old", "pi"), part.latex.replace(OLD, NOW)) for part in parts]
        text = " * ".join(f"({part.text})" for part in parts) if len(parts) > 1 else parts[0].text
        return Formula(text, r" \cdot ".join(part.latex for part in parts))

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        cuts = {"top_p": (setting.top_p, 1), "top_k": (setting.top_k, 0), "min_p": (setting.min_p, 0)}
        on = [f"{name}={value}" for name, (value, off) in cuts.items() if value != off]
        if on and setting.logprobs_over != "kept":
            option = on[0]
            correction = "the correction ignores the truncation" if self.rollout_is else "which is not corrected"
            cut = f"biased: {option} truncates sampling, but log-probs are over the whole vocabulary, {correction}"
            yield f"{cut}; rollout.logprobs_over=kept uses the kept tokens"
        if setting.temperature == 0:
            yield "no effect: at temperature 0 all completions of a prompt are the same, so baselines leave no signal"


@torch.no_grad()
def rollout_gap(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, staleness: Tensor | None = None
) -> Metrics:
    """Return metrics of the difference between the engine's and the trainer's token probabilities.

    With the same weights it is 0 up to rounding. With `staleness` [B, T], the mean is also reported for each number of
    weight versions behind, `MOST_STALE` and more together.
    """
    old, rollout = (logprobs.masked_fill(~mask, 0.0).exp() for logprobs in (old_logprobs, rollout_logprobs))
    difference, name = (old - rollout).abs(), "training/rollout_probs_diff_mean"
    metrics: Metrics = {
        name: Mean(difference.sum(), mask.sum()),
        "training/rollout_probs_diff_max": Max(difference.max() if difference.numel() else 0.0),
    }
    if staleness is not None:
        for versions in range(MOST_STALE + 1):
            tokens = mask & (staleness.clamp(0, MOST_STALE) == versions)
            metrics[f"{name}/staleness_{versions}"] = Mean(masked_sum(difference, tokens), tokens.sum())
    return metrics


def _reward_formulas(objective: PolicyObjective) -> list[Formula]:
    """Return the lines that define the reward: per token, or with the KL penalty per completion."""
    penalised = objective.kl.applied_to == "reward"
    if objective.advantage.uses_token_rewards:
        penalty = Formula(" - beta KL_{i,t}", r" - \beta\, \mathrm{KL}_{i,t}") if penalised else Formula("", "")
        reward = Formula("r_{i,t} = r_i [t = last]", r"r_{i,t} = r_i\,\mathbb{1}[t = |o_i|]")
        return [Formula(reward.text + penalty.text, reward.latex + penalty.latex)]
    penalty = Formula("r_i <- r_i - beta sum_t KL_{i,t}", r"r_i \leftarrow r_i - \beta \sum_t \mathrm{KL}_{i,t}")
    return [penalty] if penalised else []
