"""Importance ratios of the policy to the old policy, and corrections of the old policy to the rollout engine.

Ratios are log-ratios at three levels: per token (PPO), per completion (GSPO), and per completion in value with the
gradient per token (GSPO-token).
"""

import math

import torch

from atomrl.atoms import atom
from atomrl.atoms.masks import AnyMask, AnyShape, Mask, PerRow, PerToken, masked_mean, row_mean, row_sum


@atom("log rho_t = log pi_theta(a_t | s_t) - log pi_old(a_t | s_t)")
def token_log_ratio(logprobs: PerToken, old_logprobs: PerToken, mask: Mask, clamp: float | None = None) -> PerToken:
    """Log importance ratio of each token, 0 off the mask.

    The mask is applied before any `exp`: an overflow off the mask would make the gradient NaN, even if the result were
    masked afterwards.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        clamp: bound on the absolute value; tokens beyond it have no gradient. None by default, as in TRL, AReaL, slime,
            NeMo-RL and ROLL: a ratio that large is a bug that should be visible. verl, SkyRL and OpenRLHF use 20.

    Returns:
        Log-ratios; gradients flow to `logprobs` under the mask only.

    Example:
        >>> token_log_ratio(torch.tensor([[-1.0, 9.0]]), torch.tensor([[-1.5, 0.0]]), torch.tensor([[True, False]]))
        tensor([[0.5000, 0.0000]])
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    return log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp)


@atom("rho_t = pi_theta(a_t | s_t) / pi_old(a_t | s_t)", paper="PPO, arXiv:1707.06347, section 3")
def token_ratio(logprobs: PerToken, old_logprobs: PerToken, mask: Mask, clamp: float | None = None) -> PerToken:
    """Importance ratio of each token, 1 off the mask.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        clamp: as in `token_log_ratio`.

    Returns:
        Ratios.

    Example:
        >>> token_ratio(torch.tensor([[0.0]]), torch.tensor([[0.0]]), torch.tensor([[True]]))
        tensor([[1.]])
    """
    return token_log_ratio(logprobs, old_logprobs, mask, clamp).exp()


@atom(
    "s_i = (1 / |m_i|) sum_t m_it log rho_it       (the sum alone without length normalisation)",
    paper="GSPO, arXiv:2507.18071, equation 7",
)
def sequence_log_ratio(
    logprobs: PerToken, old_logprobs: PerToken, mask: Mask, length_normalised: bool = True, clamp: float | None = None
) -> PerRow:
    """Log importance ratio of each completion.

    Differs from PPO: one ratio for all tokens of a completion, with the gradient shared between them. The sum is the
    exact ratio of the completions' probabilities (RLOO's sequence-level PPO); the mean, GSPO's, does not grow with the
    length.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        length_normalised: divide by the number of tokens.
        clamp: bound on the absolute value of the result, as in `token_log_ratio`.

    Returns:
        One log-ratio per row, with gradient; 0 for an empty row. `per_token` broadcasts it.

    Example:
        >>> logprobs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]])
        >>> sequence_log_ratio(logprobs, old, torch.tensor([[True, True]]))
        tensor([0.5000])
        >>> sequence_log_ratio(logprobs, old, torch.tensor([[True, True]]), length_normalised=False)
        tensor([1.])
    """
    tokens = token_log_ratio(logprobs, old_logprobs, mask)
    rows = row_mean(tokens, mask) if length_normalised else row_sum(tokens, mask)
    return rows if clamp is None else rows.clamp(-clamp, clamp)


@atom(
    "log s_it = sg[s_i] + log pi_theta(a_t) - sg[log pi_theta(a_t)],   s_i of `sequence_log_ratio`",
    paper="GSPO, arXiv:2507.18071 (GSPO-token)",
)
def sequence_token_log_ratio(
    logprobs: PerToken, old_logprobs: PerToken, mask: Mask, ceiling: float | None = None
) -> PerToken:
    """GSPO-token log-ratio: the completion's ratio in value, with the gradient of each token's own log-prob.

    With one advantage per completion its gradient equals GSPO's; it differs where advantages differ between tokens.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        ceiling: upper bound; tokens beyond it have no gradient. None by default, as in TRL; verl and SkyRL use 10.

    Returns:
        Log-ratios per token, 0 off the mask.

    Example:
        >>> logprobs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.1]])
        >>> sequence_token_log_ratio(logprobs, old, torch.tensor([[True, True]]))
        tensor([[0.3000, 0.3000]])
    """
    rows = sequence_log_ratio(logprobs.detach(), old_logprobs, mask)
    own = token_log_ratio(logprobs, logprobs.detach(), mask)
    log_ratio = (own + rows[:, None]).masked_fill(~mask, 0.0)
    return log_ratio if ceiling is None else log_ratio.clamp(max=ceiling)


# --------------------------------------------------------------------------------------------------------------------
# Rollout importance sampling: corrections for stale rollouts, and for engines with other numerics than the trainer.
#
# A correction is a detached factor per token: a weight (truncated or masked importance sampling) or a mask (rejection
# sampling). It combines a log-ratio or KL per token, a statistic of it (per token, or the row's `row_sum`, `row_mean`
# or `row_max`), and a rule with bounds.


@atom(
    "d_t = log pi_old(a_t) - log mu(a_t)",
    paper='Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025)',
)
def rollout_log_ratio(old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask) -> PerToken:
    """Log importance ratio of the trainer's policy to the engine's, per token.

    Args:
        old_logprobs: of the trainer, at the start of the step.
        rollout_logprobs: of the engine. NaN, where it returned none, stays NaN.
        mask: True where the model wrote the token.

    Returns:
        Log-ratios without gradient; 0 off the mask.

    Example:
        >>> old, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -9.0]])
        >>> rollout_log_ratio(old, rollout, torch.tensor([[True, False]]))
        tensor([[0.5000, 0.0000]])
    """
    return token_log_ratio(old_logprobs.detach(), rollout_logprobs.detach(), mask)


@atom(
    "w = exp(clip(d, -clamp, clamp))",
    paper='Kahn and Marshall, "Methods of reducing sample size in Monte Carlo computations" (1953)',
)
def importance_weights(log_ratio: AnyShape, clamp: float | None = None) -> AnyShape:
    """Importance weights of the engine's samples for averages over the trainer's policy.

    Args:
        log_ratio: of `rollout_log_ratio` for tokens; its `row_sum` for the exact weight of completions, its
            `row_mean` for the geometric mean.
        clamp: bound on the absolute log-ratio. None by default; verl and SkyRL use 20.

    Returns:
        Weights, without gradient.

    Example:
        >>> importance_weights(torch.tensor([0.0, 99.0]), clamp=1.0)
        tensor([1.0000, 2.7183])
    """
    bounded = log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp)
    return bounded.detach().exp()


@atom("w' = clip(w, low, high)", paper="TIS in Yao et al. (2025)")
def truncated_weights(weights: AnyShape, high: float, low: float = 0.0) -> AnyShape:
    """Truncated importance sampling (TIS): clamp the weights, which bounds the variance for a small bias.

    See also Ionides, "Truncated importance sampling" (2008).

    Args:
        weights: of `importance_weights`.
        high: upper bound.
        low: lower bound. None by default, as in verl and SkyRL; an option of OpenRLHF, TRL, NeMo-RL and AReaL.

    Returns:
        Weights within the bounds.

    Example:
        >>> truncated_weights(torch.tensor([0.5, 1.0, 9.0]), high=2.0)
        tensor([0.5000, 1.0000, 2.0000])
    """
    return weights.clamp(low, high)


@atom("w' = w [low <= w <= high]", paper="IcePop in Ring-1T, arXiv:2510.18855")
def masked_weights(weights: AnyShape, low: float, high: float) -> AnyShape:
    """Masked importance sampling (MIS, IcePop): zero the weights that are out of bounds.

    Differs from truncation: an outlier has no gradient.

    Args:
        weights: of `importance_weights`.
        low: smallest weight kept.
        high: greatest weight kept.

    Returns:
        Weights, 0 out of bounds.

    Example:
        >>> masked_weights(torch.tensor([0.1, 1.0, 9.0]), low=0.5, high=2.0)
        tensor([0., 1., 0.])
    """
    return weights.masked_fill(~within(weights, low, high), 0.0)


@atom(
    "keep = low <= x <= high",
    paper=(
        'Liu et al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch" (2025)'
    ),
)
def within(statistic: AnyShape, low: float = -math.inf, high: float = math.inf) -> AnyMask:
    """Rejection sampling mask: tokens or rows whose statistic is within bounds.

    Args:
        statistic: a weight, a log-ratio or a KL, per token or per row.
        low: smallest value kept.
        high: greatest value kept.

    Returns:
        True where kept; False for NaN.

    Example:
        >>> within(torch.tensor([0.1, 1.0, 9.0]), 0.5, 2.0)
        tensor([False,  True, False])
    """
    return (statistic >= low) & (statistic <= high)


@atom(
    "w' = w / mean(w),   the mean over tokens, or over rows of the row's mean",
    paper="verl's `rollout_is_batch_normalize`",
)
def normalised_weights(weights: PerToken, mask: Mask, by_row: bool = False) -> PerToken:
    """Self-normalised importance sampling: divide weights by their mean over the step.

    See Owen, "Monte Carlo theory, methods and examples".

    Args:
        weights: per token, for all rows of the optimizer step.
        mask: True where the model wrote the token.
        by_row: take the mean over rows of their means, instead of over tokens.

    Returns:
        Weights; unchanged if the mean is at most 1e-8.

    Example:
        >>> normalised_weights(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]))
        tensor([[0.5000, 1.5000]])
    """
    mean = masked_mean(row_mean(weights, mask), mask.any(1)) if by_row else masked_mean(weights, mask)
    return weights / torch.where(mean > 1e-8, mean, 1.0)


@atom(
    "keep_it = A_it >= 0 or KL_i <= bound,     KL_i = mean_t (log mu(a_t) - log pi_theta(a_t))",
    paper="DeepSeek-V3.2, arXiv:2512.02556",
)
def off_policy_sequences(divergence: PerRow, advantages: PerToken, bound: float) -> Mask:
    """Off-policy sequence mask (OPSM): drop completions with a negative advantage that have become off-policy.

    Args:
        divergence: KL_i, nats per token: `row_mean` of `k1_kl(rollout_logprobs, logprobs, mask)`.
        advantages: per token (a single column where it is one per completion).
        bound: in nats per token.

    Returns:
        True where kept.

    Example:
        >>> off_policy_sequences(torch.tensor([0.1, 0.1]), torch.tensor([[1.0], [-1.0]]), bound=0.05)
        tensor([[ True],
                [False]])
    """
    return (advantages >= 0) | (divergence.detach() <= bound)[:, None]


@atom(
    "keep the largest set of tokens with the smallest d_t^2 whose mean of d_t^2 is < bound",
    paper="M2PO, arXiv:2510.01161",
)
def second_moment_tokens(log_ratio: PerToken, mask: Mask, bound: float) -> Mask:
    """M2PO's mask: drop the most off-policy tokens until the second moment of the rest is below a bound.

    Differs from a clip: the number of dropped tokens depends on how stale the whole batch is.

    Args:
        log_ratio: d_t, of the behaviour to the proximal policy or the reverse.
        mask: True where the model wrote the token, for all rows of the optimizer step.
        bound: of the mean of d_t^2. The most on-policy token is always kept, as in AReaL.

    Returns:
        True where kept; False off the mask.

    Example:
        >>> second_moment_tokens(torch.tensor([[0.1, 2.0, 0.2]]), torch.tensor([[True, True, True]]), bound=0.04)
        tensor([[ True, False,  True]])
    """
    moments, order = log_ratio.detach().square().masked_fill(~mask, torch.inf).flatten().sort()
    numbers = torch.arange(1, len(moments) + 1, device=mask.device)
    # Running means of sorted values increase, so those below the bound come first.
    count = (moments.cumsum(0) / numbers < bound).sum().clamp(min=1)
    return torch.zeros_like(mask).flatten().scatter(0, order, numbers <= count).view_as(mask) & mask
