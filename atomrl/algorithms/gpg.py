"""GPG: group policy gradient, the plain REINFORCE of groups.

    A_i = alpha (r_i - mean_group r) / F,   alpha = B / (B - M),   M = completions of groups of equal rewards
    maximise  1/sum_j |o_j| sum_{i,t} A_i log pi(a_{i,t})

Differs from GRPO: no ratio, clip, KL or standard deviation; alpha makes up for groups without a signal, which are all
right or all wrong. `advantage: {alpha: verl}` is that of verl, B / |{j : r_j != 0}|.

Paper: arXiv:2504.02546.
"""

from atomrl.objectives import PolicyObjective, advantage, clip

GPG = PolicyObjective(name="gpg", advantage=advantage.GPGAdvantage(), clip=clip.ReinforceClip())
