"""Terms beside the policy term: KL penalty to the reference, a critic's value loss, entropy bonus, distillation.

There is a critic if the advantage reads `values`. It has its own weights and optimizer, so the value loss shares no
gradient with the policy's terms.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from atomrl.atoms import Formula
from atomrl.atoms import kl as estimators
from atomrl.atoms.auxiliary_losses import clipped_value_loss, clipped_values, fused_generalised_jsd
from atomrl.atoms.masks import masked_sum
from atomrl.atoms.policy_losses import weighted_sum
from atomrl.atoms.shaping import kl_penalised_reward
from atomrl.batches import TrainingBatch
from atomrl.common.metrics import Mean, Metrics, Sum
from atomrl.objectives.choice import Atoms, Choice, Setting, default, not_none
from atomrl.protocols import ModelOutputs

# --------------------------------------------------------------------------------------------------------------------
# KL penalty, in the loss or in the reward: log-probs [B, T] -> KL estimate per token [B, T].


class KLPenalty(Choice):
    """Base class of KL penalties."""

    keeps_fields = True
    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference; 0: no reference model is loaded."""
    apply_to: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract it from the reward."""
    k2_gradient: bool = False
    """Keep this estimator's value, but use k2's gradient, which is the KL's."""
    target: NonNegativeFloat | None = None
    """Target KL in nats per token, for an adaptive coefficient; null: constant."""
    horizon: NonNegativeFloat = 10000.0
    """Number of completions over which the coefficient adapts."""
    fault: ClassVar[str] = ""
    """Problem of its gradient in the loss, for a warning."""

    def atoms(self) -> Atoms:
        corrected = (estimators.k2_gradient,) if self.k2_gradient else ()
        in_reward = (kl_penalised_reward,) if self.applied_to == "reward" else ()
        adaptive = (estimators.adaptive_coefficient,) if self.applied_to and self.target is not None else ()
        return self.atom, *corrected, *in_reward, *adaptive

    @property
    def applied_to(self) -> Literal["loss", "reward"] | None:
        """`apply_to`; None without a penalty."""
        return self.apply_to if self.coefficient else None

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        value: Tensor = self.atom(logprobs, ref_logprobs, mask)
        return estimators.k2_gradient(value, logprobs, ref_logprobs, mask) if self.k2_gradient else value

    def equation(self) -> Formula:
        return Formula(f"KL_{{i,t}} = {self.text}", rf"\mathrm{{KL}}_{{i,t}} = {self.latex}")

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not self.coefficient and self != type(self)():
            yield "no effect: kl.coefficient is 0, so other settings of kl are ignored and no reference is loaded"
        if self.applied_to == "loss" and not self.k2_gradient and self.fault:
            yield f"biased: {self.fault}"


class K1(KLPenalty, type="k1"):
    """k1: the difference of log-probs. Unbiased, of high variance."""

    atom = staticmethod(estimators.k1_kl)
    fault = "k1 in the loss has a gradient of mean 0; use k2 or k3, or k2_gradient"


class K2(KLPenalty, type="k2"):
    """k2: half the squared difference of log-probs. Its gradient is that of the KL."""

    atom = staticmethod(estimators.k2_kl)


class K3(KLPenalty, type="k3"):
    """k3: GRPO's estimator. Unbiased and never negative."""

    atom = staticmethod(estimators.k3_kl)
    fault = "k3's value is the reverse KL, its gradient is that of the forward KL; k2_gradient fixes it"


class AbsKL(KLPenalty, type="abs"):
    """The absolute difference of log-probs."""

    atom = staticmethod(estimators.abs_kl)
    fault = "abs in the loss does not have the gradient of a KL; use k2 or k3, or k2_gradient"


KL = K1 | K2 | K3 | AbsKL


# --------------------------------------------------------------------------------------------------------------------
# Value loss, entropy bonus, distillation: one micro-batch -> its part of the loss, and metrics.


