"""Whitening over all tokens under a mask."""

import torch

from atomrl.atoms.masks import masked_mean
from atomrl.atoms.shapes import Mask, PerToken, Scalar


def masked_variance(values: PerToken, mask: Mask) -> Scalar:
    """Unbiased variance of the values under the mask.

        v = n / (n - 1) mean_m (x - mean_m x)^2

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


def masked_whiten(values: PerToken, mask: Mask, eps: float = 1e-8, shift_mean: bool = True) -> PerToken:
    """Whitening: values brought to mean 0 and variance 1 over all tokens under the mask.

        y_t = (x_t - mean_m x) / sqrt(var_m x + eps)          (+ mean_m x without `shift_mean`)

    Paper: the whitening of advantages and rewards in Ziegler et al., arXiv:1909.08593. Statistics are taken over
    tokens, so that long rows weigh more, and over the whole batch: call it before any split.

    Args:
        values: any numbers; computed in float64.
        mask: True where a value counts.
        eps: added to the variance, as in verl, TRL, SkyRL and slime.
        shift_mean: take the mean off (the default), or leave it where it is, as for rewards.

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
    # Equal values with eps 0: nothing to divide, and 0 / 0 is not 0.
    white = (exact - mean) / torch.where(std > 0, std, 1.0)
    return (white if shift_mean else white + mean).masked_fill(~mask, 0.0).to(values.dtype)
