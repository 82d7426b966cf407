"""A reward, an advantage and a loss, as functions that a config names (docs/guides/custom_functions.md)."""

import torch
from torch import Tensor

from atomrl.objectives import AdvantageInputs, PolicyInputs
from atomrl.rewards.answers import answers_equal
from atomrl.rewards.format import extract_answer


def right_and_brief(prompts, completions, ground_truth, completion_tokens, per_token=0.005, **columns):
    """1 for the right answer, less a little for each token; 0 for any other."""
    return [
        max(0.0, 1 - per_token * tokens) if answers_equal(extract_answer(text), truth) else 0.0
        for text, truth, tokens in zip(completions, ground_truth, completion_tokens, strict=True)
    ]


def with_entropy(inputs: AdvantageInputs, alpha: float = 0.4, kappa: float = 2.0) -> Tensor:
    """The reward less its group's mean, and more for tokens at which the policy was unsure (arXiv:2506.14758).

    A_{i,t} = A_i + min(alpha H_{i,t}, |A_i| / kappa),   A_i = r_i - mean_group r
    """
    advantages = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        own = inputs.group_ids == group
        advantages[own] = inputs.rewards[own] - inputs.rewards[own].mean()
    bonus = alpha * inputs.old_entropy  # [B, T]; the config asks for it: reads: [old_entropy]
    return advantages[:, None] + torch.minimum(bonus, advantages[:, None].abs() / kappa)


def tapered(inputs: PolicyInputs, high: float = 1.0) -> tuple[Tensor, Tensor]:
    """TOPR by token: good tokens are imitated, bad ones weighed by a ratio of at most `high` (arXiv:2503.14286).

    maximise w A log pi(a_t),   w = 1 where A >= 0, else sg[min(rho, high)]
    """
    bad, ratio = inputs.advantages < 0, inputs.log_ratio.detach().exp()
    weights = torch.where(bad, ratio.clamp(max=high), torch.ones_like(ratio))
    return -weights * inputs.advantages * inputs.logprobs, bad & (ratio > high)
