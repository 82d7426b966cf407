"""A preference objective, one choice on each axis, and the record that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from atomrl.atoms.advantages import per_token
from atomrl.atoms.masks import masked_sum, row_sum
from atomrl.atoms.preference_scores import implicit_reward
from atomrl.atoms.reductions import sequence_mean, weighted_sum
from atomrl.atoms.unpaired_losses import kto_reference, running_mean
from atomrl.metrics import Mean, Metrics, Sum
from atomrl.objective.axis import check_name, checked_value
from atomrl.objective.credit import AcceptGroup
from atomrl.objective.pairing import alone, best_and_worst, labels, pair_rows, row_keys, shared_lengths
from atomrl.objective.preference import (
    RANKED,
    UNPAIRED,
    Completions,
    Demonstrated,
    Labelled,
    Loss,
    Nll,
    Pair,
    Score,
)
from atomrl.protocols import Algorithm, Annotation, LossOutput, ModelOutputs
from atomrl.stages import AdvantageBatch, RowBatch, TrainingBatch, select_rows

MEAN_TOKENS, REFERENCE, COUNT = "chosen_tokens", "reference", "reference_count"
"""What an algorithm's state holds of a whole step."""


@dataclass(frozen=True)
class PreferenceObjective:
    """One choice on each axis.

    minimise  mean over pairs of [ sum_k weight_k L_k(s_chosen, s_rejected) + coefficient NLL(chosen) ]

    A pair is the completion of a prompt with the highest reward and that with the lowest; on given preferences their
    rewards are what the data say, on rollouts what they earned.
    """

    score: Score = field(default_factory=Score)
    loss: tuple[Loss, ...] = (Loss(),)
    loss_weights: tuple[float, ...] = (1.0,)
    nll: Nll = field(default_factory=Nll)
    accept_group: AcceptGroup = field(default_factory=AcceptGroup)
    online: bool = False
    """Made for rollouts (`atomrl train`), not for given preferences; no axis."""

    @property
    def unpaired(self) -> bool:
        """Whether single completions with a label are what it takes (it makes labels of pairs too)."""
        return self.loss[0].type in UNPAIRED

    @property
    def needs_mismatched(self) -> bool:
        """Whether it takes completions of other prompts: groups of one with a reward of 0."""
        return self.loss[0].type == "kto"

    def override(self, axes: Mapping[str, Any]) -> PreferenceObjective:
        """With some axes changed; `loss` is one, or a list, with `loss_weights`.

        Raises:
            ValueError: an unknown axis, parameter or type, each with the nearest valid name.

        Example:
            >>> PreferenceObjective().override({"loss": {"beta": 0.5}}).loss
            (Loss('sigmoid', beta=0.5),)
            >>> PreferenceObjective().override({"loss": ["hinge", {"type": "ipo"}]}).loss_weights
            (1.0, 1.0)
        """
        changes: dict[str, Any] = {}
        for name, change in axes.items():
            check_name("algorithm", name, [item.name for item in fields(self) if item.name != "online"])
            if name == "loss_weights":
                given = change if isinstance(change, list | tuple) else [change]
                changes[name] = tuple(checked_value("algorithm.loss_weights", weight, float) for weight in given)
            elif name == "loss" and isinstance(change, list | tuple):
                changes[name] = tuple(_changed(Loss(), "loss", item) for item in change)
                changes.setdefault("loss_weights", (1.0,) * len(change))
            elif name == "loss":
                changes[name] = (_changed(self.loss[0], "loss", change), *self.loss[1:])
            else:
                changes[name] = _changed(getattr(self, name), name, change)
        return replace(self, **changes)

    def algorithm(
        self, name: str, *, report_entropy: bool = False, max_completion_tokens: int | None = None
    ) -> Algorithm:
        """The record of this objective.

        Args:
            name: what the algorithm is called in messages.
            report_entropy: also log the mean entropy of the policy's next-token distributions.
            max_completion_tokens: no axis takes it.

        Raises:
            ValueError: parameters that do not go together, or that an atom refuses.
        """
        check(self)
        state: dict[str, float] = {}
        in_advance: frozenset[Annotation] = frozenset().union(*(loss.reads for loss in self.loss))
        return Algorithm(
            name=name,
            advantages=lambda rows: pair_up(self, rows, state),
            weights=sequence_mean,
            loss=lambda outputs, batch: preference_loss(self, outputs, batch, state),
            needs=self.score.reads | in_advance,
            advantages_read=in_advance,
            outputs=frozenset({"logprobs"} | ({"entropy"} if report_entropy else set())),
            row_unit="row" if self.unpaired else "pair",
            accept_group=None if self.accept_group.type == "all" else self.accept_group,
            state=state,
        )

    def scores(self, logprobs: Tensor, rows: RowBatch) -> Tensor:
        """[B] of the rows' trained tokens."""
        shared = shared_lengths(rows.loss_mask, rows.group_ids)
        return self.score(Completions(logprobs, rows.ref_logprobs, rows.loss_mask, shared))

    def row_scores(self, rows: RowBatch) -> dict[str, Tensor]:
        """How rows annotated with `old_logprobs` are judged: the implicit `reward`, and the `logprob` alone."""
        assert rows.old_logprobs is not None
        reward = implicit_reward(self.scores(rows.old_logprobs, rows), self.loss[0].beta)
        return {"reward": reward, "logprob": row_sum(rows.old_logprobs, rows.loss_mask)}


