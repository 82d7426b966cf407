"""Reduction as data: the weight of each token in the loss of one optimizer step.

The loss is `(loss_weights * per_token).sum()`, so the weights say what is averaged over what. They are computed once,
over the whole step, before it is split: micro-batches, ranks and packing then cannot change the objective.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def token_mean(mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Every token weighs the same: long completions count more.

        w_{i,t} = m_{i,t} / sum_{j,s} m_{j,s}

    Paper: DAPO, arXiv:2503.14476, section 3.3 ("token-level loss").

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.

    Returns:
        Weights that sum to 1 (to 0 for an empty mask).

    Example:
        >>> token_mean(torch.tensor([[False, True, True], [False, True, True]]))
        tensor([[0.0000, 0.2500, 0.2500],
                [0.0000, 0.2500, 0.2500]])
    """
    return mask.float() / mask.sum().clamp(min=1)


def sequence_mean(mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Every completion weighs the same: a token of a long one counts less.

        w_{i,t} = m_{i,t} / (|m_i| N),    N = number of rows with a token

    Paper: GRPO in DeepSeekMath, arXiv:2402.03300, equation 3. Rows without a token are not counted in N (as in verl
    and OpenRLHF; TRL counts them).

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.

    Returns:
        Weights that sum to 1 (to 0 for an empty mask).

    Example:
        >>> sequence_mean(torch.tensor([[True, True, True, True], [True, False, False, False]]))
        tensor([[0.1250, 0.1250, 0.1250, 0.1250],
                [0.5000, 0.0000, 0.0000, 0.0000]])
    """
    tokens = mask.sum(dim=1, keepdim=True)
    rows = (tokens > 0).sum().clamp(min=1)
    return mask.float() / (tokens.clamp(min=1) * rows)


def constant_length(mask: Bool[Tensor, "B T"], length: int) -> Float[Tensor, "B T"]:
    """A token's weight does not depend on how long its own or any other completion is.

        w_{i,t} = m_{i,t} / (B L)

    Paper: Dr. GRPO, arXiv:2503.20783, appendix A. B counts all rows, L is a constant, usually the limit on length.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        length: L, in tokens.

    Returns:
        Weights that sum to the mean length divided by L.

    Raises:
        ValueError: length is not positive.

    Example:
        >>> constant_length(torch.tensor([[True, True], [True, False]]), length=4)
        tensor([[0.1250, 0.1250],
                [0.1250, 0.0000]])
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    return mask.float() / (max(1, mask.shape[0]) * length)
