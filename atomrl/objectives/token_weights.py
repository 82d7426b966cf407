"""Token weights of the policy term: old policy, rollout importance sampling c, and token filters s.

    sum_{i,t} w_{i,t} c_{i,t} s_{i,t} clip(rho_{i,t}, A_{i,t})

- `old_policy` is the policy that the ratio compares with.
- `rollout_is` corrects rollouts that are stale, or that come from an engine with other numerics than the trainer.
- `token_filter` selects tokens.

Both are computed so that no split of a step into micro-batches changes them: filters, and corrections with a statistic
over all rows (`whole_step`), once per step; other corrections row by row. The weights w are those of `loss_agg`
(`policy_loss.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from atomrl.atoms import Formula, policy_losses, token_filters
from atomrl.atoms.advantages import per_token
from atomrl.atoms.kl import abs_kl, k1_kl, k2_kl, k3_kl
from atomrl.atoms.masks import row_max, row_mean, row_sum
from atomrl.objectives.choice import Atoms, Choice, Custom, Setting, default, not_none
from atomrl.objectives.policy_loss import PolicyInputs

# --------------------------------------------------------------------------------------------------------------------
# Old policy: the trainer's at the start of the step (None), or the one that sampled the tokens.


class RolloutPolicy(Choice, type="rollout"):
    """The old policy is the one that sampled the tokens, and corrections use the current policy in place of pi_old.

    Two policies instead of three: the ratio pi / mu contains the correction, and no old log-probs are computed. verl
    calls this `bypass_mode`.
    """

    text = "pi_old = mu"
    latex = r"\pi_{\mathrm{old}} = \mu"


# --------------------------------------------------------------------------------------------------------------------
# Rollout importance sampling: `RolloutInputs` -> detached factor [B, T], from the engine's log-probs (mu) and the
# trainer's at the start of the step (pi_old).


class RolloutInputs(NamedTuple):
    """Inputs of a correction: rows of a micro-batch (of a step if `whole_step`), [B, T], on the policy's device.

    Log-probs are float32, in nats, indexed by the token itself, and 0 off the mask.
    """

    old_logprobs: Tensor
    """log pi_old: of the policy at the start of the step; with `old_policy: rollout` of the current policy."""
    rollout_logprobs: Tensor
    """log mu: of the engine, when it sampled the tokens."""
    logprobs: Tensor
    """log pi: of the current policy."""
    advantages: Tensor
    """Advantage of each token."""
    mask: Tensor
    """Bool: trained tokens, all written by the model."""

    @property
    def log_ratio(self) -> Tensor:
        """log pi_old - log mu."""
        return policy_losses.rollout_log_ratio(self.old_logprobs, self.rollout_logprobs, self.mask)


class RolloutISChoice(Choice):
    """Base class of corrections: `RolloutInputs` -> factor [B, T]."""

    by_token: ClassVar[bool] = False
    """It is an importance weight per token."""

    @property
    def whole_step(self) -> bool:
        """It uses a statistic over all rows of a step, so it is computed before the step is split."""
        return False

    def warnings(self, setting: Setting) -> Iterator[str]:
        if self.by_token and setting.axes["ratio"].type == "sequence":
            yield "biased: a weight per token on a ratio per completion; use sequence_tis"


class ImportanceWeights(RolloutISChoice):
    """Bounded importance weights pi_old / mu, per token or per completion."""

    clamp: NonNegativeFloat = 20.0
    high: NonNegativeFloat = 2.0
    low: NonNegativeFloat = 0.0

    def atoms(self) -> Atoms:
        own = policy_losses.importance_weights, self.atom
        return own if self.by_token else (row_sum, *own, per_token)

    @property
    def by_completion(self) -> bool:
        return not self.by_token and not self.whole_step  # a whole step has all rows of a trajectory anyway

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        log_ratio = inputs.log_ratio if self.by_token else row_sum(inputs.log_ratio, inputs.mask)
        weights: Tensor = self.atom(
            policy_losses.importance_weights(log_ratio, self.clamp), low=self.low, high=self.high
        )
        return weights if self.by_token else per_token(weights, inputs.mask)


class TruncatedWeights(ImportanceWeights):
    """Truncated importance sampling, per token or per completion."""

    normalised: bool = False
    """Divide by the mean weight of the step."""
    atom = staticmethod(policy_losses.truncated_weights)

    def atoms(self) -> Atoms:
        return (*super().atoms(), policy_losses.normalised_weights) if self.normalised else super().atoms()

    @property
    def whole_step(self) -> bool:
        return self.normalised

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        weights = super().__call__(inputs)
        if not self.normalised:
            return weights
        return policy_losses.normalised_weights(weights, inputs.mask, not self.by_token)


class TokenTIS(TruncatedWeights, type="token_tis"):
    """Truncated importance sampling per token; `normalised` divides by the mean weight of the step's tokens."""

    text = "min(pi_old(a_t) / mu(a_t), high)"
    latex = r"\min\Big(\frac{\pi_{\mathrm{old}}(a_{i,t})}{\mu(a_{i,t})}, c\Big)"
    by_token = True


