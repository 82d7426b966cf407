"""What happens to a reward between the reward function and the advantage: parts, penalties, limits, places."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from atomrl.atoms._options import _check_option

EmptyRow = Literal["drop", "last_column"]


def weighted_reward(parts: Float[Tensor, "B K"], weights: Float[Tensor, " K"]) -> Float[Tensor, " B"]:
    """One reward out of several, each with its weight.

        r_i = sum_k w_k r_ik,   over the parts that are there

    A part is missing (NaN) where a reward function had nothing to say about a completion.

    Args:
        parts: one column per reward function.
        weights: one per reward function.

    Returns:
        Reward per completion; NaN (missing) where all its parts are.

    Example:
        >>> weighted_reward(torch.tensor([[1.0, 2.0], [1.0, float("nan")]]), torch.tensor([1.0, 0.5]))
        tensor([2., 1.])
    """
    missing = parts.isnan()
    total = (parts.masked_fill(missing, 0.0) * weights.to(parts)).sum(1)
    return total.masked_fill(missing.all(1), torch.nan)


def clipped_reward(rewards: Float[Tensor, " B"], low: float, high: float) -> Float[Tensor, " B"]:
    """Reward held within bounds.

        r'_i = min(max(r_i, low), high)

    Args:
        rewards: reward per completion; NaN stays.
        low: in reward units.
        high: in reward units.

    Returns:
        Reward per completion.

    Raises:
        ValueError: low is above high.

    Example:
        >>> clipped_reward(torch.tensor([-3.0, 0.5]), low=-1.0, high=1.0)
        tensor([-1.0000,  0.5000])
    """
    if low > high:
        raise ValueError(f"low={low} is above high={high}")
    return rewards.clamp(low, high)


def soft_overlong_penalty(
    lengths: Int[Tensor, " B"],
    max_completion_tokens: int,
    buffer_tokens: int,
    factor: float = 1.0,
    capped: bool = True,
) -> Float[Tensor, " B"]:
    """A penalty that grows over the last tokens before the limit, so that no completion meets a cliff.

        p_i = factor * min(0, (L - C - l_i) / C),   at least -factor

    with L the limit and C the buffer before it.

    Paper: soft overlong punishment of DAPO, arXiv:2503.14476, equation 13.

    Args:
        lengths: tokens of each completion.
        max_completion_tokens: L.
        buffer_tokens: C; the penalty begins at L - C.
        factor: the penalty at L, in reward units.
        capped: True (the default, as in the paper, TRL and OpenRLHF) never goes below -factor; False (verl, NeMo-RL,
            AReaL) lets a completion beyond L, where an engine allows one, cost more.

    Returns:
        What to add to the reward, in float64: 0 or negative.

    Raises:
        ValueError: the buffer is not within 1 to L.

    Example:
        >>> soft_overlong_penalty(torch.tensor([10, 18, 20, 40]), 20, 4)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000], dtype=torch.float64)
    """
    _check_buffer(max_completion_tokens, buffer_tokens)
    penalty = ((max_completion_tokens - buffer_tokens - lengths).double() / buffer_tokens).clamp(max=0.0)
    return factor * (penalty.clamp(min=-1.0) if capped else penalty)


def in_overlong_buffer(
    lengths: Int[Tensor, " B"], max_completion_tokens: int, buffer_tokens: int
) -> Bool[Tensor, " B"]:
    """Which completions `soft_overlong_penalty` makes pay.

        l_i > L - C

    Paper: DAPO, arXiv:2503.14476, equation 13.

    Args:
        lengths: tokens of each completion.
        max_completion_tokens: L.
        buffer_tokens: C.

    Returns:
        True where the penalty is below 0.

    Raises:
        ValueError: the buffer is not within 1 to L.

    Example:
        >>> in_overlong_buffer(torch.tensor([16, 17]), 20, 4)
        tensor([False,  True])
    """
    _check_buffer(max_completion_tokens, buffer_tokens)
    return lengths > max_completion_tokens - buffer_tokens


def _check_buffer(max_completion_tokens: int, buffer_tokens: int) -> None:
    if not 1 <= buffer_tokens <= max_completion_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} must be within 1 to {max_completion_tokens=}")


def truncated_scaled(rewards: Float[Tensor, " B"], truncated: Bool[Tensor, " B"], factor: float) -> Float[Tensor, " B"]:
    """A completion that was cut off keeps only a part of its reward.

        r'_i = factor * r_i   where truncated,   r_i elsewhere

    As OpenRLHF's `stop_properly_penalty_coef` of 0 and above. A factor of 0 is DAPO's overlong filtering of the reward,
    but not of the completion, which still enters the group's mean.

    Args:
        rewards: reward per completion.
        truncated: True where the limit on length ended the completion.
        factor: what part is kept.

    Returns:
        Reward per completion.

    Example:
        >>> truncated_scaled(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), factor=0.5)
        tensor([0.5000, 1.0000])
    """
    return torch.where(truncated, rewards * factor, rewards)


def truncated_replaced(
    rewards: Float[Tensor, " B"], truncated: Bool[Tensor, " B"], reward: float
) -> Float[Tensor, " B"]:
    """A completion that was cut off has a fixed reward, whatever it was worth.

        r'_i = reward   where truncated,   r_i elsewhere

    As OpenRLHF's `stop_properly_penalty_coef` below 0.

    Args:
        rewards: reward per completion.
        truncated: True where the limit on length ended the completion.
        reward: in its place.

    Returns:
        Reward per completion.

    Example:
        >>> truncated_replaced(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), reward=-0.5)
        tensor([-0.5000,  1.0000])
    """
    return torch.where(truncated, reward, rewards)


def repetition_penalty(
    tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], ngram_tokens: int, max_penalty: float = -1.0
) -> Float[Tensor, " B"]:
    """A penalty for saying the same again: the share of n-grams that occurred before.

        p_i = max_penalty * (1 - distinct n-grams / n-grams)

    Paper: "Demystifying long chain-of-thought reasoning", arXiv:2502.03373, appendix C.2.

    Args:
        tokens: token ids.
        mask: True where the model wrote the token; n-grams run over what is left.
        ngram_tokens: n.
        max_penalty: of a completion that only repeats, in reward units; not above 0.

    Returns:
        What to add to the reward, in float64; 0 for completions of fewer than n tokens.

    Raises:
        ValueError: n is below 1, or the penalty is above 0.

    Example:
        >>> tokens = torch.tensor([[5, 5, 5, 5], [1, 2, 3, 4]])
        >>> repetition_penalty(tokens, torch.ones(2, 4, dtype=torch.bool), ngram_tokens=2)
        tensor([-0.6667,  0.0000], dtype=torch.float64)
    """
    if ngram_tokens < 1 or max_penalty > 0:
        raise ValueError(f"{ngram_tokens=} must be at least 1 and {max_penalty=} at most 0")
    penalties = []
    for row, written in zip(tokens, mask, strict=True):
        ids = row[written]
        ngrams = ids.unfold(0, ngram_tokens, 1) if len(ids) >= ngram_tokens else None
        repeated = 1 - len(torch.unique(ngrams, dim=0)) / len(ngrams) if ngrams is not None else 0.0
        penalties.append(max_penalty * repeated if repeated else 0.0)
    return torch.tensor(penalties, dtype=torch.float64, device=tokens.device)


def last_token_index(mask: Bool[Tensor, "B T"]) -> Int[Tensor, " B"]:
    """Column of the last token that the model wrote.

        max {t : m_t = 1}

    Args:
        mask: True where the model wrote the token.

    Returns:
        Index per row; -1 for an empty row.

    Example:
        >>> last_token_index(torch.tensor([[True, False, True, False], [False] * 4]))
        tensor([ 2, -1])
    """
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(1) - 1


def reward_at_last_token(
    rewards: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    empty_row: EmptyRow = "drop",
    one_past: bool = False,
) -> Float[Tensor, "B T"]:
    """A completion's reward at the token that ended it, 0 elsewhere.

        r_{i,t} = r_i [t = max {s : m_is = 1}]

    Paper: Ziegler et al., arXiv:1909.08593.

    Args:
        rewards: reward per completion.
        mask: True where the model wrote the token.
        empty_row: where the reward of a row without a token goes: nowhere ("drop", the default, as in NeMo-RL and
            slime: nobody earned it), or to the "last_column" (OpenRLHF).
        one_past: one column later where there is room, as in TRL's PPO; by default at the last token itself, as
            everywhere else.

    Returns:
        Reward per token.

    Raises:
        ValueError: an option is unknown.

    Example:
        >>> reward_at_last_token(torch.tensor([2.0]), torch.tensor([[True, True, False]]))
        tensor([[0., 2., 0.]])
    """
    _check_option("empty_row", empty_row, EmptyRow)
    width = mask.shape[1]
    last, empty = last_token_index(mask), ~mask.any(1)
    place = (last + one_past).clamp(max=width - 1).masked_fill(empty, width - 1 if empty_row == "last_column" else -1)
    here = torch.arange(width, device=mask.device) == place[:, None]
    return torch.where(here, rewards[:, None], 0.0)


def kl_penalised_reward(
    token_rewards: Float[Tensor, "B T"],
    kl: Float[Tensor, "B T"],
    coefficient: float,
    mask: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Reward per token minus what it costs to leave the reference there.

        r'_t = r_t - beta m_t kl_t

    Paper: Ziegler et al., arXiv:1909.08593, equation 2.

    Args:
        token_rewards: reward (or advantage) per token.
        kl: estimate per token, in nats; its gradient is not used.
        coefficient: beta, in reward units per nat.
        mask: True where the penalty counts. None takes every column: the estimators of `kl` are 0 off the mask
            anyhow, and OpenRLHF and one function of slime do not mask theirs.

    Returns:
        Reward per token, without gradient.

    Example:
        >>> kl_penalised_reward(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), coefficient=0.1)
        tensor([[-0.0500,  0.9500]])
    """
    kl = kl.detach() if mask is None else kl.detach().masked_fill(~mask, 0.0)
    return token_rewards.detach() - coefficient * kl


def sequence_reward(token_rewards: Float[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """A completion's reward, from rewards per token.

        r_i = sum_t r_it

    All columns count, as in verl and SkyRL: a reward at an observation (a tool's verdict) is part of the whole.

    Args:
        token_rewards: reward per token; 0 where there is none.

    Returns:
        Reward per completion.

    Example:
        >>> sequence_reward(torch.tensor([[0.0, 0.5, 1.0]]))
        tensor([1.5000])
    """
    return token_rewards.sum(1)
