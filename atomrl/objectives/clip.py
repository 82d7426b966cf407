"""Per-token policy losses: PPO's clip and what takes its place.

To add one: a class here with its equation, and its name in the union `Clip` at the end. One's own function needs
neither: `clip: {type: custom, function: "my_module:my_clip"}`.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from atomrl.atoms import policy_losses
from atomrl.atoms import policy_losses as trust_region
from atomrl.atoms.advantages import per_token
from atomrl.atoms.masks import row_mean
from atomrl.atoms.policy_losses import geometric_mean_loss, sequence_clipped_log_ratio
from atomrl.atoms.ratios import sequence_log_ratio, sequence_token_log_ratio, token_log_ratio
from atomrl.objectives.choice import Atoms, Choice, Custom, Formula, Setting

# --------------------------------------------------------------------------------------------------------------------
# The likelihood ratio to the old policy, by token or by completion: log-probs [B, T] -> log-ratio [B, T].


class RatioChoice(Choice):
    """One atom of log-probs, by token or by completion."""

    def atoms(self) -> Atoms:
        return (self.atom, per_token) if self.type == "sequence" else (self.atom,)

    @property
    def by_completion(self) -> bool:
        return self.type != "token"

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.atom(logprobs, old_logprobs, mask, **self.settings)
        return per_token(found, mask) if found.dim() == 1 else found


class TokenRatio(RatioChoice, type="token"):
    """The ratio of each token."""

    text = "rho_{i,t} = pi(a_t) / pi_old(a_t)"
    latex = r"\rho_{i,t} = \frac{\pi_\theta(a_{i,t})}{\pi_{\mathrm{old}}(a_{i,t})}"
    clamp: NonNegativeFloat | None = None
    atom = staticmethod(token_log_ratio)


class SequenceRatio(RatioChoice, type="sequence"):
    """The ratio of the whole completion, the same for all its tokens, which share the gradient: GSPO."""

    text = "rho_{i,t} = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)"
    latex = r"\rho_{i,t} = \Big(\frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}\Big)^{1/|o_i|}"
    length_normalised: bool = True
    clamp: NonNegativeFloat | None = None
    atom = staticmethod(sequence_log_ratio)

    def equation(self) -> Formula:
        if self.length_normalised:
            return super().equation()
        return Formula(
            "rho_{i,t} = pi(o_i) / pi_old(o_i)",
            r"\rho_{i,t} = \frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}",
        )


class SequenceTokenRatio(RatioChoice, type="sequence_token"):
    """The ratio of the whole completion in value, with the gradient of each token's own log-prob: GSPO-token."""

    text = "rho_{i,t} = sg[(pi(o_i) / pi_old(o_i))^(1 / |o_i|)] pi(a_t) / sg[pi(a_t)]"
    latex = (
        r"\rho_{i,t} = \operatorname{sg}\Big[\Big(\frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}\Big)^{1/|o_i|}\Big] "
        r"\frac{\pi_\theta(a_{i,t})}{\operatorname{sg}[\pi_\theta(a_{i,t})]}"
    )
    ceiling: NonNegativeFloat | None = None
    atom = staticmethod(sequence_token_log_ratio)


Ratio = TokenRatio | SequenceRatio | SequenceTokenRatio


class PolicyInputs(NamedTuple):
    """The inputs of a per-token policy loss: the rows of a micro-batch, all [B, T], on the device of the policy.

    Numbers are float32, and 0 off the mask. Log-probs are in nats, each of the token itself. Only `logprobs` and
    `log_ratio` have a gradient. Those that may be None are there where `reads` names them; `rollout_logprobs` is there
    unless the engine gives none.
    """

    log_ratio: Tensor
    """log pi - log pi_old of the axis `ratio`: of each token, or of its completion. With gradient."""
    advantages: Tensor
    """Of each token."""
    logprobs: Tensor
    """log pi, of the policy as it is now. With gradient."""
    old_logprobs: Tensor
    """log pi_old, of the policy at the start of the step."""
    mask: Tensor
    """Bool: the tokens that are trained, all of which the model wrote."""
    rollout_logprobs: Tensor | None = None
    """log mu, as the engine gave them when it drew the tokens."""
    ref_logprobs: Tensor | None = None
    """Log-probs of the frozen reference."""
    teacher_logprobs: Tensor | None = None
    """Log-probs of the teacher."""
    old_entropy: Tensor | None = None
    """Entropy of the distribution that the token was drawn from, at the start of the step, in nats."""


Clipped = tuple[Tensor, Tensor]
"""Loss per token, and the tokens on which the clip acts, both [B, T]. A clip that acts on none gives the loss alone."""


class TrustRegionClip(Choice):
    """What clips that act as the ratio leaves 1 have in common."""

    def warnings(self, setting: Setting) -> Iterator[str]:
        if setting.updates_per_step == 1:
            yield f"no effect: with one update in a step the ratio is 1, and {self.type} is plain REINFORCE"


