"""Rollout importance sampling: corrections for rollouts that are stale, or come from other numerics.

A correction is a factor on the policy term, without gradient, made from the engine's own log-probs (mu) and the
trainer's at the start of the step (pi_old). Most are made by row, as the loss is computed; those that take a statistic
over all rows are made once, with the advantages. So no split of a step changes them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from atomrl.atoms import ratios as importance_sampling
from atomrl.atoms.advantages import per_token
from atomrl.atoms.kl import k1_kl, k3_kl
from atomrl.atoms.masks import row_max, row_mean, row_sum
from atomrl.objectives.choice import Atoms, Choice, Custom, Setting


class RolloutInputs(NamedTuple):
    """The inputs of a correction: the rows of a micro-batch (a step if `whole_step`), [B, T], on the policy's device.

    Log-probs are float32, in nats, each of the token itself, and 0 off the mask.
    """

    old_logprobs: Tensor
    """log pi_old, of the policy at the start of the step."""
    rollout_logprobs: Tensor
    """log mu, as the engine gave them when it drew the tokens."""
    logprobs: Tensor
    """log pi, of the policy as it is now."""
    advantages: Tensor
    """Of each token."""
    mask: Tensor
    """Bool: the tokens that are trained, all of which the model wrote."""

    @property
    def log_ratio(self) -> Tensor:
        """log pi_old - log mu."""
        return importance_sampling.rollout_log_ratio(self.old_logprobs, self.rollout_logprobs, self.mask)


class RolloutISChoice(Choice):
    """What all corrections have in common: `RolloutInputs` -> factor [B, T]."""

    by_token: ClassVar[bool] = False
    """Whether it is an importance weight of each token."""

    @property
    def whole_step(self) -> bool:
        """Whether it takes a statistic over all rows of a step, and so is made before they are split."""
        return False

    def warnings(self, setting: Setting) -> Iterator[str]:
        if self.by_token and setting.axes["ratio"].type == "sequence":
            yield "biased: a weight by token on a ratio by completion; sequence_tis is of one level with it"


class ImportanceWeights(RolloutISChoice):
    """The weights pi_old / mu within bounds, by token or by completion."""

    clamp: NonNegativeFloat = 20.0
    high: NonNegativeFloat = 2.0
    low: NonNegativeFloat = 0.0

    def atoms(self) -> Atoms:
        own = importance_sampling.importance_weights, self.atom
        return own if self.by_token else (row_sum, *own, per_token)

    @property
    def by_completion(self) -> bool:
        return not self.by_token and not self.whole_step  # which is made of whole trajectories

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        log_ratio = inputs.log_ratio if self.by_token else row_sum(inputs.log_ratio, inputs.mask)
        weights: Tensor = self.atom(
            importance_sampling.importance_weights(log_ratio, self.clamp), low=self.low, high=self.high
        )
        return weights if self.by_token else per_token(weights, inputs.mask)


class TruncatedWeights(ImportanceWeights):
    """What truncated importance sampling by token and by completion have in common."""

    normalised: bool = False
    """Divided by the mean weight of the step."""
    atom = staticmethod(importance_sampling.truncated_weights)

    def atoms(self) -> Atoms:
        return (*super().atoms(), importance_sampling.normalised_weights) if self.normalised else super().atoms()

    @property
    def whole_step(self) -> bool:
        return self.normalised

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        weights = super().__call__(inputs)
        if not self.normalised:
            return weights
        return importance_sampling.normalised_weights(weights, inputs.mask, not self.by_token)


class TokenTIS(TruncatedWeights, type="token_tis"):
    """Truncated importance sampling by token; where `normalised`, divided by the mean weight of the step's tokens."""

    text = "min(pi_old(a_t) / mu(a_t), high)"
    latex = r"\min\Big(\frac{\pi_{\mathrm{old}}(a_{i,t})}{\mu(a_{i,t})}, c\Big)"
    by_token = True


class SequenceTIS(TruncatedWeights, type="sequence_tis"):
    """Truncated importance sampling by completion; where `normalised`, divided by the mean weight of the step's rows."""

    text = "min(pi_old(o_i) / mu(o_i), high)"
    latex = r"\min\Big(\frac{\pi_{\mathrm{old}}(o_i)}{\mu(o_i)}, c\Big)"

class TokenMIS(ImportanceWeights, type="token_mis"):
    """Masked importance sampling by token: a weight beyond the bounds is 0."""

    text = "w [low <= w <= high],   w = pi_old(a_t) / mu(a_t)"
    latex = r"w_{i,t}\,\mathbb{1}[c_l \le w_{i,t} \le c_h], \quad w_{i,t} = \pi_{\mathrm{old}}(a_{i,t}) / \mu(a_{i,t})"
    atom = staticmethod(importance_sampling.masked_weights)
    by_token = True


class SequenceMIS(ImportanceWeights, type="sequence_mis"):
    """Masked importance sampling by completion: a weight beyond the bounds is 0."""

    text = "w [low <= w <= high],   w = pi_old(o_i) / mu(o_i)"
    latex = r"w_i\,\mathbb{1}[c_l \le w_i \le c_h], \quad w_i = \pi_{\mathrm{old}}(o_i) / \mu(o_i)"
    atom = staticmethod(importance_sampling.masked_weights)


class IcePop(TokenMIS, type="icepop"):
    """IcePop: masked importance sampling by token with two bounds."""

    high: NonNegativeFloat = 5.0
    low: NonNegativeFloat = 0.5


