"""Dr. GRPO: GRPO without its two biases.

    A_i = r_i - mean_group r
    maximise  1/(N L) sum_i sum_t min(rho_{i,t} A_i, clip(rho_{i,t}, 0.8, 1.2) A_i),    L constant

Differs from GRPO: no division by the standard deviation, which gives prompts that are nearly always or never solved a
higher weight; and division by a constant (the rollout's `max_completion_tokens`) instead of each completion's length,
which penalises long wrong answers too little.

Paper: arXiv:2503.20783.
"""

from atomrl.objectives import PolicyObjective, advantage, policy_loss

DR_GRPO = PolicyObjective(
    name="dr_grpo", advantage=advantage.GRPONoStdAdvantage(), loss_agg=policy_loss.ConstantLength()
)
