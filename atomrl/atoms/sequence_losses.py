"""Sequence-level policy losses and weights: GMPO, TOPR, VESPO."""

from __future__ import annotations

import torch

from atomrl.atoms.masks import row_mean
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
