"""GRPO: group-relative policy optimization, as commonly used today.

    A_i = (r_i - mean_group r) / (std_group r + eps)
    maximise  1/sum_j |o_j| sum_{i,t} min(rho_{i,t} A_i, clip(rho_{i,t}, 1 - 0.2, 1 + 0.2) A_i)

Differs from the paper: a mean over all tokens, which does not favour long wrong answers, and no KL. The paper's
settings, `loss_agg: sequence_mean` and `kl: {coefficient: 0.04}`, are in configs/algorithms/grpo.yaml:

    maximise  1/G sum_i 1/|o_i| sum_t min(rho_{i,t} A_i, clip(rho_{i,t}, 1 - 0.2, 1 + 0.2) A_i) - beta k3_{i,t}

Paper: DeepSeekMath, arXiv:2402.03300, equations 3 and 4.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary, policy_loss

GRPO = PolicyObjective(
    name="grpo",
    advantage=advantage.GRPOAdvantage(),
    clip=policy_loss.PPOClip(),
    kl=auxiliary.K3(coefficient=0.0),
    loss_agg=policy_loss.TokenMean(),
)
