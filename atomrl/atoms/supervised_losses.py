"""Supervised losses per token: negative log-likelihood and DFT. Reduce as any other loss."""

import torch

from atomrl.atoms.policy_losses import reinforce_loss
from atomrl.atoms.shapes import Mask, PerToken


def nll_loss(logprobs: PerToken, mask: Mask) -> PerToken:
    """Negative log-likelihood of demonstrated tokens: supervised fine-tuning.

        L_t = -log pi_theta(a_t)

    Paper: InstructGPT, arXiv:2203.02155, section 3.5. It is REINFORCE with an advantage of 1.

    Args:
        logprobs: of the demonstrated tokens, with gradient.
        mask: True where the token is to be learned.

    Returns:
        Nats per token, 0 off the mask.

    Example:
        >>> nll_loss(torch.tensor([[-0.5, -2.0]]), torch.tensor([[True, True]]))
        tensor([[0.5000, 2.0000]])
    """
    return reinforce_loss(logprobs, torch.ones_like(logprobs), mask)


def dft_loss(logprobs: PerToken, mask: Mask) -> PerToken:
    """DFT loss (dynamic fine-tuning): log-likelihood, weighted by how likely the token already is.

        L_t = -sg[pi_theta(a_t)] log pi_theta(a_t)

    Paper: DFT, arXiv:2508.05629. Differs from the NLL: its gradient lacks the factor 1/pi, with which
    unlikely tokens of a demonstration dominate.

    Args:
        logprobs: of the demonstrated tokens, with gradient.
        mask: True where the token is to be learned.

    Returns:
        Loss per token, 0 off the mask.

    Example:
        >>> dft_loss(torch.tensor([[0.5]]).log(), torch.tensor([[True]]))
        tensor([[0.3466]])
    """
    weights = logprobs.detach().masked_fill(~mask, 0.0).exp()
    return reinforce_loss(logprobs, torch.ones_like(logprobs), mask, weights)
