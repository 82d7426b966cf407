"""Pass@k training: what is raised is the best of k completions, not their mean.

    A_i = (mean_{S with i} R(S) - mean_S R(S)) / std_S R(S),   R(S) = max_{j in S} r_j over k-subsets S of the group

Differs from GRPO: a completion is credited with what it adds to the best of k, for all k-subsets of the group at once,
in closed form. So groups that are mostly solved teach next to nothing, hard problems count most, and wrong completions
of them cost little. k is 4 and must be less than `rollout.completions_per_prompt`; a k of 1 is GRPO. Where k is to be
the whole group, `advantage: pass_at_k` (arXiv:2503.19595) credits the single best by how much it beats the second best.

Paper: arXiv:2508.10751.
"""

from atomrl.objectives import PolicyObjective, advantage

PASS_AT_K = PolicyObjective(name="pass_at_k", advantage=advantage.PassAtKAnalyticAdvantage(k=4))
