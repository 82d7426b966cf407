"""GRPO: group-relative policy optimization.

    A_i = (r_i - mean_group r) / (std_group r + eps)
    maximise  1/G sum_i 1/|o_i| sum_t min(rho_{i,t} A_i, clip(rho_{i,t}, 1 - 0.2, 1 + 0.2) A_i) - beta k3_{i,t}

Paper: DeepSeekMath, arXiv:2402.03300, equations 3 and 4. The paper averages over sequences; the default here is the
token mean, which does not favour long wrong answers, and no KL, as most use it today: `aggregate: sequence_mean` and
`kl: {coefficient: 0.04}` give the paper's own setting.
"""

from __future__ import annotations

from atomrl.objective import Advantage, Aggregate, Clip, Kl, Objective

GRPO = Objective(
    advantage=Advantage("grpo", eps=1e-6),
    clip=Clip("ppo", low=0.2, high=0.2),
    kl=Kl("k3", coefficient=0.0),
    aggregate=Aggregate("token_mean"),
)
