"""A preference objective: one choice on each axis, and the algorithm that they make."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from atomrl.atoms.masks import masked_sum, row_sum
from atomrl.atoms.preference_losses import implicit_reward
from atomrl.atoms.reductions import weighted_sum
from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch, select_rows
from atomrl.common.metrics import Mean, Metrics, Sum
from atomrl.common.threads import sent
from atomrl.objectives.advantage import given
from atomrl.objectives.base import MINIMISE, Formulation, Goal, SupervisedObjective
from atomrl.objectives.choice import Formula, Off, Setting
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
from atomrl.objectives.shaping import GroupFilter
from atomrl.protocols import NOTHING, LossOutput, ModelInput, ModelOutputs, RowUnit

MEAN_TOKENS = "chosen_tokens"
"""In an algorithm's state: the mean length of the step's chosen completions."""


class PreferenceObjective(SupervisedObjective):
    """One choice on each axis; the defaults are DPO's.

    minimise  mean over pairs of [ sum_k weight_k L_k(s_chosen, s_rejected) + coefficient NLL(chosen) ]

    Pairs and labels are what the data says; of rollouts, the completions of a prompt with the highest and the lowest
    reward are a pair.
    """

    name: str = "preference"
    score: Score = LogRatioScore()
    losses: Annotated[tuple[PreferenceLosses, ...], Field(min_length=1)] = Field((SigmoidLoss(),), alias="loss")
    nll: Nll = TokenMeanNll()
    group_filter: Annotated[GroupFilter | None, Off("all")] = None
    """Of rollouts: which groups are trained on."""
    online: bool = Field(False, exclude=True)
    """Made for rollouts (`atomrl train`), not for given preferences."""

    @model_validator(mode="after")
    def _choices_that_go_together(self) -> Self:
        alone = [loss.type for loss in self.losses if loss.unpaired or loss.ranked]
        if alone and len(self.losses) > 1:
            raise ValueError(f"loss: {', '.join(alone)} cannot be one of several; what it compares are not the pairs")
        if sum(loss.shifted for loss in self.losses) > 1:
            raise ValueError("loss: bco_pair_shift is there more than once, and there is one mean of rewards")
        for loss in self.losses:
            if reason := loss.refusal(self.score):
                raise ValueError(f"score: {reason}")
        if self.unpaired and self.nll.coefficient:
            raise ValueError(f"nll: {self.losses[0].type} has no pairs, and so no chosen completion to imitate")
        return self

    def off_axes(self) -> set[str]:
        return set() if self.nll.coefficient else {"nll"}

    def formulation(self) -> Formulation:
        found = [loss.equation() for loss in self.losses]
        terms, where = [Formula("L", "L")], found
        if len(found) > 1:
            weights = [f"{loss.weight:g}" for loss in self.losses]
            terms = [Formula(f"{w} L{i}", rf"{w}\,L_{i}") for i, w in enumerate(weights, start=1)]
            cut = [(item.text.removeprefix("L "), item.latex.removeprefix("L ")) for item in found]
            where = [Formula(f"L{i} {text}", f"L_{i} {latex}") for i, (text, latex) in enumerate(cut, start=1)]
        for nll in self.used_axes()["nll"]:
            weight = f"{self.nll.coefficient:g}"
            terms.append(Formula(f"{weight} NLL", rf"{weight}\,\mathrm{{NLL}}"))
            where.append(nll.equation())
        where += [self.score.equation(), *self.score.where()]
        pair = "completions of a prompt with the highest and the lowest reward"
        pair = f"y_c, y_r = the {pair if self.online else 'chosen and the rejected completion of a prompt'}"
        where += [] if self.unpaired else [Formula(pair, "")]
        where += [self.group_filter.equation()] if self.group_filter else []
        of = "labelled completions" if self.unpaired else "pairs"
        over = r"(x, y, \pm)" if self.unpaired else "(x, y_c, y_r)"
        goal = Goal(MINIMISE, Formula(f"mean over {of} of", rf"\mathbb{{E}}_{{{over}}}"), tuple(terms))
        return Formulation((goal,), tuple(where))

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if not self.nll.coefficient and not any(loss.anchored for loss in self.losses):
            yield "note: only margins count, so the chosen completion may become less likely; nll.coefficient mends it"

    @property
    def unpaired(self) -> bool:
        """Whether single completions with a label are what it takes (it makes labels of pairs too)."""
        return self.losses[0].unpaired

    @property
    def needs_mismatched(self) -> bool:
        """Whether it takes prompts with the completions of other prompts (`RowBatch.mismatched`)."""
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
        """The rows that are trained on, with their labels, their pairs, and what the loss takes of the whole step.

        Raises:
            ValueError: rows are labelled one by one, and the loss is of pairs; or KTO has no mismatched completions.
        """
        if rows.labels is not None and rows.pair_ids is None and not self.unpaired:
            raise ValueError(f"{self.name} needs pairs: rows with labels must have pair_ids")
        labels = labels_of(rows)
        pair_ids = rows.group_ids.masked_fill(labels == 0, -1) if rows.pair_ids is None else rows.pair_ids
        if not self.unpaired:
            labels = complete(labels, pair_ids)
        kept = select_rows(replace(rows, labels=labels, pair_ids=pair_ids), labels.nonzero()[:, 0])
        now = {**state}
        if isinstance(loss := self.losses[0], LabelLoss):
            if rows.rows and loss.needs:
                none = rows.loss_mask.new_zeros(rows.rows)
                others = none if rows.mismatched is None else rows.mismatched & rows.loss_mask.any(1)
                parts = kept, select_rows(rows, others.nonzero()[:, 0])
                trained, mismatched = (self.score(part.old_logprobs, part) for part in parts)
                now = loss.measure(trained, mismatched, now)
        elif kept.rows:
            now[MEAN_TOKENS] = kept.loss_mask[kept.labels == 1].sum(1).double().mean().item()
            for each in self.losses:
                if each.shifted:
                    now = each.measure(self.score(kept.old_logprobs, kept), torch.zeros(0), now)
        ranks = self._ranks(kept) if self.losses[0].ranked and kept.rows else {}
        return AdvantageBatch(**{**vars(kept), **ranks}, advantages=torch.zeros(kept.loss_mask.shape), state=now)

    def _ranks(self, rows: RowBatch) -> dict[str, Tensor]:
        """AOT: by the scores at the start of the step, the k-th smallest is compared with the k-th smallest. Unpaired,
        they become a pair; else each pair is given the reference's margin of the same rank."""
        numbers, keys = given(rows.pair_ids), row_keys(rows)
        chosen, rejected = pair_rows(given(rows.labels), numbers)
        if isinstance(self.losses[0], AotUnpairedLoss):
            scores, pair_ids = self.score(rows.old_logprobs, rows), torch.empty_like(numbers)
            for index in (chosen, rejected):
                pair_ids[index[ranked(scores[index], index, keys)]] = torch.arange(len(index))
            return {"pair_ids": pair_ids}
        policy, reference = self.score.sums(rows.old_logprobs, rows), self.score.sums(rows.ref_logprobs, rows)
        own, theirs = policy[chosen] - policy[rejected], reference[chosen] - reference[rejected]
        margins = torch.zeros_like(reference)
        margins[chosen[ranked(own, chosen, keys)]] = theirs.sort().values
        return {"pair_ref_margins": margins}

    def row_scores(self, rows: RowBatch) -> dict[str, Tensor]:
        """How rows with `old_logprobs` are judged: the implicit `reward`, and the `logprob` alone."""
        reward = implicit_reward(self.score(rows.old_logprobs, rows), self.losses[0].beta)
        return {"reward": reward, "logprob": row_sum(given(rows.old_logprobs), rows.loss_mask)}

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        """The objective on a micro-batch: sums weighted by row, so that micro-batches add up to the whole step."""
        logprobs, labels = given(outputs.logprobs), given(batch.labels)
        weights = batch.loss_weights.to(logprobs.dtype).sum(1)
        scores = self.score(logprobs, batch)
        metrics: Metrics = {}
        of_labels = self.losses[0]
        if isinstance(of_labels, LabelLoss):
            better, worse = (sent((labels == label).nonzero()[:, 0], scores.device) for label in (1, -1))
            reference = scores.new_full((), batch.state.get(REFERENCE, 0.0))
            losses = of_labels(scores, sent((labels > 0).to(scores.dtype), scores.device), reference)
            loss = weighted_sum(losses[:, None], weights[:, None])
            metrics["preference/reference"] = Mean(reference)
        else:
            better, worse = (sent(index, scores.device) for index in pair_rows(labels, given(batch.pair_ids)))
            chosen, rejected, of_pairs = scores[better], scores[worse], (weights[better] + weights[worse])[:, None]
            if batch.pair_ref_margins is not None:
                reference = self.score.sums(batch.ref_logprobs, batch)
                chosen = chosen + (reference[better] - reference[worse] - batch.pair_ref_margins[better])
            loss = scores.new_zeros(())
            for kind in self.losses:
                assert not isinstance(kind, LabelLoss)
                shift = (scores.new_full((), batch.state.get(REFERENCE, 0.0)),) if kind.shifted else ()
                loss = loss + weighted_sum(kind(chosen, rejected, *shift)[:, None], of_pairs, scale=kind.weight)
            if self.nll.coefficient:
                nll = self.nll(logprobs[better], batch.loss_mask[better], batch.state[MEAN_TOKENS])[:, None]
                loss = loss + weighted_sum(nll, of_pairs, scale=self.nll.coefficient)
                metrics["preference/nll"] = Sum((nll.detach() * of_pairs).sum())
        metrics["preference/loss"] = Sum(loss.detach())
        metrics |= self._metrics(logprobs.detach(), scores.detach(), better, worse, batch)
        if outputs.entropy is not None:
            entropy = masked_sum(outputs.entropy.detach(), batch.loss_mask)
            metrics["actor/entropy"] = Mean(entropy, batch.loss_mask.sum())
        return LossOutput(loss=loss, metrics=metrics)

    def _metrics(
        self, logprobs: Tensor, scores: Tensor, better: Tensor, worse: Tensor, batch: TrainingBatch
    ) -> Metrics:
        """TRL's names: `rewards/*` are beta times the scores, `logps/*` sums over a completion."""
        rewards = implicit_reward(scores, self.losses[0].beta)
        sums = row_sum(logprobs, batch.loss_mask)
        found = {"chosen": better, "rejected": worse}
        by_name = {f"rewards/{name}": rewards[index] for name, index in found.items()}
        by_name |= {f"logps/{name}": sums[index] for name, index in found.items()}
        if not self.unpaired:
            margin = rewards[better] - rewards[worse]
            by_name |= {"rewards/margins": margin, "rewards/accuracies": (margin > 0).to(margin.dtype)}
        return {name: Mean(each.sum(), len(each)) for name, each in by_name.items() if len(each)}
