"""OPO: strictly on-policy, with the minimum-variance baseline.

    A_i = r_i - sum_j l_j r_j / sum_j l_j,   j in the group, l its length
    maximise  1/sum_j |o_j| sum_{i,t} A_i log pi(a_{i,t})

Differs from GRPO: the baseline weights completions by length, in proportion to the size of their gradients; exactly one
update per step, so no ratio, no clip and no KL.

Paper: arXiv:2505.23585.
"""

from atomrl.objectives import PolicyObjective, advantage, policy_loss

OPO = PolicyObjective(name="opo", advantage=advantage.OPOAdvantage(), clip=policy_loss.ReinforceClip())
