"""How much likelier a token is now than when it was sampled."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def token_log_ratio(
    logprobs: Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Log of the likelihood ratio of each token, 0 off the mask.

        log rho_t = log pi_theta(a_t | s_t) - log pi_old(a_t | s_t)

    The mask is applied here, before any `exp`: an overflow off the mask would make its gradient NaN even if the
    result were masked afterwards.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.

    Returns:
        Log-ratios; gradients flow to `logprobs` under the mask only.

    Example:
        >>> token_log_ratio(torch.tensor([[-1.0, 9.0]]), torch.tensor([[-1.5, 0.0]]), torch.tensor([[True, False]]))
        tensor([[0.5000, 0.0000]])
    """
    return (logprobs - old_logprobs).masked_fill(~mask, 0.0)


def token_ratio(
    logprobs: Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The likelihood ratio of each token, 1 off the mask.

        rho_t = pi_theta(a_t | s_t) / pi_old(a_t | s_t)

    Paper: PPO, arXiv:1707.06347, section 3. The log-ratio is not clamped (as in TRL; verl clamps it to 20).

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.

    Returns:
        Ratios.

    Example:
        >>> token_ratio(torch.tensor([[0.0]]), torch.tensor([[0.0]]), torch.tensor([[True]]))
        tensor([[1.]])
    """
    return token_log_ratio(logprobs, old_logprobs, mask).exp()
