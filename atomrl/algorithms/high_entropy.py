"""High-entropy tokens: train only on tokens where the policy is uncertain.

    maximise  1/sum_j |o_j| sum_{i,t} [H_{i,t} in the step's top 20%] min(rho A, clip(rho, 0.8, 1.28) A),   A of GRPO

Differs from DAPO, its parent: tokens with a low entropy have no loss. The entropy is that of the policy at the start of
the step, and its quantile is over all rows of the step. Any algorithm takes `token_filter: high_entropy`, with a
`fraction` or a number of `tokens`; `token_filter: random` is the control.

Paper: "Beyond the 80/20 rule", arXiv:2506.01939, equation 7.
"""

from atomrl.objectives import PolicyObjective, advantage, policy_loss, token_weights

HIGH_ENTROPY = PolicyObjective(
    name="high_entropy",
    clip=policy_loss.PPOClip(low=0.2, high=0.28),
    token_filter=token_weights.HighEntropy(fraction=0.2),
    shaping=advantage.Shaping(soft_overlong=True),
    group_filter=advantage.MixedOutcomes(),
)
