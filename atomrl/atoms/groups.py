"""Statistics over the completions of one prompt, and which groups carry a signal.

Rewards `[B]` and group ids `[B]` in, one number per completion out, without gradient. Groups may differ in size and
need not be contiguous; a whole batch is one group of equal ids. A reward that is NaN is *missing* (a reward function
that had nothing to say): it enters no statistic. Everything is computed in float64, and a group of equal rewards has
exactly that mean and a standard deviation of exactly 0, so that rounding cannot pass for signal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from atomrl.atoms._options import _check_option

Lone = Literal["zero", "raw"]
Lonely = Literal["drop", "keep"]


@dataclass(frozen=True)
class GroupStatistics:
    """Of each completion's group, all `[B]` and float64; not an atom, but what atoms share."""

    values: Tensor
    """The rewards, 0 where missing."""
    present: Tensor
    count: Tensor
    """Rewards in the group that are not missing."""
    mean: Tensor
    index: Tensor
    groups: int

    def sum(self, values: Tensor) -> Tensor:
        totals = values.new_zeros(self.groups).index_add(0, self.index, values.masked_fill(~self.present, 0.0))
        return totals[self.index]


def _statistics(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    exact = rewards.detach().double()
    present = ~exact.isnan()
    names, index = torch.unique(group_ids, return_inverse=True)
    values = exact.masked_fill(~present, 0.0)
    zeros = exact.new_zeros(len(names))
    count = zeros.index_add(0, index, present.double())
    mean = zeros.index_add(0, index, values) / count.clamp(min=1)
    high = zeros.scatter_reduce(0, index, exact.masked_fill(~present, -torch.inf), "amax", include_self=False)
    low = zeros.scatter_reduce(0, index, exact.masked_fill(~present, torch.inf), "amin", include_self=False)
    mean = torch.where(high == low, high, mean)  # the sum of equal numbers, divided, need not be that number
    return GroupStatistics(values, present, count[index], mean[index], index, len(names))


def group_mean(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Mean reward of each completion's group.

        mu_i = mean_{j in group(i)} r_j

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1.2.

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.

    Returns:
        In reward units; 0 where all rewards of the group are missing.

    Example:
        >>> group_mean(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 7]))
        tensor([0.5000, 0.5000, 3.0000])
    """
    return _statistics(rewards, group_ids).mean.to(rewards.dtype)


def leave_one_out_mean(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], group_of_one: Lone = "zero"
) -> Float[Tensor, " B"]:
    """Mean reward of the *other* completions of the group: independent of the completion's own reward.

        b_i = mean_{j in group(i), j != i} r_j

    Paper: RLOO, arXiv:2402.14740; Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!" (2019).

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.
        group_of_one: what a completion without others is compared with. "zero" (the default: no comparison, no
            signal) takes its own reward, so that the advantage is 0, as in TRL, NeMo-RL and SkyRL; "raw" takes 0, so
            that the reward itself remains, as in AReaL and in verl's unvectorised function.

    Returns:
        In reward units.

    Raises:
        ValueError: an option is unknown.

    Example:
        >>> leave_one_out_mean(torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([0, 0, 0, 7]))
        tensor([1.0000, 1.5000, 0.5000, 5.0000])
    """
    _check_option("group_of_one", group_of_one, Lone)
    group = _statistics(rewards, group_ids)
    deviation = group.values - group.mean
    mean = group.mean - deviation / (group.count - 1).clamp(min=1)
    alone = group.values if group_of_one == "zero" else torch.zeros_like(mean)
    return torch.where(group.count <= 1, alone, mean).to(rewards.dtype)


def group_std(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], unbiased: bool = True) -> Float[Tensor, " B"]:
    """Standard deviation of the rewards of each completion's group, about their mean.

        sigma_i = sqrt(sum_{j in group(i)} (r_j - mu_i)^2 / (n - 1))

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1.2.

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.
        unbiased: divide by n - 1 (the default, as all peers do for groups) or by n.

    Returns:
        In reward units. Exactly 0 in a group of one or of equal rewards.

    Example:
        >>> group_std(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 7]))
        tensor([0.7071, 0.7071, 0.0000])
    """
    group = _statistics(rewards, group_ids)
    squares = group.sum((group.values - group.mean).square())
    return (squares / (group.count - int(unbiased)).clamp(min=1)).sqrt().to(rewards.dtype)


def group_root_mean_square(
    deviations: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], unbiased: bool = True
) -> Float[Tensor, " B"]:
    """Standard deviation about a baseline other than the group's own mean, from the deviations themselves.

        sigma_i = sqrt(sum_{j in group(i)} d_j^2 / (n - 1))

    With deviations from a leave-one-out mean, or group deviations and the whole batch as one group, this is AReaL's
    standard deviation; `group_std` is about the mean of the same group, as elsewhere.

    Args:
        deviations: advantage per completion, not yet scaled; NaN where missing.
        group_ids: equal for the completions that share a scale.
        unbiased: divide by n - 1 (the default, as in `group_std`) or by n.

    Returns:
        In the units of the deviations.

    Example:
        >>> group_root_mean_square(torch.tensor([1.0, -1.0, 3.0]), torch.tensor([0, 0, 7]))
        tensor([1.4142, 1.4142, 3.0000])
    """
    group = _statistics(deviations, group_ids)
    squares = group.sum(group.values.square())
    return (squares / (group.count - int(unbiased)).clamp(min=1)).sqrt().to(deviations.dtype)


def leave_one_out_std(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Unbiased standard deviation of the rewards of the *other* completions of the group.

        sigma_i = sqrt(sum_{j != i} (r_j - b_i)^2 / (n - 2)),   b_i = mean_{j != i} r_j

    As in NeMo-RL's GRPO with `use_leave_one_out_baseline`; a group of two has no spread without one of them.

    Args:
        rewards: reward per completion; NaN where missing.
        group_ids: equal for completions of one prompt.

    Returns:
        In reward units. Exactly 0 where fewer than two others are left or all of them are equal.

    Example:
        >>> leave_one_out_std(torch.tensor([1.0, 0.0, 3.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 7, 7]))
        tensor([2.1213, 1.4142, 0.7071, 0.0000, 0.0000])
    """
    group = _statistics(rewards, group_ids)
    own = (group.values - group.mean).square()
    everyone = group.sum(own)
    others = everyone - own * group.count / (group.count - 1).clamp(min=1)
    # What is left of a difference of equal numbers is rounding, not spread.
    others = others.masked_fill((others < 1e-12 * everyone) | (group.count < 3), 0.0)
    return (others / (group.count - 2).clamp(min=1)).sqrt().to(rewards.dtype)


