"""Returns and GAE per token, and rewards and returns per turn of a multi-turn episode.

A row has up to K turns, numbered from 0. `turn_ids` [B, T] is the turn of each token, -1 on tokens that the model did
not write. Values per turn are [B, K], NaN where a row has fewer turns, which `advantages` treats as a missing reward.
"""

from typing import TypedDict

import torch
from jaxtyping import Int
from torch import Tensor

from atomrl.atoms import atom
from atomrl.atoms.advantages import as_floats
from atomrl.atoms.masks import Ids, Mask, PerRow, PerToken, PerTurn, TokenIds, TokenRewards, TurnIds

# Generalised advantage estimation and discounted returns, for single turns and many.
#
# Tokens off the mask (observations: a tool's output, a user's turn; padding) are not steps, as in verl and NeMo-RL: the
# next token that the model wrote follows directly, so the length of an observation does not change the credit of the
# tokens before it. For OpenRLHF's and slime's convention, where each observed token is a step that discounts, pass a
# full mask with rewards and values of 0 there.


class Gae(TypedDict):
    """Result of `gae`: [B, T] each."""

    advantages: Tensor
    """In reward units, not whitened."""
    returns: Tensor
    """Advantage plus value: the target of the critic."""


@atom(
    "delta_t = r_t + gamma V_{t+1} - V_t\nA_t = delta_t + gamma lam A_{t+1} = sum_{l >= 0} (gamma lam)^l delta_{t+l}",
    paper="GAE, arXiv:1506.02438, equations 11 to 16",
)
def gae(rewards: TokenRewards, values: PerToken, mask: Mask, gamma: float = 1.0, lam: float | PerRow = 0.95) -> Gae:
    """Generalised advantage estimation.

    t+1 is the next token on the mask; V and A are 0 after the last.

    Args:
        rewards: per token.
        values: of the state before each token.
        mask: True where the model wrote the token.
        gamma: discount per step, 0 to 1.
        lam: 0 is one-step temporal difference, 1 the return minus the value; or one number per row.

    Returns:
        Advantages and returns, without gradient, 0 off the mask.

    Raises:
        ValueError: gamma is not within 0 to 1.
        TypeError: the rewards are not a tensor.

    Example:
        >>> mask = torch.tensor([[True, False, True]])
        >>> result = gae(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.5]]), mask, lam=1.0)
        >>> result["advantages"], result["returns"]
        (tensor([[0.5000, 0.0000, 0.5000]]), tensor([[1., 0., 1.]]))
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be between 0 and 1, got {gamma}")
    rewards = as_floats(rewards).masked_fill(~mask, 0.0)
    values = as_floats(values, "values").masked_fill(~mask, 0.0)
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


@atom("lam_i = 1 - 1 / (alpha |m_i|),   within 0 to 1", paper="VAPO, arXiv:2504.05118, where alpha is 0.05")
def length_adaptive_lambda(mask: Mask, alpha: float) -> PerRow:
    """Length-adaptive GAE lambda: nearer to 1 for longer completions, so the reward still reaches their beginning.

    Args:
        mask: True where the model wrote the token.
        alpha: the horizon 1 / (1 - lam) is alpha times the number of tokens.

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