class SequenceTIS(TruncatedWeights, type="sequence_tis"):
    """Truncated importance sampling per completion; `normalised` divides by the mean weight of the step's rows."""

    text = "min(pi_old(o_i) / mu(o_i), high)"
    latex = r"\min\Big(\frac{\pi_{\mathrm{old}}(o_i)}{\mu(o_i)}, c\Big)"


class TokenMIS(ImportanceWeights, type="token_mis"):
    """Masked importance sampling per token: weights out of bounds are 0."""

    text = "w [low <= w <= high],   w = pi_old(a_t) / mu(a_t)"
    latex = r"w_{i,t}\,\mathbb{1}[c_l \le w_{i,t} \le c_h], \quad w_{i,t} = \pi_{\mathrm{old}}(a_{i,t}) / \mu(a_{i,t})"
    atom = staticmethod(policy_losses.masked_weights)
    by_token = True


class SequenceMIS(ImportanceWeights, type="sequence_mis"):
    """Masked importance sampling per completion: weights out of bounds are 0."""

    text = "w [low <= w <= high],   w = pi_old(o_i) / mu(o_i)"
    latex = r"w_i\,\mathbb{1}[c_l \le w_i \le c_h], \quad w_i = \pi_{\mathrm{old}}(o_i) / \mu(o_i)"
    atom = staticmethod(policy_losses.masked_weights)


class IcePop(TokenMIS, type="icepop"):
    """IcePop: masked importance sampling per token with two bounds."""

    high: NonNegativeFloat = 5.0
    low: NonNegativeFloat = 0.5


class SequenceMask(RolloutISChoice, type="sequence_mask"):
    """Keep completions whose geometric mean of the weights is within bounds; `weighted` also applies the weights."""

    text = "[low <= (pi_old(o_i) / mu(o_i))^(1 / |o_i|) <= high]"
    latex = r"\mathbb{1}\big[c_l \le (\pi_{\mathrm{old}}(o_i) / \mu(o_i))^{1/|o_i|} \le c_h\big]"
    high: NonNegativeFloat = 1.001
    low: NonNegativeFloat = 0.999
    weighted: bool = False
    made_of = (row_mean, policy_losses.importance_weights, policy_losses.within)

    @property
    def by_completion(self) -> bool:
        return True

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        log_ratio, mask = inputs.log_ratio, inputs.mask
        keep = policy_losses.within(policy_losses.importance_weights(row_mean(log_ratio, mask)), self.low, self.high)
        weights = policy_losses.importance_weights(log_ratio, 20.0) if self.weighted else mask.to(log_ratio.dtype)
        return weights * keep[:, None]


STATISTICS = {"mean": row_mean, "sum": row_sum, "max": row_max}


class KLRejection(RolloutISChoice, type="kl_rejection"):
    """Keep tokens, or completions by a statistic of their tokens, whose KL of mu from pi_old is within bounds."""

    text = "[KL(mu, pi_old) <= bound]"
    latex = r"\mathbb{1}[\widehat{\mathrm{KL}}(\mu \,\|\, \pi_{\mathrm{old}}) \le c]"
    bound: NonNegativeFloat = 0.01
    low: float | None = None
    """Lower bound, for k1, which can be negative; null: none."""
    level: Literal["token", "mean", "sum", "max"] = "mean"
    estimator: Literal["k1", "k2", "k3"] = "k3"

    def atoms(self) -> Atoms:
        statistic = () if self.level == "token" else (STATISTICS[self.level],)
        return self._estimate, *statistic, policy_losses.within

    @property
    def _estimate(self) -> Callable[..., Tensor]:
        return {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}[self.estimator]

    def equation(self) -> Formula:
        if self.low is None:
            return super().equation()
        return Formula(self.text.replace("[", "[low <= "), self.latex.replace("{1}[", r"{1}[c_l \le "))

    @property
    def by_completion(self) -> bool:
        return self.level != "token"

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        mask, low = inputs.mask, -math.inf if self.low is None else self.low
        kl = self._estimate(inputs.rollout_logprobs, inputs.old_logprobs, mask)
        if self.level == "token":
            return policy_losses.within(kl, low, self.bound).to(kl.dtype)
        keep = policy_losses.within(STATISTICS[self.level](kl, mask), low, self.bound)
        return keep[:, None].expand_as(mask).to(kl.dtype)