def groups_with_spread(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    min_std: float = 0.0,
    group_of_one: Lonely = "drop",
) -> Bool[Tensor, " B"]:
    """Which completions belong to a group whose rewards differ: the others have no advantage to learn from.

        keep_i = (std_{group(i)} r > min_std)

    Paper: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.

    Args:
        rewards: reward per completion.
        group_ids: equal for completions of one prompt.
        min_std: the unbiased standard deviation must be above it. The default, 0, drops a group only if all its
            rewards are equal, as verl does (but for rounding: verl keeps equal rewards whose mean is inexact);
            slime asks for more than 1e-6.
        group_of_one: "drop" (the default, as in slime: with a group baseline it has no signal) or "keep" (verl).

    Returns:
        True for every completion of a group to keep.

    Raises:
        ValueError: `min_std` is negative, or an option is unknown.

    Example:
        >>> groups_with_spread(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1, 2]))
        tensor([ True,  True, False, False, False])
    """
    _check_option("group_of_one", group_of_one, Lonely)
    if min_std < 0:
        raise ValueError(f"min_std must not be negative, got {min_std}")
    keep = group_std(rewards.double(), group_ids) > min_std
    alone = _statistics(rewards, group_ids).count <= 1
    return torch.where(alone, torch.full_like(keep, group_of_one == "keep"), keep)


def groups_with_mean_inside(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], low: float = 0.0, high: float = 1.0
) -> Bool[Tensor, " B"]:
    """Which completions belong to a group of middling difficulty: solved neither always nor never.

        keep_i = (low < mean_{group(i)} r < high)

    Paper: dynamic sampling of DAPO, arXiv:2503.14476, equation 11, whose 0 < |correct| < G this is for rewards of 0
    and 1. Differs from `groups_with_spread`: a group of equal rewards inside the range is kept, as in OpenRLHF and
    ROLL.

    Args:
        rewards: reward per completion.
        group_ids: equal for completions of one prompt.
        low: the mean must be above it, in reward units.
        high: the mean must be below it.

    Returns:
        True for every completion of a group to keep.

    Raises:
        ValueError: the range is empty.

    Example:
        >>> groups_with_mean_inside(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
        tensor([ True,  True, False, False])
    """
    if not low < high:
        raise ValueError(f"low={low} must be below high={high}")
    mean = group_mean(rewards.double(), group_ids)
    return (mean > low) & (mean < high)
