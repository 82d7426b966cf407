"""Loss aggregation as loss weights: the weight of each token in the loss of one optimizer step.

The loss is `(loss_weights * per_token).sum()`. Weights are computed once, over the whole step, before it is split, so
micro-batches, ranks and packing cannot change the objective. Pass the denominator (`total_tokens`, `total_rows`) where
a process sees only a part of the step, or counts differently. Weights have torch's default dtype.
"""

import torch

from atomrl.atoms import atom
from atomrl.atoms.masks import Ids, Mask, PerToken, Scalar


@atom(
    "w_{i,t} = 1 / sum_j |o_j|",
    latex=r"\frac{1}{\sum_j |o_j|} \sum_{i,t}",
    paper='DAPO, arXiv:2503.14476, section 3.3 ("token-level loss")',
)
def token_mean(mask: Mask, total_tokens: float | None = None) -> PerToken:
    """Token mean: every token has the same weight, so long completions count more.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        total_tokens: denominator, by default the number of tokens in the mask; 1 gives a plain sum.

    Returns:
        Weights that sum to 1 (to 0 for an empty mask).

    Example:
        >>> token_mean(torch.tensor([[False, True, True], [False, True, True]]))
        tensor([[0.0000, 0.2500, 0.2500],
                [0.0000, 0.2500, 0.2500]])
    """
    return mask / (mask.sum().clamp(min=1) if total_tokens is None else total_tokens)


@atom(
    "w_{i,t} = 1 / (N |o_i|)",
    latex=r"\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t",
    paper="GRPO in DeepSeekMath, arXiv:2402.03300, equation 3",
)
def sequence_mean(mask: Mask, total_rows: float | None = None) -> PerToken:
    """Sequence mean: every completion has the same weight, so a token of a long one counts less.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        total_rows: N. By default the number of rows with a token, as in verl and OpenRLHF, so padding a batch with
            empty rows changes nothing; TRL, SkyRL and ROLL count empty rows.

    Returns:
        Weights that sum to 1 (to 0 for an empty mask).

    Example:
        >>> sequence_mean(torch.tensor([[True, True, True, True], [True, False, False, False]]))
        tensor([[0.1250, 0.1250, 0.1250, 0.1250],
                [0.5000, 0.0000, 0.0000, 0.0000]])
    """
    rows = mask.any(1).sum().clamp(min=1) if total_rows is None else total_rows
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * rows)


@atom(
    "w_{i,t} = 1 / (N L)",
    latex=r"\frac{1}{N L} \sum_{i,t}",
    paper="Dr. GRPO, arXiv:2503.20783, appendix A",
)
def constant_length(mask: Mask, length: int, total_rows: float | None = None) -> PerToken:
    """Dr. GRPO's aggregation: token sums divided by a constant, independent of the lengths of completions.

    L is a constant, usually the limit on length; a length of 1 gives the mean over rows of their sums
    ("sequence-mean-token-sum", LUSPO arXiv:2602.05261).

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        length: L, in tokens.
        total_rows: N. By default the number of all rows, as in TRL and SkyRL; verl leaves out empty rows.

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


@atom(
    "w_{i,t} = 1 / (P sum_{j in group} |o_j|)",
    latex=r"\frac{1}{P} \sum_{g} \frac{1}{\sum_{j \in g} |o_j|} \sum_{i \in g, t}",
)
def group_token_mean(mask: Mask, group_ids: Ids) -> PerToken:
    """Prompt mean: every group of rows has the same weight, and every token within a group.

    P is the number of groups. With the completions of a prompt as the group, prompts with long answers do not count
    more (SkyRL's `prompt_mean`). With micro-batches as groups it is the mean of micro-batch means of older trainers,
    which depends on how a batch is split: use it only to reproduce such a run.

    Args:
        mask: True where the model wrote the token, for all rows of the optimizer step.
        group_ids: equal for rows of one group. A group without a token counts in P.

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


@atom("L = scale sum_{i,t} w_{i,t} c_{i,t} l_{i,t}")
def weighted_sum(per_token: PerToken, loss_weights: PerToken, *factors: Mask | PerToken, scale: float = 1.0) -> Scalar:
    """Weighted sum of per-token losses: the loss of an optimizer step, or of a part of it.

    Tokens of weight 0 are ignored, even if their loss is NaN.

    Args:
        per_token: loss per token, with gradient.
        loss_weights: of a reduction, over the whole optimizer step.
        factors: further factors per token: importance weights, or a mask. Detached; they do not change the denominator.
        scale: factor of the sum. The default of 1 is for gradients that are summed over processes; with a back end that
            averages them, pass the number of processes.

    Returns:
        A scalar. Those of the micro-batches add up to that of the step.

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