class OffPolicySequences(RolloutISChoice, type="off_policy_sequences"):
    """Off-policy sequence masking: drop off-policy completions with a negative advantage (DeepSeek-V3.2)."""

    text = "[A_{i,t} >= 0 or mean_t (log mu - log pi) <= bound]"
    latex = (
        r"\mathbb{1}\big[\hat A_{i,t} \ge 0 \text{ or } \tfrac{1}{|o_i|}\sum_t \log \tfrac{\mu}{\pi_\theta} \le "
        r"\delta\big]"
    )
    bound: NonNegativeFloat = 0.05
    made_of = (k1_kl, row_mean, policy_losses.off_policy_sequences)

    @property
    def by_completion(self) -> bool:
        return True

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        kl = k1_kl(inputs.rollout_logprobs, inputs.logprobs.detach(), inputs.mask)
        keep = policy_losses.off_policy_sequences(row_mean(kl, inputs.mask), inputs.advantages, self.bound)
        return keep.to(inputs.logprobs.dtype)


class SecondMoment(RolloutISChoice, type="second_moment"):
    """M2PO: drop the step's most off-policy tokens until the second moment of the rest is below a bound."""

    text = "[t in the largest set of least d_t^2 with mean d_t^2 < bound],   d_t = log pi_old(a_t) - log mu(a_t)"
    latex = (
        r"\mathbb{1}\big[t \in \arg\max\{|M| : \operatorname{mean}_M d_t^2 < \tau\}\big], \quad d_t = \log "
        r"\frac{\pi_{\mathrm{old}}(a_{i,t})}{\mu(a_{i,t})}"
    )
    bound: NonNegativeFloat = 0.04
    made_of = (policy_losses.second_moment_tokens,)

    @property
    def whole_step(self) -> bool:
        return True

    def __call__(self, inputs: RolloutInputs) -> Tensor:
        log_ratio = inputs.log_ratio
        return policy_losses.second_moment_tokens(log_ratio, inputs.mask, self.bound).to(log_ratio.dtype)


class CustomRolloutIS(Custom, RolloutISChoice, type="custom"):
    """A user's function: `RolloutInputs` -> factor [B, T], computed row by row. The factor is detached."""

    inputs = RolloutInputs

    def check(self, result: Any, inputs: RolloutInputs) -> None:
        is_bool = isinstance(result, Tensor) and result.dtype == torch.bool
        self.check_tensor(result, (inputs.mask,), "bool" if is_bool else "number")


Weights = TokenTIS | SequenceTIS | TokenMIS | SequenceMIS | IcePop
Masks = SequenceMask | KLRejection | OffPolicySequences | SecondMoment
RolloutIS = Weights | Masks | CustomRolloutIS


def rollout_is_product(parts: Sequence[RolloutIS], inputs: RolloutInputs, *, whole_step: bool) -> Tensor | None:
    """Return the product of the corrections over the whole step, or of those per row; None if there are none."""
    factors = [part(inputs) for part in parts if part.whole_step == whole_step]
    return torch.stack(factors).prod(0) if factors else None


# --------------------------------------------------------------------------------------------------------------------
# Token filters: `FilterInputs` -> [B, T] bool, over all rows of a step.

Fraction = Annotated[float, Field(ge=0, le=1)]


class FilterInputs(NamedTuple):
    """Inputs of a filter: all rows of a step, [B, T] each, on the CPU. Numbers are float32.

    Optional fields are None unless `needs`, or `reads` of a custom filter, names them.
    """

    mask: Tensor
    """Bool: trained tokens, all written by the model."""
    advantages: Tensor
    """Advantage of each token."""
    old_logprobs: Tensor | None
    """log pi_old in nats: of the policy at the start of the step."""
    old_entropy: Tensor | None
    """Entropy in nats of the distribution that the token was sampled from, at the start of the step."""
    generator: torch.Generator
    """For random choices; seeded so that they do not depend on the order of rows or on a resume."""


class TokenFilterChoice(Choice):
    """Base class of filters: `FilterInputs` -> [B, T] bool, before any split."""

    adds: ClassVar[bool] = False
    """It adds a penalty on the selected tokens, instead of dropping the others."""

    def use(self, loss: Tensor, selected: Tensor, inputs: PolicyInputs) -> Tensor:
        """Apply the selection to the loss per token."""
        return loss.masked_fill(~selected, 0.0)


