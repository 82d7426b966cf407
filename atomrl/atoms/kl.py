"""KL divergence of the policy from a reference: estimators per sampled token, and the adaptive coefficient.

With tokens drawn from the policy and d_t = log pi_theta - log pi_ref (Schulman, "Approximating KL divergence", 2020).
As a *loss*, k1 has a gradient of mean zero: use k2 or k3 there (k2's gradient is that of the KL itself), or multiply k1
or k3 by `token_ratio`, which adds the part of the gradient that sampling hides (DeepSeek-V3.2, arXiv:2512.02556; TRL's
`use_bias_correction_kl`).

The estimators are not clamped, as in TRL. verl, SkyRL and NeMo-RL bound |d_t| by 20 and k3 by 10: that is
`k3_kl(token_log_ratio(logprobs, ref_logprobs, mask, clamp=20.0), zeros, mask).clamp(max=10.0)`.
"""

import torch

from atomrl.atoms.masks import Mask, PerPosition, PerToken, Vocabulary
from atomrl.atoms.ratios import token_log_ratio


def k1_kl(logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """KL estimator k1: unbiased, of high variance, negative for some tokens.

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


def abs_kl(logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """KL estimator "abs", the absolute log-ratio: biased, never negative and not dominated by outliers.

        abs_t = |log pi_theta(a_t) - log pi_ref(a_t)|

    Paper: none; an option of verl, SkyRL and ROLL, and the penalty of KL-Cov (arXiv:2505.22617).

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


def k2_kl(logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """KL estimator k2, half the squared log-ratio: biased, of low variance; its gradient is that of the KL.

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


def k3_kl(logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """KL estimator k3, of GRPO's KL term: unbiased, never negative.

        k3_t = pi_ref(a_t) / pi_theta(a_t) - 1 - (log pi_ref(a_t) - log pi_theta(a_t))

    Paper: DeepSeekMath, arXiv:2402.03300, equation 4. verl's `low_var_kl`, without its clamps.

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


def k2_gradient(estimate: PerToken, logprobs: PerToken, ref_logprobs: PerToken, mask: Mask) -> PerToken:
    """Straight-through KL estimate: the value of any estimator with the gradient of k2, which is that of the KL.

        sg[estimate_t] + k2_t - sg[k2_t]

    Paper: "On a few pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477. It is the trailing "+" of
    verl's estimators; the gradient is not clamped, even where the value is.

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


def distribution_kl(logprobs: Vocabulary, other_logprobs: Vocabulary) -> PerPosition:
    """KL divergence of two distributions, summed over the vocabulary (or over the part of it that is given).

        KL(p || q) = sum_v p_v (log p_v - log q_v)

    Paper: Kullback and Leibler, "On information and sufficiency" (1951). Differs from the estimators: no sampling
    noise, and it needs whole distributions.

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


def adaptive_coefficient(
    coefficient: float, current_kl: float, target_kl: float, horizon: float, samples: float
) -> float:
    """Adaptive KL controller: the coefficient after a step, raised where the KL is above its target.

        beta' = beta (1 + clip(KL / KL_target - 1, -0.2, 0.2) n / horizon)

    Paper: Ziegler et al., "Fine-tuning language models from human preferences", arXiv:1909.08593, section 2.2.

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
