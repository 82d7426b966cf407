"""Preference scores and weights: implicit rewards, f-divergences, length normalisation, WPO, LD-DPO, AOT."""

import math
from typing import Literal, get_args

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from atomrl.atoms.masks import row_mean, row_sum
from atomrl.atoms.shapes import PerPair

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


def implicit_reward(log_ratio: PerPair, beta: float = 0.1) -> PerPair:
    """DPO's implicit reward: that for which the policy is optimal under a KL penalty.

        r = beta (log pi_theta(y) - log pi_ref(y))

    Paper: DPO, arXiv:2305.18290, equation 5, up to a constant of the prompt.

    Args:
        log_ratio: per completion, in nats.
        beta: coefficient of the penalty.

    Returns:
        Rewards.

    Example:
        >>> implicit_reward(torch.tensor([5.0]))
        tensor([0.5000])
    """
    return beta * log_ratio


def f_divergence_score(log_ratio: PerPair, divergence: Divergence = "reverse_kl", alpha: float = 1.0) -> PerPair:
    """f-DPO score: in the place of the log-ratio, for another divergence than the reverse KL.

        f'(u),  u = exp(z):   reverse_kl z    forward_kl 1 - exp(-z)    js_divergence log 2 + log sigmoid(z)
                              alpha_divergence (exp((a - 1) z) - 1) / (a - 1), which is z for a = 1

    Paper: f-DPO, arXiv:2309.16240 (constants that cancel in a margin are chosen so that f'(1) = 0).

    Args:
        log_ratio: z, in nats.
        divergence: which one.
        alpha: a, of `alpha_divergence`. Its exponent is bounded by 80.

    Returns:
        Scores.

    Raises:
        ValueError: the divergence is not known.

    Example:
        >>> f_divergence_score(torch.tensor([0.0]), "forward_kl")
        tensor([0.])
    """
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and alpha == 1):
        return log_ratio
    if divergence == "forward_kl":
        return -(-log_ratio).expm1()
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    if divergence != "alpha_divergence":
        raise ValueError(f"divergence={divergence!r} is not one of {', '.join(get_args(Divergence))}")
    return ((alpha - 1) * log_ratio).clamp(max=80.0).expm1() / (alpha - 1)


def length_normalised(scores: PerPair, lengths: Int[Tensor, " P"]) -> PerPair:
    """Length-normalised scores: long completions have no larger margins for their length.

        s / max(1, n)

    Paper: length-normalised DPO in Tulu 3, arXiv:2411.15124; IPO as its authors advise.

    Args:
        scores: sums over tokens.
        lengths: tokens of each completion.

    Returns:
        Scores per token.

    Example:
        >>> length_normalised(torch.tensor([6.0]), torch.tensor([3]))
        tensor([2.])
    """
    return scores / lengths.clamp(min=1)


def length_desensitised_logprob(
    logprobs: Float[Tensor, "P T"], mask: Bool[Tensor, "P T"], shared_length: Int[Tensor, " P"], alpha: float = 0.5
) -> PerPair:
    """LD-DPO log-prob of a completion: what is longer than the other of its pair counts less.

        log p = sum over the first L tokens + alpha * sum over the rest,    L = length of the shorter completion

    Paper: LD-DPO, arXiv:2409.06411.

    Args:
        logprobs: per token.
        mask: True on the completion.
        shared_length: L, in tokens.
        alpha: between 0 (the rest does not count) and 1 (DPO).

    Returns:
        One number per completion, with gradient.

    Example:
        >>> every = torch.tensor([[True, True, True]])
        >>> length_desensitised_logprob(torch.tensor([[-1.0, -1.0, -1.0]]), every, torch.tensor([2]))
        tensor([-2.5000])
    """
    first = mask & (mask.cumsum(1) <= shared_length[:, None])
    return row_sum(logprobs, first) + alpha * row_sum(logprobs, mask & ~first)


def wpo_weight(
    logprobs: Float[Tensor, "P T"], log_collision: Float[Tensor, "P T"], mask: Bool[Tensor, "P T"]
) -> PerPair:
    """WPO weight: how much a completion looks like one of the policy's own, so that off-policy pairs count less.

        w = exp(mean_t (log pi_theta(a_t) - log sum_v pi_theta(v)^2))

    Paper: WPO, arXiv:2406.11827. The weight of a pair is the product of its two.

    Args:
        logprobs: of the policy.
        log_collision: log sum_v pi(v)^2 per token, the log of `collision_probability`.
        mask: True on the completion.

    Returns:
        One weight per completion, without gradient; 1 where the policy is uniform.

    Example:
        >>> wpo_weight(torch.tensor([[0.5]]).log(), torch.tensor([[0.5]]).log(), torch.tensor([[True]]))
        tensor([1.])
    """
    return row_mean((logprobs - log_collision).detach(), mask).exp()


def alpha_score(logprob: PerPair, alpha: float) -> PerPair:
    """AlphaPO score: a log-prob, bent so that its slope falls (alpha > 0) or rises with likelihood.

        s = (1 - p^-alpha) / alpha,   which is log p for alpha = 0

    Paper: AlphaPO, arXiv:2501.03884.

    Args:
        logprob: average log-prob of a completion.
        alpha: shape.

    Returns:
        Scores, to take the place of log-probs in SimPO.

    Example:
        >>> alpha_score(torch.tensor([0.0, -1.0]), alpha=0.0)
        tensor([ 0., -1.])
    """
    return logprob if alpha == 0 else -(-alpha * logprob).expm1() / alpha


def log_odds_ratio(chosen: PerPair, rejected: PerPair) -> PerPair:
    """ORPO's log-odds ratio of the chosen completion to the rejected one.

        log(p_c / (1 - p_c)) - log(p_r / (1 - p_r))

    Paper: ORPO, arXiv:2403.07691.

    Args:
        chosen: average log-prob per token of the chosen completion, below 0.
        rejected: of the rejected one.

    Returns:
        One number per pair.

    Example:
        >>> log_odds_ratio(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([1.0986])
    """
    return (chosen - rejected) - ((-chosen.exp()).log1p() - (-rejected.exp()).log1p())
