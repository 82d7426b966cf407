"""Group statistics and advantage estimators: GRPO, Dr. GRPO, RLOO, MaxRL, pass@k, OPO, GPG, ReMax and others.

Most map rewards `[B]` and group ids `[B]` to advantages `[B]` without gradient, so they are interchangeable;
`per_token` broadcasts advantages to tokens. Rewards may be floats, integers or bools. Groups may differ in size and
need not be contiguous; equal ids make the whole batch one group.

A NaN reward is *missing* (a reward function returned nothing) and enters no statistic. `missing` selects its advantage:
"zero", or "nan" for a later statistic that has to skip it. A group of one has an advantage of 0, as in TRL, NeMo-RL and
prime-rl (verl keeps the bare reward).

Statistics are computed in float64. A group of equal rewards has exactly that mean and a standard deviation of exactly
0, so rounding errors do not become a signal.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from atomrl.atoms import atom
from atomrl.atoms.masks import Ids, Mask, PerRow, PerToken, Rewards

# --------------------------------------------------------------------------------------------------------------------
# Group statistics: mean, leave-one-out mean, standard deviation.


class _Statistics(NamedTuple):
    """Statistics of each completion's group: [B] float64."""

    dtype: torch.dtype
    """Result dtype: that of the rewards, or torch's default for integers and bools."""
    values: Tensor
    """Rewards, 0 where missing."""
    size: Tensor
    """Number of rewards in the group that are not missing."""
    mean: Tensor
    squares: Tensor
    """Sum of squared deviations from the mean."""


def _as_tensor(values: object, name: str) -> Tensor:
    if not isinstance(values, Tensor) or values.is_complex():
        what = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a tensor of numbers or bools, got {what} (convert lists with torch.tensor)")
    return values.detach()


def as_floats(values: object, name: str = "rewards") -> Tensor:
    """Detach, and convert integers and bools to floats."""
    values = _as_tensor(values, name)
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _statistics(rewards: object, group_ids: object) -> _Statistics:
    floats = as_floats(rewards)
    exact = floats.double()
    present = ~exact.isnan()
    names, index = torch.unique(_as_tensor(group_ids, "group_ids"), return_inverse=True)
    values = exact.masked_fill(~present, 0.0)
    zeros = exact.new_zeros(len(names))
    count = zeros.index_add(0, index, present.double())
    mean = zeros.index_add(0, index, values) / count.clamp(min=1)
    high = zeros.scatter_reduce(0, index, exact.masked_fill(~present, -torch.inf), "amax", include_self=False)
    low = zeros.scatter_reduce(0, index, exact.masked_fill(~present, torch.inf), "amin", include_self=False)
    mean = torch.where(high == low, high, mean)  # exact for equal rewards, whose sum / count may be off by rounding
    squares = (values - mean[index]).square().masked_fill(~present, 0.0)
    return _Statistics(floats.dtype, values, count[index], mean[index], zeros.index_add(0, index, squares)[index])


@atom("mu_i = mean_{j in group(i)} r_j", paper="DeepSeekMath, arXiv:2402.03300, section 4.1.2")
def group_mean(rewards: Rewards, group_ids: Ids) -> PerRow:
    """Mean reward of each completion's group.

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.

    Returns:
        In reward units; 0 where all rewards of the group are missing.

    Example:
        >>> group_mean(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 7]))
        tensor([0.5000, 0.5000, 3.0000])
    """
    group = _statistics(rewards, group_ids)
    return group.mean.to(group.dtype)


@atom("b_i = mean_{j in group(i), j != i} r_j", paper="RLOO, arXiv:2402.14740")
def leave_one_out_mean(rewards: Rewards, group_ids: Ids) -> PerRow:
    """Leave-one-out mean: the mean reward of the *other* completions of the group.

    See also Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!" (2019).

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.

    Returns:
        In reward units. A completion without others has its own reward, and so no advantage (as in TRL, NeMo-RL and
        SkyRL; 0, which leaves the reward itself as the advantage, in AReaL and in verl's unvectorised function).

    Example:
        >>> leave_one_out_mean(torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([0, 0, 0, 7]))
        tensor([1.0000, 1.5000, 0.5000, 5.0000])
    """
    group = _statistics(rewards, group_ids)
    deviation = group.values - group.mean
    mean = group.mean - deviation / (group.size - 1).clamp(min=1)
    return torch.where(group.size <= 1, group.values, mean).to(group.dtype)


