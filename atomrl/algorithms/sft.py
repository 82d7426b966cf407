"""Supervised fine-tuning: the likelihood of what a demonstration says.

    L = - sum_{i,t} w_{i,t} log pi_theta(y_{i,t} | y_{i,<t}),    w = token mean

The same record as any algorithm, so that the same back ends train it.
"""

from __future__ import annotations

from atomrl.atoms.advantages import per_token, raw_reward
from atomrl.atoms.masks import masked_sum
from atomrl.atoms.reductions import token_mean
from atomrl.metrics import Mean, Sum
from atomrl.protocols import Algorithm, LossOutput, ModelOutputs
from atomrl.stages import AdvantageBatch, RowBatch, TrainingBatch


def _advantages(rows: RowBatch) -> AdvantageBatch:
    credit = raw_reward(rows.rewards, rows.group_ids)
    return AdvantageBatch(**vars(rows), advantages=per_token(credit, rows.loss_mask))


def _loss(outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
    loss = -(batch.loss_weights * outputs.logprobs.masked_fill(~batch.loss_mask, 0.0)).sum()
    nll = -masked_sum(outputs.logprobs.detach(), batch.loss_mask).item()
    return LossOutput(
        loss=loss,
        metrics={"sft/loss": Sum(loss.item()), "sft/nll_per_token": Mean(nll, float(batch.loss_mask.sum()))},
    )


SFT = Algorithm(name="sft", advantages=_advantages, weights=token_mean, loss=_loss)