class SequenceMask(RolloutISChoice, type="sequence_mask"):
    """Keeps completions whose geometric mean of the weights is within bounds; `weighted` keeps the weights as well."""

    text = "[low <= (pi_old(o_i) / mu(o_i))^(1 / |o_i|) <= high]"
    latex = r"\mathbb{1}\big[c_l \le (\pi_{\mathrm{old}}(o_i) / \mu(o_i))^{1/|o_i|} \le c_h\big]"
    high: NonNegativeFloat = 1.001
    low: NonNegativeFloat = 0.999
    weighted: bool = False
    made_of = (row_mean, importance_sampling.importance_weights, importance_sampling.within)

    @property
    def by_completion(self) -> bool:
        return True

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        log_ratio, mask = inputs.log_ratio, inputs.mask
        keep = importance_sampling.within(
            importance_sampling.importance_weights(row_mean(log_ratio, mask)), self.low, self.high
        )
        weights = importance_sampling.importance_weights(log_ratio, 20.0) if self.weighted else mask.to(log_ratio.dtype)
        return weights * keep[:, None]


STATISTICS = {"mean": row_mean, "sum": row_sum, "max": row_max}


class KLRejection(RolloutISChoice, type="kl_rejection"):
    """Keeps tokens, or whole completions by a statistic of their tokens, whose KL of mu from pi_old is small."""

    text = "[KL(mu, pi_old) <= bound]"
    latex = r"\mathbb{1}[\widehat{\mathrm{KL}}(\mu \,\|\, \pi_{\mathrm{old}}) \le c]"
    bound: NonNegativeFloat = 0.01
    level: Literal["token", "mean", "sum", "max"] = "mean"
    estimator: Literal["k1", "k3"] = "k3"

    def atoms(self) -> Atoms:
        statistic = () if self.level == "token" else (STATISTICS[self.level],)
        return k1_kl if self.estimator == "k1" else k3_kl, *statistic, importance_sampling.within

    @property
    def by_completion(self) -> bool:
        return self.level != "token"

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        estimate, mask = k1_kl if self.estimator == "k1" else k3_kl, inputs.mask
        kl = estimate(inputs.rollout_logprobs, inputs.old_logprobs, mask)
        if self.level == "token":
            return importance_sampling.within(kl, -math.inf, self.bound).to(kl.dtype)
        keep = importance_sampling.within(STATISTICS[self.level](kl, mask), -math.inf, self.bound)
        return keep[:, None].expand_as(mask).to(kl.dtype)


class OffPolicySequences(RolloutISChoice, type="off_policy_sequences"):
    """Off-policy sequence masking: bad completions that the policy has left are not learned from (DeepSeek-V3.2)."""

    text = "[A_{i,t} >= 0 or mean_t (log mu - log pi) <= bound]"
    latex = (
        r"\mathbb{1}\big[\hat A_{i,t} \ge 0 \text{ or } \tfrac{1}{|o_i|}\sum_t \log \tfrac{\mu}{\pi_\theta} \le "
        r"\delta\big]"
    )
    bound: NonNegativeFloat = 0.05
    made_of = (k1_kl, row_mean, importance_sampling.off_policy_sequences)

    @property
    def by_completion(self) -> bool:
        return True

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        kl = k1_kl(inputs.rollout_logprobs, inputs.logprobs.detach(), inputs.mask)
        keep = importance_sampling.off_policy_sequences(row_mean(kl, inputs.mask), inputs.advantages, self.bound)
        return keep.to(inputs.logprobs.dtype)


class SecondMoment(RolloutISChoice, type="second_moment"):
    """M2PO: drops the step's tokens furthest from the policy until the second moment of the rest is below a bound."""

    text = "[t in the largest set of least d_t^2 with mean d_t^2 < bound],   d_t = log pi_old(a_t) - log mu(a_t)"
    latex = (
        r"\mathbb{1}\big[t \in \arg\max\{|M| : \operatorname{mean}_M d_t^2 < \tau\}\big], \quad d_t = \log "
        r"\frac{\pi_{\mathrm{old}}(a_{i,t})}{\mu(a_{i,t})}"
    )
    bound: NonNegativeFloat = 0.04
    made_of = (importance_sampling.second_moment_tokens,)

    @property
    def whole_step(self) -> bool:
        return True

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        log_ratio = inputs.log_ratio
        return importance_sampling.second_moment_tokens(log_ratio, inputs.mask, self.bound).to(log_ratio.dtype)


class CustomRolloutIS(Custom, RolloutISChoice, type="custom"):
    """Your own function: `RolloutInputs` -> factor [B, T], made by row. It has no gradient, whatever it is made of."""

    inputs = RolloutInputs

    def check(self, found: Any, inputs: RolloutInputs) -> None:
        is_bool = isinstance(found, Tensor) and found.dtype == torch.bool
        self.check_tensor(found, (inputs.mask,), "bool" if is_bool else "number")


Weights = TokenTIS | SequenceTIS | TokenMIS | SequenceMIS | IcePop
Masks = SequenceMask | KLRejection | OffPolicySequences | SecondMoment
RolloutIS = Weights | Masks | CustomRolloutIS


def product(parts: Sequence[RolloutIS], inputs: RolloutInputs, *, whole_step: bool) -> Tensor | None:
    """The product of the corrections made over the whole step, or of those made by row; None: there is none."""
    factors = [part(inputs) for part in parts if part.whole_step == whole_step]
    return torch.stack(factors).prod(0) if factors else None