@atom(
    "sigma_i = sqrt(sum_{j in group(i)} (r_j - mu_i)^2 / (n - 1))",
    paper="DeepSeekMath, arXiv:2402.03300, section 4.1.2",
)
def group_std(rewards: Rewards, group_ids: Ids) -> PerRow:
    """Standard deviation of the rewards of each completion's group, about their mean.

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.

    Returns:
        In reward units, divided by n - 1 as in all peers. Exactly 0 in a group of one or of equal rewards.

    Example:
        >>> group_std(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 7]))
        tensor([0.7071, 0.7071, 0.0000])
    """
    group = _statistics(rewards, group_ids)
    return (group.squares / (group.size - 1).clamp(min=1)).sqrt().to(group.dtype)


Missing = Literal["zero", "nan"]
"""Advantage of a missing reward: 0, or NaN."""


# --------------------------------------------------------------------------------------------------------------------
# Advantages of completions: rewards [B] and group ids [B] -> [B].


@atom(
    "A_i = r_i",
    latex=r"\hat A_i = r_i",
    paper='Williams, "Simple statistical gradient-following algorithms", Machine Learning 8 (1992)',
)
def raw_reward(rewards: Rewards, group_ids: Ids) -> PerRow:
    """REINFORCE advantage: the reward itself, with no baseline.

    Unbiased, with the highest variance of all.

    Args:
        rewards: reward per completion.
        group_ids: not used; there for the common signature.

    Returns:
        Advantages in reward units, without gradient.

    Example:
        >>> raw_reward(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        tensor([1., 0.])
    """
    return as_floats(rewards).clone()


