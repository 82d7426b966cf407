"""Importance ratios of the policy to the old policy, as log-ratios.

Three levels to choose from: by token (PPO), by completion (GSPO), and by completion with the gradient of each token on
its own (GSPO-token). The ratio is the exponential of each.
"""

from atomrl.atoms.masks import row_mean, row_sum
from atomrl.atoms.shapes import Mask, PerRow, PerToken


def token_log_ratio(logprobs: PerToken, old_logprobs: PerToken, mask: Mask, clamp: float | None = None) -> PerToken:
    """Log importance ratio of each token, 0 off the mask.

        log rho_t = log pi_theta(a_t | s_t) - log pi_old(a_t | s_t)

    The mask is applied here, before any `exp`: an overflow off the mask would make its gradient NaN even if the
    result were masked afterwards.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        clamp: bound on the absolute value; a token beyond it has no gradient. The default is none, as in TRL, AReaL,
            slime, NeMo-RL and ROLL: a ratio that far off is a fault that should be seen. verl, SkyRL and OpenRLHF
            bound it by 20.

    Returns:
        Log-ratios; gradients flow to `logprobs` under the mask only.

    Example:
        >>> token_log_ratio(torch.tensor([[-1.0, 9.0]]), torch.tensor([[-1.5, 0.0]]), torch.tensor([[True, False]]))
        tensor([[0.5000, 0.0000]])
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    return log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp)


def token_ratio(logprobs: PerToken, old_logprobs: PerToken, mask: Mask, clamp: float | None = None) -> PerToken:
    """Importance ratio of each token, 1 off the mask.

        rho_t = pi_theta(a_t | s_t) / pi_old(a_t | s_t)

    Paper: PPO, arXiv:1707.06347, section 3.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        clamp: as in `token_log_ratio`.

    Returns:
        Ratios.

    Example:
        >>> token_ratio(torch.tensor([[0.0]]), torch.tensor([[0.0]]), torch.tensor([[True]]))
        tensor([[1.]])
    """
    return token_log_ratio(logprobs, old_logprobs, mask, clamp).exp()


def sequence_log_ratio(
    logprobs: PerToken, old_logprobs: PerToken, mask: Mask, length_normalised: bool = True, clamp: float | None = None
) -> PerRow:
    """Log importance ratio of each completion.

        s_i = (1 / |m_i|) sum_t m_it log rho_it       (the sum alone without length normalisation)

    Paper: GSPO, arXiv:2507.18071, equation 7. Differs from PPO: one ratio for all tokens of a completion, with the
    gradient shared between them. The sum is the exact ratio of the completions' probabilities (RLOO's sequence-level
    PPO); the mean, GSPO's, does not grow with the length.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        length_normalised: divide by the number of tokens.
        clamp: bound on the absolute value of the result, as in `token_log_ratio`.

    Returns:
        One log-ratio per row, with gradient; 0 for an empty row. `per_token` spreads it.

    Example:
        >>> logprobs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]])
        >>> sequence_log_ratio(logprobs, old, torch.tensor([[True, True]]))
        tensor([0.5000])
        >>> sequence_log_ratio(logprobs, old, torch.tensor([[True, True]]), length_normalised=False)
        tensor([1.])
    """
    tokens = token_log_ratio(logprobs, old_logprobs, mask)
    rows = row_mean(tokens, mask) if length_normalised else row_sum(tokens, mask)
    return rows if clamp is None else rows.clamp(-clamp, clamp)


def sequence_token_log_ratio(
    logprobs: PerToken, old_logprobs: PerToken, mask: Mask, ceiling: float | None = None
) -> PerToken:
    """GSPO-token log-ratio: the completion's in value, with the gradient of each token's own log-prob.

        log s_it = sg[s_i] + log pi_theta(a_t) - sg[log pi_theta(a_t)],   s_i of `sequence_log_ratio`

    Paper: GSPO, arXiv:2507.18071 (GSPO-token). With one advantage per completion its gradient equals
    GSPO's; it differs where advantages differ between tokens.

    Args:
        logprobs: of the policy, with gradient.
        old_logprobs: of the policy at the start of the step.
        mask: True where the model wrote the token.
        ceiling: upper bound, beyond which a token has no gradient. The default is none, as in TRL; verl and SkyRL
            have 10.

    Returns:
        Log-ratios per token, 0 off the mask.

    Example:
        >>> logprobs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.1]])
        >>> sequence_token_log_ratio(logprobs, old, torch.tensor([[True, True]]))
        tensor([[0.3000, 0.3000]])
    """
    rows = sequence_log_ratio(logprobs.detach(), old_logprobs, mask)
    own = token_log_ratio(logprobs, logprobs.detach(), mask)
    log_ratio = (own + rows[:, None]).masked_fill(~mask, 0.0)
    return log_ratio if ceiling is None else log_ratio.clamp(max=ceiling)
