"""Estimators of the KL divergence of the policy from a reference, per sampled token, and its coefficient.

With tokens drawn from the policy and d_t = log pi_theta - log pi_ref (Schulman, "Approximating KL divergence", 2020).
As a *loss*, k1 has a gradient of mean zero: use k2 or k3 there (k2's gradient is that of the KL itself), or give k1 or
k3 a `weight` with gradient, which adds the part of the gradient that sampling hides.

All estimators share three options. The defaults are the plain estimators; where peers disagree:

- `input_clamp` bounds |d_t|: 20 for k3 in verl, SkyRL and NeMo-RL; none in TRL, OpenRLHF, AReaL, slime and ROLL.
- `output_clamp` bounds the estimate: 10 for k3 in verl, SkyRL, NeMo-RL and ROLL, for all in OpenRLHF; none in TRL.
- `weight` multiplies the estimate before the output clamp. A token beyond a clamp has no gradient, nor has its weight.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from atomrl.atoms.ratios import token_log_ratio


def k1_kl(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """The plain estimator: unbiased, of high variance, negative for some tokens.

        k1_t = log pi_theta(a_t) - log pi_ref(a_t)

    Paper: Schulman, "Approximating KL divergence" (2020).

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.
        input_clamp: see the module.
        output_clamp: see the module.
        weight: see the module.

    Returns:
        Estimate per token in nats, 0 off the mask.

    Example:
        >>> k1_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.5000]])
    """
    difference = token_log_ratio(logprobs, ref_logprobs, mask)
    estimate = difference if input_clamp is None else difference.clamp(-input_clamp, input_clamp)
    return _bounded(estimate, difference, mask, input_clamp, output_clamp, weight)


def abs_kl(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """The absolute log-ratio: no estimator of the KL, but never negative and not dominated by outliers.

        abs_t = |log pi_theta(a_t) - log pi_ref(a_t)|

    Paper: none; an option of verl, SkyRL and ROLL, and the penalty of KL-Cov (arXiv:2505.22617).

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.
        input_clamp: see the module.
        output_clamp: see the module.
        weight: see the module.

    Returns:
        Nats per token, 0 off the mask; its gradient is 0 where both agree.

    Example:
        >>> abs_kl(torch.tensor([[-1.5]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
        tensor([[0.5000]])
    """
    return _bounded(
        k1_kl(logprobs, ref_logprobs, mask, input_clamp).abs(),
        token_log_ratio(logprobs, ref_logprobs, mask),
        mask,
        input_clamp,
        output_clamp,
        weight,
    )


def k2_kl(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Half the squared log-ratio: biased, of low variance; its gradient is that of the KL in expectation.

        k2_t = (log pi_theta(a_t) - log pi_ref(a_t))^2 / 2

    Paper: Schulman, "Approximating KL divergence" (2020).

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.
        input_clamp: see the module.
        output_clamp: see the module.
        weight: see the module.

    Returns:
        Estimate per token in nats, 0 off the mask.

    Example:
        >>> k2_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.1250]])
    """
    return _bounded(
        k1_kl(logprobs, ref_logprobs, mask, input_clamp).square() / 2,
        token_log_ratio(logprobs, ref_logprobs, mask),
        mask,
        input_clamp,
        output_clamp,
        weight,
    )


def k3_kl(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """The estimator of GRPO's KL term: unbiased, never negative.

        k3_t = pi_ref(a_t) / pi_theta(a_t) - 1 - (log pi_ref(a_t) - log pi_theta(a_t))

    Paper: DeepSeekMath, arXiv:2402.03300, equation 4; with the ratio to the old policy as weight, DeepSeek-V3.2,
    arXiv:2512.02556.

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        mask: True where the model wrote the token.
        input_clamp: see the module.
        output_clamp: see the module.
        weight: see the module.

    Returns:
        Estimate per token in nats, 0 off the mask.

    Example:
        >>> k3_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.1065]])
    """
    difference = -k1_kl(logprobs, ref_logprobs, mask, input_clamp)
    estimate = difference.expm1() - difference
    log_ratio = token_log_ratio(logprobs, ref_logprobs, mask)
    return _bounded(estimate, log_ratio, mask, input_clamp, output_clamp, weight)


def k2_gradient(
    estimate: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """An estimate in value, with the gradient of k2, which is that of the KL in expectation.

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


def jensen_shannon_estimate(
    logprobs: Float[Tensor, "B T"], other_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """How far two policies are from their mixture, by k3: a symmetric measure of the gap between engine and trainer.

        JS_t = (k3(log m, log p) + k3(log m, log q)) / 2,    m = (p + q) / 2

    Paper: Lin, "Divergence measures based on the Shannon entropy" (1991), with Schulman's k3 in the place of the KL.

    Args:
        logprobs: log p of the sampled tokens.
        other_logprobs: log q of the same tokens.
        mask: True where the model wrote the token.

    Returns:
        Estimate per token in nats, 0 off the mask.

    Example:
        >>> logprobs, other = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
        >>> jensen_shannon_estimate(logprobs, other, torch.tensor([[True]]))
        tensor([[0.0589]])
    """
    p, q = logprobs.masked_fill(~mask, 0.0), other_logprobs.masked_fill(~mask, 0.0)
    mixture = torch.logaddexp(p, q) - math.log(2)
    return (k3_kl(mixture, p, mask) + k3_kl(mixture, q, mask)) / 2


def kl_terms(
    logprobs: Float[Tensor, "*batch V"], other_logprobs: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch V"]:
    """What each value of the vocabulary adds to a KL divergence.

        p_v (log p_v - log q_v)

    Paper: Kullback and Leibler, "On information and sufficiency" (1951).

    Args:
        logprobs: log p.
        other_logprobs: log q.

    Returns:
        Nats per value, with gradient to both; 0 where p = 0.

    Example:
        >>> kl_terms(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log())
        tensor([-0.2027,  0.3466])
    """
    return logprobs.exp() * torch.where(logprobs == -torch.inf, 0.0, logprobs - other_logprobs)


def distribution_kl(
    logprobs: Float[Tensor, "*batch V"], other_logprobs: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """The KL divergence itself, summed over the vocabulary (or over the part of it that is given).

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
    return kl_terms(logprobs, other_logprobs).sum(-1)


def adaptive_coefficient(
    coefficient: float, current_kl: float, target_kl: float, horizon: float, samples: float, max_error: float = 0.2
) -> float:
    """The KL coefficient after a step: raised where the KL is above its target, lowered where it is below.

        beta' = beta (1 + clip(KL / KL_target - 1, -0.2, 0.2) n / horizon)

    Paper: Ziegler et al., "Fine-tuning language models from human preferences", arXiv:1909.08593, section 2.2.

    Args:
        coefficient: beta.
        current_kl: mean KL of the step, in nats.
        target_kl: above 0, in nats.
        horizon: samples after which a full error has multiplied beta by about e^0.2; `inf` keeps beta as it is.
        samples: completions of the step.
        max_error: bound on the relative error.

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
    error = min(max(current_kl / target_kl - 1, -max_error), max_error)
    return coefficient * (1 + error * samples / horizon)


def _bounded(
    estimate: Tensor,
    difference: Tensor,
    mask: Tensor,
    input_clamp: float | None,
    output_clamp: float | None,
    weight: Tensor | None,
) -> Tensor:
    if weight is not None:
        factor = weight.masked_fill(~mask, 0.0)
        if input_clamp is not None:
            factor = torch.where(difference.abs() > input_clamp, factor.detach(), factor)
        estimate = estimate * factor
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)
