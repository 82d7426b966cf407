"""Loss aggregation, as the weight of each token in the loss of one optimizer step.

The loss is `(loss_weights * per_token).sum()`, so the weights say what is averaged over what. They are computed once,
over the whole step, before it is split: micro-batches, ranks and packing then cannot change the objective. What is
divided by can be given where a process sees only a part of the step, or counts in another way (`total_tokens`,
`total_rows`). Weights have torch's default dtype.
"""

import torch

from atomrl.atoms.masks import Ids, Mask, PerToken, Scalar


def token_mean(mask: Mask, total_tokens: float | None = None) -> PerToken:
    """Token mean: every token weighs the same, so that long completions count more.

        w_{i,t} = m_{i,t} / sum_{j,s} m_{j,s}

    Paper: DAPO, arXiv:2503.14476, section 3.3 ("token-level loss").

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        total_tokens: what to divide by instead of the mask's count; 1 gives a plain sum.

    Returns:
        Weights that sum to 1 (to 0 for an empty mask).

    Example:
        >>> token_mean(torch.tensor([[False, True, True], [False, True, True]]))
        tensor([[0.0000, 0.2500, 0.2500],
                [0.0000, 0.2500, 0.2500]])
    """
    return mask / (mask.sum().clamp(min=1) if total_tokens is None else total_tokens)


def sequence_mean(mask: Mask, total_rows: float | None = None) -> PerToken:
    """Sequence mean: every completion weighs the same, so that a token of a long one counts less.

        w_{i,t} = m_{i,t} / (|m_i| N),    N = number of rows with a token

    Paper: GRPO in DeepSeekMath, arXiv:2402.03300, equation 3.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        total_rows: N itself. By default rows without a token are not counted, as in verl and OpenRLHF, so that padding
            a batch with empty rows changes nothing; TRL, SkyRL and ROLL count them.

    Returns:
        Weights that sum to 1 (to 0 for an empty mask).

    Example:
        >>> sequence_mean(torch.tensor([[True, True, True, True], [True, False, False, False]]))
        tensor([[0.1250, 0.1250, 0.1250, 0.1250],
                [0.5000, 0.0000, 0.0000, 0.0000]])
    """
    rows = mask.any(1).sum().clamp(min=1) if total_rows is None else total_rows
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * rows)


def constant_length(mask: Mask, length: int, total_rows: float | None = None) -> PerToken:
    """Dr. GRPO's aggregation: token sums divided by a constant, whatever the length of the completions.

        w_{i,t} = m_{i,t} / (N L)

    Paper: Dr. GRPO, arXiv:2503.20783, appendix A. L is a constant, usually the limit on length; a length of 1 gives
    the mean over rows of their sums ("sequence-mean-token-sum", LUSPO arXiv:2602.05261).

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        length: L, in tokens.
        total_rows: N itself. By default all rows are counted, as in TRL and SkyRL: N is then as constant as L. verl
            drops those without a token.

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
    return mask / ((max(1, len(mask)) if total_rows is None else total_rows) * length)


def group_token_mean(mask: Mask, group_ids: Ids) -> PerToken:
    """Prompt mean: every group of rows weighs the same, and every token within its group.

        w_{i,t} = m_{i,t} / (G |m_g|),    g = group of row i, |m_g| = its tokens, G = number of groups

    With the completions of a prompt as the group no prompt counts more for its long answers (SkyRL's `prompt_mean`).
    With micro-batches as the group it is the mean of micro-batch means that older trainers took, an objective that
    depends on how a batch is split: use it to reproduce such a run only.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        group_ids: equal for rows of one group. A group without a token counts in G.

    Returns:
        Weights that sum to 1 where no group is empty.

    Example:
        >>> group_token_mean(torch.tensor([[True, True], [True, True], [True, False]]), torch.tensor([0, 0, 1]))
        tensor([[0.1250, 0.1250],
                [0.1250, 0.1250],
                [0.5000, 0.0000]])
    """
    groups, index = torch.unique(group_ids, return_inverse=True)
    lengths = mask.sum(1)
    tokens = lengths.new_zeros(len(groups)).index_add(0, index, lengths)
    return mask / (tokens.clamp(min=1)[index, None] * len(groups))


def weighted_sum(per_token: PerToken, loss_weights: PerToken, *factors: Mask | PerToken, scale: float = 1.0) -> Scalar:
    """Weighted sum of per-token losses: the loss of an optimizer step, or of a part of it.

        L = scale sum_{i,t} w_{i,t} c_{i,t} l_{i,t}

    A token of no weight has no influence, whatever its loss: NaN times 0 does not happen.

    Args:
        per_token: loss per token, with gradient.
        loss_weights: of a reduction, over the whole optimizer step.
        factors: what else multiplies a token: importance weights of a correction, or a choice of tokens. They carry
            no gradient and do not change what is divided by.
        scale: of the whole. The default of 1 is for gradients that are summed over processes; where a back end
            averages them, the number of processes undoes it.

    Returns:
        A scalar; micro-batches of a step add up to it.

    Example:
        >>> losses, weights = torch.tensor([[1.0, 2.0, float("nan")]]), torch.tensor([[0.5, 0.5, 0.0]])
        >>> weighted_sum(losses, weights)
        tensor(1.5000)
        >>> weighted_sum(losses, weights, torch.tensor([[True, False, True]]))
        tensor(0.5000)
    """
    weights, used = loss_weights, loss_weights != 0
    for factor in factors:
        weights = torch.where(used, weights * factor.detach(), 0.0)
    return scale * (per_token.masked_fill(weights == 0, 0.0) * weights).sum()
