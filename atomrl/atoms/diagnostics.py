"""What is worth logging about importance weights and about how far two policies are apart."""

from __future__ import annotations

from typing import TypedDict

from jaxtyping import Bool, Float
from torch import Tensor

from atomrl.atoms.masks import masked_mean, row_mean, row_sum


def effective_sample_fraction(
    weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], eps: float = 0.0
) -> Float[Tensor, ""]:
    """Kish's effective sample size over the number of tokens: 1 for equal weights, 1/n where one has them all.

        ESS / n = mean(w)^2 / mean(w^2)

    Paper: Kish, "Survey sampling" (1965).

    Args:
        weights: per token.
        mask: True where the model wrote the token.
        eps: added to counts and to the mean weight, 1e-8 in verl.

    Returns:
        A fraction.

    Example:
        >>> effective_sample_fraction(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]))
        tensor(0.5000)
    """
    relative = weights / (masked_mean(weights, mask, eps) + eps)
    return 1 / masked_mean(relative.square(), mask, eps)


def masked_std(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], eps: float = 0.0) -> Float[Tensor, ""]:
    """Standard deviation of the values under the mask, divided by their number.

        sqrt(max(0, mean(x^2) - mean(x)^2))

    Args:
        values: any numbers.
        mask: True where a value counts.
        eps: added to the count, 1e-8 in verl.

    Returns:
        A scalar; 0 for an empty mask.

    Example:
        >>> masked_std(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]))
        tensor(1.)
    """
    return (masked_mean(values.square(), mask, eps) - masked_mean(values, mask, eps).square()).clamp(min=0).sqrt()


def perplexity(logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], eps: float = 0.0) -> Float[Tensor, " B"]:
    """How many tokens the model hesitates between, on the average, along each completion.

        PPL_i = exp(-mean_t log p(a_t))

    Paper: Jelinek et al., "Perplexity - a measure of the difficulty of speech recognition tasks" (1977).

    Args:
        logprobs: of any model.
        mask: True where the model wrote the token.
        eps: added to the count, 1e-8 in verl.

    Returns:
        One number per row; 1 for an empty row.

    Example:
        >>> perplexity(torch.tensor([[0.25, 0.25]]).log(), torch.tensor([[True, True]]))
        tensor([4.])
    """
    return (-row_mean(logprobs, mask, eps)).exp()


def chi_square(log_ratio: Float[Tensor, "*shape"], clamp: float = 20.0) -> Float[Tensor, "*shape"]:
    """The chi-square divergence, per sample: how much importance sampling raises the variance.

        chi^2 = (pi / mu)^2 - 1,   in expectation under mu

    Paper: Owen, "Monte Carlo theory, methods and examples".

    Args:
        log_ratio: d of `rollout_log_ratio`, per token, or its `row_sum`.
        clamp: bound on |d|; 20 as in verl.

    Returns:
        One number per sample.

    Example:
        >>> chi_square(torch.tensor([0.0, 2.0]).log().nan_to_num(neginf=-20.0))
        tensor([-1.,  3.])
    """
    return log_ratio.clamp(-clamp, clamp).exp().square() - 1


def dropped_rows(keep: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Bool[Tensor, " B"]:
    """Which completions have lost a token.

        any_t (m_it and not keep_it)

    Args:
        keep: what a rejection keeps.
        mask: True where the model wrote the token.

    Returns:
        True for a row that is not whole.

    Example:
        >>> dropped_rows(torch.tensor([[True, False], [True, True]]), torch.tensor([[True, True], [True, True]]))
        tensor([ True, False])
    """
    return row_sum((~keep).float(), mask) > 0


class WeightSpread(TypedDict):
    """What `weight_spread` gives, each a scalar."""

    mean: Tensor
    std: Tensor
    highest: Tensor
    lowest: Tensor
    max_deviation: Tensor


def weight_spread(weights: Float[Tensor, " N"]) -> WeightSpread:
    """How far a set of weights is from all being 1, which they are where engine and trainer agree.

        mean w, std w (divided by N - 1; 0 for N = 1), max w, min w, max |w - 1|

    Args:
        weights: one per completion, say `row_mean` of a correction's.

    Returns:
        The five numbers by name.

    Raises:
        ValueError: there are no weights.

    Example:
        >>> weight_spread(torch.tensor([0.5, 1.0, 1.2]))["max_deviation"]
        tensor(0.5000)
    """
    if not len(weights):
        raise ValueError("weight_spread needs at least one weight")
    std = weights.std() if len(weights) > 1 else weights.new_zeros(())
    return WeightSpread(
        mean=weights.mean(),
        std=std,
        highest=weights.max(),
        lowest=weights.min(),
        max_deviation=(weights - 1).abs().max(),
    )
