"""Baselines that know more than the group's rewards: lengths, the best completion, a greedy one, the score's variance.

Those of a completion take rewards `[B]` and group ids `[B]`, as in `advantages`; those of a token take `[B, T]`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from atomrl.atoms._options import _check_option
from atomrl.atoms.groups import Lone

Position = Literal["column", "token"]


def best_minus_second(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Credit for the best completion alone, by how much it beats the second best: the group's best-of-k is raised.

        A_i = r_i - max_{j in group(i), j != i} r_j   if r_i is the group's maximum,   0 otherwise

    Paper: inference-time objectives (pass@k), arXiv:2503.19595. Differs from the group baselines: the advantages of a
    group do not sum to 0, because only what changes max_j r_j counts. Divide by `group_std` with `standardised` for
    verl's `norm_adv_by_std_in_grpo`.

    Args:
        rewards: reward per completion.
        group_ids: equal for completions of one prompt.

    Returns:
        Advantages in reward units, without gradient; 0 for all where two share the maximum, and in a group of one
        (where verl raises an error).

    Example:
        >>> best_minus_second(torch.tensor([1.0, 0.25, 0.0, 5.0]), torch.tensor([0, 0, 0, 7]))
        tensor([0.7500, 0.0000, 0.0000, 0.0000])
    """
    exact = rewards.detach().double()
    names, index = torch.unique(group_ids, return_inverse=True)
    lowest = exact.new_full((len(names),), -torch.inf)
    best = lowest.scatter_reduce(0, index, exact, "amax")[index]
    is_best = exact == best
    second = lowest.scatter_reduce(0, index, exact.masked_fill(is_best, -torch.inf), "amax")[index]
    ties = exact.new_zeros(len(names)).index_add(0, index, is_best.double())[index]
    wins = is_best & (ties == 1) & second.isfinite()
    return torch.where(wins, best - second, 0.0).to(rewards.dtype)


