"""Importance ratios, policy losses per token (PPO's clip, REINFORCE, CISPO, SAPO, GMPO, VESPO, DPPO), and reductions.

Two families of losses: of the ratio, with the gradient through the ratio (PPO's clip, SAPO, GMPO), and of the log-prob
with a detached weight (REINFORCE, CISPO, DPPO). None of them reduces: the reductions at the end give the weights.
"""

import math

import torch

from atomrl.atoms import atom
from atomrl.atoms.masks import AnyMask, AnyShape, Ids, Mask, PerRow, PerToken, Scalar, masked_mean, row_mean, row_sum

# --------------------------------------------------------------------------------------------------------------------
# Importance ratios of the policy to the old policy, and corrections of the old policy to the rollout engine.
#
# Ratios are log-ratios at three levels: per token (PPO), per completion (GSPO), and per completion in value with the
# gradient per token (GSPO-token).


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


@atom("L_t = -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)", paper="PPO, arXiv:1707.06347, equation 7")
def clipped_policy_loss(
    ratio: PerToken,
    advantages: PerToken,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> PerToken:
    """PPO's clipped surrogate loss, with separate lower and upper bounds (clip-higher) and an optional dual clip.

    For A_t < 0, a dual clip c bounds the loss of a token that has become much likelier:

        L_t = min(L_t, -c A_t)

    Asymmetric bounds ("clip-higher"): DAPO, arXiv:2503.14476, equation 10; dual clip: arXiv:1912.09729; two-sided clip:
    INTELLECT-2, arXiv:2505.07291.

    Args:
        ratio: likelihood ratio per token, with gradient.
        advantages: per token, without gradient.
        clip_low: lower bound of the ratio is 1 - clip_low (`inf` for none).
        clip_high: upper bound of the ratio is 1 + clip_high (`inf` for none).
        dual_clip: c. The default is none, as in the paper of PPO; verl has 3.
        ratio_cap: delta of the two-sided clip: the ratio is min(rho_t, delta) in the first term. Above
            1 + clip_high, where it belongs, it is the same as a dual clip of delta.

    Returns:
        Loss per token, not yet weighted.

    Raises:
        ValueError: a bound is negative.

    Example:
        >>> clipped_policy_loss(torch.tensor([[1.5, 0.5]]), torch.tensor([[1.0, -1.0]]), 0.2, 0.28)
        tensor([[-1.2800,  0.8000]])
        >>> clipped_policy_loss(torch.tensor([[9.0]]), torch.tensor([[-1.0]]), dual_clip=3.0)
        tensor([[3.]])
    """
    _check_bounds(clip_low, clip_high)
    free = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    loss = -torch.minimum(free * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


@atom(
    "(A_t > 0 and rho_t > 1 + clip_high) or (A_t < 0 and rho_t < 1 - clip_low)",
    paper="PPO, arXiv:1707.06347, figure 1",
)
def clipped_tokens(ratio: PerToken, advantages: PerToken, clip_low: float, clip_high: float) -> Mask:
    """Tokens clipped by PPO's clip: the ratio is out of bounds in the advantage's direction.

    Args:
        ratio: likelihood ratio per token.
        advantages: per token.
        clip_low: as in `clipped_policy_loss`.
        clip_high: as in `clipped_policy_loss`.

    Returns:
        True where the clip acts; its mean over the mask is the metric `actor/pg_clipfrac`.

    Raises:
        ValueError: a bound is negative.

    Example:
        >>> clipped_tokens(torch.tensor([[1.5, 1.5]]), torch.tensor([[1.0, -1.0]]), 0.2, 0.2)
        tensor([[ True, False]])
    """
    _check_bounds(clip_low, clip_high)
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    return too_high | too_low


@atom("x < low or x > high")
def out_of_bounds(values: AnyShape, low: float, high: float) -> AnyMask:
    """Values outside an interval, regardless of the advantage.

    Gives the clip fraction of methods that clip by the ratio alone, such as CISPO (arXiv:2506.13585).

    Args:
        values: for example ratios.
        low: smallest value inside.
        high: greatest value inside.

    Returns:
        True outside.

    Example:
        >>> out_of_bounds(torch.tensor([0.5, 1.0, 1.5]), 0.8, 1.2)
        tensor([ True, False,  True])
    """
    return (values < low) | (values > high)


@atom(
    "L_t = -sg[w_t] A_t log pi_theta(a_t)",
    paper='Williams, "Simple statistical gradient-following algorithms", Machine Learning 8 (1992)',
)
def reinforce_loss(logprobs: PerToken, advantages: PerToken, mask: Mask, weights: PerToken | None = None) -> PerToken:
    """REINFORCE loss: log-probs weighted by advantages, and by weights without gradient.

    Without weights it is GPG's, arXiv:2504.02546. Differs from PPO: a clipped weight does not stop a token's gradient.
    Weights of a bounded ratio give CISPO, TIS, TOPR and DPPO.

    Args:
        logprobs: of the policy, with gradient.
        advantages: per token, without gradient.
        mask: True where the model wrote the token.
        weights: 1 where they are not given; detached.

    Returns:
        Loss per token, 0 off the mask.

    Example:
        >>> reinforce_loss(torch.tensor([[-0.5, -2.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]]))
        tensor([[ 0.5000, -2.0000]])
    """
    scale = advantages if weights is None else advantages * weights.detach()
    return -scale.masked_fill(~mask, 0.0) * logprobs.masked_fill(~mask, 0.0)


@atom(
    "L_t = -sg[clip(rho_t, 1 - clip_low, 1 + clip_high)] A_t log pi_theta(a_t)",
    paper="CISPO in MiniMax-M1, arXiv:2506.13585, equations 4 and 5",
)
def cispo_loss(
    logprobs: PerToken, ratio: PerToken, advantages: PerToken, mask: Mask, clip_low: float = 1.0, clip_high: float = 4.0
) -> PerToken:
    """CISPO loss, REINFORCE with the clipped ratio as weight: a clipped token keeps its gradient.

    Its unified form drops `clipped_tokens`.

    Args:
        logprobs: of the policy, with gradient.
        ratio: likelihood ratio per token; detached.
        advantages: per token, without gradient.
        mask: True where the model wrote the token.
        clip_low: the weight is at least 1 - clip_low. The default of 1 sets no lower bound, as in the paper and in TRL.
        clip_high: the weight is at most 1 + clip_high. TRL's `epsilon_high` is this sum itself.

    Returns:
        Loss per token, 0 off the mask.

    Raises:
        ValueError: a bound is negative.

    Example:
        >>> logprobs, ratio, ones = torch.tensor([[-1.0, -1.0]]), torch.tensor([[0.5, 9.0]]), torch.ones(1, 2)
        >>> cispo_loss(logprobs, ratio, ones, torch.tensor([[True, True]]))
        tensor([[0.5000, 5.0000]])
    """
    _check_bounds(clip_low, clip_high)
    return reinforce_loss(logprobs, advantages, mask, ratio.clamp(1 - clip_low, 1 + clip_high))


@atom(
    "L_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A_t,    tau = tau_positive where A_t > 0, else tau_negative",
    paper="SAPO, arXiv:2511.20347",
)
def sapo_loss(ratio: PerToken, advantages: PerToken, tau_positive: float = 1.0, tau_negative: float = 1.05) -> PerToken:
    """SAPO loss, with a sigmoid instead of PPO's clip: the gradient decays as the ratio leaves 1.

    At rho = 1 its gradient is that of the unclipped surrogate.

    Args:
        ratio: likelihood ratio per token, with gradient.
        advantages: per token, without gradient.
        tau_positive: temperature for positive advantages; the greater, the faster the gradient decays.
        tau_negative: temperature for the others; larger, as negative advantages are less stable.

    Returns:
        Loss per token, not yet weighted.

    Raises:
        ValueError: a temperature is not above 0.

    Example:
        >>> sapo_loss(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, -1.0]]))
        tensor([[-2.0000,  1.9048]])
    """
    if not tau_positive > 0 or not tau_negative > 0:
        raise ValueError(f"temperatures must be above 0, got {tau_positive} and {tau_negative}")
    tau = torch.where(advantages > 0, torch.full_like(ratio, tau_positive), tau_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def _check_bounds(clip_low: float, clip_high: float) -> None:
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip bounds must not be negative, got low={clip_low}, high={clip_high}")


# --------------------------------------------------------------------------------------------------------------------
# Sequence-level policy losses and weights: GMPO and VESPO.


@atom(
    "A_t > 0: min(log rho_t, clip_high)       A_t < 0: max(log rho_t, -clip_low)       A_t = 0: 0",
    paper="GMPO, arXiv:2507.20673",
)
def sequence_clipped_log_ratio(
    log_ratio: PerToken, advantages: PerToken, clip_low: float = 0.4, clip_high: float = 0.4
) -> PerToken:
    """GMPO's clip: log-ratios clipped on the advantage's side, before they are averaged.

    Differs from PPO: the clip is in log space, on the factors of a product.

    Args:
        log_ratio: per token, with gradient.
        advantages: per token, without gradient.
        clip_low: the lower bound's distance from 0, in nats.
        clip_high: the upper bound's distance from 0, in nats.

    Returns:
        Log-ratios; clipped ones have no gradient.

    Example:
        >>> sequence_clipped_log_ratio(torch.tensor([[0.9, -0.9, 0.9]]), torch.tensor([[1.0, 1.0, -1.0]]))
        tensor([[ 0.4000, -0.9000,  0.9000]])
    """
    sign = advantages.sign()
    return sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))


@atom(
    "L_i = -A_i exp((1 / |m_i|) sum_t m_it log rho_it)",
    paper="GMPO, arXiv:2507.20673",
)
def geometric_mean_loss(log_ratio: PerToken, advantages: PerRow, mask: Mask) -> PerRow:
    """GMPO loss: the advantage of a completion times the geometric mean of its tokens' ratios.

    Takes log-ratios of `sequence_clipped_log_ratio`. Differs from GRPO: a geometric instead of an arithmetic mean, so a
    single large ratio counts little.

    Args:
        log_ratio: per token, with gradient.
        advantages: per completion. An empty row has a ratio of 1 and so a loss of -A_i, as in TRL; give it an
            advantage of 0 (say the mean over its tokens, as verl does) for no loss.
        mask: True where the model wrote the token.

    Returns:
        Loss per completion.

    Example:
        >>> geometric_mean_loss(torch.tensor([[0.2, -0.2]]), torch.tensor([2.0]), torch.tensor([[True, True]]))
        tensor([-2.])
    """
    return -advantages * row_mean(log_ratio, mask).exp()


@atom(
    "log phi_i = lambda + k log W_i - lambda W_i,    log W_i = sum_t m_it (log rho_it + log w_it)",
    paper="VESPO, arXiv:2602.10693",
)
def vespo_weights(
    log_ratio: PerToken,
    advantages: PerRow,
    mask: Mask,
    rollout_weights: PerToken | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> PerRow:
    """VESPO weights: W^k exp(lambda (1 - W)) of a completion's ratio W, greatest near 1 and decaying on both sides.

    Differs from GSPO: the ratio is a product, not normalised by length, and the weight is smooth; phi(1) = 1.

    Args:
        log_ratio: per token; bounded by 20 on each side.
        advantages: per completion; k and lambda are the positive ones where A_i >= 0.
        mask: True where the model wrote the token.
        rollout_weights: importance weights w_it of the rollout, bounded to [1e-8, e^20].
        k_positive: exponent for good completions.
        lambda_positive: decay for good completions, at least 1e-4.
        k_negative: exponent for bad completions.
        lambda_negative: decay for bad completions, at least 1e-4.

    Returns:
        Weights for `reinforce_loss` (after `per_token`), without gradient.

    Example:
        >>> vespo_weights(torch.tensor([[0.0], [0.5]]), torch.tensor([1.0, 1.0]), torch.tensor([[True], [True]]))
        tensor([1.0000, 0.3882])
    """
    lowest = math.log(1e-8)
    log_w = row_sum(log_ratio.detach().clamp(-20.0, 20.0), mask)
    if rollout_weights is not None:
        log_w = log_w + row_sum(rollout_weights.detach().log().clamp(lowest, 20.0), mask)
    log_w = log_w.clamp(lowest, 20.0)
    good = advantages >= 0
    k = torch.where(good, torch.full_like(log_w, k_positive), k_negative)
    decay = torch.where(good, torch.full_like(log_w, lambda_positive), lambda_negative).clamp(min=1e-4)
    return (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


# --------------------------------------------------------------------------------------------------------------------
# DPPO: trust-region masks by the divergence of probabilities, not by their ratio.
#
# A ratio exaggerates changes of unlikely tokens and understates those of likely ones. DPPO bounds the change of the
# sampled token's probability instead, or the KL of the binary distribution "this token or another".


@atom("d_t = pi_theta(a_t) - pi_old(a_t)", paper="DPPO, arXiv:2602.04879")
def probability_change(logprobs: PerToken, old_logprobs: PerToken, mask: Mask) -> PerToken:
    """Change in the probability of each token; its absolute value is the binary total variation.

    Args:
        logprobs: of the policy; detached.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.

    Returns:
        Change in probability, between -1 and 1, without gradient; 0 off the mask.

    Example:
        >>> probability_change(torch.tensor([[0.5]]).log(), torch.tensor([[0.3]]).log(), torch.tensor([[True]]))
        tensor([[0.2000]])
    """
    return logprobs.detach().masked_fill(~mask, 0.0).exp() - old_logprobs.masked_fill(~mask, 0.0).exp()


@atom(
    "D_t = q (log q - log p) + (1 - q) log((1 - q + eps) / (1 - p + eps)),    p = pi_theta(a_t), q = pi_old(a_t)",
    paper="DPPO, arXiv:2602.04879",
)
def binary_kl(logprobs: PerToken, old_logprobs: PerToken, mask: Mask, eps: float = 1e-8) -> PerToken:
    """Binary KL divergence of the old from the new policy, over "this token or another".

    A lower bound of the KL over the whole vocabulary.

    Args:
        logprobs: of the policy; detached.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        eps: avoids a division by 0 where a token is certain; 1e-8 as in verl and SkyRL.

    Returns:
        Nats per token, without gradient; 0 off the mask.

    Example:
        >>> binary_kl(torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log(), torch.tensor([[True]]))
        tensor([[0.1438]])
    """
    new, old = logprobs.detach().masked_fill(~mask, 0.0), old_logprobs.masked_fill(~mask, 0.0)
    p, q = new.exp(), old.exp()
    return q * (old - new) + (1 - q) * ((1 - q + eps) / (1 - p + eps)).log()


@atom(
    "keep_t = not (A_t > 0 and d_t > 0 and D_t > high) and not (A_t < 0 and d_t < 0 and D_t > low)",
    paper="DPPO, arXiv:2602.04879",
)
def trust_region_tokens(
    change: PerToken, divergence: PerToken, advantages: PerToken, low: float = 0.2, high: float = 0.2
) -> Mask:
    """DPPO's trust-region mask: tokens near the old policy, or moving back towards it.

    Differs from PPO's clip: the divergence is bounded, not the ratio.

    Args:
        change: d_t of `probability_change`; its sign is the direction of the change.
        divergence: D_t, the absolute change or `binary_kl`.
        advantages: per token. A token of advantage 0 is kept, as in SkyRL: it has no loss, so dropping it would only
            distort the clip fraction (verl and prime-rl treat it as negative).
        low: bound for tokens that became less likely.
        high: bound for tokens that became likelier.

    Returns:
        True where the token is kept.

    Example:
        >>> change, advantages = torch.tensor([[0.3, 0.3, -0.3]]), torch.tensor([[1.0, -1.0, -1.0]])
        >>> trust_region_tokens(change, change.abs(), advantages)
        tensor([[False,  True, False]])
    """
    too_likely = (advantages > 0) & (change > 0) & (divergence > high)
    too_unlikely = (advantages < 0) & (change < 0) & (divergence > low)
    return ~(too_likely | too_unlikely)


# --------------------------------------------------------------------------------------------------------------------
# Loss aggregation as loss weights: the weight of each token in the loss of one optimizer step.
#
# The loss is `(loss_weights * per_token).sum()`. Weights are computed once, over the whole step, before it is split, so
# micro-batches, ranks and packing cannot change the objective. Pass the denominator (`total_tokens`, `total_rows`)
# where a process sees only a part of the step, or counts differently. Weights have torch's default dtype.


@atom(
    "w_{i,t} = 1 / sum_j |o_j|",
    latex=r"\frac{1}{\sum_j |o_j|} \sum_{i,t}",
    paper='DAPO, arXiv:2503.14476, section 3.3 ("token-level loss")',
)
def token_mean(mask: Mask, total_tokens: float | None = None) -> PerToken:
    """Token mean: every token has the same weight, so long completions count more.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        total_tokens: denominator, by default the number of tokens in the mask; 1 gives a plain sum.

    Returns:
        Weights that sum to 1 (to 0 for an empty mask).

    Example:
        >>> token_mean(torch.tensor([[False, True, True], [False, True, True]]))
        tensor([[0.0000, 0.2500, 0.2500],
                [0.0000, 0.2500, 0.2500]])
    """
    return mask / (mask.sum().clamp(min=1) if total_tokens is None else total_tokens)


@atom(
    "w_{i,t} = 1 / (N |o_i|)",
    latex=r"\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t",
    paper="GRPO in DeepSeekMath, arXiv:2402.03300, equation 3",
)
def sequence_mean(mask: Mask, total_rows: float | None = None) -> PerToken:
    """Sequence mean: every completion has the same weight, so a token of a long one counts less.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        total_rows: N. By default the number of rows with a token, as in verl and OpenRLHF, so padding a batch with
            empty rows changes nothing; TRL, SkyRL and ROLL count empty rows.

    Returns:
        Weights that sum to 1 (to 0 for an empty mask).

    Example:
        >>> sequence_mean(torch.tensor([[True, True, True, True], [True, False, False, False]]))
        tensor([[0.1250, 0.1250, 0.1250, 0.1250],
                [0.5000, 0.0000, 0.0000, 0.0000]])
    """
    rows = mask.any(1).sum().clamp(min=1) if total_rows is None else total_rows
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * rows)


@atom(
    "w_{i,t} = 1 / (N L)",
    latex=r"\frac{1}{N L} \sum_{i,t}",
    paper="Dr. GRPO, arXiv:2503.20783, appendix A",
)
def constant_length(mask: Mask, length: int, total_rows: float | None = None) -> PerToken:
    """Dr. GRPO's aggregation: token sums divided by a constant, independent of the lengths of completions.

    L is a constant, usually the limit on length; a length of 1 gives the mean over rows of their sums
    ("sequence-mean-token-sum", LUSPO arXiv:2602.05261).

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        length: L, in tokens.
        total_rows: N. By default the number of all rows, as in TRL and SkyRL; verl leaves out empty rows.

    Returns:
        Weights that sum to the mean length divided by L.

    Raises:
        ValueError: length is not positive.

    Example:
        >>> constant_length(torch.tensor([[True, True], [True, False]]), length=4)
        tensor([[0.1250, 0.1250],
                [0.1250, 0.0000]])
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    return mask / ((max(1, len(mask)) if total_rows is None else total_rows) * length)


@atom(
    "w_{i,t} = 1 / (P sum_{j in group} |o_j|)",
    latex=r"\frac{1}{P} \sum_{g} \frac{1}{\sum_{j \in g} |o_j|} \sum_{i \in g, t}",
)
def group_token_mean(mask: Mask, group_ids: Ids) -> PerToken:
    """Prompt mean: every group of rows has the same weight, and every token within a group.

    P is the number of groups. With the completions of a prompt as the group, prompts with long answers do not count
    more (SkyRL's `prompt_mean`). With micro-batches as groups it is the mean of micro-batch means of older trainers,
    which depends on how a batch is split: use it only to reproduce such a run.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        group_ids: equal for rows of one group. A group without a token counts in P.

    Returns:
        Weights that sum to 1 where no group is empty.

    Example:
        >>> group_token_mean(torch.tensor([[True, True], [True, True], [True, False]]), torch.tensor([0, 0, 1]))
        tensor([[0.1250, 0.1250],
                [0.1250, 0.1250],
                [0.5000, 0.0000]])
    """
    groups, index = torch.unique(group_ids, return_inverse=True)
    lengths = mask.sum(1)
    tokens = lengths.new_zeros(len(groups)).index_add(0, index, lengths)
    return mask / (tokens.clamp(min=1)[index, None] * len(groups))


@atom("L = scale sum_{i,t} w_{i,t} c_{i,t} l_{i,t}")
def weighted_sum(per_token: PerToken, loss_weights: PerToken, *factors: Mask | PerToken, scale: float = 1.0) -> Scalar:
    """Weighted sum of per-token losses: the loss of an optimizer step, or of a part of it.

    Tokens of weight 0 are ignored, even if their loss is NaN.

    Args:
        per_token: loss per token, with gradient.
        loss_weights: of a reduction, over the whole optimizer step.
        factors: further factors per token: importance weights, or a mask. Detached; they do not change the denominator.
        scale: factor of the sum. The default of 1 is for gradients that are summed over processes; with a back end that
            averages them, pass the number of processes.

    Returns:
        A scalar. Those of the micro-batches add up to that of the step.

    Example:
        >>> losses, weights = torch.tensor([[1.0, 2.0, float("nan")]]), torch.tensor([[0.5, 0.5, 0.0]])
        >>> weighted_sum(losses, weights)
        tensor(1.5000)
        >>> weighted_sum(losses, weights, torch.tensor([[True, False, True]]))
        tensor(0.5000)
    """
    weights, used = loss_weights, loss_weights != 0
    for factor in factors:
        weights = torch.where(used, weights * factor.detach(), 0.0)
    return scale * (per_token.masked_fill(weights == 0, 0.0) * weights).sum()