class _Share(TokenFilterChoice):
    """Selects a fraction of the step's tokens, or a number of them."""

    fraction: Fraction = default(token_filters.high_entropy_tokens, "fraction")
    tokens: NonNegativeInt | None = None

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield "note: the loss is still divided by all tokens, so the gradient is smaller"


class HighEntropy(_Share, type="high_entropy"):
    """High-entropy tokens: the fraction with the highest entropy of the old policy, or a number of them."""

    text = "[H_{i,t} >= quantile_{1 - fraction}(H)]"
    latex = r"\mathbb{1}[H_{i,t} \ge \operatorname{quantile}_{1-\rho}(H)]"
    needs = frozenset({"old_entropy"})

    def atoms(self) -> Atoms:
        by_share, by_count = token_filters.high_entropy_tokens, token_filters.highest_entropy_tokens
        return (by_share if self.tokens is None else by_count,)

    def __call__(self, inputs: FilterInputs) -> Tensor:
        if self.tokens is not None:
            return token_filters.highest_entropy_tokens(not_none(inputs.old_entropy), inputs.mask, self.tokens)
        return token_filters.high_entropy_tokens(not_none(inputs.old_entropy), inputs.mask, self.fraction)


class RandomTokens(_Share, type="random"):
    """Random tokens, the same number: the control of `high_entropy`."""

    text = "[t in a random sample]"
    latex = r"\mathbb{1}[t \in \text{random sample}]"
    made_of = (token_filters.random_tokens,)

    def __call__(self, inputs: FilterInputs) -> Tensor:
        count = round(self.fraction * int(inputs.mask.sum())) if self.tokens is None else self.tokens
        return token_filters.random_tokens(inputs.mask, count, inputs.generator)


class ClipCov(TokenFilterChoice, type="clip_cov"):
    """Clip-Cov: drop a random sample of the tokens with a high covariance between advantage and log-prob."""

    text = (
        "[t not in a random sample of {t : low < cov_t < high}],   cov_t = (A_t - mean A)(log pi_old - mean log pi_old)"
    )
    latex = r"\mathbb{1}[t \notin \text{sample of } \{t : c_l < \operatorname{cov}_t < c_h\}]"
    fraction: Fraction = default(token_filters.clip_covariance_tokens, "ratio")
    low: NonNegativeFloat = default(token_filters.clip_covariance_tokens, "low")
    high: NonNegativeFloat = default(token_filters.clip_covariance_tokens, "high")
    needs = frozenset({"old_logprobs"})
    made_of = (token_filters.token_covariance, token_filters.clip_covariance_tokens)

    def __call__(self, inputs: FilterInputs) -> Tensor:
        mask = inputs.mask
        covariance = token_filters.token_covariance(not_none(inputs.old_logprobs), inputs.advantages, mask)
        return token_filters.clip_covariance_tokens(
            covariance, mask, mask, self.fraction, self.low, self.high, inputs.generator
        )


class KLCov(TokenFilterChoice, type="kl_cov"):
    """KL-Cov: a KL penalty on the tokens with the highest covariance between advantage and log-prob; drops none."""

    text = "coefficient [t in the highest covariances] |log pi - log pi_old|"
    latex = r"c\,\mathbb{1}[t \in \text{top } \operatorname{cov}]\,|\log \pi_\theta - \log \pi_{\mathrm{old}}|"
    fraction: Fraction = default(token_filters.highest_covariance_tokens, "fraction")
    coefficient: NonNegativeFloat = 1.0
    needs = frozenset({"old_logprobs"})
    adds = True
    made_of = (token_filters.token_covariance, token_filters.highest_covariance_tokens, abs_kl)

    def __call__(self, inputs: FilterInputs) -> Tensor:
        covariance = token_filters.token_covariance(not_none(inputs.old_logprobs), inputs.advantages, inputs.mask)
        return token_filters.highest_covariance_tokens(covariance, inputs.mask, self.fraction)

    def use(self, loss: Tensor, selected: Tensor, inputs: PolicyInputs) -> Tensor:
        distance = abs_kl(inputs.logprobs, inputs.old_logprobs, inputs.mask)
        return loss + self.coefficient * distance.masked_fill(~selected, 0.0)


class CustomFilter(Custom, TokenFilterChoice, type="custom"):
    """A user's function: `FilterInputs` -> [B, T] bool."""

    inputs = FilterInputs

    def check(self, result: Any, inputs: FilterInputs) -> None:
        self.check_tensor(result, (inputs.mask,), "bool")


TokenFilter = HighEntropy | RandomTokens | ClipCov | KLCov | CustomFilter
