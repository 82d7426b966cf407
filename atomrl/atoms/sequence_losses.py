"""Sequence-level policy losses and weights: GMPO, TOPR, VESPO."""

import math

import torch

from atomrl.atoms.masks import row_mean, row_sum
from atomrl.atoms.shapes import Mask, PerRow, PerToken


def sequence_clipped_log_ratio(
    log_ratio: PerToken, advantages: PerToken, clip_low: float = 0.4, clip_high: float = 0.4
) -> PerToken:
    """GMPO's clip: log-ratios clipped on the advantage's side, before their mean is taken.

        A_t > 0: min(log rho_t, clip_high)       A_t < 0: max(log rho_t, -clip_low)       A_t = 0: 0

    Paper: GMPO, arXiv:2507.20673. Differs from PPO: the clip is in log space, on the factors of a product.

    Args:
        log_ratio: per token, with gradient.
        advantages: per token, without gradient.
        clip_low: the lower bound's distance from 0, in nats.
        clip_high: the upper bound's distance from 0, in nats.

    Returns:
        Log-ratios; those that are clipped have no gradient.

    Example:
        >>> sequence_clipped_log_ratio(torch.tensor([[0.9, -0.9, 0.9]]), torch.tensor([[1.0, 1.0, -1.0]]))
        tensor([[ 0.4000, -0.9000,  0.9000]])
    """
    sign = advantages.sign()
    return sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))


def geometric_mean_loss(log_ratio: PerToken, advantages: PerRow, mask: Mask) -> PerRow:
    """GMPO loss: the advantage of a completion times the geometric mean of its tokens' ratios.

        L_i = -A_i exp((1 / |m_i|) sum_t m_it log rho_it)

    Paper: GMPO, arXiv:2507.20673, with log-ratios of `sequence_clipped_log_ratio`. Differs from GRPO:
    the arithmetic mean of the ratios is replaced, so that a single large ratio counts little.

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
    """VESPO weights: W^k exp(lambda (1 - W)) of a completion's ratio W, greatest near 1 and falling on both sides.

        log phi_i = lambda + k log W_i - lambda W_i,    log W_i = sum_t m_it (log rho_it + log w_it)

    Paper: VESPO, arXiv:2602.10693. Differs from GSPO: the ratio is a product, not normalised by length, and the
    weight is smooth; phi(1) = 1.

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
