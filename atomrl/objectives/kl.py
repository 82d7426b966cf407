"""KL penalties: estimators of the KL to the reference, [B, T], in the loss or in the reward."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat
from torch import Tensor

from atomrl.atoms import kl as estimators
from atomrl.atoms.shaping import kl_penalised_reward
from atomrl.objectives.choice import Atoms, Choice, Formula, Setting


class KLPenalty(Choice):
    """What all estimators have in common. A coefficient of 0 loads no reference.

    With a `target` (nats per token) the coefficient adapts; `horizon` is in completions. `k2_gradient` keeps the value
    and takes the gradient of k2, which is that of the KL.
    """

    keeps_fields = True
    coefficient: NonNegativeFloat = 0.0
    apply_to: Literal["loss", "reward"] = "loss"
    k2_gradient: bool = False
    target: NonNegativeFloat | None = None
    horizon: NonNegativeFloat = 10000.0
    fault: ClassVar[str] = ""
    """What is wrong with its gradient in the loss."""

    def atoms(self) -> Atoms:
        corrected = (estimators.k2_gradient,) if self.k2_gradient else ()
        in_reward = (kl_penalised_reward,) if self.applied_to == "reward" else ()
        adaptive = (estimators.adaptive_coefficient,) if self.applied_to and self.target is not None else ()
        return self.atom, *corrected, *in_reward, *adaptive

    @property
    def applied_to(self) -> Literal["loss", "reward"] | None:
        """Where it is applied; None where there is no penalty."""
        return self.apply_to if self.coefficient else None

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        value: Tensor = self.atom(logprobs, ref_logprobs, mask)
        return estimators.k2_gradient(value, logprobs, ref_logprobs, mask) if self.k2_gradient else value

    def equation(self) -> Formula:
        return Formula(f"KL_{{i,t}} = {self.text}", rf"\mathrm{{KL}}_{{i,t}} = {self.latex}")

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not self.coefficient and self != type(self)():
            yield "no effect: kl.coefficient is 0, so the other settings of kl do nothing and no reference is loaded"
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
    fault = "k3's value is the reverse KL, its gradient is that of the forward KL; k2_gradient mends it"


class AbsKL(KLPenalty, type="abs"):
    """The absolute difference of log-probs."""

    atom = staticmethod(estimators.abs_kl)
    fault = "abs in the loss has the gradient of no KL; use k2 or k3, or k2_gradient"


KL = K1 | K2 | K3 | AbsKL
