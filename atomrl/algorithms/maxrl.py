"""MaxRL: maximise the log-likelihood of success instead of its probability.

    A_i = (r_i - mean_group r) / mean_group r
    maximise  1/sum_j |o_j| sum_{i,t} A_i log pi(a_{i,t})

Differs from GRPO: divides by the mean, so a prompt has the weight 1 / (its success rate), as in maximum likelihood: the
gradient is that of log p, not of p. For rewards of 0 and 1.

Paper: arXiv:2602.02710.
"""

from atomrl.objectives import PolicyObjective, advantage, policy_loss

MAXRL = PolicyObjective(name="maxrl", advantage=advantage.MaxRLAdvantage(), clip=policy_loss.ReinforceClip())