def best_of_k(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], k: int) -> Float[Tensor, " B"]:
    """Pass@k training: how much better the best of k completions is for having this one among them.

        R(S) = max_{j in S} r_j,   S any k completions of the group
        A_i = (mean_{S with i} R(S) - mean_S R(S)) / std_S R(S)

    in closed form over all C(n, k) subsets, as the j-th smallest reward is the best of C(j - 1, k - 1) of them. With
    m of n completions right and rewards of 0 and 1 it is the paper's

        mean = 1 - C(n - m, k) / C(n, k),   std = sqrt(mean (1 - mean))
        A_right = (1 - mean) / std,   A_wrong = (1 - C(n - m - 1, k - 1) / C(n - 1, k - 1) - mean) / std

    Paper: pass@k training, arXiv:2508.10751. Differs from GRPO: a group of which most are right
    teaches next to nothing, hard prompts count most. `best_minus_second` has k = n, where this one has no signal.

    Args:
        rewards: reward per completion; of any values, not only 0 and 1.
        group_ids: equal for completions of one prompt.
        k: how many attempts count as one. A k of 1 is `group_zscore` with the biased deviation.

    Returns:
        Advantages in standard deviations, without gradient; 0 where every k completions have the same best, as in
        groups of at most k.

    Raises:
        ValueError: k is below 1.

    Example:
        >>> best_of_k(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0]), k=2)
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    exact = rewards.detach().double()
    advantages = torch.zeros_like(exact)
    for group in group_ids.unique():
        members = (group_ids == group).nonzero()[:, 0]
        values, order = exact[members].sort()
        n = len(values)
        if n <= k or values[k - 1] == values[-1]:
            continue
        best = _shares(n, k)
        mean = (best * values).sum()
        std = (best * (values - mean).square()).sum().sqrt()
        # Of subsets with i: the others' best is the (j-th of n - 1)-th with these shares, and i may beat it.
        others = torch.stack([torch.cat([values[:i], values[i + 1 :]]) for i in range(n)])
        own = torch.maximum(others, values[:, None]) @ _shares(n - 1, k - 1) if k > 1 else values
        advantages[members[order]] = (own - mean) / std
    return advantages.to(rewards.dtype)


def _shares(n: int, k: int) -> Tensor:
    """[n] the share of the k-subsets of n numbers in rising order whose greatest is the j-th."""
    return torch.tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], dtype=torch.float64)


def length_weighted_baseline(
    rewards: Float[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    group_of_one: Lone = "zero",
) -> Float[Tensor, " B"]:
    """Reward minus the mean reward of its group, weighted by length: the baseline of least variance.

        A_i = r_i - sum_{j in group(i)} l_j r_j / sum_{j in group(i)} l_j

    Paper: OPO, arXiv:2505.23585. Differs from `group_mean_baseline`: a long completion has a gradient of
    larger norm, and so weighs more. No division by the standard deviation.

    Args:
        rewards: reward per completion.
        lengths: tokens of each completion.
        group_ids: equal for completions of one prompt.
        group_of_one: "zero" (the default: nothing to be compared with) or "raw" (verl: the bare reward).

    Returns:
        Advantages in reward units, without gradient; 0 in a group without a token.

    Raises:
        ValueError: an option is unknown.

    Example:
        >>> length_weighted_baseline(torch.tensor([1.0, 0.0]), torch.tensor([1, 3]), torch.tensor([0, 0]))
        tensor([ 0.7500, -0.2500])
    """
    _check_option("group_of_one", group_of_one, Lone)
    exact, weights = rewards.detach().double(), lengths.double()
    names, index = torch.unique(group_ids, return_inverse=True)
    zeros = exact.new_zeros(len(names))
    total = zeros.index_add(0, index, weights)[index]
    # Weighing the deviations from any member keeps equal rewards at exactly 0.
    member = zeros.scatter_reduce(0, index, exact, "amax", include_self=False)[index]
    above = zeros.index_add(0, index, weights * (exact - member))[index] / total.clamp(min=1)
    alone = torch.bincount(index, minlength=len(names))[index] == 1
    advantages = (exact - member - above).masked_fill(total == 0, 0.0)
    return torch.where(alone, exact if group_of_one == "raw" else 0.0, advantages).to(rewards.dtype)


def rescaled_by_nonzero_rewards(
    advantages: Float[Tensor, " B"], rewards: Float[Tensor, " B"], normaliser: float = 1.0
) -> Float[Tensor, " B"]:
    """Advantages made larger by as much as few completions of the batch earned a reward.

        A'_i = alpha A_i / F,   alpha = B / max(1, |{j : r_j != 0}|)

    Paper: GPG, arXiv:2504.02546. Differs from GRPO: one factor for the whole batch instead of each group's
    standard deviation.

    Args:
        advantages: of the whole batch, with a group's mean taken off.
        rewards: of the same completions.
        normaliser: F.

    Returns:
        Advantages in reward units.

    Raises:
        ValueError: the normaliser is 0.

    Example:
        >>> rescaled_by_nonzero_rewards(torch.tensor([0.5, -0.5]), torch.tensor([1.0, 0.0]))
        tensor([ 1., -1.])
    """
    if normaliser == 0:
        raise ValueError("normaliser must not be 0")
    alpha = len(rewards) / max(1, int((rewards != 0).sum()))
    return advantages * alpha / normaliser


def return_minus_baseline(
    returns: Float[Tensor, "B T"], baselines: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """A baseline per token taken off the return of each token that the model wrote.

        A_t = (G_t - b_t) m_t

    Paper: ReMax, arXiv:2310.10505, with the reward of the greedy completion as b for every token of the
    row; with `optimal_token_baseline`, arXiv:2602.07078.

    Args:
        returns: reward to go.
        baselines: in the same units.
        mask: True where the model wrote the token.

    Returns:
        Advantages per token, 0 off the mask.

    Example:
        >>> mask = torch.tensor([[True, True, False]])
        >>> return_minus_baseline(torch.tensor([[3.0, 1.0, 9.0]]), torch.full((1, 3), 0.5), mask)
        tensor([[2.5000, 0.5000, 0.0000]])
    """
    return (returns - baselines).masked_fill(~mask, 0.0)


def cumulative_score_norm(
    logprobs: Float[Tensor, "B T"],
    sum_squared_probs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    importance_weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """How large the gradient of the log-probability of a completion has become by each token.

        W_t = sum_{u <= t} m_u rho_u^2 |d log pi(a_u) / d z_u|^2
            = sum_{u <= t} m_u rho_u^2 (1 - 2 pi(a_u) + sum_v pi(v)^2)

    with z the logits: the squared norm of one token's score is exact, and the sum takes tokens as orthogonal.

    Paper: optimal token baseline, arXiv:2602.07078 ("realized energy").

    Args:
        logprobs: of the sampled tokens, under the policy that sampled them.
        sum_squared_probs: sum over the vocabulary of the squared probabilities, at the same positions.
        mask: True where the model wrote the token.
        importance_weights: rho, where rollouts are weighted; None for 1.

    Returns:
        W per token, without gradient and without unit; constant across what is off the mask.

    Example:
        >>> half = torch.tensor([[0.5, 0.5]])
        >>> cumulative_score_norm(half.log(), half, torch.tensor([[True, True]]))
        tensor([[0.5000, 1.0000]])
    """
    squared = 1 - 2 * logprobs.detach().exp() + sum_squared_probs.detach()
    if importance_weights is not None:
        squared = squared * importance_weights.detach().square()
    return squared.masked_fill(~mask, 0.0).cumsum(1)


def optimal_token_baseline(
    returns: Float[Tensor, "B T"],
    energy: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_ids: Int[Tensor, " B"],
    eps: float = 1e-8,
    position: Position = "column",
    zero_tail: bool = True,
) -> Float[Tensor, "B T"]:
    """The baseline of least variance for each position: the group's returns, weighted by how noisy each is there.

        b_k = sum_{i in group} G_{i,k} W_{i,k} / (sum_{i in group} W_{i,k} + eps)

    Paper: optimal token baseline, arXiv:2602.07078.

    Args:
        returns: reward to go, G.
        energy: W, from `cumulative_score_norm`.
        mask: True where the model wrote the token; others enter no sum.
        group_ids: equal for completions of one prompt.
        eps: added to the sum of weights.
        position: what k counts: the "column" (the default; the same as the token in a single turn), or the "token",
            the k-th that the model wrote, so that turns of different length stay comparable. By token, rows without
            any token are no members of their group.
        zero_tail: where one completion is longer than all others of its group, its tail has no comparison; True (the
            default, as in verl) gives it a baseline of 0 from the length of the second longest on, so that its return
            remains instead of an advantage of nearly 0.

    Returns:
        Baseline per token, in reward units, without gradient; 0 in a group of one and off the mask.

    Raises:
        ValueError: an option is unknown.

    Example:
        >>> returns, energy = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [3.0]])
        >>> optimal_token_baseline(returns, energy, torch.tensor([[True], [True]]), torch.tensor([0, 0]))
        tensor([[0.2500],
                [0.2500]])
    """
    _check_option("position", position, Position)
    rows, width = mask.shape
    names, index = torch.unique(group_ids, return_inverse=True)
    columns = torch.arange(width, device=mask.device).expand(rows, width)
    place = columns if position == "column" else (mask.cumsum(1) - 1).clamp(min=0)
    cell = index[:, None] * width + place
    weights = energy.detach().masked_fill(~mask, 0.0)
    zeros = weights.new_zeros(len(names) * width)
    weighted = weights * returns.detach().masked_fill(~mask, 0.0)
    above = zeros.index_add(0, cell.flatten(), weighted.flatten())
    below = zeros.index_add(0, cell.flatten(), weights.flatten()) + eps
    lengths = mask.sum(1)
    member = torch.ones_like(lengths) if position == "column" else (lengths > 0).long()
    members = torch.zeros_like(lengths).index_add(0, index, member)[index]
    without = ~mask | (members <= 1)[:, None]
    if zero_tail:
        without |= place >= _length_of_the_others(lengths, index)[:, None]
    return (above / below)[cell].masked_fill(without, 0.0)


def _length_of_the_others(lengths: Tensor, index: Tensor) -> Tensor:
    """For a row that is longer than all others of its group, the longest of those; no bound for other rows."""
    same = (index[:, None] == index) & ~torch.eye(len(index), dtype=torch.bool, device=index.device)
    others = torch.where(same, lengths[None, :], -1).amax(1)
    return torch.where(lengths > others, others, torch.iinfo(torch.int64).max)
