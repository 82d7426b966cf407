"""The axis of distillation: how far the policy's distributions may be from a teacher's, on what the policy wrote."""

from __future__ import annotations

from torch import Tensor

from atomrl.atoms.distillation import generalised_jsd
from atomrl.atoms.reductions import weighted_sum
from atomrl.metrics import Mean, Metrics
from atomrl.objective.axis import Axis
from atomrl.protocols import ModelOutputs
from atomrl.stages import TrainingBatch


def _jsd(student: Tensor, teacher: Tensor, *, coefficient: float = 0.0, beta: float = 0.5) -> Tensor:
    r"""Generalised Jensen-Shannon divergence of the teacher's distribution (p) and the policy's.

        D_{i,t} = beta KL(p, m) + (1 - beta) KL(pi, m),   m = beta p + (1 - beta) pi

    beta = 0 is the forward KL(p, pi), which covers what the teacher does, beta = 1 the reverse KL(pi, p), which settles
    on some of it.

    LaTeX: D_{i,t} = \beta_D\, \mathrm{KL}(p \,\|\, m) + (1 - \beta_D)\, \mathrm{KL}(\pi_\theta \,\|\, m), \quad
        m = \beta_D\, p + (1 - \beta_D)\, \pi_\theta
    """
    # Log-probs are logits too; they are at the sampling temperature already.
    return generalised_jsd(student, teacher, beta)


class Distillation(Axis):
    """What each trained token's distribution costs, by its distance from the teacher's: [N, V] log-probs of the policy
    and of the teacher -> [N]. The coefficient multiplies it; 0 asks for no teacher."""

    label, kinds, default = "distillation", {"jsd": _jsd}, "jsd"

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """What distillation adds to the loss of one micro-batch.

        Args:
            outputs: of the forward pass.
            batch: rows of an optimizer step.
        """
        student, teacher = outputs.distributions, outputs.teacher_distributions
        assert student is not None and teacher is not None, "the back end gives what `outputs` names"
        mask = batch.loss_mask
        divergence = self(student, teacher)
        loss = weighted_sum(divergence[None], batch.loss_weights[mask][None])
        seen = Mean(divergence.detach().sum().item(), float(mask.sum()))
        return self.coefficient * loss, {"actor/distillation_loss": seen}
