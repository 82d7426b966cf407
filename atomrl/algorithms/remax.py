"""ReMax: REINFORCE with the reward of the prompt's greedy completion as the baseline.

    A_i = r_i - r(greedy completion of the same prompt)
    maximise  1/N sum_i sum_t A_i log pi(a_{i,t})

Differs from RLOO: the baseline is a rollout of its own (the loop draws and scores it, and does not train on it), so one
completion of each prompt will do.

Paper: arXiv:2310.10505.
"""

from __future__ import annotations

from atomrl.objective import Advantage, Aggregate, Clip, Kl, Objective

REMAX = Objective(
    advantage=Advantage("remax"),
    clip=Clip("reinforce"),
    kl=Kl("k1", coefficient=0.05, place="reward"),
    aggregate=Aggregate("constant_length", length=1),
)
