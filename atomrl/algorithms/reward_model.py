"""Reward modelling: a score for each completion, such that the preferred one of a pair has the higher one.

    L = sum_i w_i [ -log sigmoid(r_c - r_r - m_i) + centring (r_c + r_r)^2 ],    w = pair mean

The same record as any algorithm, so that the same back ends train it. Rows come in pairs, the chosen one first.
"""

from __future__ import annotations

from atomrl.atoms.advantages import per_token, raw_reward
from atomrl.atoms.preference_losses import bradley_terry_loss, reward_centring_loss
from atomrl.atoms.reductions import sequence_mean
from atomrl.metrics import Mean, Sum
from atomrl.protocols import Algorithm, LossOutput, ModelOutputs
from atomrl.stages import AdvantageBatch, RowBatch, TrainingBatch


def reward_model(*, margin: float = 0.0, centring: float = 0.0) -> Algorithm:
    """The record that trains a reward model on pairs.

    Args:
        margin: times the difference of the pair's labelled scores is m, by how much the chosen one must be ahead
            (Llama 2, arXiv:2307.09288); 0 is plain Bradley-Terry.
        centring: of the penalty that holds the mean score at 0 (arXiv:2312.09244 takes 0.01).

    Example:
        >>> sorted(reward_model(centring=0.01).outputs)
        ['scores']
    """

    def advantages(rows: RowBatch) -> AdvantageBatch:
        pairs = rows.group_ids.view(-1, 2) if rows.rows % 2 == 0 else None
        if pairs is None or bool((pairs[:, 0] != pairs[:, 1]).any()):
            raise ValueError("reward_model: rows must come in pairs, the chosen and the rejected completion of each")
        credit = raw_reward(rows.rewards, rows.group_ids)
        return AdvantageBatch(**vars(rows), advantages=per_token(credit, rows.loss_mask))

    def loss(outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        chosen, rejected = outputs.scores.view(-1, 2).unbind(1)
        better, worse = batch.rewards.to(chosen).view(-1, 2).unbind(1)
        per_pair = bradley_terry_loss(chosen, rejected, margin * (better - worse) if margin else None)
        if centring:
            per_pair = per_pair + centring * reward_centring_loss(chosen, rejected)
        weights = batch.loss_weights.sum(1).view(-1, 2).sum(1)
        total = (weights * per_pair).sum()
        gap = (chosen - rejected).detach()
        right = (gap > 0).double() + 0.5 * (gap == 0).double()  # a tie is a coin toss
        of_pairs = {"chosen": chosen, "rejected": rejected, "margins": gap, "accuracies": right}
        means = {f"rewards/{name}": Mean(each.sum().item(), len(each)) for name, each in of_pairs.items()}
        return LossOutput(loss=total, metrics={"reward_model/loss": Sum(total.item()), **means})

    return Algorithm(
        name="reward_model",
        advantages=advantages,
        weights=sequence_mean,
        loss=loss,
        outputs=frozenset({"scores"}),
        row_unit="pair",
    )