def _changed(axis: Any, name: str, change: Any) -> Any:
    parameters = {"type": change} if isinstance(change, str) else change
    if not isinstance(parameters, Mapping):
        raise ValueError(f"algorithm.{name} takes a mapping of parameters, got {change!r}")
    return axis.with_parameters(**parameters)


def check(objective: PreferenceObjective) -> None:
    """Raise ValueError for axes that do not go together, or a parameter that an atom refuses."""
    types = [loss.type for loss in objective.loss]
    if len(types) != len(objective.loss_weights) or not types:
        raise ValueError(f"algorithm.loss_weights: {len(objective.loss_weights)} weights for {len(types)} losses")
    if len(types) > 1 and set(types) & (UNPAIRED | RANKED):
        alone_only = ", ".join(sorted(set(types) & (UNPAIRED | RANKED)))
        raise ValueError(f"algorithm.loss: {alone_only} cannot be one of several; what it compares are not the pairs")
    reads_reference = "ref_logprobs" in objective.score.reads
    if set(types) & (UNPAIRED | RANKED) and not reads_reference:
        raise ValueError(f"algorithm.score: {types[0]} compares with a reference; score must be log_ratio")
    if "odds_ratio" in types and (reads_reference or not objective.score.length_normalised):
        raise ValueError("algorithm.score: odds_ratio takes mean log-probs: {type: logprob, length_normalised: true}")
    if "aot" in types and (objective.score.divergence != "reverse_kl" or objective.score.length_normalised):
        raise ValueError("algorithm.score: aot ranks sums of log-ratios: reverse_kl, and not length_normalised")
    if types[0] in UNPAIRED and objective.nll.coefficient:
        raise ValueError(f"algorithm.nll: {types[0]} has no pairs, and so no chosen completion to imitate")
    if types[0] in UNPAIRED | {"aot_unpaired"} and objective.score.ld_alpha != 1:
        raise ValueError(f"algorithm.score.ld_alpha: {types[0]} has no pairs, and so no length that two share")
    minus = torch.full((2,), -1.0)
    try:
        for loss in objective.loss:
            loss(Labelled(minus, minus, minus[0]) if loss.type in UNPAIRED else Pair(minus, minus))
    except ValueError as error:
        raise ValueError(f"algorithm: {error}") from None


