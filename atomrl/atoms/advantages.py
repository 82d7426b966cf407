"""Advantage estimators with group baselines: GRPO, Dr. GRPO, RLOO, MaxRL, REINFORCE.

All take rewards `[B]` and group ids `[B]` and give advantages `[B]` without gradient, so that they can replace each
other; `per_token` spreads them over the tokens. Rewards may be floats, whole numbers or True and False. Statistics are
those of `groups`: float64, a missing reward (NaN) in none of them. The only completion of a prompt has an advantage of
0, as in TRL, NeMo-RL and prime-rl (verl gives it its bare reward). `missing` is what a missing reward's advantage is:
"zero", or "nan" for a further statistic that must know.
"""

from typing import Literal

import torch
from torch import Tensor

from atomrl.atoms.groups import _as_floats, group_mean, group_std, leave_one_out_mean
from atomrl.atoms.shapes import Ids, Mask, PerRow, PerToken, Rewards

Missing = Literal["zero", "nan"]


def raw_reward(rewards: Rewards, group_ids: Ids) -> PerRow:
    """REINFORCE advantage: the reward itself, with no baseline.

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
    return _as_floats(rewards).clone()


def group_mean_baseline(rewards: Rewards, group_ids: Ids, missing: Missing = "zero") -> PerRow:
    """Dr. GRPO advantage: reward minus the mean reward of its group.

        A_i = r_i - mean_{j in group(i)} r_j

    Paper: Dr. GRPO, arXiv:2503.20783. Differs from GRPO: no division by the standard deviation, which weights
    prompts that are nearly always or nearly never solved more than the others.

    Args:
        rewards: reward per completion, in task units; NaN where missing.
        group_ids: equal for completions of one prompt; groups may differ in size and need not be contiguous.
        missing: see the module.

    Returns:
        Advantages in reward units, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        TypeError: the rewards are no tensor.

    Example:
        >>> group_mean_baseline(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 7]))
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    rewards = _as_floats(rewards)
    exact = rewards.double()
    return _filled(exact - group_mean(exact, group_ids), rewards, missing)


def leave_one_out_baseline(rewards: Rewards, group_ids: Ids, missing: Missing = "zero") -> PerRow:
    """RLOO advantage: reward minus the mean reward of the other completions of its group.

        A_i = r_i - mean_{j in group(i), j != i} r_j = n / (n - 1) (r_i - mean_{group(i)} r)

    Paper: RLOO, arXiv:2402.14740. Differs from `group_mean_baseline`: unbiased, and larger by n / (n - 1).

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.
        missing: see the module.

    Returns:
        Advantages in reward units, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        TypeError: the rewards are no tensor.

    Example:
        >>> leave_one_out_baseline(torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 7]))
        tensor([ 1.0000, -0.5000, -0.5000,  0.0000])
    """
    rewards = _as_floats(rewards)
    exact = rewards.double()
    return _filled(exact - leave_one_out_mean(exact, group_ids), rewards, missing)


def group_zscore(rewards: Rewards, group_ids: Ids, eps: float = 1e-6, missing: Missing = "zero") -> PerRow:
    """GRPO advantage: reward standardised within its group.

        A_i = (r_i - mean_{group(i)} r) / (std_{group(i)} r + eps)

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1.2.

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt; groups may differ in size and need not be contiguous.
        eps: added to the standard deviation, in reward units: 1e-6 (the default) in verl, SkyRL and NeMo-RL, 1e-4 in
            TRL, 1e-9 in OpenRLHF. The standard deviation divides by n - 1, as all peers' does.
        missing: see the module.

    Returns:
        Advantages in standard deviations, without gradient. Exactly 0 in a group of equal rewards.

    Raises:
        ValueError: eps is negative.
        TypeError: the rewards are no tensor.

    Example:
        >>> group_zscore(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    rewards = _as_floats(rewards)
    exact = rewards.double()
    centred = group_mean_baseline(exact, group_ids, missing)
    return standardised(centred, group_std(exact, group_ids), eps).to(rewards.dtype)


def standardised(advantages: PerRow, std: PerRow, eps: float = 1e-6) -> PerRow:
    """Advantages divided by a standard deviation, left as they are where there is no spread.

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


def maxrl_advantage(rewards: Rewards, group_ids: Ids, eps: float = 0.0) -> PerRow:
    """MaxRL advantage: deviation from the group's mean reward in units of that mean.

        A_i = (r_i - mean_{group(i)} r) / (mean_{group(i)} r + eps)

    Paper: MaxRL, arXiv:2602.02710. Differs from GRPO: divides by the mean, so that a prompt counts as 1 / (its success
    rate), as in maximum likelihood.

    Args:
        rewards: reward per completion, not negative.
        group_ids: equal for completions of one prompt.
        eps: added to the mean: none (the default, as in prime-rl) or 1e-6 (SkyRL).

    Returns:
        Advantages without unit and without gradient; 0 where the mean is not above 0, where dividing by it would turn
        signs around (as in prime-rl; SkyRL divides).

    Raises:
        ValueError: eps is negative.
        TypeError: the rewards are no tensor.

    Example:
        >>> maxrl_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1]))
        tensor([ 2., -1., -1.,  0.,  0.])
    """
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    rewards = _as_floats(rewards)
    mean = group_mean(rewards.double(), group_ids)
    centred = group_mean_baseline(rewards.double(), group_ids)
    return (centred / torch.where(mean > 0, mean + eps, torch.inf)).to(rewards.dtype)


def per_token(advantages: PerRow, mask: Mask) -> PerToken:
    """Advantage per token from one per completion, 0 off the mask.

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


def _filled(advantages: Tensor, rewards: Tensor, missing: Missing) -> Tensor:
    """Those of missing rewards set, in the dtype of the rewards."""
    return advantages.masked_fill(rewards.isnan(), {"zero": 0.0, "nan": torch.nan}[missing]).to(rewards.dtype)
