"""DPPO: trust-region masks by the divergence of probabilities, not by their ratio.

A ratio overstates the move of an unlikely token and understates that of a likely one. Here the change of the sampled
token's probability, or the divergence of the two-outcome distribution "this token or another", decides.
"""

from atomrl.atoms.shapes import Mask, PerToken


def probability_change(logprobs: PerToken, old_logprobs: PerToken, mask: Mask) -> PerToken:
    """Change in the probability of each token; its absolute value is the binary total variation.

        d_t = pi_theta(a_t) - pi_old(a_t)

    Paper: DPPO, arXiv:2602.04879.

    Args:
        logprobs: of the policy; detached.
        old_logprobs: of the policy that the tokens came from.
        mask: True where the model wrote the token.

    Returns:
        Change in probability, between -1 and 1, without gradient; 0 off the mask.

    Example:
        >>> probability_change(torch.tensor([[0.5]]).log(), torch.tensor([[0.3]]).log(), torch.tensor([[True]]))
        tensor([[0.2000]])
    """
    return logprobs.detach().masked_fill(~mask, 0.0).exp() - old_logprobs.masked_fill(~mask, 0.0).exp()


def binary_kl(logprobs: PerToken, old_logprobs: PerToken, mask: Mask, eps: float = 1e-8) -> PerToken:
    """Binary KL divergence, of "this token or another" under the old policy from that under the new.

        D_t = q (log q - log p) + (1 - q) log((1 - q + eps) / (1 - p + eps)),    p = pi_theta(a_t), q = pi_old(a_t)

    Paper: DPPO, arXiv:2602.04879. A lower bound of the KL over the whole vocabulary.

    Args:
        logprobs: of the policy; detached.
        old_logprobs: of the policy that the tokens came from.
        mask: True where the model wrote the token.
        eps: against a division by 0 where a token is certain; 1e-8 as in verl and SkyRL.

    Returns:
        Nats per token, without gradient; 0 off the mask.

    Example:
        >>> binary_kl(torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log(), torch.tensor([[True]]))
        tensor([[0.1438]])
    """
    new, old = logprobs.detach().masked_fill(~mask, 0.0), old_logprobs.masked_fill(~mask, 0.0)
    p, q = new.exp(), old.exp()
    return q * (old - new) + (1 - q) * ((1 - q + eps) / (1 - p + eps)).log()


def trust_region_tokens(
    change: PerToken, divergence: PerToken, advantages: PerToken, low: float = 0.2, high: float = 0.2
) -> Mask:
    """DPPO's trust-region mask: tokens near the old policy, or on their way back to it.

        keep_t = not (A_t > 0 and d_t > 0 and D_t > high) and not (A_t < 0 and d_t < 0 and D_t > low)

    Paper: DPPO, arXiv:2602.04879. Differs from PPO's clip: the divergence is bounded, not the ratio.

    Args:
        change: d_t of `probability_change`, whose sign says where the token has moved.
        divergence: D_t, the absolute change or `binary_kl`.
        advantages: per token. A token of advantage 0 is kept, as in SkyRL: it has no loss, so that dropping it would
            only distort the fraction that is dropped (verl and prime-rl treat it as negative).
        low: bound for tokens that became less likely.
        high: bound for tokens that became likelier.

    Returns:
        True where the token is kept.

    Example:
        >>> change, advantages = torch.tensor([[0.3, 0.3, -0.3]]), torch.tensor([[1.0, -1.0, -1.0]])
        >>> trust_region_tokens(change, change.abs(), advantages)
        tensor([[False,  True, False]])
    """
    too_likely = (advantages > 0) & (change > 0) & (divergence > high)
    too_unlikely = (advantages < 0) & (change < 0) & (divergence > low)
    return ~(too_likely | too_unlikely)
