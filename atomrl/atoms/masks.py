"""Masked sums, means and maxima, over all tokens and by row. What is off the mask, NaN included, has no influence."""

import torch

from atomrl.atoms.shapes import AnyMask, AnyShape, Mask, PerRow, PerToken, Scalar


def masked_sum(values: AnyShape, mask: AnyMask) -> Scalar:
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


def masked_mean(values: AnyShape, mask: AnyMask) -> Scalar:
    """Mean of the values under the mask; 0 where the mask is empty.

        sum_{m_t = 1} x_t / max(1, sum_t m_t)

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


def row_sum(values: PerToken, mask: Mask) -> PerRow:
    """Sum of each row's values under the mask.

        S_i = sum_{m_it = 1} x_it

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


def row_mean(values: PerToken, mask: Mask) -> PerRow:
    """Mean of each row's values under the mask.

        M_i = sum_{m_it = 1} x_it / max(1, |m_i|)

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


def row_max(values: PerToken, mask: Mask) -> PerRow:
    """Largest of each row's values under the mask.

        X_i = max_{m_it = 1} x_it

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
