"""Credit: from one reward per completion to an advantage.

The three modes of GRPO share their shapes: rewards `[B]` and group ids `[B]` in, advantages `[B]` out, no gradient.
`per_token` spreads them over the tokens. Statistics are taken in float64, so that rounding cannot pass for signal.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def raw_reward(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """The reward itself, with no baseline: REINFORCE.

        A_i = r_i

    Paper: Williams, "Simple statistical gradient-following algorithms", Machine Learning 8 (1992). Unbiased, with the
    highest variance of the three.

    Args:
        rewards: reward per completion.
        group_ids: not used; there so that the modes can replace each other.

    Returns:
        Advantages in reward units, without gradient.

    Example:
        >>> raw_reward(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        tensor([1., 0.])
    """
    return rewards.detach().clone()


def group_mean_baseline(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Reward minus the mean reward of its group.

        A_i = r_i - mean_{j in group(i)} r_j

    Paper: Dr. GRPO, arXiv:2503.20783. Differs from GRPO: no division by the standard deviation, which weights
    prompts that are nearly always or nearly never solved more than the others.

    Args:
        rewards: reward per completion, in task units.
        group_ids: equal for completions of one prompt; groups may differ in size and need not be contiguous.

    Returns:
        Advantages in reward units, without gradient. Exactly 0 in a group of one or of equal rewards.

    Example:
        >>> group_mean_baseline(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 7]))
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    centred, _, _ = _group_statistics(rewards, group_ids)
    return centred.to(rewards.dtype)


def group_zscore(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], eps: float = 1e-6) -> Float[Tensor, " B"]:
    """Reward standardised within its group: the advantage of GRPO.

        A_i = (r_i - mean_{group(i)} r) / (std_{group(i)} r + eps)

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1.2. The standard deviation is the unbiased one (divided by
    n - 1), as in verl, TRL and OpenRLHF; eps is 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF.

    Args:
        rewards: reward per completion.
        group_ids: equal for completions of one prompt; groups may differ in size and need not be contiguous.
        eps: added to the standard deviation, in reward units.

    Returns:
        Advantages in standard deviations, without gradient. Exactly 0 in a group of one or of equal rewards.

    Raises:
        ValueError: eps is negative.

    Example:
        >>> group_zscore(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    centred, inverse, counts = _group_statistics(rewards, group_ids)
    squares = torch.zeros_like(counts).index_add_(0, inverse, centred.square())
    std = (squares / (counts - 1).clamp(min=1)).sqrt()[inverse]
    # A group without spread has nothing to standardise, and eps may be 0.
    safe = torch.where(std > 0, std + eps, torch.ones_like(std))
    return (centred / safe).to(rewards.dtype)


def _group_statistics(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centred rewards [B] (exactly 0 in groups of equal rewards), group index [B], group sizes [groups]; float64."""
    exact = rewards.detach().double()
    groups, inverse = torch.unique(group_ids, return_inverse=True)
    zeros = exact.new_zeros(len(groups))
    counts = zeros.index_add(0, inverse, torch.ones_like(exact))
    mean = zeros.index_add(0, inverse, exact) / counts
    high = zeros.scatter_reduce(0, inverse, exact, "amax", include_self=False)
    low = zeros.scatter_reduce(0, inverse, exact, "amin", include_self=False)
    centred = (exact - mean[inverse]).masked_fill((high == low)[inverse], 0.0)
    return centred, inverse, counts


def per_token(advantages: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """A completion's advantage on each token that the model wrote, 0 elsewhere.

        A_{i,t} = A_i m_{i,t}

    Args:
        advantages: one per completion.
        mask: True where the model wrote the token.

    Returns:
        Advantage per token.

    Example:
        >>> per_token(torch.tensor([2.0]), torch.tensor([[False, True, True]]))
        tensor([[0., 2., 2.]])
    """
    return torch.where(mask, advantages[:, None], 0.0)
