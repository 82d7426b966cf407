"""KL divergence of the policy from a reference: estimators per sampled token, and the adaptive coefficient.

With tokens drawn from the policy and d_t = log pi_theta - log pi_ref (Schulman, "Approximating KL divergence", 2020).
As a *loss*, k1 has a gradient with mean zero: use k2 or k3 (k2's gradient is the KL's), or multiply k1 or k3 by
`token_ratio`, which restores the score-function part of the gradient (DeepSeek-V3.2, arXiv:2512.02556; TRL's
`use_bias_correction_kl`).

The estimators are not clamped, as in TRL. verl, SkyRL and NeMo-RL bound |d_t| by 20 and k3 by 10: that is
`k3_kl(token_log_ratio(logprobs, ref_logprobs, mask, clamp=20.0), zeros, mask).clamp(max=10.0)`.
"""

import torch

from atomrl.atoms import atom
from atomrl.atoms.masks import Mask, PerPosition, PerToken, Vocabulary
from atomrl.atoms.policy_losses import token_log_ratio


@atom(
    "k1 = log pi - log pi_ref",
    latex=r"k_1 = \log \pi_\theta - \log \pi_{\mathrm{ref}}",
    paper='Schulman, "Approximating KL divergence" (2020)',
)
def k1_kl(logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """KL estimator k1: unbiased, of high variance, negative for some tokens.

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


@atom(
    "abs = |log pi - log pi_ref|",
    latex=r"|\log \pi_\theta - \log \pi_{\mathrm{ref}}|",
)
def abs_kl(logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """KL estimator "abs", the absolute log-ratio: biased, never negative and not dominated by outliers.

    An option of verl, SkyRL and ROLL, and the penalty of KL-Cov (arXiv:2505.22617).

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.

    Returns:
        Nats per token, 0 off the mask; its gradient is 0 where both agree.

    Example:
        >>> abs_kl(torch.tensor([[-1.5]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
        tensor([[0.5000]])
    """
    return token_log_ratio(logprobs, ref_logprobs, mask).abs()


@atom(
    "k2 = (log pi - log pi_ref)^2 / 2",
    latex=r"k_2 = \tfrac12 (\log \pi_\theta - \log \pi_{\mathrm{ref}})^2",
    paper='Schulman, "Approximating KL divergence" (2020)',
)
def k2_kl(logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """KL estimator k2, half the squared log-ratio: biased, of low variance; its gradient is that of the KL.

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


@atom(
    "k3 = pi_ref / pi - 1 - log(pi_ref / pi)",
    latex=r"k_3 = \frac{\pi_{\mathrm{ref}}}{\pi_\theta} - 1 - \log \frac{\pi_{\mathrm{ref}}}{\pi_\theta}",
    paper="DeepSeekMath, arXiv:2402.03300, equation 4",
)
def k3_kl(logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """KL estimator k3, of GRPO's KL term: unbiased, never negative.

    The same as verl's `low_var_kl`, without its clamps.

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


@atom(
    "sg[estimate_t] + k2_t - sg[k2_t]",
    paper='"On a few pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477',
)
def k2_gradient(estimate: PerToken, logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """Straight-through KL estimate: the value of any estimator with k2's gradient, which is the KL's.

    It is the trailing "+" of verl's estimators; the gradient is not clamped, even where the value is.

    Args:
        estimate: of any estimator.
        logprobs: of the policy, with gradient.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.

    Returns:
        Estimate per token in nats.

    Example:
        >>> logprobs, ref, mask = torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]])
        >>> k2_gradient(k1_kl(logprobs, ref, mask), logprobs, ref, mask)
        tensor([[0.5000]])
    """
    surrogate = k2_kl(logprobs, ref_logprobs, mask)
    return estimate.detach() + surrogate - surrogate.detach()


@atom(
    "KL(p || q) = sum_v p_v (log p_v - log q_v)",
    paper='Kullback and Leibler, "On information and sufficiency" (1951)',
)
def distribution_kl(logprobs: Vocabulary, other_logprobs: Vocabulary) -> PerPosition:
    """KL divergence of two distributions, summed over the last dimension: the vocabulary, or a part of it.

    Differs from the estimators: no sampling noise, and it needs whole distributions.

    Args:
        logprobs: log p. Over a part of the vocabulary, not normalised again, the sum may be negative.
        other_logprobs: log q.

    Returns:
        Nats per position, with gradient to both.

    Example:
        >>> distribution_kl(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log())
        tensor(0.1438)
    """
    return (logprobs.exp() * torch.where(logprobs == -torch.inf, 0.0, logprobs - other_logprobs)).sum(-1)


@atom(
    "beta' = beta (1 + clip(KL / KL_target - 1, -0.2, 0.2) n / horizon)",
    paper='Ziegler et al., "Fine-tuning language models from human preferences", arXiv:1909.08593, section 2.2',
)
def adaptive_coefficient(
    coefficient: float, current_kl: float, target_kl: float, horizon: float, samples: float
) -> float:
    """Adaptive KL controller: the coefficient after a step, raised where the KL is above its target.

    Args:
        coefficient: beta.
        current_kl: mean KL of the step, in nats.
        target_kl: above 0, in nats.
        horizon: samples after which a full error has multiplied beta by about e^0.2; `inf` keeps beta as it is.
        samples: completions of the step.

    Returns:
        The next coefficient.

    Raises:
        ValueError: the target or the horizon is not above 0.

    Example:
        >>> round(adaptive_coefficient(0.1, current_kl=9.0, target_kl=6.0, horizon=1000.0, samples=100.0), 6)
        0.102
    """
    if not target_kl > 0 or not horizon > 0:
        raise ValueError(f"target_kl={target_kl} and horizon={horizon} must be above 0")
    error = min(max(current_kl / target_kl - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)
