"""Token filters: high-entropy tokens (80/20), Clip-Cov and KL-Cov.

A filter is a mask that multiplies the loss per token (`weighted_sum`); the denominator of the loss does not change.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from atomrl.atoms import atom
from atomrl.atoms.masks import Mask, PerToken, masked_mean


@atom("keep_t = H_t >= quantile_{1 - fraction}(H)", paper='"Beyond the 80/20 rule", arXiv:2506.01939')
def high_entropy_tokens(entropies: PerToken, mask: Mask, fraction: float = 0.2) -> Mask:
    """High-entropy tokens: the fraction of tokens with the highest entropy.

    The quantile is over all rows that are given, with linear interpolation, as in TRL: give it the whole optimizer
    step.

    Args:
        entropies: per token, in nats.
        mask: True where the model wrote the token.
        fraction: of tokens to keep, between 0 and 1.

    Returns:
        True for the tokens that are kept, ties included; never off the mask.

    Raises:
        ValueError: the fraction is not between 0 and 1.

    Example:
        >>> high_entropy_tokens(torch.tensor([[0.1, 2.0, 0.3, 1.0]]), torch.tensor([[True, True, True, True]]), 0.5)
        tensor([[False,  True, False,  True]])
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction} must be between 0 and 1")
    entropies = entropies.detach()
    if not entropies.numel():
        return mask.clone()
    # Not torch.quantile, which refuses more than 16 million values and has no mask.
    ranked = entropies.masked_fill(~mask, torch.inf).flatten().sort().values
    rank = (mask.sum() - 1).clamp(min=0).to(ranked.dtype) * (1 - fraction)
    low, high = ranked.gather(0, torch.stack([rank.floor(), rank.ceil()]).long()).unbind()
    return (entropies >= low.lerp(high, rank - rank.floor())) & mask


@atom("keep_t = H_t is among the N greatest", paper="after arXiv:2506.01939, with a budget instead of a fraction")
def highest_entropy_tokens(entropies: PerToken, mask: Mask, tokens: int) -> Mask:
    """High-entropy tokens: the N tokens with the highest entropy.

    Args:
        entropies: per token, in nats.
        mask: True where the model wrote the token.
        tokens: N; all tokens if there are fewer.

    Returns:
        True for exactly min(N, |m|) tokens.

    Example:
        >>> highest_entropy_tokens(torch.tensor([[0.1, 2.0, 0.3]]), torch.tensor([[True, True, True]]), tokens=1)
        tensor([[False,  True, False]])
    """
    return _top(entropies, mask, tokens)


@atom("keep = a uniform sample of N tokens, without replacement", paper="the control of arXiv:2506.01939")
def random_tokens(mask: Mask, tokens: int | Int[Tensor, ""], generator: torch.Generator | None = None) -> Mask:
    """Random tokens: the control of `highest_entropy_tokens`.

    Args:
        mask: True where the model wrote the token.
        tokens: N; all tokens if there are fewer.
        generator: of random numbers, on the mask's device.

    Returns:
        True for exactly min(N, |m|) tokens.

    Example:
        >>> random_tokens(torch.tensor([[True, True, False]]), tokens=9)
        tensor([[ True,  True, False]])
    """
    return _top(torch.rand(mask.shape, generator=generator, device=mask.device), mask, tokens)


@atom(
    "cov_t = (A_t - mean A) (log pi_theta(a_t) - mean log pi_theta)",
    paper='"The entropy mechanism of RL for reasoning language models", arXiv:2505.22617',
)
def token_covariance(logprobs: PerToken, advantages: PerToken, mask: Mask) -> PerToken:
    """Covariance of log-prob and advantage, per token: tokens that are likely and good lower the entropy.

    Args:
        logprobs: of the policy; detached.
        advantages: per token.
        mask: True where the model wrote the token; means are over it.

    Returns:
        Covariance per token, without gradient; 0 off the mask, and where all advantages are equal.

    Example:
        >>> token_covariance(torch.tensor([[-1.0, -3.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]]))
        tensor([[1., 1.]])
    """
    logprobs, inf = logprobs.detach(), float("inf")
    product = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    # Equal advantages differ from their mean by its rounding.
    differ = advantages.masked_fill(~mask, -inf).amax() > advantages.masked_fill(~mask, inf).amin()
    return product.masked_fill(~mask | ~differ, 0.0)


@atom(
    "drop = a uniform sample of max(1, int(ratio |m|)) of the candidates with low < cov_t < high",
    paper="Clip-Cov in arXiv:2505.22617",
)
def clip_covariance_tokens(
    covariance: PerToken,
    candidates: Mask,
    mask: Mask,
    ratio: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    generator: torch.Generator | None = None,
) -> Mask:
    """Clip-Cov: drops a random sample of the tokens of high covariance, so that the entropy does not collapse.

    Args:
        covariance: of `token_covariance`.
        candidates: tokens that may be dropped: those that the clip has not stopped already.
        mask: True where the model wrote the token.
        ratio: of tokens to drop.
        low: lower bound of the covariance.
        high: upper bound of the covariance.
        generator: of random numbers, on the mask's device.

    Returns:
        True for the tokens that are kept; a factor of `weighted_sum`.

    Example:
        >>> covariance, every = torch.tensor([[0.0, 2.0, 9.0]]), torch.tensor([[True, True, True]])
        >>> clip_covariance_tokens(covariance, every, every)
        tensor([[ True, False,  True]])
    """
    eligible = candidates & mask & (covariance > low) & (covariance < high)
    return ~random_tokens(eligible, _count(mask, ratio), generator)


@atom(
    "pick = the max(1, int(fraction |m|)) tokens of greatest cov_t, of those with cov_t != 0",
    paper="KL-Cov in arXiv:2505.22617",
)
def highest_covariance_tokens(covariance: PerToken, mask: Mask, fraction: float = 2e-3) -> Mask:
    """KL-Cov: the tokens of highest covariance, which get a KL penalty to the old policy.

    Where all advantages are equal, every covariance is 0 and no token is picked: the gradient of the penalty has the
    same size however near the old policy is, and would follow the rounding of its log-probs.

    The penalty is `abs_kl` to the old policy.

    Args:
        covariance: of `token_covariance`.
        mask: True where the model wrote the token.
        fraction: of tokens to pick.

    Returns:
        True for the tokens to penalise.

    Example:
        >>> highest_covariance_tokens(torch.tensor([[0.0, 2.0, 9.0]]), torch.tensor([[True, True, True]]))
        tensor([[False, False,  True]])
    """
    return _top(covariance, mask & (covariance != 0), _count(mask, fraction))


def _count(mask: Tensor, fraction: float) -> Tensor:
    return (fraction * mask.sum().double()).long().clamp(min=1)


def _top(values: Tensor, mask: Tensor, count: int | Tensor) -> Tensor:
    """The tokens of the greatest values. A sort, because topk wants the count on the host."""
    order = values.detach().masked_fill(~mask, -torch.inf).flatten().argsort(descending=True)
    first = torch.arange(order.numel(), device=mask.device) < count
    return torch.zeros_like(mask).flatten().scatter(0, order, first).view_as(mask) & mask
