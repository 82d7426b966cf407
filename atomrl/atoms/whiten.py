"""Statistics over all tokens under a mask, and values standardised by them."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from atomrl.atoms._options import _check_option
from atomrl.atoms.masks import masked_mean, row_mean

EpsRole = Literal["variance", "std", "floor"]


def masked_variance(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], unbiased: bool = True, count_eps: float = 0.0
) -> Float[Tensor, ""]:
    """Variance of the values under the mask.

        v = n / (n - 1) mean_m (x - mean_m x)^2

    Args:
        values: any numbers.
        mask: True where a value counts.
        unbiased: with the factor n / (n - 1), as verl, TRL, SkyRL and slime do for tokens (the default), or without it
            (OpenRLHF, NeMo-RL's REINFORCE++).
        count_eps: added to n in the means, none by default; verl and NeMo-RL add 1e-8.

    Returns:
        A scalar; 0 for fewer than two values.

    Example:
        >>> masked_variance(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]]))
        tensor(2.)
    """
    count = mask.sum()
    deviations = values - masked_mean(values, mask, eps=count_eps)
    biased = masked_mean(deviations.square(), mask, eps=count_eps)
    return biased * count / (count - 1).clamp(min=1) if unbiased else biased


def masked_whiten(
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    unbiased: bool = True,
    eps: float = 1e-8,
    eps_role: EpsRole = "variance",
    shift_mean: bool = True,
    count_eps: float = 0.0,
    keep_off_mask: bool = False,
) -> Float[Tensor, "B T"]:
    """Values brought to mean 0 and variance 1 over all tokens under the mask.

        y_t = (x_t - mean_m x) / sqrt(var_m x + eps)          (+ mean_m x without `shift_mean`)

    Paper: the whitening of advantages and rewards in Ziegler et al., arXiv:1909.08593. Statistics are taken over
    tokens, so that long rows weigh more, and over the whole batch: call it before any split.

    Args:
        values: any numbers; computed in float64.
        mask: True where a value counts.
        unbiased: as in `masked_variance`, and by default so, as in most peers.
        eps: keeps the divisor from 0.
        eps_role: "variance" (the default; verl, TRL, SkyRL, slime) adds eps to the variance, "std" (AReaL) to its
            root, "floor" (OpenRLHF, NeMo-RL) takes the variance as at least eps.
        shift_mean: take the mean off (the default), or leave it where it is, as for rewards.
        count_eps: as in `masked_variance`.
        keep_off_mask: True gives the same map of what is off the mask instead of 0 (OpenRLHF, NeMo-RL, verl: masked
            later).

    Returns:
        In standard deviations. Nearly 0 (0 in exact arithmetic) where all values are equal.

    Raises:
        ValueError: eps is negative, or an option is unknown.

    Example:
        >>> masked_whiten(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]]))
        tensor([[-0.7071,  0.0000,  0.7071]])
    """
    exact = values.double()
    mean = masked_mean(exact, mask, eps=count_eps)
    variance = masked_variance(exact, mask, unbiased, count_eps)
    white = (exact - mean) / _divisor(variance, eps, eps_role)
    white = white if shift_mean else white + mean
    return (white if keep_off_mask else white.masked_fill(~mask, 0.0)).to(values.dtype)


def row_whiten(
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    unbiased: bool = False,
    eps: float = 1e-8,
    eps_role: EpsRole = "floor",
) -> Float[Tensor, "B T"]:
    """Values of each row brought to mean 0 and variance 1 over the row's tokens under the mask.

        y_it = (x_it - mean_i x) / sqrt(max(var_i x, eps))

    Differs from `masked_whiten`: statistics by row, so that rows cannot be compared afterwards. The defaults are
    those of OpenRLHF, the only peer that has it.

    Args:
        values: any numbers; computed in float64.
        mask: True where a value counts.
        unbiased: with the factor n / (n - 1), or (the default) without.
        eps: keeps the divisor from 0.
        eps_role: as in `masked_whiten`.

    Returns:
        In standard deviations, 0 off the mask.

    Raises:
        ValueError: eps is negative, or an option is unknown.

    Example:
        >>> row_whiten(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]]))
        tensor([[-1.,  0.,  1.]])
    """
    exact, count = values.double(), mask.sum(1)
    deviations = exact - row_mean(exact, mask)[:, None]
    variance = row_mean(deviations.square(), mask)
    if unbiased:
        variance = variance * count / (count - 1).clamp(min=1)
    white = deviations / _divisor(variance, eps, eps_role)[:, None]
    return white.masked_fill(~mask, 0.0).to(values.dtype)


def masked_mean_baseline(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], keep_off_mask: bool = False
) -> Float[Tensor, "B T"]:
    """Values minus their mean over all tokens under the mask: whitening without the division.

        y_t = x_t - mean_m x

    Paper: REINFORCE++, arXiv:2501.03262, without its division by the standard deviation.

    Args:
        values: any numbers; computed in float64.
        mask: True where a value counts.
        keep_off_mask: as in `masked_whiten`.

    Returns:
        In the units of the values, 0 off the mask.

    Example:
        >>> masked_mean_baseline(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]]))
        tensor([[-1.,  0.,  1.]])
    """
    exact = values.double()
    centred = exact - masked_mean(exact, mask)
    return (centred if keep_off_mask else centred.masked_fill(~mask, 0.0)).to(values.dtype)


def _divisor(variance: Tensor, eps: float, eps_role: EpsRole) -> Tensor:
    _check_option("eps_role", eps_role, EpsRole)
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    roots = {"variance": (variance + eps).sqrt(), "std": variance.sqrt() + eps, "floor": variance.clamp(min=eps).sqrt()}
    divisor = roots[eps_role]
    # Equal values with eps 0: nothing to divide, and 0 / 0 is not 0.
    return torch.where(divisor > 0, divisor, torch.ones_like(divisor))
