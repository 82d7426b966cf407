"""Auxiliary losses beside the policy term: a critic's value loss, an entropy bonus, distillation from a teacher.

A critic is there where the advantage reads `values`; its weights and its optimizer are its own, so that the value
loss and the policy's terms share no gradient.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from atomrl.atoms.auxiliary_losses import clipped_value_loss, clipped_values, fused_generalised_jsd
from atomrl.atoms.masks import masked_sum
from atomrl.atoms.reductions import weighted_sum
from atomrl.batches import TrainingBatch
from atomrl.common.metrics import Mean, Metrics, Sum
from atomrl.objectives.advantage import given
from atomrl.objectives.choice import Choice, Formula, Setting
from atomrl.protocols import ModelOutputs


class ValueLoss(Choice):
    """What value losses have in common. Without an advantage that reads `values` there is no critic."""

    coefficient: NonNegativeFloat = 1.0

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Of one micro-batch: a weighted sum, with the weights of the policy's."""
        values, mask, clip = given(outputs.values), batch.loss_mask, getattr(self, "clip", None)
        predictions = (values, given(batch.values), given(batch.returns), mask)
        loss = weighted_sum(clipped_value_loss(*predictions, clip), batch.loss_weights)
        clipped = mask & False if clip is None else clipped_values(*predictions, clip)
        tokens = mask.sum()
        return self.coefficient * loss, {
            "critic/vf_loss": Sum(loss.detach()),
            "critic/vf_clipfrac": Mean(clipped.sum(), tokens),
            "critic/vpred_mean": Mean(masked_sum(values.detach(), mask), tokens),
        }

    def where(self) -> tuple[Formula, ...]:
        returns = "R_{i,t} = V_{i,t} + sum_{l >= 0} (gamma lam)^l delta_{i,t+l},   V = v at the start of the step"
        printed = r"\sum_{l \ge 0} (\gamma \lambda)^l \delta_{i,t+l}, \quad V = v_{\phi_{\mathrm{old}}}"
        return (Formula(returns, r"R_{i,t} = V_{i,t} + " + printed),)

    def warnings(self, setting: Setting) -> Iterator[str]:
        advantage = setting.axes["advantage"]
        if "values" in advantage.required():
            if not self.coefficient:
                yield "biased: value.coefficient is 0: the critic stays what it starts as; a fresh one expects 0"
        elif self != ClippedValue():
            yield f"no effect: {advantage.type} reads no values, so there is no critic for the settings of value"


class ClippedValue(ValueLoss, type="clipped"):
    """Half the squared error, no gradient to a value that has moved `clip` towards its return or past it."""

    text = "max((v - R)^2, (clip(v, V - clip, V + clip) - R)^2) / 2"
    latex = (
        r"\tfrac12 \max\big((v_{i,t} - R_{i,t})^2, (\operatorname{clip}(v_{i,t}, V_{i,t} - \epsilon_v, V_{i,t} + "
        r"\epsilon_v) - R_{i,t})^2\big)"
    )
    clip: NonNegativeFloat = 0.2
    made_of = (clipped_value_loss, clipped_values, weighted_sum)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if "values" in setting.axes["advantage"].required() and setting.updates_per_step == 1:
            yield "no effect: with one update in a step no value has moved yet, and the clip of values never acts"


class SquaredValue(ValueLoss, type="squared"):
    """Half the squared error."""

    text = "(v - R)^2 / 2"
    latex = r"\tfrac12 (v_{i,t} - R_{i,t})^2"
    made_of = (clipped_value_loss, weighted_sum)


Value = ClippedValue | SquaredValue


class Entropy(Choice, type="bonus"):
    """An entropy bonus: of the distribution that each token was drawn from, in nats."""

    text = "H_{i,t} = - sum_v pi(v) log pi(v)"
    latex = r"\mathcal{H}_{i,t} = -\sum_v \pi_\theta(v) \log \pi_\theta(v)"
    coefficient: NonNegativeFloat = 0.0
    made_of = (weighted_sum,)

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Of one micro-batch: minus the coefficient times a weighted sum."""
        mean = weighted_sum(given(outputs.entropy), batch.loss_weights)
        return -self.coefficient * mean, {"actor/entropy_loss": Sum(mean.detach())}

    def warnings(self, setting: Setting) -> Iterator[str]:
        if self.coefficient >= 0.01:
            yield "unstable: nothing bounds the bonus; over a large vocabulary entropy has exploded (arXiv:2505.22617)"


class Distillation(Choice, type="jsd"):
    """Generalised Jensen-Shannon divergence of the policy's distributions from a teacher's (p): GKD.

    beta = 0 is the forward KL(p, pi), which covers what the teacher does, beta = 1 the reverse KL(pi, p), which settles
    on some of it. A coefficient of 0 asks for no teacher.
    """

    text = "D_{i,t} = beta KL(p, m) + (1 - beta) KL(pi, m),   m = beta p + (1 - beta) pi"
    latex = (
        r"D_{i,t} = \beta_D\, \mathrm{KL}(p \,\|\, m) + (1 - \beta_D)\, \mathrm{KL}(\pi_\theta \,\|\, m), \quad m = "
        r"\beta_D\, p + (1 - \beta_D)\, \pi_\theta"
    )
    coefficient: NonNegativeFloat = 0.0
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    made_of = (fused_generalised_jsd, weighted_sum)

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Of one micro-batch: the coefficient times a weighted sum."""
        mask = batch.loss_mask
        student, teacher = given(outputs.distributions), given(outputs.teacher_distributions)
        weights = student.hidden, student.head_weight, teacher.hidden, teacher.head_weight
        divergence = student.of_all(fused_generalised_jsd(*weights, self.beta, student.temperature))
        loss = weighted_sum(divergence[None], batch.loss_weights.flatten()[student.places][None])
        return self.coefficient * loss, {"actor/distillation_loss": Mean(divergence.detach().sum(), mask.sum())}

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not self.coefficient and self != Distillation():
            yield "no effect: distillation.coefficient is 0, so the other settings of distillation do nothing"
