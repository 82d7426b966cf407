"""The axis of off-policy correction: what to do about rollouts that are stale, or come from other numerics.

A correction is a factor on the policy term, without gradient, made from the engine's own log-probs (mu) and the
trainer's at the start of the step (pi_old). Most are made by row, as the loss is computed; those that take a statistic
over all rows are made once, with the advantages. So no split of a step changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from atomrl.atoms.advantages import per_token
from atomrl.atoms.corrections import (
    importance_weights,
    masked_weights,
    normalised_weights,
    off_policy_sequences,
    rollout_log_ratio,
    second_moment_tokens,
    truncated_weights,
    within,
)
from atomrl.atoms.kl import k1_kl, k3_kl
from atomrl.atoms.masks import row_max, row_mean, row_sum
from atomrl.objective.axis import Axis
from atomrl.protocols import Annotation


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


def _token_tis(
    r: Rollout, *, high: float = 2.0, low: float = 0.0, clamp: float = 20.0, normalised: bool = False
) -> Tensor:
    r"""Truncated importance sampling by token; where `normalised`, divided by the mean weight of the step's tokens.

        min(pi_old(a_t) / mu(a_t), high)

    LaTeX: \min\Big(\frac{\pi_{\mathrm{old}}(a_{i,t})}{\mu(a_{i,t})}, c\Big)
    """
    weights = truncated_weights(_token_weights(r, clamp), high, low)
    return normalised_weights(weights, r.mask) if normalised else weights


def _sequence_tis(
    r: Rollout, *, high: float = 2.0, low: float = 0.0, clamp: float = 20.0, normalised: bool = False
) -> Tensor:
    r"""Truncated importance sampling by completion; where `normalised`, divided by the mean weight of the step's rows.

        min(pi_old(o_i) / mu(o_i), high)

    LaTeX: \min\Big(\frac{\pi_{\mathrm{old}}(o_i)}{\mu(o_i)}, c\Big)
    """
    weights = per_token(truncated_weights(_sequence_weights(r, clamp), high, low), r.mask)
    return normalised_weights(weights, r.mask, by_row=True) if normalised else weights


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


def _second_moment(r: Rollout, *, bound: float = 0.04) -> Tensor:
    r"""Drops the step's tokens furthest from the policy until the second moment of the rest is below a bound (M2PO).

        [t in the largest set of least d_t^2 with mean d_t^2 < bound],   d_t = log pi_old(a_t) - log mu(a_t)

    LaTeX: \mathbb{1}\big[t \in \arg\max\{|M| : \operatorname{mean}_M d_t^2 < \tau\}\big], \quad
        d_t = \log \frac{\pi_{\mathrm{old}}(a_{i,t})}{\mu(a_{i,t})}
    """
    log_ratio = rollout_log_ratio(r.old_logprobs, r.rollout_logprobs, r.mask)
    return second_moment_tokens(log_ratio, r.mask, bound).to(log_ratio.dtype)


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
    "second_moment": _second_moment,
}


class Correction(Axis):
    """A factor on the policy term for the gap between the engine that sampled and the trainer: `Rollout` -> [B, T]."""

    label, kinds, default = "correction", CORRECTIONS, "none"

    @property
    def whole_step(self) -> bool:
        """Whether it takes a statistic over all rows of a step, and so is made before they are split."""
        return self.type == "second_moment" or self.parameters.get("normalised", False)

    @property
    def reads(self) -> frozenset[Annotation]:
        """What the back end must annotate before the step's first update."""
        return frozenset({"old_logprobs"}) if any(part.whole_step for part in self.parts) else frozenset()

    def factor(self, rollout: Rollout, whole_step: bool) -> Tensor | None:
        """The product of those parts that are made over the whole step, or of those that are made by row; None where
        there is none."""
        found = [part(rollout) for part in self.parts if part.whole_step == whole_step]
        factors = [item for item in found if item is not None]
        return torch.stack(factors).prod(0) if factors else None

    @classmethod
    def several(cls, items: Sequence[Any]) -> Correction:
        """A config's list of corrections, each a type or a mapping.

        Raises:
            ValueError: an item is neither, or has an unknown name.
        """
        for item in items:
            if not isinstance(item, str | Mapping):
                raise ValueError(f"algorithm.correction: each of a list is a type or a mapping, got {item!r}")
        parts = [cls(item) if isinstance(item, str) else cls(**item) for item in items]
        return parts[0] if len(parts) == 1 else Corrections(parts)


class Corrections(Correction):
    """Several corrections at once: the factor is the product of theirs, as of weights and of a rejection.

    Example:
        >>> Corrections([Correction("token_tis"), Correction("kl_rejection", bound=0.02)]).type
        'token_tis + kl_rejection'
    """

    def __init__(self, parts: Sequence[Correction] = ()) -> None:
        vars(self).update(type=" + ".join(part.type for part in parts) or "none", choices=tuple(parts))

    @property
    def parts(self) -> tuple[Correction, ...]:
        return self.choices

    @property
    def parameters(self) -> dict[str, Any]:
        """Of all parts, as `type.name`."""
        return {f"{part.type}.{name}": value for part in self.parts for name, value in part.parameters.items()}

    def with_parameters(self, **changes: Any) -> Correction:
        if "type" not in changes:
            raise ValueError("algorithm.correction is a list here; give all of it, or one correction with its type")
        return Correction(**changes)

    def __repr__(self) -> str:
        return f"Corrections({list(self.parts)!r})"
