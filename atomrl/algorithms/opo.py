"""OPO: on-policy, with the baseline of least variance.

    A_i = r_i - sum_j l_j r_j / sum_j l_j,   j in the group, l its length
    maximise  1/sum_j |o_j| sum_{i,t} A_i log pi(a_{i,t})

Differs from GRPO: the baseline weighs completions by length, as their gradients are that much larger; exactly one
update in a step, so no ratio, no clip and no KL.

Paper: arXiv:2505.23585.
"""

from __future__ import annotations

from atomrl.objective import Advantage, Aggregate, Clip, Kl, Objective

OPO = Objective(
    advantage=Advantage("opo"),
    clip=Clip("reinforce"),
    kl=Kl(coefficient=0.0),
    aggregate=Aggregate("token_mean"),
)
