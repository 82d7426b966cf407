"""Masked sums, means, maxima and whitening, over all tokens or per row. Values off the mask, even NaN, are ignored."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from atomrl.atoms import atom

# --------------------------------------------------------------------------------------------------------------------
# Shapes of the atoms' arguments: B rows (completions), T tokens, K turns, P pairs. `pytest` checks them at every call.

PerToken = Float[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]
PerRow = Float[Tensor, " B"]
Rewards = Shaped[Tensor, " B"]
"""Floats, integers or bools."""
TokenRewards = Shaped[Tensor, "B T"]
Ids = Int[Tensor, " B"]
TokenIds = Int[Tensor, "B T"]
PerTurn = Float[Tensor, "B K"]
"""One value per turn; NaN where the row has fewer turns."""
TurnIds = Int[Tensor, "B K"]
PerItem = Float[Tensor, " N"]
"""N independent items: labelled completions, states."""
PerPair = Float[Tensor, " P"]
Scalar = Float[Tensor, ""]
AnyShape = Float[Tensor, "*shape"]
AnyMask = Bool[Tensor, "*shape"]
PerPosition = Float[Tensor, "*batch"]
Vocabulary = Float[Tensor, "*batch V"]
Flat = Float[Tensor, " D"]
"""All trainable parameters flattened into one vector."""


@atom("sum_{m_t = 1} x_t")
def masked_sum(values: AnyShape, mask: AnyMask) -> Scalar:
    """Sum of the values under the mask; values off the mask, even NaN, are ignored.

    Args:
        values: any numbers.
        mask: True where a value counts.

    Returns:
        A scalar; 0 where the mask is empty.

    Example:
        >>> masked_sum(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True]))
        tensor(4.)
    """
    return values.masked_fill(~mask, 0.0).sum()


@atom("sum_{m_t = 1} x_t / max(1, sum_t m_t)")
def masked_mean(values: AnyShape, mask: AnyMask) -> Scalar:
    """Mean of the values under the mask; 0 where the mask is empty.

    Exact, as in TRL and AReaL; verl and NeMo-RL add 1e-8 to the count.

    Args:
        values: any numbers.
        mask: True where a value counts.

    Returns:
        A scalar.

    Example:
        >>> masked_mean(torch.tensor([1.0, 9.0, 3.0]), torch.tensor([True, False, True]))
        tensor(2.)
    """
    return masked_sum(values, mask) / mask.sum().to(values.dtype).clamp(min=1)


@atom("S_i = sum_{m_it = 1} x_it")
def row_sum(values: PerToken, mask: Mask) -> PerRow:
    """Sum of each row's values under the mask.

    Args:
        values: any numbers.
        mask: True where a value counts.

    Returns:
        One number per row; 0 for an empty row.

    Example:
        >>> row_sum(torch.tensor([[1.0, 9.0, 3.0], [5.0, 6.0, 7.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]]).bool())
        tensor([4., 0.])
    """
    return values.masked_fill(~mask, 0.0).sum(1)


@atom("M_i = sum_{m_it = 1} x_it / max(1, |m_i|)")
def row_mean(values: PerToken, mask: Mask) -> PerRow:
    """Mean of each row's values under the mask.

    Args:
        values: any numbers.
        mask: True where a value counts.

    Returns:
        One number per row; 0 for an empty row.

    Example:
        >>> row_mean(torch.tensor([[1.0, 9.0, 3.0], [5.0, 6.0, 7.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]]).bool())
        tensor([2., 0.])
    """
    return row_sum(values, mask) / mask.sum(1).to(values.dtype).clamp(min=1)


@atom("X_i = max_{m_it = 1} x_it")
def row_max(values: PerToken, mask: Mask) -> PerRow:
    """Largest of each row's values under the mask.

    Args:
        values: any numbers.
        mask: True where a value counts.

    Returns:
        One number per row; 0 for an empty row.

    Example:
        >>> row_max(torch.tensor([[-1.0, 9.0, -3.0], [5.0, 6.0, 7.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]]).bool())
        tensor([-1.,  0.])
    """
    highest = values.masked_fill(~mask, -torch.inf).amax(1)
    return highest.masked_fill(~mask.any(1), 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Whitening over all tokens under a mask.


@atom("v = n / (n - 1) mean_m (x - mean_m x)^2")
def masked_variance(values: PerToken, mask: Mask) -> Scalar:
    """Unbiased variance of the values under the mask.

    Args:
        values: any numbers.
        mask: True where a value counts.

    Returns:
        A scalar; 0 for fewer than two values. The factor n / (n - 1) is in verl, TRL, SkyRL and slime, and not in
        OpenRLHF and NeMo-RL's REINFORCE++.

    Example:
        >>> masked_variance(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]]))
        tensor(2.)
    """
    count = mask.sum()
    deviations = values - masked_mean(values, mask)
    return masked_mean(deviations.square(), mask) * count / (count - 1).clamp(min=1)


@atom(
    "y_t = (x_t - mean_m x) / sqrt(var_m x + eps)          (+ mean_m x without `shift_mean`)",
    paper="Ziegler et al., arXiv:1909.08593 (whitening of advantages and rewards)",
)
def masked_whiten(values: PerToken, mask: Mask, eps: float = 1e-8, shift_mean: bool = True) -> PerToken:
    """Whiten values to mean 0 and variance 1 over all tokens under the mask.

    Statistics are taken over tokens, so that long rows weigh more, and over the whole batch: call it before any split.

    Args:
        values: any numbers; computed in float64.
        mask: True where a value counts.
        eps: added to the variance, as in verl, TRL, SkyRL and slime.
        shift_mean: subtract the mean (the default), or keep it, as for rewards.

    Returns:
        In standard deviations, 0 off the mask. Nearly 0 (0 in exact arithmetic) where all values are equal.

    Raises:
        ValueError: eps is negative.

    Example:
        >>> masked_whiten(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]]))
        tensor([[-0.7071,  0.0000,  0.7071]])
    """
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    exact = values.double()
    mean = masked_mean(exact, mask)
    std = (masked_variance(exact, mask) + eps).sqrt()
    # Equal values with eps 0 would be 0 / 0.
    white = (exact - mean) / torch.where(std > 0, std, 1.0)
    return (white if shift_mean else white + mean).masked_fill(~mask, 0.0).to(values.dtype)