@torch.no_grad()
def pair_up(objective: PreferenceObjective, rows: RowBatch, state: dict[str, float]) -> AdvantageBatch:
    """Rows with 1 as the advantage of chosen and good completions and -1 as that of rejected and bad ones; the others
    are not trained on. What a loss takes of the whole step goes into `state`, or into which rows make a pair.

    Raises:
        ValueError: KTO has no completions of other prompts to take its reference point from.
    """
    if not rows.rows:
        return AdvantageBatch(**vars(rows), advantages=torch.zeros(rows.loss_mask.shape))
    if objective.unpaired:
        signs = labels(rows)
        _measure_reference(objective, rows, signs, state)
    else:
        signs = best_and_worst(rows)
        chosen_tokens = rows.loss_mask[signs == 1].sum(1).double()
        state[MEAN_TOKENS] = chosen_tokens.mean().item() if len(chosen_tokens) else 1.0
    if objective.needs_mismatched:
        keep = (~alone(rows) | (signs != 0)).nonzero()[:, 0]
        rows, signs = select_rows(rows, keep), signs[keep]
    rows = RowBatch(**(vars(rows) | {"loss_mask": rows.loss_mask & (signs != 0)[:, None]}))
    if objective.loss[0].type in RANKED:
        rows = _rank(objective, rows, signs)
    return AdvantageBatch(**vars(rows), advantages=per_token(signs.to(rows.rewards.dtype), rows.loss_mask))


def _measure_reference(objective: PreferenceObjective, rows: RowBatch, signs: Tensor, state: dict[str, float]) -> None:
    """KTO's z_0 of this step, or BCO's running mean of rewards."""
    loss = objective.loss[0]
    if loss.type == "apo_zero_unpaired":
        return
    assert rows.old_logprobs is not None, "annotated, as `advantages_read` asks"
    scores = objective.scores(rows.old_logprobs, rows)
    if loss.type == "bco":
        rewards = implicit_reward(scores[signs != 0], loss.beta)
        if len(rewards):
            mean, count = running_mean(rewards.new_tensor(state.get(REFERENCE, 0.0)), state.get(COUNT, 0.0), rewards)
            state[REFERENCE], state[COUNT] = mean.item(), float(count)
        return
    others = alone(rows) & (rows.rewards == 0) & rows.loss_mask.any(1)
    if not others.any():
        raise ValueError("kto needs completions of other prompts (groups of one with a reward of 0)")
    state[REFERENCE] = kto_reference(scores[others]).item()


def _rank(objective: PreferenceObjective, rows: RowBatch, signs: Tensor) -> RowBatch:
    """AOT: by the scores at the start of the step, the k-th smallest is compared with the k-th smallest. Unpaired, they
    become a pair; else the reference's margin of the same rank takes the place of a pair's own."""
    assert rows.old_logprobs is not None and rows.ref_logprobs is not None
    chosen, rejected = pair_rows(signs, rows.group_ids)
    keys = row_keys(rows)
    shared = shared_lengths(rows.loss_mask, rows.group_ids)
    mine = [rows.old_logprobs, rows.ref_logprobs]
    policy, reference = (objective.score(Completions(p, torch.zeros_like(p), rows.loss_mask, shared)) for p in mine)

    def ranked(values: Tensor, index: Tensor) -> Tensor:
        by_key = keys[index].argsort(stable=True)
        return by_key[values[by_key].argsort(stable=True)]

    if objective.loss[0].type == "aot_unpaired":
        ratio = policy - reference
        group_ids = -1 - torch.arange(rows.rows)  # of rows in no pair, each its own
        for index in (chosen, rejected):
            order = index[ranked(ratio[index], index)]
            group_ids[order] = torch.arange(len(order))
        return RowBatch(**(vars(rows) | {"group_ids": group_ids}))
    own, theirs = policy[chosen] - policy[rejected], reference[chosen] - reference[rejected]
    given = torch.empty_like(theirs)
    given[ranked(own, chosen)] = theirs.sort().values
    ref_logprobs = rows.ref_logprobs.clone()
    first = rows.loss_mask[chosen].int().argmax(1)
    ref_logprobs[chosen, first] += given - theirs
    return RowBatch(**(vars(rows) | {"ref_logprobs": ref_logprobs}))


