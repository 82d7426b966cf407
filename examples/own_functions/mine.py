"""A custom reward, advantage and loss, which grpo.yaml names (docs/guides/custom_functions.md)."""

import torch
from torch import Tensor

from atomrl.objectives import AdvantageInputs, PolicyInputs
from atomrl.rewards.answers import answers_equal
from atomrl.rewards.extraction import extract_answer


def right_and_brief(prompts, completions, ground_truth, completion_tokens, per_token=0.005, **columns):
    """Return 1 minus `per_token` for each token if the answer is right, else 0."""
    return [
        max(0.0, 1 - per_token * tokens) if answers_equal(extract_answer(text), truth) else 0.0
        for text, truth, tokens in zip(completions, ground_truth, completion_tokens, strict=True)
    ]


def with_entropy(inputs: AdvantageInputs, alpha: float = 0.4, kappa: float = 2.0) -> Tensor:
    """Add a bonus for tokens with high entropy to the reward minus the mean of its group (arXiv:2506.14758).

    A_{i,t} = A_i + min(alpha H_{i,t}, |A_i| / kappa),   A_i = r_i - mean_group r
    """
    advantages = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        own = inputs.group_ids == group
        advantages[own] = inputs.rewards[own] - inputs.rewards[own].mean()
    bonus = alpha * inputs.old_entropy  # [B, T]; the config requests it: reads: [old_entropy]
    return advantages[:, None] + torch.minimum(bonus, advantages[:, None].abs() / kappa)


def tapered(inputs: PolicyInputs, high: float = 1.0) -> tuple[Tensor, Tensor]:
    """Per-token TOPR: weight 1 for tokens with A >= 0, else the ratio, at most `high` (arXiv:2503.14286).

    maximise w A log pi(a_t),   w = 1 where A >= 0, else sg[min(rho, high)]
    """
    bad, ratio = inputs.advantages < 0, inputs.log_ratio.detach().exp()
    weights = torch.where(bad, ratio.clamp(max=high), torch.ones_like(ratio))
    return -weights * inputs.advantages * inputs.logprobs, bad & (ratio > high)
