"""Per-token policy losses: PPO's clip and its relatives, REINFORCE, CISPO, SAPO, mirror descent.

Two families: losses of a ratio, whose gradient flows through it (PPO's clip, SAPO), and losses of a log-prob, which is
weighted by something without gradient (REINFORCE, CISPO, mirror descent). Smaller is better. None averages anything:
see `reductions`.
"""

import torch

from atomrl.atoms.shapes import AnyMask, AnyShape, Mask, PerToken


def clipped_policy_loss(
    ratio: PerToken,
    advantages: PerToken,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> PerToken:
    """PPO's clipped surrogate loss, with a bound of its own on each side (clip-higher) and an optional dual clip.

        L_t = -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

    and for A_t < 0 with a dual clip c, which bounds the loss of a token that has become far likelier:

        L_t = min(L_t, -c A_t)

    Paper: PPO, arXiv:1707.06347, equation 7; asymmetric bounds ("clip-higher"): DAPO, arXiv:2503.14476, equation 10;
    dual clip: arXiv:1912.09729; two-sided clip: INTELLECT-2, arXiv:2505.07291.

    Args:
        ratio: likelihood ratio per token, with gradient.
        advantages: per token, without gradient.
        clip_low: how far the ratio may fall below 1 (`inf` for no bound).
        clip_high: how far it may rise above 1 (`inf` for no bound).
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


def clipped_tokens(ratio: PerToken, advantages: PerToken, clip_low: float = 0.2, clip_high: float = 0.2) -> Mask:
    """Tokens on which PPO's clip acts: the ratio is out of bounds in the advantage's direction.

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


def out_of_bounds(values: AnyShape, low: float, high: float) -> AnyMask:
    """Values outside an interval, whatever the advantage.

        x < low or x > high

    Paper: none; the clip fraction of methods whose clip looks at the ratio alone, such as CISPO (arXiv:2506.13585).

    Args:
        values: ratios, say.
        low: the least value that is inside.
        high: the greatest value that is inside.

    Returns:
        True outside.

    Example:
        >>> out_of_bounds(torch.tensor([0.5, 1.0, 1.5]), 0.8, 1.2)
        tensor([ True, False,  True])
    """
    return (values < low) | (values > high)


def reinforce_loss(logprobs: PerToken, advantages: PerToken, mask: Mask, weights: PerToken | None = None) -> PerToken:
    """REINFORCE loss: log-probs weighted by advantages, and by weights without gradient.

        L_t = -sg[w_t] A_t log pi_theta(a_t)

    Paper: Williams, "Simple statistical gradient-following algorithms", Machine Learning 8 (1992); without weights it
    is GPG's, arXiv:2504.02546. Differs from PPO: a clipped weight does not stop a token's gradient. Weights of a
    bounded ratio give CISPO, TIS, TOPR and DPPO.

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


def cispo_loss(
    logprobs: PerToken, ratio: PerToken, advantages: PerToken, mask: Mask, clip_low: float = 1.0, clip_high: float = 4.0
) -> PerToken:
    """CISPO loss, REINFORCE with the clipped ratio as weight: a clipped token keeps its gradient.

        L_t = -sg[clip(rho_t, 1 - clip_low, 1 + clip_high)] A_t log pi_theta(a_t)

    Paper: CISPO in MiniMax-M1, arXiv:2506.13585, equations 4 and 5. Its unified form drops `clipped_tokens`.

    Args:
        logprobs: of the policy, with gradient.
        ratio: likelihood ratio per token; detached.
        advantages: per token, without gradient.
        mask: True where the model wrote the token.
        clip_low: the weight is at least 1 - clip_low. The default of 1 is no lower bound, as in the paper and in TRL.
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


def sapo_loss(ratio: PerToken, advantages: PerToken, tau_positive: float = 1.0, tau_negative: float = 1.05) -> PerToken:
    """SAPO loss, a sigmoid in the place of PPO's clip: the gradient fades as the ratio leaves 1.

        L_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A_t,    tau = tau_positive where A_t > 0, else tau_negative

    Paper: SAPO, arXiv:2511.20347. At rho = 1 its gradient is that of the unclipped surrogate.

    Args:
        ratio: likelihood ratio per token, with gradient.
        advantages: per token, without gradient. A = 0 takes the negative temperature, without consequence.
        tau_positive: the greater, the sooner the gradient fades.
        tau_negative: the same for negative advantages; larger, as they are the less stable ones.

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
