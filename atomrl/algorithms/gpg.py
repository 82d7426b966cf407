"""GPG: group policy gradient, REINFORCE with a group baseline.

    A_i = alpha (r_i - mean_group r) / F,   alpha = B / (B - M),   M = completions of groups of equal rewards
    maximise  1/sum_j |o_j| sum_{i,t} A_i log pi(a_{i,t})

Differs from GRPO: no ratio, clip, KL or standard deviation; alpha compensates for groups that are all right or all
wrong and have no gradient. `advantage: {alpha: verl}` is verl's alpha, B / |{j : r_j != 0}|.

Paper: arXiv:2504.02546.
"""

from atomrl.objectives import PolicyObjective, advantage, policy_loss

GPG = PolicyObjective(name="gpg", advantage=advantage.GPGAdvantage(), clip=policy_loss.ReinforceClip())
