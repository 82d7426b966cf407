"""Value losses of a critic, per token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomrl.atoms.shapes import Mask, PerToken


def clipped_value_loss(
    values: PerToken,
    old_values: PerToken,
    returns: PerToken,
    mask: Mask,
    clip: float | None = 0.2,
    huber_delta: float | None = None,
) -> PerToken:
    """PPO's clipped value loss: the worse of the errors of the prediction and of one that moved at most `clip`.

        L_t = max((v_t - R_t)^2, (clip(v_t, v_old - c, v_old + c) - R_t)^2) / 2

    Paper: PPO's reference implementation (the paper, arXiv:1707.06347, equation 9, has no clip); GAE's returns.

    Args:
        values: predictions, with gradient.
        old_values: predictions at the start of the step.
        returns: targets, without gradient.
        mask: True where the model wrote the token.
        clip: c, in units of the return; None for the plain error. A token whose clipped error is the greater has no
            gradient.
        huber_delta: from where on the error is linear (Huber's, an option of AReaL), in units of the return; by
            default it is half the square everywhere.

    Returns:
        Loss per token, 0 off the mask. It includes the factor 1/2.

    Example:
        >>> old, mask = torch.zeros(1, 1), torch.tensor([[True]])
        >>> clipped_value_loss(torch.tensor([[0.5]]), old, torch.tensor([[1.0]]), mask)
        tensor([[0.3200]])
    """
    plain = _value_error(values, returns, mask, huber_delta)
    if clip is None:
        return plain
    clipped = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum(plain, _value_error(clipped, returns, mask, huber_delta))


def clipped_values(values: PerToken, old_values: PerToken, returns: PerToken, mask: Mask, clip: float = 0.2) -> Mask:
    """Tokens on which the clip of `clipped_value_loss` acts: they have no gradient.

        (clip(v_t, v_old - c, v_old + c) - R_t)^2 > (v_t - R_t)^2

    Paper: PPO's reference implementation.

    Args:
        values: predictions.
        old_values: predictions at the start of the step.
        returns: targets.
        mask: True where the model wrote the token.
        clip: c, in units of the return.

    Returns:
        True where it acts; its mean over the mask is the metric `critic/vf_clipfrac`.

    Example:
        >>> old, mask = torch.zeros(1, 2), torch.tensor([[True, True]])
        >>> clipped_values(torch.tensor([[0.5, 0.1]]), old, torch.tensor([[1.0, 1.0]]), mask)
        tensor([[ True, False]])
    """
    clipped = values.clamp(old_values - clip, old_values + clip)
    return (_value_error(clipped, returns, mask) > _value_error(values, returns, mask)) & mask


def _value_error(values: Tensor, returns: Tensor, mask: Tensor, huber_delta: float | None = None) -> Tensor:
    values, returns = values.masked_fill(~mask, 0.0), returns.masked_fill(~mask, 0.0)
    if huber_delta is not None:
        return F.huber_loss(values, returns, reduction="none", delta=huber_delta)
    return (values - returns).square() / 2
