"""Corrections for rollouts that are not the policy's own: stale, or from an engine with other numerics.

A correction is a factor per token without gradient: a weight (truncated or masked importance sampling) or a choice
(rejection). It is made of three steps, each to be chosen on its own: a log-ratio or KL per token, a statistic of it
(the token's, or the row's sum, mean or maximum: `row_sum`, `row_mean`, `row_max`), and a rule with bounds.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from atomrl.atoms.masks import masked_mean, row_mean
from atomrl.atoms.ratios import token_log_ratio


def rollout_log_ratio(
    old_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    clamp: float | None = None,
    missing_is_equal: bool = False,
) -> Float[Tensor, "B T"]:
    """How much likelier the trainer finds each token than the engine that sampled it, in logs.

        d_t = log pi_old(a_t) - log mu(a_t)

    Paper: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).

    Args:
        old_logprobs: of the trainer, at the start of the step.
        rollout_logprobs: of the engine.
        mask: True where the model wrote the token.
        clamp: bound on the absolute value. The default is none, as in TRL and AReaL; verl and SkyRL have 20.
        missing_is_equal: take a NaN of the engine, which gave no log-prob there, for a ratio of 1, as TRL does. By
            default a NaN stays one and so is seen.

    Returns:
        Log-ratios without gradient; 0 off the mask.

    Example:
        >>> old, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, float("nan")]])
        >>> rollout_log_ratio(old, rollout, torch.tensor([[True, True]]), missing_is_equal=True)
        tensor([[0.5000, 0.0000]])
    """
    known = mask & ~rollout_logprobs.isnan() if missing_is_equal else mask
    return token_log_ratio(old_logprobs.detach(), rollout_logprobs.detach(), known, clamp)


def importance_weights(log_ratio: Float[Tensor, "*shape"], clamp: float | None = None) -> Float[Tensor, "*shape"]:
    """The weight that makes an average over the engine's samples one over the trainer's.

        w = exp(clip(d, -clamp, clamp))

    Paper: Kahn and Marshall, "Methods of reducing sample size in Monte Carlo computations" (1953).

    Args:
        log_ratio: of `rollout_log_ratio` for tokens; its `row_sum` for the exact weight of completions, its
            `row_mean` for the geometric mean.
        clamp: bound on the absolute log-ratio. The default is none; verl and SkyRL have 20.

    Returns:
        Weights, without gradient.

    Example:
        >>> importance_weights(torch.tensor([0.0, 99.0]), clamp=1.0)
        tensor([1.0000, 2.7183])
    """
    bounded = log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp)
    return bounded.detach().exp()


def truncated_weights(weights: Float[Tensor, "*shape"], high: float, low: float = 0.0) -> Float[Tensor, "*shape"]:
    """Truncated importance sampling: bounded variance for a little bias.

        w' = clip(w, low, high)

    Paper: TIS in Yao et al. (2025); Ionides, "Truncated importance sampling" (2008).

    Args:
        weights: of `importance_weights`.
        high: upper bound.
        low: lower bound. The default is none, as in verl and SkyRL; OpenRLHF, TRL, NeMo-RL and AReaL can have one.

    Returns:
        Weights within the bounds.

    Example:
        >>> truncated_weights(torch.tensor([0.5, 1.0, 9.0]), high=2.0)
        tensor([0.5000, 1.0000, 2.0000])
    """
    return weights.clamp(low, high)


def masked_weights(weights: Float[Tensor, "*shape"], low: float, high: float) -> Float[Tensor, "*shape"]:
    """Masked importance sampling (IcePop): what is out of bounds is not trusted at all.

        w' = w [low <= w <= high]

    Paper: IcePop in Ring-1T, arXiv:2510.18855. Differs from truncation: an outlier has no gradient.

    Args:
        weights: of `importance_weights`.
        low: the least weight that is kept.
        high: the greatest weight that is kept.

    Returns:
        Weights, 0 out of bounds.

    Example:
        >>> masked_weights(torch.tensor([0.1, 1.0, 9.0]), low=0.5, high=2.0)
        tensor([0., 1., 0.])
    """
    return weights.masked_fill(~within(weights, low, high), 0.0)


def within(
    statistic: Float[Tensor, "*shape"], low: float = -math.inf, high: float = math.inf
) -> Bool[Tensor, "*shape"]:
    """Rejection sampling: what is kept, by a statistic of its tokens or rows.

        keep = low <= x <= high

    Paper: Liu et al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch"
    (2025).

    Args:
        statistic: a weight, a log-ratio or a KL, per token or per row.
        low: the least value that is kept.
        high: the greatest value that is kept.

    Returns:
        True where it is kept; NaN is not.

    Example:
        >>> within(torch.tensor([0.1, 1.0, 9.0]), 0.5, 2.0)
        tensor([False,  True, False])
    """
    return (statistic >= low) & (statistic <= high)


def mean_weight(
    weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], by_row: bool = False, eps: float = 1e-8
) -> Float[Tensor, ""]:
    """What self-normalised importance sampling divides by: the mean weight of a step.

        mean over tokens of w_t, or over rows of the row's mean

    Paper: verl's `rollout_is_batch_normalize`; Owen, "Monte Carlo theory, methods and examples".

    Args:
        weights: per token, for all rows of the optimizer step.
        mask: True where the model wrote the token.
        by_row: the mean over the rows that have tokens of their means, instead of over tokens.
        eps: added to counts; a mean that is not above it is taken for 1.

    Returns:
        A scalar, not 0. `weights / mean_weight(weights, mask)` has a mean of 1.

    Example:
        >>> mean_weight(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]))
        tensor(2.)
    """
    mean = masked_mean(row_mean(weights, mask), mask.any(1)) if by_row else masked_mean(weights, mask, eps)
    return torch.where(mean > eps, mean, 1.0)


def normalised_weights(
    weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], by_row: bool = False, eps: float = 1e-8
) -> Float[Tensor, "B T"]:
    """Self-normalised importance sampling: weights with a mean of 1 over the step.

        w' = w / mean(w)

    Paper: as `mean_weight`, which takes the same arguments.

    Args:
        weights: per token, for all rows of the optimizer step.
        mask: True where the model wrote the token.
        by_row: as in `mean_weight`.
        eps: as in `mean_weight`.

    Returns:
        Weights.

    Example:
        >>> normalised_weights(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]))
        tensor([[0.5000, 1.5000]])
    """
    return weights / mean_weight(weights, mask, by_row, eps)


def off_policy_sequences(
    divergence: Float[Tensor, " B"], advantages: Float[Tensor, "B T"], bound: float
) -> Bool[Tensor, "B T"]:
    """Off-policy sequence masking: bad completions that the policy has already left are not learned from.

        keep_it = A_it >= 0 or KL_i <= bound,     KL_i = mean_t (log mu(a_t) - log pi_theta(a_t))

    Paper: DeepSeek-V3.2, arXiv:2512.02556.

    Args:
        divergence: KL_i, nats per token: `row_mean` of `k1_kl(rollout_logprobs, logprobs, mask)`.
        advantages: per token (a single column where it is one per completion).
        bound: in nats per token.

    Returns:
        True where it is kept.

    Example:
        >>> off_policy_sequences(torch.tensor([0.1, 0.1]), torch.tensor([[1.0], [-1.0]]), bound=0.05)
        tensor([[ True],
                [False]])
    """
    return (advantages >= 0) | (divergence.detach() <= bound)[:, None]


def second_moment_tokens(
    log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], bound: float
) -> Bool[Tensor, "B T"]:
    """M2PO: drops the tokens furthest from the policy until the second moment of the rest is below a bound.

        keep the largest set of tokens with the smallest d_t^2 whose mean of d_t^2 is < bound

    Paper: M2PO, arXiv:2510.01161. Differs from a clip: how many tokens are dropped depends on how stale
    the whole batch is.

    Args:
        log_ratio: d_t, of the behaviour to the proximal policy (either way round).
        mask: True where the model wrote the token, for all rows of the optimizer step.
        bound: of the mean of d_t^2. The token nearest to the policy is kept in any case, as in AReaL.

    Returns:
        True where it is kept, never off the mask.

    Example:
        >>> second_moment_tokens(torch.tensor([[0.1, 2.0, 0.2]]), torch.tensor([[True, True, True]]), bound=0.04)
        tensor([[ True, False,  True]])
    """
    keep = torch.zeros_like(mask)
    moments, order = log_ratio.detach()[mask].square().sort()
    if len(moments):
        means = moments.cumsum(0) / torch.arange(1, len(moments) + 1, device=mask.device)
        # The means of ever more tokens in rising order rise too, so those below the bound come first.
        kept = torch.zeros_like(moments, dtype=torch.bool)
        kept[order[: max(1, int((means < bound).sum()))]] = True
        keep[mask] = kept
    return keep