class PPOClip(TrustRegionClip, type="ppo"):
    """PPO's clip: no gradient beyond the bound on the advantage's side."""

    text = "min(rho A, clip(rho, 1 - low, 1 + high) A)"
    latex = (
        r"\min\big(\rho_{i,t} \hat A_{i,t}, \operatorname{clip}(\rho_{i,t}, 1 - \epsilon_l, 1 + \epsilon_h) \hat "
        r"A_{i,t}\big)"
    )
    low: NonNegativeFloat = 0.2
    high: NonNegativeFloat = 0.2
    dual: NonNegativeFloat | None = None
    made_of = (policy_losses.clipped_policy_loss, policy_losses.clipped_tokens)

    def __call__(self, inputs: PolicyInputs) -> Clipped:
        ratio, advantages = inputs.log_ratio.exp(), inputs.advantages
        loss = policy_losses.clipped_policy_loss(ratio, advantages, self.low, self.high, self.dual)
        return loss, policy_losses.clipped_tokens(ratio.detach(), advantages, self.low, self.high)

    def where(self) -> tuple[Formula, ...]:
        bound = r"\text{at least } c \hat A_{i,t} \text{ where } \hat A_{i,t} < 0"
        return () if self.dual is None else (Formula("the minimum is at least dual A where A < 0", bound),)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.dual is not None and self.dual <= 1:
            yield "no effect: a dual clip of at most 1 leaves negative advantages without a gradient; 3 is usual"
        ratio, by_token = setting.axes["ratio"], setting.axes["ratio"].type == "token"
        if setting.updates_per_step == 1:
            return
        if not by_token and getattr(ratio, "length_normalised", True) and self.low >= 0.05:
            yield "no effect: a completion's mean ratio moves by some 1e-4; a clip this wide never acts (GSPO: 3e-4)"
        if by_token and self.high < 0.01:
            yield "unstable: token ratios move by more than this; nearly every token is clipped after the first update"


class CISPOClip(Choice, type="cispo"):
    """CISPO: the clipped ratio is a weight without gradient, so that a clipped token still learns."""

    text = "sg[clip(rho, 1 - low, 1 + high)] A log pi(a_t)"
    latex = (
        r"\operatorname{sg}[\operatorname{clip}(\rho_{i,t}, 1 - \epsilon_l, 1 + \epsilon_h)] \hat A_{i,t} \log "
        r"\pi_\theta(a_{i,t})"
    )
    low: NonNegativeFloat = 1.0
    high: NonNegativeFloat = 4.0
    made_of = (policy_losses.cispo_loss, policy_losses.out_of_bounds)

    def __call__(self, inputs: PolicyInputs) -> Clipped:
        ratio = inputs.log_ratio.detach().exp()
        loss = policy_losses.cispo_loss(inputs.logprobs, ratio, inputs.advantages, inputs.mask, self.low, self.high)
        return loss, policy_losses.out_of_bounds(ratio, 1 - self.low, 1 + self.high)


class SAPOClip(TrustRegionClip, type="sapo"):
    """SAPO: a sigmoid in the place of the clip, with a temperature by the sign of the advantage."""

    text = "(4 / tau) sigmoid(tau (rho - 1)) A,   tau by the sign of A"
    latex = r"\frac{4}{\tau} \sigma(\tau (\rho_{i,t} - 1)) \hat A_{i,t}"
    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    made_of = (policy_losses.sapo_loss,)

    def __call__(self, inputs: PolicyInputs) -> Tensor:
        return policy_losses.sapo_loss(inputs.log_ratio.exp(), inputs.advantages, **self.settings)


class GMPOClip(TrustRegionClip, type="gmpo"):
    """GMPO: the geometric mean of a completion's ratios, each clipped in log space on the advantage's side."""

    text = "A_i exp(mean_t clip_A(log rho_t, -low, high))"
    latex = (
        r"\hat A_i \exp\Big(\frac{1}{|o_i|} \sum_t \operatorname{clip}_{\hat A}(\log \rho_{i,t}, -\epsilon_l, "
        r"\epsilon_h)\Big)"
    )
    low: NonNegativeFloat = 0.4
    high: NonNegativeFloat = 0.4
    made_of = (sequence_clipped_log_ratio, row_mean, geometric_mean_loss, per_token)

    @property
    def by_completion(self) -> bool:
        return True

    def __call__(self, inputs: PolicyInputs) -> Clipped:
        log_ratio, advantages, mask = inputs.log_ratio, inputs.advantages, inputs.mask
        clipped = sequence_clipped_log_ratio(log_ratio, advantages, self.low, self.high)
        loss = geometric_mean_loss(clipped, row_mean(advantages, mask), mask)
        return per_token(loss, mask), clipped.detach() != log_ratio.detach() * (advantages != 0)


