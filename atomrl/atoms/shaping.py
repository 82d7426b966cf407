"""Reward shaping: weighted sums, length and repetition penalties, clipping, KL in the reward."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from atomrl.atoms import atom
from atomrl.atoms.advantages import as_floats
from atomrl.atoms.masks import Ids, Mask, PerRow, PerToken, Rewards, TokenRewards


@atom("r_i = sum_k w_k r_ik,   over the parts that are not missing")
def weighted_reward(parts: Float[Tensor, "B K"], weights: Float[Tensor, " K"]) -> PerRow:
    """Weighted sum of several reward functions.

    Args:
        parts: one column per reward function; NaN where it returned nothing for a completion.
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


@atom("r'_i = min(max(r_i, low), high)")
def clipped_reward(rewards: Rewards, low: float, high: float) -> PerRow:
    """Reward clipping.

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
    return as_floats(rewards).clamp(low, high)


@atom(
    "p_i = factor * min(0, (L - C - l_i) / C),   at least -factor",
    paper="Soft overlong punishment of DAPO, arXiv:2503.14476, equation 13",
)
def soft_overlong_penalty(lengths: Ids, max_completion_tokens: int, buffer_tokens: int, factor: float = 1.0) -> PerRow:
    """DAPO's soft overlong punishment: a length penalty that grows linearly over the last tokens before the limit.


    Args:
        lengths: tokens of each completion.
        max_completion_tokens: L.
        buffer_tokens: C; the penalty begins at L - C.
        factor: the penalty at L, in reward units. The penalty does not grow beyond L, as in the paper, TRL and OpenRLHF
            (it does in verl, NeMo-RL and AReaL).

    Returns:
        Penalty to add to the reward, in float64: 0 or negative.

    Raises:
        ValueError: the buffer is not within 1 to L.

    Example:
        >>> soft_overlong_penalty(torch.tensor([10, 18, 20, 40]), 20, 4)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000], dtype=torch.float64)
    """
    if not 1 <= buffer_tokens <= max_completion_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} must be within 1 to {max_completion_tokens=}")
    return factor * ((max_completion_tokens - buffer_tokens - lengths).double() / buffer_tokens).clamp(-1.0, 0.0)


@atom(
    "p_i = max_penalty * (1 - distinct n-grams / n-grams)",
    paper='"Demystifying long chain-of-thought reasoning", arXiv:2502.03373, appendix C.2',
)
def repetition_penalty(tokens: Int[Tensor, "B T"], mask: Mask, ngram_tokens: int, max_penalty: float = -1.0) -> PerRow:
    """Repetition penalty: proportional to the share of repeated n-grams.

    Args:
        tokens: token ids.
        mask: True where the model wrote the token; n-grams skip other tokens.
        ngram_tokens: n.
        max_penalty: for a completion that only repeats, in reward units; not above 0.

    Returns:
        Penalty to add to the reward, in float64; 0 for completions of fewer than n tokens.

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


@atom("r_{i,t} = r_i [t = max {s : m_is = 1}]", paper="Ziegler et al., arXiv:1909.08593")
def reward_at_last_token(rewards: Rewards, mask: Mask) -> PerToken:
    """Place rewards of completions at the last token of the mask; 0 elsewhere.

    Args:
        rewards: reward per completion.
        mask: True where the model wrote the token.

    Returns:
        Reward per token. The reward of a row without a token is dropped, as in NeMo-RL and slime.

    Example:
        >>> reward_at_last_token(torch.tensor([2.0]), torch.tensor([[True, True, False]]))
        tensor([[0., 2., 0.]])
    """
    written = mask.cumsum(1)
    last = mask & (written == written[:, -1:])
    return torch.where(last, as_floats(rewards)[:, None], 0.0)


@atom("r'_t = r_t - beta m_t kl_t", paper="Ziegler et al., arXiv:1909.08593, equation 2")
def kl_penalised_reward(
    token_rewards: TokenRewards, kl: PerToken, coefficient: float, mask: Mask | None = None
) -> PerToken:
    """KL penalty in the reward: reward per token minus beta times the KL to the reference.

    Args:
        token_rewards: reward (or advantage) per token.
        kl: estimate per token, in nats; its gradient is not used.
        coefficient: beta, in reward units per nat.
        mask: True where the penalty counts. None: everywhere; the estimators of `kl` are 0 off the mask.

    Returns:
        Reward per token, without gradient.

    Example:
        >>> kl_penalised_reward(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), coefficient=0.1)
        tensor([[-0.0500,  0.9500]])
    """
    kl = kl.detach() if mask is None else kl.detach().masked_fill(~mask, 0.0)
    return as_floats(token_rewards, "token_rewards") - coefficient * kl
