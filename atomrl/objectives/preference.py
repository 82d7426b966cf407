"""`PreferenceObjective`: a preference objective as one choice on each axis, with its batches and its loss."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from atomrl.atoms import Formula
from atomrl.atoms.masks import masked_sum, row_sum
from atomrl.atoms.policy_losses import weighted_sum
from atomrl.atoms.preference_losses import implicit_reward
from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch, select_rows
from atomrl.common.metrics import Mean, Metrics, Sum
from atomrl.common.threads import to_device
from atomrl.objectives.advantage import GroupFilter
from atomrl.objectives.choice import Setting, not_none
from atomrl.objectives.objective import MINIMISE, Formulation, Goal, SupervisedObjective
from atomrl.objectives.overrides import Off
from atomrl.objectives.preference_loss import (
    REFERENCE,
    AotUnpairedLoss,
    LabelLoss,
    LogRatioScore,
    Nll,
    PreferenceLosses,
    Score,
    SigmoidLoss,
    TokenMeanNll,
    complete,
    labels_of,
    pair_rows,
    ranked,
    row_keys,
)
from atomrl.protocols import NOTHING, LossOutput, ModelInput, ModelOutputs, RowUnit

MEAN_TOKENS = "chosen_tokens"
"""Key in an algorithm's state: mean length in tokens of the step's chosen completions."""


class PreferenceObjective(SupervisedObjective):
    """One choice on each axis. The defaults are DPO.

    minimise  mean over pairs of [ sum_k weight_k L_k(s_chosen, s_rejected) + coefficient NLL(chosen) ]

    Pairs and labels come from the data. Of rollouts, a pair is the completions of a prompt with the highest and the
    lowest reward.
    """

    name: str = "preference"
    score: Score = LogRatioScore()
    losses: Annotated[tuple[PreferenceLosses, ...], Field(min_length=1)] = Field((SigmoidLoss(),), alias="loss")
    nll: Nll = TokenMeanNll()
    group_filter: Annotated[GroupFilter | None, Off("all")] = None
    """For rollouts: which groups are trained on."""
    online: bool = Field(False, exclude=True)
    """Trains on pairs of rollouts instead of a dataset of preferences."""

    @model_validator(mode="after")
    def _choices_that_go_together(self) -> Self:
        alone = [loss.type for loss in self.losses if loss.unpaired or loss.ranked]
        if alone and len(self.losses) > 1:
            raise ValueError(
                f"loss: {', '.join(alone)} cannot be combined with other losses; it does not compare pairs"
            )
        if sum(loss.shifted for loss in self.losses) > 1:
            raise ValueError("loss: bco_pair_shift can only be used once, as it has one running mean of rewards")
        for loss in self.losses:
            if reason := loss.refusal(self.score):
                raise ValueError(f"score: {reason}")
        if self.unpaired and self.nll.coefficient:
            raise ValueError(f"nll: {self.losses[0].type} has no pairs, and so no chosen completions")
        return self

    def off_axes(self) -> set[str]:
        return set() if self.nll.coefficient else {"nll"}

    def formulation(self) -> Formulation:
        where = [loss.equation() for loss in self.losses]
        terms = [Formula("L", "L")]
        if len(where) > 1:  # number the losses: L = ... becomes L1 = ...
            weights = [f"{loss.weight:g}" for loss in self.losses]
            terms = [Formula(f"{w} L{i}", rf"{w}\,L_{i}") for i, w in enumerate(weights, start=1)]
            sides = [(item.text.removeprefix("L "), item.latex.removeprefix("L ")) for item in where]
            where = [Formula(f"L{i} {text}", f"L_{i} {latex}") for i, (text, latex) in enumerate(sides, start=1)]
        for nll in self.used_axes()["nll"]:
            weight = f"{self.nll.coefficient:g}"
            terms.append(Formula(f"{weight} NLL", rf"{weight}\,\mathrm{{NLL}}"))
            where.append(nll.equation())
        where += [self.score.equation(), *self.score.where()]
        pair = "completions of a prompt with the highest and the lowest reward"
        pair = f"y_c, y_r = the {pair if self.online else 'chosen and the rejected completion of a prompt'}"
        where += [] if self.unpaired else [Formula(pair, "")]
        where += [self.group_filter.equation()] if self.group_filter else []
        items = "labelled completions" if self.unpaired else "pairs"
        over = r"(x, y, \pm)" if self.unpaired else "(x, y_c, y_r)"
        goal = Goal(MINIMISE, Formula(f"mean over {items} of", rf"\mathbb{{E}}_{{{over}}}"), tuple(terms))
        return Formulation((goal,), tuple(where))

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if not self.nll.coefficient and not any(loss.anchored for loss in self.losses):
            yield "note: only margins count, so chosen completions may become less likely; nll.coefficient prevents it"

    @property
    def unpaired(self) -> bool:
        """It trains on single labelled completions; pairs are split into these."""
        return self.losses[0].unpaired

    @property
    def needs_mismatched(self) -> bool:
        """It needs prompts with completions of other prompts (`PreferenceFields.mismatched`)."""
        return isinstance(self.losses[0], LabelLoss) and self.losses[0].needs_mismatched

    @property
    def needs(self) -> frozenset[ModelInput]:
        return self.score.needs | self.advantage_inputs

    @property
    def advantage_inputs(self) -> frozenset[ModelInput]:
        return frozenset().union(*(loss.needs for loss in self.losses))

    @property
    def row_unit(self) -> RowUnit:
        return "row" if self.unpaired else "pair"

    @torch.no_grad()
    def advantages(self, rows: RowBatch, state: Mapping[str, float] = NOTHING) -> AdvantageBatch:
        """Return the trained rows with labels and pairs, and the statistics of the step that the loss needs.

        Raises:
            ValueError: the rows have labels but no pairs, and the loss needs pairs; or KTO has no mismatched
                completions.
        """
        if rows.preference.labels is not None and rows.pair_ids is None and not self.unpaired:
            raise ValueError(f"{self.name} needs pairs: rows with labels must have pair_ids")
        labels = labels_of(rows)
        pair_ids = rows.group_ids.masked_fill(labels == 0, -1) if rows.pair_ids is None else rows.pair_ids
        if not self.unpaired:
            labels = complete(labels, pair_ids)
        preference = replace(rows.preference, labels=labels, pair_ids=pair_ids)
        trained = select_rows(replace(rows, preference=preference), labels.nonzero()[:, 0])
        new_state = {**state}
        if isinstance(loss := self.losses[0], LabelLoss):
            if rows.rows and loss.needs:
                none = rows.loss_mask.new_zeros(rows.rows)
                others = none if preference.mismatched is None else preference.mismatched & rows.loss_mask.any(1)
                parts = trained, select_rows(rows, others.nonzero()[:, 0])
                scores, mismatched = (self.score(part.old_logprobs, part) for part in parts)
                new_state = loss.measure(scores, mismatched, new_state)
        elif trained.rows:
            chosen = not_none(trained.preference.labels) == 1
            new_state[MEAN_TOKENS] = trained.loss_mask[chosen].sum(1).double().mean().item()
            for each in self.losses:
                if each.shifted:
                    scores = self.score(trained.old_logprobs, trained)
                    new_state = each.measure(scores, torch.zeros(0), new_state)
        fields = vars(trained) | (self._ranks(trained) if self.losses[0].ranked and trained.rows else {})
        return AdvantageBatch(**fields, advantages=torch.zeros(trained.loss_mask.shape), state=new_state)

    def _ranks(self, rows: RowBatch) -> dict[str, Any]:
        """Match by rank for AOT, by the scores at the start of the step: the k-th smallest with the k-th smallest.

        Unpaired AOT makes these pairs; paired AOT assigns each pair the reference's margin of the same rank.
        """
        numbers, keys = not_none(rows.pair_ids), row_keys(rows)
        chosen, rejected = pair_rows(not_none(rows.preference.labels), numbers)
        if isinstance(self.losses[0], AotUnpairedLoss):
            scores, pair_ids = self.score(rows.old_logprobs, rows), torch.empty_like(numbers)
            for index in (chosen, rejected):
                pair_ids[index[ranked(scores[index], index, keys)]] = torch.arange(len(index))
            return {"preference": replace(rows.preference, pair_ids=pair_ids)}
        policy, reference = self.score.sums(rows.old_logprobs, rows), self.score.sums(rows.ref_logprobs, rows)
        own, theirs = policy[chosen] - policy[rejected], reference[chosen] - reference[rejected]
        margins = torch.zeros_like(reference)
        margins[chosen[ranked(own, chosen, keys)]] = theirs.sort().values
        return {"pair_ref_margins": margins}

    def row_scores(self, rows: RowBatch) -> dict[str, Tensor]:
        """Return the implicit `reward` and the `logprob` [B] of rows with `old_logprobs`."""
        reward = implicit_reward(self.score(rows.old_logprobs, rows), self.losses[0].beta)
        return {"reward": reward, "logprob": row_sum(not_none(rows.old_logprobs), rows.loss_mask)}

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        """Compute the loss of one micro-batch: weighted sums, which add up to the loss of the step."""
        logprobs, labels = not_none(outputs.logprobs), not_none(batch.preference.labels)
        weights = batch.loss_weights.to(logprobs.dtype).sum(1)
        scores = self.score(logprobs, batch)
        metrics: Metrics = {}
        label_loss = self.losses[0]
        if isinstance(label_loss, LabelLoss):
            better, worse = (to_device((labels == label).nonzero()[:, 0], scores.device) for label in (1, -1))
            reference = scores.new_full((), batch.state.get(REFERENCE, 0.0))
            losses = label_loss(scores, to_device((labels > 0).to(scores.dtype), scores.device), reference)
            loss = weighted_sum(losses[:, None], weights[:, None])
            metrics["preference/reference"] = Mean(reference)
        else:
            better, worse = (to_device(index, scores.device) for index in pair_rows(labels, not_none(batch.pair_ids)))
            chosen, rejected, pair_weights = scores[better], scores[worse], (weights[better] + weights[worse])[:, None]
            if batch.pair_ref_margins is not None:
                reference = self.score.sums(batch.ref_logprobs, batch)
                chosen = chosen + (reference[better] - reference[worse] - batch.pair_ref_margins[better])
            loss = scores.new_zeros(())
            for kind in self.losses:
                assert not isinstance(kind, LabelLoss)
                shift = (scores.new_full((), batch.state.get(REFERENCE, 0.0)),) if kind.shifted else ()
                loss = loss + weighted_sum(kind(chosen, rejected, *shift)[:, None], pair_weights, scale=kind.weight)
            if self.nll.coefficient:
                nll = self.nll(logprobs[better], batch.loss_mask[better], batch.state[MEAN_TOKENS])[:, None]
                loss = loss + weighted_sum(nll, pair_weights, scale=self.nll.coefficient)
                metrics["preference/nll"] = Sum((nll.detach() * pair_weights).sum())
        metrics["preference/loss"] = Sum(loss.detach())
        metrics |= self._metrics(logprobs.detach(), scores.detach(), better, worse, batch)
        if outputs.entropy is not None:
            entropy = masked_sum(outputs.entropy.detach(), batch.loss_mask)
            metrics["actor/entropy"] = Mean(entropy, batch.loss_mask.sum())
        return LossOutput(loss=loss, metrics=metrics)

    def _metrics(
        self, logprobs: Tensor, scores: Tensor, better: Tensor, worse: Tensor, batch: TrainingBatch
    ) -> Metrics:
        """Return metrics under TRL's names: `rewards/*` are beta times the scores, `logps/*` sums over a completion."""
        rewards = implicit_reward(scores, self.losses[0].beta)
        sums = row_sum(logprobs, batch.loss_mask)
        sides = {"chosen": better, "rejected": worse}
        by_name = {f"rewards/{name}": rewards[index] for name, index in sides.items()}
        by_name |= {f"logps/{name}": sums[index] for name, index in sides.items()}
        if not self.unpaired:
            margin = rewards[better] - rewards[worse]
            by_name |= {"rewards/margins": margin, "rewards/accuracies": (margin > 0).to(margin.dtype)}
        return {name: Mean(each.sum(), len(each)) for name, each in by_name.items() if len(each)}
