"""Credit: from one reward per completion to an advantage.

All take rewards `[B]` and group ids `[B]` and give advantages `[B]` without gradient, so that they can replace each
other; `per_token` spreads them over the tokens. Statistics are those of `groups`: float64, a missing reward (NaN) in
none of them. Two options recur, and where peers disagree the default is the one without a false signal:

- `group_of_one`: "zero" (TRL, NeMo-RL, prime-rl, SkyRL's RLOO) or "raw", which compares the reward with 0 and a
  standard deviation of 1 (verl, SkyRL): a prompt with one completion then trains on its bare reward.
- `missing`: what a missing reward's advantage is, "zero", or "nan" for a further statistic that must know.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from atomrl.atoms._options import _check_option
from atomrl.atoms.groups import Lone, _statistics, group_mean, group_std, leave_one_out_mean

Missing = Literal["zero", "nan"]
Nonpositive = Literal["zero", "divide"]


def raw_reward(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """The reward itself, with no baseline: REINFORCE.

        A_i = r_i

    Paper: Williams, "Simple statistical gradient-following algorithms", Machine Learning 8 (1992). Unbiased, with the
    highest variance of all.

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


def group_mean_baseline(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    group_of_one: Lone = "zero",
    missing: Missing = "zero",
) -> Float[Tensor, " B"]:
    """Reward minus the mean reward of its group.

        A_i = r_i - mean_{j in group(i)} r_j

    Paper: Dr. GRPO, arXiv:2503.20783. Differs from GRPO: no division by the standard deviation, which weights
    prompts that are nearly always or nearly never solved more than the others.

    Args:
        rewards: reward per completion, in task units; NaN where missing.
        group_ids: equal for completions of one prompt; groups may differ in size and need not be contiguous.
        group_of_one: see the module; "zero" is the default because one completion has nothing to be compared with.
        missing: see the module.

    Returns:
        Advantages in reward units, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        ValueError: an option is unknown.

    Example:
        >>> group_mean_baseline(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 7]))
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    centred = rewards.detach().double() - group_mean(rewards.double(), group_ids)
    return _lone_and_missing(centred, rewards, group_ids, group_of_one, missing)


def leave_one_out_baseline(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    group_of_one: Lone = "zero",
    missing: Missing = "zero",
) -> Float[Tensor, " B"]:
    """Reward minus the mean reward of the other completions of its group: RLOO.

        A_i = r_i - mean_{j in group(i), j != i} r_j = n / (n - 1) (r_i - mean_{group(i)} r)

    Paper: RLOO, arXiv:2402.14740. Differs from `group_mean_baseline`: unbiased, and larger by n / (n - 1).

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.
        group_of_one: see the module.
        missing: see the module.

    Returns:
        Advantages in reward units, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        ValueError: an option is unknown.

    Example:
        >>> leave_one_out_baseline(torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 7]))
        tensor([ 1.0000, -0.5000, -0.5000,  0.0000])
    """
    centred = rewards.detach().double() - leave_one_out_mean(rewards.double(), group_ids)
    return _lone_and_missing(centred, rewards, group_ids, group_of_one, missing)


def group_zscore(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    eps: float = 1e-6,
    unbiased: bool = True,
    group_of_one: Lone = "zero",
    missing: Missing = "zero",
) -> Float[Tensor, " B"]:
    """Reward standardised within its group: the advantage of GRPO.

        A_i = (r_i - mean_{group(i)} r) / (std_{group(i)} r + eps)

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1.2.

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt; groups may differ in size and need not be contiguous.
        eps: added to the standard deviation, in reward units: 1e-6 (the default) in verl, SkyRL and NeMo-RL, 1e-4 in
            TRL, 1e-9 in OpenRLHF.
        unbiased: the standard deviation divides by n - 1, as all peers' does.
        group_of_one: see the module.
        missing: see the module.

    Returns:
        Advantages in standard deviations, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        ValueError: eps is negative, or an option is unknown.

    Example:
        >>> group_zscore(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    exact = rewards.detach().double()
    std = group_std(exact, group_ids, unbiased)
    # One reward has no deviation: "raw" takes 1 for it.
    std = torch.where(_statistics(exact, group_ids).count <= 1, torch.ones_like(std), std)
    centred = group_mean_baseline(exact, group_ids, group_of_one, missing)
    return standardised(centred, std, eps).to(rewards.dtype)


def standardised(advantages: Float[Tensor, " B"], std: Float[Tensor, " B"], eps: float = 1e-6) -> Float[Tensor, " B"]:
    """Advantages in standard deviations, left as they are where there is no spread.

        A'_i = A_i / (sigma_i + eps)   where sigma_i > 0,   A_i elsewhere

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1.2. With the deviation of the whole batch for every group:
    REINFORCE++, arXiv:2501.03262. Where there is no spread there is no scale: dividing by eps alone would turn rounding
    into signal (so too in NeMo-RL; elsewhere the advantage is then 0 and it makes no difference).

    Args:
        advantages: with a baseline taken off.
        std: the standard deviation to divide by, per completion.
        eps: added to it, in reward units.

    Returns:
        Advantages without unit.

    Raises:
        ValueError: eps is negative.

    Example:
        >>> standardised(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([2.0, 2.0, 0.0]), eps=0.0)
        tensor([ 0.5000, -0.5000,  0.5000])
    """
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return advantages / torch.where(std > 0, std + eps, torch.ones_like(std))


def maxrl_advantage(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    eps: float = 0.0,
    nonpositive_mean: Nonpositive = "zero",
    group_of_one: Lone = "zero",
) -> Float[Tensor, " B"]:
    """Deviation from the group's mean reward in units of that mean: follows the gradient of the log success rate.

        A_i = (r_i - mean_{group(i)} r) / (mean_{group(i)} r + eps)

    Paper: MaxRL, arXiv:2602.02710. Differs from GRPO: divides by the mean, so that a prompt counts as 1 / (its success
    rate), as in maximum likelihood.

    Args:
        rewards: reward per completion, not negative.
        group_ids: equal for completions of one prompt.
        eps: added to the mean: none (the default, as in prime-rl, because a mean of 0 is handled) or 1e-6 (SkyRL).
        nonpositive_mean: "zero" (the default, as in prime-rl) gives 0 where the mean is not above 0, where dividing
            by it would turn signs around; "divide" (SkyRL) divides, and needs an eps.
        group_of_one: see the module.

    Returns:
        Advantages without unit and without gradient.

    Raises:
        ValueError: eps is negative, or 0 with `nonpositive_mean="divide"`; or an option is unknown.

    Example:
        >>> maxrl_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1]))
        tensor([ 2., -1., -1.,  0.,  0.])
    """
    _check_option("nonpositive_mean", nonpositive_mean, Nonpositive)
    if eps < 0 or (nonpositive_mean == "divide" and eps == 0):
        raise ValueError(f"eps={eps} must not be negative, and above 0 to divide by a mean that may be 0")
    exact = rewards.detach().double()
    mean = group_mean(exact, group_ids)
    centred = group_mean_baseline(exact, group_ids)
    scaled = centred / torch.where(mean > 0, mean + eps, torch.full_like(mean, torch.inf))
    if nonpositive_mean == "divide":
        scaled = centred / (mean + eps)
    return _lone_and_missing(scaled, rewards, group_ids, group_of_one, "zero")


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


def _lone_and_missing(
    advantages: Tensor, rewards: Tensor, group_ids: Tensor, group_of_one: Lone, missing: Missing
) -> Tensor:
    """The two options of the module, applied to float64 advantages; in the dtype of the rewards."""
    _check_option("group_of_one", group_of_one, Lone)
    _check_option("missing", missing, Missing)
    group = _statistics(rewards, group_ids)
    alone = group.values if group_of_one == "raw" else torch.zeros_like(group.values)
    advantages = torch.where(group.count <= 1, alone, advantages)
    absent = torch.nan if missing == "nan" else 0.0
    return advantages.masked_fill(~group.present, absent).to(rewards.dtype)
