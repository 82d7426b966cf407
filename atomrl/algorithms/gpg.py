"""GPG: group policy gradient, the plain REINFORCE of groups.

    A_i = alpha (r_i - mean_group r) / F,   alpha = B / |{j : r_j != 0}|
    maximise  1/sum_j |o_j| sum_{i,t} A_i log pi(a_{i,t})

Differs from GRPO: no ratio, clip, KL or standard deviation; alpha makes up for groups without a signal.

Paper: arXiv:2504.02546.
"""

from __future__ import annotations

from atomrl.objective import Advantage, Aggregate, Clip, Kl, Objective

GPG = Objective(
    advantage=Advantage("gpg"),
    clip=Clip("reinforce"),
    kl=Kl(coefficient=0.0),
    aggregate=Aggregate("token_mean"),
)