@atom("G_t = r_t + gamma G_{t+1}", paper="REINFORCE++, arXiv:2501.03262")
def discounted_returns(rewards: TokenRewards, mask: Mask, gamma: float = 1.0) -> PerToken:
    """Discounted return (reward to go) from each token: REINFORCE++, ReMax.

    Rewards off the mask are ignored.

    Args:
        rewards: per token.
        mask: True where the model wrote the token.
        gamma: discount per step, 0 to 1.

    Returns:
        Returns in reward units, without gradient, 0 off the mask.

    Raises:
        ValueError: gamma is not within 0 to 1.
        TypeError: the rewards are not a tensor.

    Example:
        >>> discounted_returns(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[True, False, True]]), gamma=0.5)
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    rewards = as_floats(rewards)
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)["returns"]


@atom("r_{i,k} = sum_{t in turn k of i} r_{i,t}")
def turn_totals(values: TokenRewards, turn_ids: TokenIds) -> PerTurn:
    """Sum of each turn's values: the reward of a turn.

    Args:
        values: per token; ignored off the model's tokens.
        turn_ids: of each token, -1 off the model's.

    Returns:
        [B, K], without gradient; NaN where the row has no turn k.

    Example:
        >>> turn_totals(torch.tensor([[9.0, 1.0, 9.0, 2.0, 3.0]]), torch.tensor([[-1, 0, -1, 1, 1]]))
        tensor([[1., 5.]])
    """
    values = as_floats(values)
    place = turn_ids.clamp(min=0)
    own = turn_ids >= 0
    zeros = values.new_zeros(len(values), _turns(turn_ids))
    totals = zeros.scatter_add(1, place, values.masked_fill(~own, 0.0))
    return totals.masked_fill(zeros.scatter_add(1, place, own.to(values)) == 0, torch.nan)


@atom(
    "s_{i,k} = s_{i,t}   for any t in turn k of i",
    paper="GiGPO, arXiv:2505.10978 (turns that begin in the same anchor state are a group)",
)
def turn_states(state_ids: TokenIds, turn_ids: TokenIds) -> TurnIds:
    """State at the start of each turn.

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


@atom("n_{i,k} = n_{j,l}   just if g(i) = g(j) and k = l")
def turn_numbers(group_ids: Ids, turns: PerTurn) -> TurnIds:
    """Group ids of turns: equal for turns of the same number and the same group of completions.

    Args:
        group_ids: equal for completions of one prompt.
        turns: [B, K]; only K is used.

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


@atom("G_k = r_k + gamma G_{k+1}", paper="GiGPO, arXiv:2505.10978, equation 5")
def turn_returns(rewards: PerTurn, gamma: float = 1.0) -> PerTurn:
    """Discounted return (reward to go) from each turn.

    MT-GRPO, arXiv:2505.11821, applies it to advantages instead of rewards.

    Args:
        rewards: of each turn, NaN where the row has no turn k.
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
        raise ValueError(f"gamma must be between 0 and 1, got {gamma}")
    rewards = as_floats(rewards)
    later, columns = rewards.new_zeros(len(rewards)), []
    for turn in reversed(range(rewards.shape[1])):
        later = rewards[:, turn].nan_to_num(0.0) + gamma * later
        columns.append(later)
    return torch.stack(columns[::-1], 1).masked_fill(rewards.isnan(), torch.nan)


@atom("x_{i,k} = x_i [k = last turn of i]")
def at_last_turn(values: Tensor, turns: PerTurn) -> PerTurn:
    """Place one value per completion at its last turn.

    Args:
        values: [B].
        turns: [B, K], NaN where the row has no turn k.

    Returns:
        [B, K]: 0 at the turns before, NaN where the row has no turn k.

    Example:
        >>> at_last_turn(torch.tensor([2.0, 3.0]), torch.tensor([[0.0, 0.0], [0.0, torch.nan]]))
        tensor([[0., 2.],
                [3., nan]])
    """
    present = ~turns.isnan()
    number = present.cumsum(1)
    last = present & (number == number[:, -1:])
    return torch.where(last, values[:, None], 0.0).masked_fill(~present, torch.nan)


@atom("A_{i,t} = A_{i,k(t)}")
def per_turn_token(values: PerTurn, turn_ids: TokenIds) -> PerToken:
    """Broadcast advantages per turn to tokens; 0 off the model's tokens.

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


@atom("m_{i,t} = [k(t) = last turn of i]")
def last_turn(turn_ids: TokenIds) -> Mask:
    """Mask of the tokens of each row's last turn.

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
    """Largest number of turns of a row, at least 1."""
    return max(1, int(turn_ids.max()) + 1) if turn_ids.numel() else 1