class ValueLoss(Choice):
    """Base class of value losses. A run has a critic only if the advantage reads `values`."""

    coefficient: NonNegativeFloat = 1.0

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of one micro-batch, with the loss weights of the policy term, and metrics."""
        values, mask, clip = not_none(outputs.values), batch.loss_mask, getattr(self, "clip", None)
        predictions = (values, not_none(batch.values), not_none(batch.returns), mask)
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
                yield "biased: value.coefficient is 0: the critic is not trained; a fresh one predicts 0"
        elif self != ClippedValue():
            yield f"no effect: {advantage.type} reads no values, so no critic uses the settings of value"


class ClippedValue(ValueLoss, type="clipped"):
    """Half the squared error, clipped: no gradient once a value has moved by `clip` towards its return."""

    text = "max((v - R)^2, (clip(v, V - clip, V + clip) - R)^2) / 2"
    latex = (
        r"\tfrac12 \max\big((v_{i,t} - R_{i,t})^2, (\operatorname{clip}(v_{i,t}, V_{i,t} - \epsilon_v, V_{i,t} + "
        r"\epsilon_v) - R_{i,t})^2\big)"
    )
    clip: NonNegativeFloat = default(clipped_value_loss, "clip")
    made_of = (clipped_value_loss, clipped_values, weighted_sum)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if "values" in setting.axes["advantage"].required() and setting.updates_per_step == 1:
            yield "no effect: with one update in a step values have not changed, so they are never clipped"


class SquaredValue(ValueLoss, type="squared"):
    """Half the squared error."""

    text = "(v - R)^2 / 2"
    latex = r"\tfrac12 (v_{i,t} - R_{i,t})^2"
    made_of = (clipped_value_loss, weighted_sum)


Value = ClippedValue | SquaredValue


class Entropy(Choice, type="bonus"):
    """Entropy bonus: entropy of the distribution that each token was sampled from, in nats."""

    text = "H_{i,t} = - sum_v pi(v) log pi(v)"
    latex = r"\mathcal{H}_{i,t} = -\sum_v \pi_\theta(v) \log \pi_\theta(v)"
    coefficient: NonNegativeFloat = 0.0
    made_of = (weighted_sum,)

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Return minus the coefficient times the weighted entropy of one micro-batch, and metrics."""
        mean = weighted_sum(not_none(outputs.entropy), batch.loss_weights)
        return -self.coefficient * mean, {"actor/entropy_loss": Sum(mean.detach())}

    def warnings(self, setting: Setting) -> Iterator[str]:
        if self.coefficient >= 0.01:
            yield "unstable: nothing bounds the bonus; over a large vocabulary entropy has exploded (arXiv:2505.22617)"


class Distillation(Choice, type="jsd"):
    """Generalised Jensen-Shannon divergence of the policy's distributions from a teacher's (p): GKD.

    beta = 0 is the forward KL(p, pi), which is mode-covering, beta = 1 the reverse KL(pi, p), which is mode-seeking.
    With a coefficient of 0, no teacher is loaded.
    """

    text = "D_{i,t} = beta KL(p, m) + (1 - beta) KL(pi, m),   m = beta p + (1 - beta) pi"
    latex = (
        r"D_{i,t} = \beta_D\, \mathrm{KL}(p \,\|\, m) + (1 - \beta_D)\, \mathrm{KL}(\pi_\theta \,\|\, m), \quad m = "
        r"\beta_D\, p + (1 - \beta_D)\, \pi_\theta"
    )
    coefficient: NonNegativeFloat = 0.0
    beta: Annotated[float, Field(ge=0, le=1)] = default(fused_generalised_jsd, "beta")
    made_of = (fused_generalised_jsd, weighted_sum)

    def loss(self, outputs: ModelOutputs, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Return the coefficient times the weighted divergence of one micro-batch, and metrics."""
        mask = batch.loss_mask
        student, teacher = not_none(outputs.distributions), not_none(outputs.teacher_distributions)
        weights = student.hidden, student.head_weight, teacher.hidden, teacher.head_weight
        divergence = student.of_all(fused_generalised_jsd(*weights, self.beta, student.temperature))
        loss = weighted_sum(divergence[None], batch.loss_weights.flatten()[student.places][None])
        return self.coefficient * loss, {"actor/distillation_loss": Mean(divergence.detach().sum(), mask.sum())}

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not self.coefficient and self != Distillation():
            yield "no effect: distillation.coefficient is 0, so other settings of distillation are ignored"
