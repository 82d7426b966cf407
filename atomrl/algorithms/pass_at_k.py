"""Pass@k training: maximise the best of k completions, not their mean.

    A_i = (mean_{S with i} R(S) - mean_S R(S)) / std_S R(S),   R(S) = max_{j in S} r_j over k-subsets S of the group

Differs from GRPO: the advantage is a completion's contribution to the best of k, over all k-subsets of the group, in
closed form. So groups that are mostly solved have little gradient, hard problems have the most, and wrong completions
of hard problems are penalised little. k is 4 and must be less than `rollout.completions_per_prompt`; a k of 1 is GRPO.
If k is the whole group, use `advantage: pass_at_k` (arXiv:2503.19595): the best completion minus the second best.

Paper: arXiv:2508.10751.
"""

from atomrl.objectives import PolicyObjective, advantage

PASS_AT_K = PolicyObjective(name="pass_at_k", advantage=advantage.PassAtKAnalyticAdvantage(k=4))
