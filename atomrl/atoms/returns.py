"""Credit by turn: rewards, returns and baselines of what a model wrote between two answers of an environment.

A row has up to K turns, numbered from 0; `turn_ids` [B, T] says of which each token is, and is -1 on tokens that the
model did not write. What belongs to a turn is `[B, K]`, and NaN where a row has no such turn: `groups` and
`advantages` leave it out of their statistics, as they do a missing reward.
"""

from typing import TypedDict

import torch
from jaxtyping import Int
from torch import Tensor

from atomrl.atoms.advantages import _as_floats
from atomrl.atoms.masks import Ids, Mask, PerRow, PerToken, PerTurn, TokenIds, TokenRewards, TurnIds

# --------------------------------------------------------------------------------------------------------------------
# Generalised advantage estimation and discounted returns, for single turns and many.
#
# A row may have gaps: tokens of an observation (a tool's output, a user's turn) that the model did not write. They are
# no steps, as in verl and NeMo-RL: the next token that the model wrote follows directly, so neither the length nor the
# content of an observation changes the credit of what came before. For the conventions of other peers pass other masks:
# a full one, with rewards and values of 0 in the gaps, makes each observed token a step that discounts once more
# (OpenRLHF, slime).
#
# Right padding is a gap that is never left. Rewards belong to the token at which they stand; nothing follows the last.


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


def turn_totals(values: TokenRewards, turn_ids: TokenIds) -> PerTurn:
    """The sum of each turn's values: the reward of a turn.

        r_{i,k} = sum_{t in turn k of i} r_{i,t}

    Args:
        values: per token; those off the model's tokens have no influence.
        turn_ids: of each token, -1 off the model's.

    Returns:
        [B, K], without gradient; NaN where the row has no turn k.

    Example:
        >>> turn_totals(torch.tensor([[9.0, 1.0, 9.0, 2.0, 3.0]]), torch.tensor([[-1, 0, -1, 1, 1]]))
        tensor([[1., 5.]])
    """
    values = _as_floats(values)
    place = turn_ids.clamp(min=0)
    own = turn_ids >= 0
    zeros = values.new_zeros(len(values), _turns(turn_ids))
    totals = zeros.scatter_add(1, place, values.masked_fill(~own, 0.0))
    return totals.masked_fill(zeros.scatter_add(1, place, own.to(values)) == 0, torch.nan)


def turn_states(state_ids: TokenIds, turn_ids: TokenIds) -> TurnIds:
    """The state in which each turn began.

        s_{i,k} = s_{i,t}   for any t in turn k of i

    Paper: GiGPO, arXiv:2505.10978, where turns that begin in the same state (its anchor) are a group.

    Args:
        state_ids: of each token, the same within a turn.
        turn_ids: of each token, -1 off the model's.

    Returns:
        [B, K] int64; -1 where the row has no turn k.

    Example:
        >>> turn_states(torch.tensor([[-1, 7, -1, 3, 3]]), torch.tensor([[-1, 0, -1, 1, 1]]))
        tensor([[7, 3]])
    """
    nothing = state_ids.new_full((len(state_ids), _turns(turn_ids)), -1)
    return nothing.scatter_reduce(1, turn_ids.clamp(min=0), state_ids.masked_fill(turn_ids < 0, -1), "amax")


def turn_numbers(group_ids: Ids, turns: PerTurn) -> TurnIds:
    """What turns of one number have in common within a group of completions.

        n_{i,k} = n_{j,l}   just if g(i) = g(j) and k = l

    Args:
        group_ids: equal for completions of one prompt.
        turns: [B, K], for their number.

    Returns:
        [B, K] int64.

    Example:
        >>> turn_numbers(torch.tensor([0, 4, 4]), torch.zeros(3, 2))
        tensor([[0, 1],
                [2, 3],
                [2, 3]])
    """
    index = torch.unique(group_ids, return_inverse=True)[1]
    numbers: Tensor = index[:, None] * turns.shape[1] + torch.arange(turns.shape[1], device=group_ids.device)
    return numbers


def turn_returns(rewards: PerTurn, gamma: float = 1.0) -> PerTurn:
    """Discounted return (reward to go) from each turn.

        G_k = r_k + gamma G_{k+1}

    Paper: GiGPO, arXiv:2505.10978, equation 5; of advantages in the place of rewards MT-GRPO, arXiv:2505.11821.

    Args:
        rewards: of each turn, NaN where there is none.
        gamma: discount per turn, 0 to 1.

    Returns:
        [B, K], without gradient; NaN where the row has no turn k.

    Raises:
        ValueError: gamma is not within 0 to 1.

    Example:
        >>> turn_returns(torch.tensor([[1.0, 0.0, 4.0], [1.0, 2.0, torch.nan]]), gamma=0.5)
        tensor([[2., 2., 4.],
                [2., 2., nan]])
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be within 0 to 1, got {gamma}")
    rewards = _as_floats(rewards)
    later, columns = rewards.new_zeros(len(rewards)), []
    for turn in reversed(range(rewards.shape[1])):
        later = rewards[:, turn].nan_to_num(0.0) + gamma * later
        columns.append(later)
    return torch.stack(columns[::-1], 1).masked_fill(rewards.isnan(), torch.nan)


def at_last_turn(values: Tensor, turns: PerTurn) -> PerTurn:
    """A completion's number at its last turn.

        x_{i,k} = x_i [k = last turn of i]

    Args:
        values: [B] one number per completion.
        turns: [B, K], NaN where the row has no turn k.

    Returns:
        [B, K]: 0 at the turns before, NaN where there is none.

    Example:
        >>> at_last_turn(torch.tensor([2.0, 3.0]), torch.tensor([[0.0, 0.0], [0.0, torch.nan]]))
        tensor([[0., 2.],
                [3., nan]])
    """
    there = ~turns.isnan()
    number = there.cumsum(1)
    last = there & (number == number[:, -1:])
    return torch.where(last, values[:, None], 0.0).masked_fill(~there, torch.nan)


def per_turn_token(values: PerTurn, turn_ids: TokenIds) -> PerToken:
    """Advantage per token from one per turn, 0 off the model's tokens.

        A_{i,t} = A_{i,k(t)}

    Args:
        values: of each turn.
        turn_ids: of each token, -1 off the model's.

    Returns:
        [B, T]

    Example:
        >>> per_turn_token(torch.tensor([[1.0, 5.0]]), torch.tensor([[-1, 0, -1, 1, 1]]))
        tensor([[0., 1., 0., 5., 5.]])
    """
    return values.gather(1, turn_ids.clamp(min=0)).masked_fill(turn_ids < 0, 0.0)


def last_turn(turn_ids: TokenIds) -> Mask:
    """The tokens of each row's last turn.

        m_{i,t} = [k(t) = last turn of i]

    Args:
        turn_ids: of each token, -1 off the model's.

    Returns:
        [B, T] bool.

    Example:
        >>> last_turn(torch.tensor([[-1, 0, -1, 1, 1, -1]]))
        tensor([[False, False, False,  True,  True, False]])
    """
    if not turn_ids.shape[1]:
        return turn_ids >= 0
    return (turn_ids >= 0) & (turn_ids == turn_ids.amax(1, keepdim=True))


def _turns(turn_ids: Int[Tensor, "B T"]) -> int:
    """The most turns of a row, and at least 1."""
    return max(1, int(turn_ids.max()) + 1) if turn_ids.numel() else 1