@atom(
    "A_i = r_i - mean_group r",
    latex=r"\hat A_i = r_i - \operatorname{mean}_{g(i)} r",
    paper="Dr. GRPO, arXiv:2503.20783",
)
def group_mean_baseline(rewards: Rewards, group_ids: Ids, missing: Missing = "zero") -> PerRow:
    """Dr. GRPO advantage: reward minus the mean reward of its group.

    Differs from GRPO: no division by the standard deviation, which weights prompts that are nearly always or nearly
    never solved more than the others.

    Args:
        rewards: reward per completion, in task units; NaN where missing.
        group_ids: equal for completions of one prompt; groups may differ in size and need not be contiguous.
        missing: advantage of a missing reward.

    Returns:
        Advantages in reward units, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        TypeError: the rewards are not a tensor.

    Example:
        >>> group_mean_baseline(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 7]))
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    rewards = as_floats(rewards)
    exact = rewards.double()
    return _filled(exact - group_mean(exact, group_ids), rewards, missing)


@atom(
    "A_i = r_i - mean_{j in group, j != i} r_j",
    latex=r"\hat A_i = r_i - \operatorname{mean}_{j \in g(i), j \neq i} r_j",
    paper="RLOO, arXiv:2402.14740",
)
def leave_one_out_baseline(rewards: Rewards, group_ids: Ids, missing: Missing = "zero") -> PerRow:
    """RLOO advantage: reward minus the mean reward of the other completions of its group.

    Differs from `group_mean_baseline`: unbiased, and larger by n / (n - 1).

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.
        missing: advantage of a missing reward.

    Returns:
        Advantages in reward units, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        TypeError: the rewards are not a tensor.

    Example:
        >>> leave_one_out_baseline(torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 7]))
        tensor([ 1.0000, -0.5000, -0.5000,  0.0000])
    """
    rewards = as_floats(rewards)
    exact = rewards.double()
    return _filled(exact - leave_one_out_mean(exact, group_ids), rewards, missing)


@atom(
    "A_i = (r_i - mean_group r) / (std_group r + eps)",
    latex=r"\hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{std}_{g(i)} r + \epsilon}",
    paper="DeepSeekMath, arXiv:2402.03300, section 4.1.2",
)
def group_zscore(rewards: Rewards, group_ids: Ids, eps: float = 1e-6, missing: Missing = "zero") -> PerRow:
    """GRPO advantage: reward standardised within its group.

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt; groups may differ in size and need not be contiguous.
        eps: added to the standard deviation, in reward units: 1e-6 (the default) in verl, SkyRL and NeMo-RL, 1e-4 in
            TRL, 1e-9 in OpenRLHF. The standard deviation divides by n - 1, as all peers' does.
        missing: advantage of a missing reward.

    Returns:
        Advantages in standard deviations, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        ValueError: eps is negative.
        TypeError: the rewards are not a tensor.

    Example:
        >>> group_zscore(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    rewards = as_floats(rewards)
    exact = rewards.double()
    centred = group_mean_baseline(exact, group_ids, missing)
    return standardised(centred, group_std(exact, group_ids), eps).to(rewards.dtype)


@atom(
    "A'_i = A_i / (sigma_i + eps)   where sigma_i > 0,   A_i elsewhere",
    paper="DeepSeekMath, arXiv:2402.03300, section 4.1.2",
)
def standardised(advantages: PerRow, std: PerRow, eps: float = 1e-6) -> PerRow:
    """Divide advantages by a standard deviation; leave them as they are where it is 0.

    With the deviation of the whole batch for every group: REINFORCE++, arXiv:2501.03262. Where std is 0, dividing by
    eps alone would amplify rounding errors (NeMo-RL handles it the same way; elsewhere the advantage is then 0 anyway).

    Args:
        advantages: rewards minus a baseline.
        std: standard deviation to divide by, per completion.
        eps: added to it, in reward units.

    Returns:
        Dimensionless advantages.

    Raises:
        ValueError: eps is negative.

    Example:
        >>> standardised(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([2.0, 2.0, 0.0]), eps=0.0)
        tensor([ 0.5000, -0.5000,  0.5000])
    """
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return advantages / torch.where(std > 0, std + eps, torch.ones_like(std))


@atom(
    "A_i = (r_i - mean_group r) / (mean_group r + eps)",
    latex=r"\hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{mean}_{g(i)} r + \epsilon}",
    paper="MaxRL, arXiv:2602.02710",
)
def maxrl_advantage(rewards: Rewards, group_ids: Ids, eps: float = 0.0) -> PerRow:
    """MaxRL advantage: deviation from the group's mean reward in units of that mean.

    Differs from GRPO: divides by the mean, so that a prompt counts as 1 / (its success rate), as in maximum likelihood.

    Args:
        rewards: reward per completion, not negative.
        group_ids: equal for completions of one prompt.
        eps: added to the mean: none (the default, as in prime-rl) or 1e-6 (SkyRL).

    Returns:
        Dimensionless advantages without gradient; 0 where the mean is not above 0, where dividing by it would flip
        signs (as in prime-rl; SkyRL divides).

    Raises:
        ValueError: eps is negative.
        TypeError: the rewards are not a tensor.

    Example:
        >>> maxrl_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1]))
        tensor([ 2., -1., -1.,  0.,  0.])
    """
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    rewards = as_floats(rewards)
    mean = group_mean(rewards.double(), group_ids)
    centred = group_mean_baseline(rewards.double(), group_ids)
    return (centred / torch.where(mean > 0, mean + eps, torch.inf)).to(rewards.dtype)


@atom("A_{i,t} = A_i m_{i,t}")
def per_token(advantages: PerRow, mask: Mask) -> PerToken:
    """Advantage per token from one per completion, 0 off the mask.

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


def _filled(advantages: Tensor, rewards: Tensor, missing: Missing) -> Tensor:
    """Fill the advantages of missing rewards, and cast to the dtype of the rewards."""
    return advantages.masked_fill(rewards.isnan(), {"zero": 0.0, "nan": torch.nan}[missing]).to(rewards.dtype)


@atom(
    "A_i = r_i - max_{j in group(i), j != i} r_j   if r_i is the group's maximum,   0 otherwise",
    paper="Inference-time objectives (pass@k), arXiv:2503.19595",
)
def best_minus_second(rewards: Rewards, group_ids: Ids) -> PerRow:
    """Pass@k advantage of verl (`grpo_passk`): the group's best completion alone, by how much it beats the second.

    Differs from the group baselines: the advantages of a group do not sum to 0, because only what changes max_j r_j
    counts. Divide by `group_std` with `standardised` for verl's `norm_adv_by_std_in_grpo`.

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
    rewards = as_floats(rewards)
    exact = rewards.double()
    names, index = torch.unique(group_ids, return_inverse=True)
    lowest = exact.new_full((len(names),), -torch.inf)
    best = lowest.scatter_reduce(0, index, exact, "amax")[index]
    is_best = exact == best
    second = lowest.scatter_reduce(0, index, exact.masked_fill(is_best, -torch.inf), "amax")[index]
    ties = exact.new_zeros(len(names)).index_add(0, index, is_best.double())[index]
    wins = is_best & (ties == 1) & second.isfinite()
    return torch.where(wins, best - second, 0.0).to(rewards.dtype)


@atom(
    "A_i = (mean_{S with i} R(S) - mean_S R(S)) / std_S R(S),   R(S) = max_{j in S} r_j",
    latex=(
        r"\hat A_i = \frac{\operatorname{mean}_{S \ni i} R(S) - \operatorname{mean}_S R(S)}{\operatorname{std}_S "
        r"R(S)}, \quad R(S) = \max_{j \in S} r_j, \quad S \subseteq g(i), |S| = k"
    ),
    paper="Pass@k training, arXiv:2508.10751",
)
def best_of_k(rewards: Rewards, group_ids: Ids, k: int) -> PerRow:
    """Pass@k advantage: the marginal contribution of a completion to the expected best of k.

    S is any subset of k completions of the group. Computed in closed form over all C(n, k) subsets: the j-th smallest
    reward is the best of C(j - 1, k - 1) of them. With m of n completions right and rewards of 0 and 1 it is the
    paper's

        mean = 1 - C(n - m, k) / C(n, k),   std = sqrt(mean (1 - mean))
        A_right = (1 - mean) / std,   A_wrong = (1 - C(n - m - 1, k - 1) / C(n - 1, k - 1) - mean) / std

    Differs from GRPO: a group of which most are right teaches next to nothing, hard prompts count most.
    `best_minus_second` has k = n, where this one has no signal.

    Args:
        rewards: reward per completion; of any values, not only 0 and 1.
        group_ids: equal for completions of one prompt.
        k: number of attempts of which the best counts. With 1 it is `group_zscore` with the biased deviation.

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
    rewards = as_floats(rewards)
    exact = rewards.double()
    advantages = torch.zeros_like(exact)
    for group in torch.unique(group_ids):
        members = (group_ids == group).nonzero()[:, 0]
        values, order = exact[members].sort()
        n = len(values)
        if n <= k or values[k - 1] == values[-1]:
            continue
        best = _shares(n, k)
        mean = (best * values).sum()
        std = (best * (values - mean).square()).sum().sqrt()
        # Mean best of the subsets with i: the best of k - 1 others, distributed by their shares, or i if it is better.
        others = torch.stack([torch.cat([values[:i], values[i + 1 :]]) for i in range(n)])
        own = torch.maximum(others, values[:, None]) @ _shares(n - 1, k - 1) if k > 1 else values
        advantages[members[order]] = (own - mean) / std
    return advantages.to(rewards.dtype)


def _shares(n: int, k: int) -> Tensor:
    """Return [n]: the share of the k-subsets of n sorted numbers whose maximum is the j-th."""
    return torch.tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], dtype=torch.float64)


@atom(
    "A_i = r_i - sum_j l_j r_j / sum_j l_j,   j in the group",
    latex=r"\hat A_i = r_i - \frac{\sum_{j \in g(i)} l_j r_j}{\sum_{j \in g(i)} l_j}",
    paper="OPO, arXiv:2505.23585",
)
def length_weighted_baseline(rewards: Rewards, lengths: Ids, group_ids: Ids) -> PerRow:
    """OPO advantage: reward minus the length-weighted mean reward of its group.

    Differs from `group_mean_baseline`: a long completion has a gradient of larger norm, and so weighs more, which makes
    this the baseline of least variance. No division by the standard deviation.

    Args:
        rewards: reward per completion.
        lengths: tokens of each completion.
        group_ids: equal for completions of one prompt.

    Returns:
        Advantages in reward units, without gradient; 0 in a group of one (the bare reward in verl) or without a token.

    Example:
        >>> length_weighted_baseline(torch.tensor([1.0, 0.0]), torch.tensor([1, 3]), torch.tensor([0, 0]))
        tensor([ 0.7500, -0.2500])
    """
    rewards = as_floats(rewards)
    exact, weights = rewards.double(), lengths.double()
    names, index = torch.unique(group_ids, return_inverse=True)
    zeros = exact.new_zeros(len(names))
    total = zeros.index_add(0, index, weights)[index]
    # Weighing the deviations from any member keeps equal rewards at exactly 0.
    member = zeros.scatter_reduce(0, index, exact, "amax", include_self=False)[index]
    above = zeros.index_add(0, index, weights * (exact - member))[index] / total.clamp(min=1)
    return (exact - member - above).masked_fill(total == 0, 0.0).to(rewards.dtype)


@atom(
    "A'_i = alpha A_i / F,   alpha = B / max(1, |{j : j counts}|)",
    paper="GPG, arXiv:2504.02546",
)
def rescaled_by_share(advantages: PerRow, counted: Bool[Tensor, " B"], normaliser: float = 1.0) -> PerRow:
    """Rescale advantages by GPG's alpha: divide by the share of completions that count.

    Groups that are all right or all wrong have no gradient; alpha makes up for their share of the mean. So the
    completions of all other groups count: `group_std(rewards, group_ids) > 0`. verl's `compute_gpg_outcome_advantage`
    counts completions whose reward is not 0, so alpha grows with the share of wrong completions even where every group
    is mixed.

    Args:
        advantages: of the whole batch, minus the group's mean.
        counted: True where a completion counts.
        normaliser: F.

    Returns:
        Advantages in reward units. Where no group is mixed, those of a group baseline are 0 and stay 0.

    Raises:
        ValueError: the normaliser is 0.

    Example: one of two groups is mixed, so alpha is 2
        >>> rescaled_by_share(torch.tensor([0.5, -0.5, 0.0, 0.0]), torch.tensor([True, True, False, False]))
        tensor([ 1., -1.,  0.,  0.])
    """
    if normaliser == 0:
        raise ValueError("normaliser must not be 0")
    return advantages * (len(counted) / counted.sum().clamp(min=1).double()) / normaliser


@atom(
    "A_t = (G_t - b_t) m_t",
    paper="ReMax, arXiv:2310.10505",
)
def return_minus_baseline(returns: PerToken, baselines: PerToken, mask: Mask) -> PerToken:
    """Return minus a baseline, per token: ReMax and the optimal token baseline.

    b is the reward of the greedy completion at every token (ReMax), or `optimal_token_baseline`, arXiv:2602.07078.

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


@atom(
    "W_t = sum_{u <= t} m_u rho_u^2 |d log pi(a_u) / d z_u|^2\n"
    "    = sum_{u <= t} m_u rho_u^2 (1 - 2 pi(a_u) + sum_v pi(v)^2)",
    paper='Optimal token baseline, arXiv:2602.07078 ("realized energy")',
)
def cumulative_score_norm(
    logprobs: PerToken, sum_squared_probs: PerToken, mask: Mask, importance_weights: PerToken | None = None
) -> PerToken:
    """Realized energy: the cumulative squared norm of the score of a completion, by token.

    z are the logits. The squared norm of one token's score is exact; the sum treats the scores of tokens as orthogonal.

    Args:
        logprobs: of the sampled tokens, under the policy that sampled them.
        sum_squared_probs: sum over the vocabulary of the squared probabilities, at the same positions.
        mask: True where the model wrote the token.
        importance_weights: rho, where rollouts are weighted; None for 1.

    Returns:
        W per token, dimensionless, without gradient; constant across positions off the mask.

    Example:
        >>> half = torch.tensor([[0.5, 0.5]])
        >>> cumulative_score_norm(half.log(), half, torch.tensor([[True, True]]))
        tensor([[0.5000, 1.0000]])
    """
    squared = 1 - 2 * logprobs.detach().exp() + sum_squared_probs.detach()
    if importance_weights is not None:
        squared = squared * importance_weights.detach().square()
    return squared.masked_fill(~mask, 0.0).cumsum(1)


@atom(
    "b_k = sum_{i in group} G_{i,k} W_{i,k} / (sum_{i in group} W_{i,k} + eps)",
    paper="Optimal token baseline, arXiv:2602.07078",
)
def optimal_token_baseline(
    returns: PerToken,
    energy: PerToken,
    mask: Mask,
    group_ids: Ids,
    eps: float = 1e-8,
    by_token: bool = False,
    zero_tail: bool = True,
) -> PerToken:
    """Optimal token baseline: the group's returns at each position, weighted by their realized energy.

    Args:
        returns: reward to go, G.
        energy: W, from `cumulative_score_norm`.
        mask: True where the model wrote the token; others enter no sum.
        group_ids: equal for completions of one prompt.
        eps: added to the sum of weights.
        by_token: k counts the tokens that the model wrote, so that turns of different length stay comparable, and
            rows without any are not members of their group (verl's `tir_optimal_token_baseline`). By default k is the
            column, which in a single turn is the same.
        zero_tail: where one completion is longer than all others of its group, its tail has no comparison; True (the
            default, as in verl) gives it a baseline of 0 from the length of the second longest on, so that its return
            remains instead of an advantage of nearly 0.

    Returns:
        Baseline per token, in reward units, without gradient; 0 in a group of one and off the mask.

    Example:
        >>> returns, energy = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [3.0]])
        >>> optimal_token_baseline(returns, energy, torch.tensor([[True], [True]]), torch.tensor([0, 0]))
        tensor([[0.2500],
                [0.2500]])
    """
    rows, width = mask.shape
    names, index = torch.unique(group_ids, return_inverse=True)
    columns = torch.arange(width, device=mask.device).expand(rows, width)
    place = (mask.cumsum(1) - 1).clamp(min=0) if by_token else columns
    cell = index[:, None] * width + place
    weights = energy.detach().masked_fill(~mask, 0.0)
    zeros = weights.new_zeros(len(names) * width)
    weighted = weights * returns.detach().masked_fill(~mask, 0.0)
    above = zeros.index_add(0, cell.flatten(), weighted.flatten())
    below = zeros.index_add(0, cell.flatten(), weights.flatten()) + eps
    lengths = mask.sum(1)
    member = (lengths > 0).long() if by_token else torch.ones_like(lengths)
    members = torch.zeros_like(lengths).index_add(0, index, member)[index]
    without = ~mask | (members <= 1)[:, None]
    if zero_tail:
        without |= place >= _length_of_the_others(lengths, index)[:, None]
    return (above / below)[cell].masked_fill(without, 0.0)


def _length_of_the_others(lengths: Tensor, index: Tensor) -> Tensor:
    """Return the second longest length of the group for its longest row, and int64's maximum for all other rows."""
    same = (index[:, None] == index) & ~torch.eye(len(index), dtype=torch.bool, device=index.device)
    others = torch.where(same, lengths[None, :], -1).amax(1)
    return torch.where(lengths > others, others, torch.iinfo(torch.int64).max)
