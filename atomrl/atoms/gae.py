"""Generalised advantage estimation and discounted returns, for single turns and many.

A row may have gaps: tokens of an observation (a tool's output, a user's turn) that the model did not write. They are
no steps, as in verl and NeMo-RL: the next token that the model wrote follows directly, so neither the length nor the
content of an observation changes the credit of what came before. For the conventions of other peers pass other masks:
a full one, with rewards and values of 0 in the gaps, makes each observed token a step that discounts once more
(OpenRLHF, slime).

Right padding is a gap that is never left. Rewards belong to the token at which they stand; nothing follows the last.
"""

from typing import TypedDict

import torch
from torch import Tensor

from atomrl.atoms.groups import _as_floats
from atomrl.atoms.shapes import Mask, PerRow, PerToken, TokenRewards


class Gae(TypedDict):
    """What `gae` returns, both `[B, T]`."""

    advantages: Tensor
    """In reward units, not whitened."""
    returns: Tensor
    """Advantage plus value: what the value is trained towards."""


def gae(rewards: TokenRewards, values: PerToken, mask: Mask, gamma: float = 1.0, lam: float | PerRow = 0.95) -> Gae:
    """Generalised advantage estimation.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1} = sum_{l >= 0} (gamma lam)^l delta_{t+l}

    where t+1 is the next step of the row, and V and A are 0 after the last.

    Paper: GAE, arXiv:1506.02438, equations 11 to 16.

    Args:
        rewards: per token.
        values: of the state in which each token was chosen.
        mask: True where the model wrote the token.
        gamma: discount per step, 0 to 1.
        lam: 0 is one-step temporal difference, 1 the return minus the value; or one number per row.

    Returns:
        Advantages and returns, without gradient, 0 off the mask.

    Raises:
        ValueError: gamma is not within 0 to 1.
        TypeError: the rewards are no tensor.

    Example:
        >>> mask = torch.tensor([[True, False, True]])
        >>> result = gae(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.5]]), mask, lam=1.0)
        >>> result["advantages"], result["returns"]
        (tensor([[0.5000, 0.0000, 0.5000]]), tensor([[1., 0., 1.]]))
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be within 0 to 1, got {gamma}")
    rewards = _as_floats(rewards).masked_fill(~mask, 0.0)
    values = _as_floats(values, "values").masked_fill(~mask, 0.0)
    next_value = advantage = values.new_zeros(len(values))
    columns = []
    for t in reversed(range(values.shape[1])):
        new = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantage = torch.where(mask[:, t], new, advantage)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], 1) if columns else torch.zeros_like(values)
    advantages = advantages.masked_fill(~mask, 0.0)
    return {"advantages": advantages, "returns": advantages + values}


def length_adaptive_lambda(mask: Mask, alpha: float) -> PerRow:
    """Length-adaptive GAE lambda: nearer to 1 for a longer completion, so that its beginning still sees the reward.

        lam_i = 1 - 1 / (alpha |m_i|),   within 0 to 1

    Paper: VAPO, arXiv:2504.05118, where alpha is 0.05.

    Args:
        mask: True where the model wrote the token.
        alpha: how the horizon grows with length: 1 / (1 - lam) is alpha times the tokens.

    Returns:
        One lambda per row, in float64; 0 for rows of at most 1 / alpha tokens.

    Raises:
        ValueError: alpha is not above 0.

    Example:
        >>> length_adaptive_lambda(torch.ones(2, 40, dtype=torch.bool), alpha=0.05)
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    return 1 - 1 / (alpha * mask.sum(1).double()).clamp(min=1)


def discounted_returns(rewards: TokenRewards, mask: Mask, gamma: float = 1.0) -> PerToken:
    """Discounted return (reward to go) from each token: REINFORCE++, ReMax.

        G_t = r_t + gamma G_{t+1}

    Paper: REINFORCE++, arXiv:2501.03262; Williams (1992). Rewards off the mask are ignored.

    Args:
        rewards: per token.
        mask: True where the model wrote the token.
        gamma: discount per step, 0 to 1.

    Returns:
        Returns in reward units, without gradient, 0 off the mask.

    Raises:
        ValueError: gamma is not within 0 to 1.
        TypeError: the rewards are no tensor.

    Example:
        >>> discounted_returns(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[True, False, True]]), gamma=0.5)
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    rewards = _as_floats(rewards)
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)["returns"]