def preference_loss(
    objective: PreferenceObjective, outputs: ModelOutputs, batch: TrainingBatch, state: Mapping[str, float]
) -> LossOutput:
    """The objective on one micro-batch: sums weighted by row, so that micro-batches add up to the whole step.

    Args:
        objective: its axes.
        outputs: of the forward pass.
        batch: rows of an optimizer step; those of a pair are together.
        state: what was measured of the whole step (`pair_up`).
    """
    assert outputs.logprobs is not None
    logprobs = outputs.logprobs
    signs = batch.advantages.sum(1).sign()
    weights = batch.loss_weights.to(logprobs.dtype).sum(1)
    scores = objective.scores(logprobs, batch)
    if objective.unpaired:
        reference = scores.new_tensor(state.get(REFERENCE, 0.0))
        index = signs.nonzero()[:, 0]
        losses = objective.loss[0](Labelled(scores[index], (signs[index] > 0).to(scores.dtype), reference))
        loss = weighted_sum(losses[:, None], weights[index, None])
        metrics: Metrics = {"preference/reference": Mean(reference.item())}
        better, worse = ((signs == sign).nonzero()[:, 0] for sign in (1, -1))
    else:
        better, worse = pair_rows(signs, batch.group_ids)
        pair, pair_weights = Pair(scores[better], scores[worse]), (weights[better] + weights[worse])[:, None]
        loss = logprobs.masked_fill(torch.ones_like(batch.loss_mask), 0.0).sum()
        for weight, kind in zip(objective.loss_weights, objective.loss, strict=True):
            loss = loss + weighted_sum(kind(pair)[:, None], pair_weights, scale=weight)
        metrics = {}
        if objective.nll.coefficient:
            chosen = Demonstrated(logprobs[better], batch.loss_mask[better], state[MEAN_TOKENS])
            nll = objective.nll(chosen)
            loss = loss + weighted_sum(nll[:, None], pair_weights, scale=objective.nll.coefficient)
            metrics["preference/nll"] = Sum((nll.detach() * pair_weights[:, 0]).sum().item())
    metrics["preference/loss"] = Sum(loss.item())
    metrics |= _metrics(objective, logprobs.detach(), scores.detach(), better, worse, batch)
    if outputs.entropy is not None:
        entropy = masked_sum(outputs.entropy.detach(), batch.loss_mask).item()
        metrics["actor/entropy"] = Mean(entropy, float(batch.loss_mask.sum()))
    return LossOutput(loss=loss, metrics=metrics)


def _metrics(
    objective: PreferenceObjective,
    logprobs: Tensor,
    scores: Tensor,
    better: Tensor,
    worse: Tensor,
    batch: TrainingBatch,
) -> Metrics:
    """TRL's names: `rewards/*` are beta times the scores, `logps/*` sums over a completion."""
    rewards = implicit_reward(scores, objective.loss[0].beta)
    sums = row_sum(logprobs, batch.loss_mask)
    metrics: Metrics = {}
    for name, index in (("chosen", better), ("rejected", worse)):
        if len(index):
            metrics[f"rewards/{name}"] = Mean(rewards[index].sum().item(), float(len(index)))
            metrics[f"logps/{name}"] = Mean(sums[index].sum().item(), float(len(index)))
    if not objective.unpaired and len(better):
        margin = rewards[better] - rewards[worse]
        metrics["rewards/margins"] = Mean(margin.sum().item(), float(len(margin)))
        metrics["rewards/accuracies"] = Mean(float((margin > 0).sum()), float(len(margin)))
    return metrics
