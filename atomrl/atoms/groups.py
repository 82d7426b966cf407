"""Statistics of groups of completions.

Rewards `[B]` (floats, whole numbers or True and False) and group ids `[B]` in, one number per completion out, without
gradient. Groups may differ in size and need not be contiguous; a whole batch is one group of equal ids. A reward that
is NaN is *missing* (a reward function that had nothing to say): it enters no statistic. Everything is computed in
float64, and a group of equal rewards has exactly that mean and a standard deviation of exactly 0, so that rounding
cannot pass for signal.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from atomrl.atoms.shapes import Ids, PerRow, Rewards


class _Statistics(NamedTuple):
    """Of each completion's group, all `[B]` and float64."""

    dtype: torch.dtype
    """Of the results: that of the rewards, or torch's default for whole numbers and bools."""
    values: Tensor
    """The rewards, 0 where missing."""
    size: Tensor
    """Rewards in the group that are not missing."""
    mean: Tensor
    squares: Tensor
    """The sum of squared deviations from the mean."""


def _as_tensor(values: object, name: str) -> Tensor:
    if not isinstance(values, Tensor) or values.is_complex():
        what = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a tensor of numbers or bools, got {what} (torch.tensor makes one of a list)")
    return values.detach()


def _as_floats(values: object, name: str = "rewards") -> Tensor:
    """Detached; whole numbers and bools as floats."""
    values = _as_tensor(values, name)
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _statistics(rewards: object, group_ids: object) -> _Statistics:
    floats = _as_floats(rewards)
    exact = floats.double()
    present = ~exact.isnan()
    names, index = torch.unique(_as_tensor(group_ids, "group_ids"), return_inverse=True)
    values = exact.masked_fill(~present, 0.0)
    zeros = exact.new_zeros(len(names))
    count = zeros.index_add(0, index, present.double())
    mean = zeros.index_add(0, index, values) / count.clamp(min=1)
    high = zeros.scatter_reduce(0, index, exact.masked_fill(~present, -torch.inf), "amax", include_self=False)
    low = zeros.scatter_reduce(0, index, exact.masked_fill(~present, torch.inf), "amin", include_self=False)
    mean = torch.where(high == low, high, mean)  # the sum of equal numbers, divided, need not be that number
    squares = (values - mean[index]).square().masked_fill(~present, 0.0)
    return _Statistics(floats.dtype, values, count[index], mean[index], zeros.index_add(0, index, squares)[index])


def group_mean(rewards: Rewards, group_ids: Ids) -> PerRow:
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
    group = _statistics(rewards, group_ids)
    return group.mean.to(group.dtype)


def leave_one_out_mean(rewards: Rewards, group_ids: Ids) -> PerRow:
    """Mean reward of the *other* completions of the group: independent of the completion's own reward.

        b_i = mean_{j in group(i), j != i} r_j

    Paper: RLOO, arXiv:2402.14740; Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!" (2019).

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


def group_std(rewards: Rewards, group_ids: Ids) -> PerRow:
    """Standard deviation of the rewards of each completion's group, about their mean.

        sigma_i = sqrt(sum_{j in group(i)} (r_j - mu_i)^2 / (n - 1))

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1.2.

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
