"""What a mask selects."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum of the values under the mask; what is off the mask, NaN included, has no influence.

        sum_{m_t = 1} x_t

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


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean of the values under the mask; 0 where the mask is empty.

        sum_{m_t = 1} x_t / max(1, sum_t m_t)

    Args:
        values: any numbers.
        mask: True where a value counts.

    Returns:
        A scalar.

    Example:
        >>> masked_mean(torch.tensor([1.0, 9.0, 3.0]), torch.tensor([True, False, True]))
        tensor(2.)
    """
    return masked_sum(values, mask) / mask.sum().clamp(min=1)
