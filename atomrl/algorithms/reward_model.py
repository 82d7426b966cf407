"""Reward model: a score for each completion, higher for the preferred completion of a pair (Bradley-Terry).

L = sum_i w_i [ -log sigmoid(r_c - r_r - m_i) + centring (r_c + r_r)^2 ],    w = pair mean
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from atomrl.atoms import Formula
from atomrl.atoms.preference_losses import bradley_terry_loss, reward_centring_loss
from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch
from atomrl.common.metrics import Mean, Sum
from atomrl.common.threads import to_device
from atomrl.objectives.choice import not_none
from atomrl.objectives.objective import MINIMISE, Formulation, Goal, SupervisedObjective
from atomrl.objectives.preference_loss import AtLeast0, complete, labels_of, pair_rows
from atomrl.protocols import NOTHING, LossOutput, ModelOutputs, Output, RowUnit


class RewardModelObjective(SupervisedObjective):
    """Bradley-Terry loss of pairs, with an optional margin and centring.

    Example:
        >>> sorted(RewardModelObjective(centring=0.01).outputs)
        ['scores']
    """

    name: str = "reward_model"
    margin: AtLeast0 = 0.0
    """Margin m per unit of difference between the pair's labelled scores (Llama 2, arXiv:2307.09288); 0 is plain
    Bradley-Terry."""
    centring: AtLeast0 = 0.0
    """Coefficient of the penalty on mean scores other than 0 (arXiv:2312.09244 uses 0.01)."""

    def formulation(self) -> Formulation:
        loss = Formula("-log sigmoid(r_c - r_r - m)", r"-\log \sigma(r_c - r_r - m)")
        terms, where = [loss], [Formula("r = the score of a completion, m = margin (given r_c - given r_r)", "")]
        if self.centring:
            terms.append(Formula("centring (r_c + r_r)^2", r"\lambda\,(r_c + r_r)^2"))
        over = Formula("mean over pairs of", r"\mathbb{E}_{(x, y_c, y_r)}")
        return Formulation((Goal(MINIMISE, over, tuple(terms)),), tuple(where))

    @property
    def outputs(self) -> frozenset[Output]:
        return frozenset({"scores"})

    @property
    def row_unit(self) -> RowUnit:
        return "pair"

    def advantages(self, rows: RowBatch, state: Mapping[str, float] = NOTHING) -> AdvantageBatch:
        """Check that all rows are pairs, and return them with advantages of 0.

        Raises:
            ValueError: they are not.
        """
        labels = labels_of(rows)
        if rows.pair_ids is None or not torch.equal(labels.abs(), complete(labels, rows.pair_ids).abs()):
            raise ValueError("reward_model: rows must be pairs of chosen and rejected completions")
        return super().advantages(rows, state)

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        """Compute the loss of one micro-batch: weighted sums, which add up to the mean over pairs of the step."""
        scores, margins = not_none(outputs.scores), batch.preference.margins
        pairs = pair_rows(not_none(batch.preference.labels), not_none(batch.pair_ids))
        better, worse = (to_device(index, scores.device) for index in pairs)
        chosen, rejected = scores[better], scores[worse]
        margin: Tensor | None = None
        if self.margin and margins is not None:
            margin = self.margin * margins[better].to(chosen)
        per_pair = bradley_terry_loss(chosen, rejected, margin)
        if self.centring:
            per_pair = per_pair + self.centring * reward_centring_loss(chosen, rejected)
        weights = batch.loss_weights.sum(1)
        total = ((weights[better] + weights[worse]) * per_pair).sum()
        gap = (chosen - rejected).detach()
        accuracy = (gap > 0).double() + 0.5 * (gap == 0).double()  # a tie counts one half
        by_name = {"chosen": chosen, "rejected": rejected, "margins": gap, "accuracies": accuracy}
        means = {f"rewards/{name}": Mean(each.detach().sum(), len(each)) for name, each in by_name.items()}
        return LossOutput(loss=total, metrics={"reward_model/loss": Sum(total.detach()), **means})
