"""What a ratio and an advantage cost, per token. All are losses: smaller is better."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def clipped_policy_loss(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], clip_low: float = 0.2, clip_high: float = 0.2
) -> Float[Tensor, "B T"]:
    """PPO's pessimistic surrogate, with a bound of its own on each side.

        L_t = -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

    Paper: PPO, arXiv:1707.06347, equation 7; asymmetric bounds ("clip-higher"): DAPO, arXiv:2503.14476, equation 10.

    Args:
        ratio: likelihood ratio per token, with gradient.
        advantages: per token, without gradient.
        clip_low: how far the ratio may fall below 1 (`inf` for no bound).
        clip_high: how far it may rise above 1 (`inf` for no bound).

    Returns:
        Loss per token, not yet weighted.

    Raises:
        ValueError: a bound is negative.

    Example:
        >>> clipped_policy_loss(torch.tensor([[1.5, 0.5]]), torch.tensor([[1.0, -1.0]]), 0.2, 0.28)
        tensor([[-1.2800,  0.8000]])
    """
    _check_bounds(clip_low, clip_high)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped_tokens(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], clip_low: float = 0.2, clip_high: float = 0.2
) -> Bool[Tensor, "B T"]:
    """Which tokens `clipped_policy_loss` gives no gradient: the ratio is out of bounds in the advantage's direction.

        (A_t > 0 and rho_t > 1 + clip_high) or (A_t < 0 and rho_t < 1 - clip_low)

    Paper: PPO, arXiv:1707.06347, figure 1.

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
        >>> clipped_tokens(torch.tensor([[1.5, 1.5]]), torch.tensor([[1.0, -1.0]]))
        tensor([[ True, False]])
    """
    _check_bounds(clip_low, clip_high)
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    return too_high | too_low


def _check_bounds(clip_low: float, clip_high: float) -> None:
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip bounds must not be negative, got low={clip_low}, high={clip_high}")
