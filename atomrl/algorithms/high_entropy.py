"""High-entropy tokens only: the policy learns where it hesitates.

    maximise  1/sum_j |o_j| sum_{i,t} [H_{i,t} in the step's top 20%] min(rho A, clip(rho, 0.8, 1.28) A),   A of GRPO

Differs from DAPO's loss, its parent: tokens of low entropy have none. The entropy is that of the policy at the start of
the step, and its quantile is over all rows of the step. It is an axis: any algorithm takes
`token_filter: high_entropy`, by `fraction` or by a budget of `tokens`, and `token_filter: random` is the control.

Paper: "Beyond the 80/20 rule", arXiv:2506.01939, equation 7.
"""

from atomrl.objectives import PolicyObjective, clip, shaping, token_weights

HIGH_ENTROPY = PolicyObjective(
    name="high_entropy",
    clip=clip.PPOClip(low=0.2, high=0.28),
    token_filter=token_weights.HighEntropy(fraction=0.2),
    shaping=shaping.Shaping(soft_overlong=True),
    group_filter=shaping.MixedOutcomes(),
)
