"""The axes of the policy term: ratio, clip, KL, aggregation, off-policy correction and token selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from atomrl.atoms import kl as kl_atoms
from atomrl.atoms import policy_losses, reductions, token_selection, trust_region
from atomrl.atoms.advantages import per_token
from atomrl.atoms.masks import row_mean
from atomrl.atoms.ratios import sequence_log_ratio, sequence_token_log_ratio, token_log_ratio
from atomrl.atoms.sequence_losses import geometric_mean_loss, sequence_clipped_log_ratio
from atomrl.objective.axis import Axis, reads


def _token(logprobs: Tensor, old: Tensor, mask: Tensor, *, clamp: float | None = None) -> Tensor:
    r"""Of each token.

        rho_{i,t} = pi(a_t) / pi_old(a_t)

    LaTeX: \rho_{i,t} = \frac{\pi_\theta(a_{i,t})}{\pi_{\mathrm{old}}(a_{i,t})}
    """
    return token_log_ratio(logprobs, old, mask, clamp)


def _sequence(
    logprobs: Tensor, old: Tensor, mask: Tensor, *, length_normalised: bool = True, clamp: float | None = None
) -> Tensor:
    r"""Of the whole completion, the same for all its tokens, which share the gradient.

        rho_{i,t} = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)

    LaTeX: \rho_{i,t} = \Big(\frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}\Big)^{1/|o_i|}
    """
    return per_token(sequence_log_ratio(logprobs, old, mask, length_normalised, clamp), mask)


def _sequence_token(logprobs: Tensor, old: Tensor, mask: Tensor, *, ceiling: float | None = None) -> Tensor:
    r"""Of the whole completion in value, with the gradient of each token's own log-prob.

        rho_{i,t} = sg[(pi(o_i) / pi_old(o_i))^(1 / |o_i|)] pi(a_t) / sg[pi(a_t)]

    LaTeX: \rho_{i,t} = \operatorname{sg}\Big[\Big(\frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}\Big)^{1/|o_i|}\Big]
        \frac{\pi_\theta(a_{i,t})}{\operatorname{sg}[\pi_\theta(a_{i,t})]}
    """
    return sequence_token_log_ratio(logprobs, old, mask, ceiling)


RATIOS: dict[str, Callable[..., Tensor]] = {"token": _token, "sequence": _sequence, "sequence_token": _sequence_token}


class Ratio(Axis):
    """On which level the likelihood ratio to the old policy is taken; gives its log, [B, T]."""

    label, kinds, default = "ratio", RATIOS, "token"


class Surrogate(NamedTuple):
    """What a clip rule sees, all [B, T]."""

    log_ratio: Tensor
    advantages: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor


Clipped = tuple[Tensor, Tensor]
"""Loss per token, and which tokens the rule acts on."""


def _ppo(s: Surrogate, *, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Clipped:
    r"""PPO's clip: no gradient beyond the bound on the advantage's side.

        min(rho A, clip(rho, 1 - low, 1 + high) A)

    LaTeX: \min\big(\rho_{i,t} \hat A_{i,t}, \operatorname{clip}(\rho_{i,t}, 1 - \epsilon_l, 1 + \epsilon_h)
        \hat A_{i,t}\big)
    """
    ratio = s.log_ratio.exp()
    loss = policy_losses.clipped_policy_loss(ratio, s.advantages, low, high, dual)
    return loss, policy_losses.clipped_tokens(ratio.detach(), s.advantages, low, high)


def _none(s: Surrogate) -> Clipped:
    r"""The ratio as it is.

        rho A

    LaTeX: \rho_{i,t} \hat A_{i,t}
    """
    loss = policy_losses.clipped_policy_loss(s.log_ratio.exp(), s.advantages, math.inf, math.inf)
    return loss, torch.zeros_like(s.mask)


def _reinforce(s: Surrogate) -> Clipped:
    r"""The log-prob in the place of a ratio.

        A log pi(a_t)

    LaTeX: \hat A_{i,t} \log \pi_\theta(a_{i,t})
    """
    return policy_losses.reinforce_loss(s.logprobs, s.advantages, s.mask), torch.zeros_like(s.mask)


def _cispo(s: Surrogate, *, low: float = 1.0, high: float = 4.0) -> Clipped:
    r"""The clipped ratio is a weight without gradient: a clipped token still learns.

        sg[clip(rho, 1 - low, 1 + high)] A log pi(a_t)

    LaTeX: \operatorname{sg}[\operatorname{clip}(\rho_{i,t}, 1 - \epsilon_l, 1 + \epsilon_h)] \hat A_{i,t}
        \log \pi_\theta(a_{i,t})
    """
    ratio = s.log_ratio.detach().exp()
    loss = policy_losses.cispo_loss(s.logprobs, ratio, s.advantages, s.mask, low, high)
    return loss, policy_losses.out_of_bounds(ratio, 1 - low, 1 + high)


def _sapo(s: Surrogate, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Clipped:
    r"""A sigmoid in the place of the clip.

        (4 / tau) sigmoid(tau (rho - 1)) A,   tau by the sign of A

    LaTeX: \frac{4}{\tau} \sigma(\tau (\rho_{i,t} - 1)) \hat A_{i,t}
    """
    loss = policy_losses.sapo_loss(s.log_ratio.exp(), s.advantages, tau_positive, tau_negative)
    return loss, torch.zeros_like(s.mask)


def _gmpo(s: Surrogate, *, low: float = 0.4, high: float = 0.4) -> Clipped:
    r"""The geometric mean of a completion's ratios, each clipped in log space on the advantage's side.

        A_i exp(mean_t clip_A(log rho_t, -low, high))

    LaTeX: \hat A_i \exp\Big(\frac{1}{|o_i|} \sum_t \operatorname{clip}_{\hat A}(\log \rho_{i,t}, -\epsilon_l,
        \epsilon_h)\Big)
    """
    clipped = sequence_clipped_log_ratio(s.log_ratio, s.advantages, low, high)
    loss = geometric_mean_loss(clipped, row_mean(s.advantages, s.mask), s.mask)
    return per_token(loss, s.mask), clipped.detach() != s.log_ratio.detach() * (s.advantages != 0)


def _dppo_tv(s: Surrogate, *, low: float = 0.2, high: float = 0.2, cap: float = 20.0) -> Clipped:
    r"""No gradient where the probability itself has moved too far on the advantage's side.

        sg[min(rho, cap)] [|pi - pi_old| within bounds] A log pi(a_t)

    LaTeX: \operatorname{sg}[\min(\rho_{i,t}, c)]\,[\,|\pi_\theta - \pi_{\mathrm{old}}| \le \delta\,]\,\hat A_{i,t}
        \log \pi_\theta(a_{i,t})
    """
    return _dppo(s, trust_region.probability_change(s.logprobs, s.old_logprobs, s.mask).abs(), low, high, cap)


def _dppo_kl(s: Surrogate, *, low: float = 0.05, high: float = 0.05, cap: float = 20.0) -> Clipped:
    r"""No gradient where the two-outcome KL has grown too large on the advantage's side.

        sg[min(rho, cap)] [KL_binary(pi_old, pi) within bounds] A log pi(a_t)

    LaTeX: \operatorname{sg}[\min(\rho_{i,t}, c)]\,[\,\mathrm{KL}_{\mathrm{bin}}(\pi_{\mathrm{old}}, \pi_\theta) \le
        \delta\,]\,\hat A_{i,t} \log \pi_\theta(a_{i,t})
    """
    return _dppo(s, trust_region.binary_kl(s.logprobs, s.old_logprobs, s.mask), low, high, cap)


def _dppo(s: Surrogate, divergence: Tensor, low: float, high: float, cap: float) -> Clipped:
    change = trust_region.probability_change(s.logprobs, s.old_logprobs, s.mask)
    keep = trust_region.trust_region_tokens(change, divergence, s.advantages, low, high)
    weights = s.log_ratio.detach().exp().clamp(max=cap) * keep
    return policy_losses.reinforce_loss(s.logprobs, s.advantages, s.mask, weights), ~keep


CLIPS: dict[str, Callable[..., Clipped]] = {
    "ppo": _ppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "none": _none,
    "reinforce": _reinforce,
}


class Clip(Axis):
    """What a ratio and an advantage cost: `Surrogate` -> loss per token, and where the rule acts."""

    label, kinds, default = "clip", CLIPS, "ppo"


def _estimator(estimate: Callable[..., Tensor], text: str, latex: str) -> Callable[..., Tensor]:
    """An estimator with the options that all have in common."""

    def kl(
        logprobs: Tensor,
        ref_logprobs: Tensor,
        mask: Tensor,
        *,
        coefficient: float = 0.0,
        place: Literal["loss", "reward"] = "loss",
        k2_gradient: bool = False,
        target: float | None = None,
        horizon: float = 10000.0,
    ) -> Tensor:
        value = estimate(logprobs, ref_logprobs, mask)
        return kl_atoms.k2_gradient(value, logprobs, ref_logprobs, mask) if k2_gradient else value

    kl.__doc__ = f"By the estimator {text.partition(' ')[0]}.\n\n    {text}\n\nLaTeX: {latex}\n"
    kl.atoms = (estimate,)  # type: ignore[attr-defined]
    return kl


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "k1": _estimator(kl_atoms.k1_kl, "k1 = log pi - log pi_ref", r"k_1 = \log \pi_\theta - \log \pi_{\mathrm{ref}}"),
    "k2": _estimator(
        kl_atoms.k2_kl,
        "k2 = (log pi - log pi_ref)^2 / 2",
        r"k_2 = \tfrac12 (\log \pi_\theta - \log \pi_{\mathrm{ref}})^2",
    ),
    "k3": _estimator(
        kl_atoms.k3_kl,
        "k3 = pi_ref / pi - 1 - log(pi_ref / pi)",
        r"k_3 = \frac{\pi_{\mathrm{ref}}}{\pi_\theta} - 1 - \log \frac{\pi_{\mathrm{ref}}}{\pi_\theta}",
    ),
    "abs": _estimator(kl_atoms.abs_kl, "abs = |log pi - log pi_ref|", r"|\log \pi_\theta - \log \pi_{\mathrm{ref}}|"),
}


class Kl(Axis):
    """A penalty for leaving the reference, in the loss or in the reward. A coefficient of 0 loads no reference.

    With a `target` (nats per token) the coefficient adapts; `horizon` is in completions. `k2_gradient` keeps the value
    and takes the gradient of k2, which is that of the KL.
    """

    label, kinds, default = "kl", KL_ESTIMATORS, "k3"

    def with_parameters(self, **changes: Any) -> Self:
        """Another estimator keeps the rest: all take the same parameters."""
        return super().with_parameters(**(self.parameters | changes))


def _token_mean(mask: Tensor, group_ids: Tensor | None = None) -> Tensor:
    r"""Over all tokens of the optimizer step.

        w_{i,t} = 1 / sum_j |o_j|

    LaTeX: \frac{1}{\sum_j |o_j|} \sum_{i,t}
    """
    return reductions.token_mean(mask)


def _sequence_mean(mask: Tensor, group_ids: Tensor | None = None) -> Tensor:
    r"""Over completions, of their means over tokens.

        w_{i,t} = 1 / (N |o_i|)

    LaTeX: \frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t
    """
    return reductions.sequence_mean(mask)


def _constant_length(mask: Tensor, group_ids: Tensor | None = None, *, length: int | None = None) -> Tensor:
    r"""Over completions, of their sums over tokens divided by a constant.

        w_{i,t} = 1 / (N L)

    LaTeX: \frac{1}{N L} \sum_{i,t}
    """
    assert length is not None
    return reductions.constant_length(mask, length)


def _prompt_mean(mask: Tensor, group_ids: Tensor) -> Tensor:
    r"""Over prompts, of their means over all tokens of their completions. A prompt's rows stay in one update.

        w_{i,t} = 1 / (P sum_{j in group} |o_j|)

    LaTeX: \frac{1}{P} \sum_{g} \frac{1}{\sum_{j \in g} |o_j|} \sum_{i \in g, t}
    """
    return reductions.group_token_mean(mask, group_ids)


_prompt_mean.row_unit = "group"  # type: ignore[attr-defined]
AGGREGATES: dict[str, Callable[..., Tensor]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "constant_length": _constant_length,
    "prompt_mean": _prompt_mean,
}


class Aggregate(Axis):
    """What the loss is a mean of: mask [B, T] -> loss weights [B, T]. `length` is in tokens, the rollout's limit
    unless given."""

    label, kinds, default = "aggregate", AGGREGATES, "token_mean"


class Candidates(NamedTuple):
    """What a selection sees of all rows of a step, all [B, T]."""

    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None
    old_entropy: Tensor | None
    generator: torch.Generator


def _all_tokens(c: Candidates) -> Tensor:
    """Every token that the model wrote."""
    return c.mask


@reads("old_entropy")
def _high_entropy(c: Candidates, *, fraction: float = 0.2, tokens: int | None = None) -> Tensor:
    r"""The tokens at which the old policy was least sure: a fraction of the step's, or a number of them.

        [H_{i,t} >= quantile_{1 - fraction}(H)]

    LaTeX: \mathbb{1}[H_{i,t} \ge \operatorname{quantile}_{1-\rho}(H)]
    """
    assert c.old_entropy is not None
    if tokens is not None:
        return token_selection.highest_entropy_tokens(c.old_entropy, c.mask, tokens)
    return token_selection.high_entropy_tokens(c.old_entropy, c.mask, fraction)


def _random(c: Candidates, *, fraction: float = 0.2, tokens: int | None = None) -> Tensor:
    r"""Tokens at random, as many: the control of `high_entropy`.

        [t in a random sample]

    LaTeX: \mathbb{1}[t \in \text{random sample}]
    """
    count = round(fraction * int(c.mask.sum())) if tokens is None else tokens
    return token_selection.random_tokens(c.mask, count, c.generator)


@reads("old_logprobs")
def _clip_cov(c: Candidates, *, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Tensor:
    r"""All but some tokens, at random, whose advantage and log-prob go together most.

        [t not in a random sample of {t : low < cov_t < high}],   cov_t = (A_t - mean A)(log pi_old - mean log pi_old)

    LaTeX: \mathbb{1}[t \notin \text{sample of } \{t : c_l < \operatorname{cov}_t < c_h\}]
    """
    assert c.old_logprobs is not None
    covariance = token_selection.token_covariance(c.old_logprobs, c.advantages, c.mask)
    return token_selection.clip_covariance_tokens(covariance, c.mask, c.mask, fraction, low, high, c.generator)


@reads("old_logprobs")
def _kl_cov(c: Candidates, *, fraction: float = 2e-3, coefficient: float = 1.0) -> Tensor:
    r"""The tokens whose advantage and log-prob go together most pay for leaving the old policy; all are kept.

        - coefficient [t in the highest covariances] |log pi - log pi_old|

    LaTeX: -\, c\,\mathbb{1}[t \in \text{top } \operatorname{cov}]\,|\log \pi_\theta - \log \pi_{\mathrm{old}}|
    """
    assert c.old_logprobs is not None
    covariance = token_selection.token_covariance(c.old_logprobs, c.advantages, c.mask)
    return token_selection.highest_covariance_tokens(covariance, c.mask, fraction)


def _kept(loss: Tensor, selected: Tensor, s: Surrogate, **_: float) -> Tensor:
    return loss.masked_fill(~selected, 0.0)


def _penalised(loss: Tensor, selected: Tensor, s: Surrogate, *, coefficient: float, **_: float) -> Tensor:
    distance = kl_atoms.abs_kl(s.logprobs, s.old_logprobs, s.mask)
    return loss + coefficient * distance.masked_fill(~selected, 0.0)


_kl_cov.use = _penalised  # type: ignore[attr-defined]
SELECTIONS: dict[str, Callable[..., Tensor]] = {
    "all": _all_tokens,
    "high_entropy": _high_entropy,
    "random": _random,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}


class Selection(Axis):
    """Which tokens the policy term is taken over: `Candidates` of a whole step -> [B, T] bool, before any split."""

    label, kinds, default = "selection", SELECTIONS, "all"

    def use(self, loss: Tensor, selected: Tensor, surrogate: Surrogate) -> Tensor:
        """What a selection does to the loss per token."""
        return getattr(self.function, "use", _kept)(loss, selected, surrogate, **self.parameters)