class DPPOClip(TrustRegionClip):
    """What DPPO's two measures of a token's move have in common."""

    cap: NonNegativeFloat = 20.0
    low: NonNegativeFloat = 0.2
    high: NonNegativeFloat = 0.2

    def __call__(self, inputs: PolicyInputs) -> Clipped:
        policies = (inputs.logprobs, inputs.old_logprobs, inputs.mask)
        # A divergence has no sign, a change has.
        change, divergence = trust_region.probability_change(*policies), self.atom(*policies).abs()
        keep = trust_region.trust_region_tokens(change, divergence, inputs.advantages, self.low, self.high)
        weights = inputs.log_ratio.detach().exp().clamp(max=self.cap) * keep
        return policy_losses.reinforce_loss(inputs.logprobs, inputs.advantages, inputs.mask, weights), ~keep


class DPPOTVClip(DPPOClip, type="dppo_tv"):
    """DPPO by total variation: no gradient where the probability has moved too far on the advantage's side."""

    text = "sg[min(rho, cap)] [|pi - pi_old| within bounds] A log pi(a_t)"
    latex = (
        r"\operatorname{sg}[\min(\rho_{i,t}, c)]\,[\,|\pi_\theta - \pi_{\mathrm{old}}| \le \delta\,]\,\hat A_{i,t} "
        r"\log \pi_\theta(a_{i,t})"
    )
    atom = staticmethod(trust_region.probability_change)
    made_of = (trust_region.probability_change, trust_region.trust_region_tokens, policy_losses.reinforce_loss)


class DPPOKLClip(DPPOClip, type="dppo_kl"):
    """DPPO by binary KL: no gradient where the two-outcome KL has grown too large on the advantage's side."""

    text = "sg[min(rho, cap)] [KL_binary(pi_old, pi) within bounds] A log pi(a_t)"
    latex = (
        r"\operatorname{sg}[\min(\rho_{i,t}, c)]\,[\,\mathrm{KL}_{\mathrm{bin}}(\pi_{\mathrm{old}}, \pi_\theta) \le "
        r"\delta\,]\,\hat A_{i,t} \log \pi_\theta(a_{i,t})"
    )
    low: NonNegativeFloat = 0.05
    high: NonNegativeFloat = 0.05
    atom = staticmethod(trust_region.binary_kl)
    made_of = (trust_region.binary_kl, *DPPOTVClip.made_of)


class NoClip(Choice, type="none"):
    """The ratio as it is."""

    text = "rho A"
    latex = r"\rho_{i,t} \hat A_{i,t}"
    made_of = (policy_losses.clipped_policy_loss,)

    def __call__(self, inputs: PolicyInputs) -> Tensor:
        return policy_losses.clipped_policy_loss(inputs.log_ratio.exp(), inputs.advantages, math.inf, math.inf)

    def warnings(self, setting: Setting) -> Iterator[str]:
        bounded = getattr(setting.axes["token_filter"], "type", "") == "kl_cov" or setting.axes["update"] is not None
        if setting.updates_per_step > 1 and not bounded:
            yield "unstable: nothing bounds the ratio over several updates"


class ReinforceClip(Choice, type="reinforce"):
    """REINFORCE: the log-prob in the place of a ratio."""

    text = "A log pi(a_t)"
    latex = r"\hat A_{i,t} \log \pi_\theta(a_{i,t})"
    made_of = (policy_losses.reinforce_loss,)

    def __call__(self, inputs: PolicyInputs) -> Tensor:
        return policy_losses.reinforce_loss(inputs.logprobs, inputs.advantages, inputs.mask)

    def warnings(self, setting: Setting) -> Iterator[str]:
        updates = setting.updates_per_step
        if updates > 1 and setting.axes["advantage"].type != "none":
            yield f"biased: {updates} updates in a step without a ratio; all but the first are off-policy"


class CustomClip(Custom, type="custom"):
    """Your own function: `PolicyInputs` -> loss per token [B, T], or that and the tokens on which it acts."""

    inputs = PolicyInputs

    def check(self, found: Any, inputs: PolicyInputs) -> None:
        pair = isinstance(found, tuple)
        if pair and len(found) != 2:
            raise ValueError(
                f"{self.function} must return the loss, or (loss, clipped), but returned {len(found)} values"
            )
        loss, clipped = found if pair else (found, None)
        self.check_tensor(loss, (inputs.mask,), "float", "the loss per token" if pair else "")
        if clipped is not None:
            self.check_tensor(clipped, (inputs.mask,), "bool", "the clipped tokens")
        # A loss that is 0 throughout may be a constant. (The values are only looked at where there is no gradient, so
        # that nothing waits for the device.)
        needs_gradient = inputs.logprobs.requires_grad and torch.is_grad_enabled()
        if needs_gradient and not loss.requires_grad and loss[inputs.mask].any():
            raise ValueError(
                f"{self.shown} returned a loss without a gradient, from which nothing is learned: make it of "
                "log_ratio or logprobs, without detach() or torch.no_grad()"
            )


Clip = PPOClip | CISPOClip | SAPOClip | GMPOClip | DPPOTVClip | DPPOKLClip | NoClip | ReinforceClip | CustomClip
