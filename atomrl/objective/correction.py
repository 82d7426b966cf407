"""The axis of off-policy correction: what to do about rollouts that are stale, or come from other numerics.

A correction is a factor on the policy term, without gradient, made by row from the engine's own log-probs (mu) and the
trainer's at the start of the step (pi_old); so no split of a step changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from atomrl.atoms.advantages import per_token
from atomrl.atoms.corrections import (
    importance_weights,
    masked_weights,
    off_policy_sequences,
    rollout_log_ratio,
    truncated_weights,
    within,
)
from atomrl.atoms.kl import k1_kl, k3_kl
from atomrl.atoms.masks import row_max, row_mean, row_sum
from atomrl.objective.axis import Axis


class Rollout(NamedTuple):
    """What a correction sees, all [B, T]."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    logprobs: Tensor
    advantages: Tensor
    mask: Tensor


def _token_weights(r: Rollout, clamp: float) -> Tensor:
    return importance_weights(rollout_log_ratio(r.old_logprobs, r.rollout_logprobs, r.mask), clamp)


def _sequence_weights(r: Rollout, clamp: float) -> Tensor:
    return importance_weights(row_sum(rollout_log_ratio(r.old_logprobs, r.rollout_logprobs, r.mask), r.mask), clamp)


def _token_tis(r: Rollout, *, high: float = 2.0, low: float = 0.0, clamp: float = 20.0) -> Tensor:
    r"""Truncated importance sampling by token.

        min(pi_old(a_t) / mu(a_t), high)

    LaTeX: \min\Big(\frac{\pi_{\mathrm{old}}(a_{i,t})}{\mu(a_{i,t})}, c\Big)
    """
    return truncated_weights(_token_weights(r, clamp), high, low)


def _sequence_tis(r: Rollout, *, high: float = 2.0, low: float = 0.0, clamp: float = 20.0) -> Tensor:
    r"""Truncated importance sampling by completion.

        min(pi_old(o_i) / mu(o_i), high)

    LaTeX: \min\Big(\frac{\pi_{\mathrm{old}}(o_i)}{\mu(o_i)}, c\Big)
    """
    return per_token(truncated_weights(_sequence_weights(r, clamp), high, low), r.mask)


def _token_mis(r: Rollout, *, high: float = 2.0, low: float = 0.0, clamp: float = 20.0) -> Tensor:
    r"""Masked importance sampling by token: a weight beyond the bounds is 0.

        w [low <= w <= high],   w = pi_old(a_t) / mu(a_t)

    LaTeX: w_{i,t}\,\mathbb{1}[c_l \le w_{i,t} \le c_h], \quad w_{i,t} = \pi_{\mathrm{old}}(a_{i,t}) / \mu(a_{i,t})
    """
    return masked_weights(_token_weights(r, clamp), low, high)


def _sequence_mis(r: Rollout, *, high: float = 2.0, low: float = 0.0, clamp: float = 20.0) -> Tensor:
    r"""Masked importance sampling by completion: a weight beyond the bounds is 0.

        w [low <= w <= high],   w = pi_old(o_i) / mu(o_i)

    LaTeX: w_i\,\mathbb{1}[c_l \le w_i \le c_h], \quad w_i = \pi_{\mathrm{old}}(o_i) / \mu(o_i)
    """
    return per_token(masked_weights(_sequence_weights(r, clamp), low, high), r.mask)


def _icepop(r: Rollout, *, high: float = 5.0, low: float = 0.5, clamp: float = 20.0) -> Tensor:
    r"""IcePop: masked importance sampling by token with two bounds.

        w [low <= w <= high],   w = pi_old(a_t) / mu(a_t)

    LaTeX: w_{i,t}\,\mathbb{1}[\alpha \le w_{i,t} \le \beta], \quad w_{i,t} = \pi_{\mathrm{old}}(a_{i,t}) / \mu(a_{i,t})
    """
    return masked_weights(_token_weights(r, clamp), low, high)


def _sequence_mask(r: Rollout, *, high: float = 1.001, low: float = 0.999, weighted: bool = False) -> Tensor:
    r"""Keeps completions whose geometric mean of the weights is within bounds; `weighted` keeps the weights as well.

        [low <= (pi_old(o_i) / mu(o_i))^(1 / |o_i|) <= high]

    LaTeX: \mathbb{1}\big[c_l \le (\pi_{\mathrm{old}}(o_i) / \mu(o_i))^{1/|o_i|} \le c_h\big]
    """
    log_ratio = rollout_log_ratio(r.old_logprobs, r.rollout_logprobs, r.mask)
    keep = within(importance_weights(row_mean(log_ratio, r.mask)), low, high)
    weights = importance_weights(log_ratio, 20.0) if weighted else r.mask.to(log_ratio.dtype)
    return weights * keep[:, None]


STATISTICS = {"mean": row_mean, "sum": row_sum, "max": row_max}


def _kl_rejection(
    r: Rollout,
    *,
    bound: float = 0.01,
    level: Literal["token", "mean", "sum", "max"] = "mean",
    estimator: Literal["k1", "k3"] = "k3",
) -> Tensor:
    r"""Keeps tokens, or whole completions by a statistic of their tokens, whose KL of mu from pi_old is small.

        [KL(mu, pi_old) <= bound]

    LaTeX: \mathbb{1}[\widehat{\mathrm{KL}}(\mu \,\|\, \pi_{\mathrm{old}}) \le c]
    """
    estimate = {"k1": k1_kl, "k3": k3_kl}[estimator](r.rollout_logprobs, r.old_logprobs, r.mask)
    if level == "token":
        return within(estimate, -math.inf, bound).to(estimate.dtype)
    keep = within(STATISTICS[level](estimate, r.mask), -math.inf, bound)
    return keep[:, None].expand_as(r.mask).to(estimate.dtype)


def _off_policy_sequences(r: Rollout, *, bound: float = 0.05) -> Tensor:
    r"""Bad completions that the policy has left already are not learned from (DeepSeek-V3.2).

        [A_{i,t} >= 0 or mean_t (log mu - log pi) <= bound]

    LaTeX: \mathbb{1}\big[\hat A_{i,t} \ge 0 \text{ or } \tfrac{1}{|o_i|}\sum_t \log \tfrac{\mu}{\pi_\theta} \le
        \delta\big]
    """
    divergence = row_mean(k1_kl(r.rollout_logprobs, r.logprobs.detach(), r.mask), r.mask)
    return off_policy_sequences(divergence, r.advantages, bound).to(r.logprobs.dtype)


def _none(r: Rollout) -> None:
    """Rollouts count as the trainer's own."""
    return None


CORRECTIONS: dict[str, Callable[..., Tensor | None]] = {
    "none": _none,
    "token_tis": _token_tis,
    "sequence_tis": _sequence_tis,
    "token_mis": _token_mis,
    "sequence_mis": _sequence_mis,
    "icepop": _icepop,
    "sequence_mask": _sequence_mask,
    "kl_rejection": _kl_rejection,
    "off_policy_sequences": _off_policy_sequences,
}


class Correction(Axis):
    """A factor on the policy term for the gap between the engine that sampled and the trainer: `Rollout` -> [B, T]."""

    label, kinds, default = "correction", CORRECTIONS, "none"
