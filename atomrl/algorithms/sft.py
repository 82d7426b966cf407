"""Supervised fine-tuning: negative log-likelihood of demonstrations.

    L = - sum_{i,t} w_{i,t} log pi_theta(y_{i,t} | y_{i,<t}),    w = token mean

Paper: InstructGPT, arXiv:2203.02155, section 3.5. Pretraining is the same on windows of plain text.
"""

from torch import Tensor

from atomrl.atoms import Formula
from atomrl.atoms.auxiliary_losses import nll_loss
from atomrl.atoms.masks import masked_sum
from atomrl.atoms.policy_losses import token_mean, weighted_sum
from atomrl.batches import TrainingBatch
from atomrl.common.metrics import Mean
from atomrl.objectives.choice import not_none
from atomrl.objectives.objective import MINIMISE, Formulation, Goal, SupervisedObjective
from atomrl.protocols import LossOutput, ModelOutputs


class SFTObjective(SupervisedObjective):
    """Mean negative log-likelihood of the rows' trained tokens; every token has the same weight."""

    name: str = "sft"
    metric: str = "sft/nll_per_token"
    """Name of the loss in the log."""

    def formulation(self) -> Formulation:
        over = Formula("mean over tokens of", r"\frac{1}{\sum_j |y_j|} \sum_{i,t}")
        nll = Formula("-log pi(y_t)", r"-\log \pi_\theta(y_{i,t} \mid y_{i,<t})")
        where = Formula("y = the tokens of a row that are trained on", "")
        return Formulation((Goal(MINIMISE, over, (nll,)),), (where,))

    def loss_weights(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        """Return the weights of a mean over tokens."""
        return token_mean(mask)

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> LossOutput:
        """Compute the loss of one micro-batch: a weighted sum, which adds up to the mean of the step."""
        per_token = nll_loss(not_none(outputs.logprobs), batch.loss_mask)
        nll = Mean(masked_sum(per_token.detach(), batch.loss_mask), batch.loss_mask.sum())
        return LossOutput(loss=weighted_sum(per_token, batch.loss_weights), metrics={self.metric: nll})


SFT = SFTObjective()
PRETRAINING = SFTObjective(name="pretrain", metric="train/loss")
