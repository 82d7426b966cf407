"""Estimators of the KL divergence of the policy from a reference, per sampled token.

With tokens drawn from the policy and d_t = log pi_theta - log pi_ref (Schulman, "Approximating KL divergence", 2020).
As a *loss*, k1 has a gradient of mean zero: use k2 or k3 there (k2's gradient is that of the KL itself).
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from atomrl.atoms.ratios import token_log_ratio


def k1_kl(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The plain estimator: unbiased, of high variance, negative for some tokens.

        k1_t = log pi_theta(a_t) - log pi_ref(a_t)

    Paper: Schulman, "Approximating KL divergence" (2020).

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.

    Returns:
        Estimate per token in nats, 0 off the mask.

    Example:
        >>> k1_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.5000]])
    """
    return token_log_ratio(logprobs, ref_logprobs, mask)


def k2_kl(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Half the squared log-ratio: biased, of low variance; its gradient is that of the KL in expectation.

        k2_t = (log pi_theta(a_t) - log pi_ref(a_t))^2 / 2

    Paper: Schulman, "Approximating KL divergence" (2020).

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.

    Returns:
        Estimate per token in nats, 0 off the mask.

    Example:
        >>> k2_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.1250]])
    """
    return token_log_ratio(logprobs, ref_logprobs, mask).square() / 2


def k3_kl(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The estimator of GRPO's KL term: unbiased, never negative.

        k3_t = pi_ref(a_t) / pi_theta(a_t) - 1 - (log pi_ref(a_t) - log pi_theta(a_t))

    Paper: DeepSeekMath, arXiv:2402.03300, equation 4. Not clamped (as in TRL; verl clamps input and output).

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.

    Returns:
        Estimate per token in nats, 0 off the mask.

    Example:
        >>> k3_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.1065]])
    """
    difference = -token_log_ratio(logprobs, ref_logprobs, mask)
    return difference.expm1() - difference
