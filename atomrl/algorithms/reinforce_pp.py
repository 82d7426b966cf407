"""REINFORCE++: returns standardised over the whole batch, in the place of a group.

    A_{i,t} = whiten_batch( sum_{s >= t} (r_i [s = last] - beta k1_{i,s}) )
    maximise  1/sum_j |o_j| sum_{i,t} min(rho A, clip(rho, 0.8, 1.2) A)

Differs from GRPO: no group is needed (one completion of each prompt will do); the KL is in the reward, token by token.

Its baseline variant first takes the group's mean off and moves the KL into the loss, as k2:

    A_{i,t} = whiten_batch( r_i - mean_group r )

Paper: arXiv:2501.03262.
"""

from __future__ import annotations

from atomrl.objective import Advantage, Aggregate, Clip, Kl, Objective

REINFORCE_PP = Objective(
    advantage=Advantage("reinforce_pp", gamma=1.0),
    clip=Clip("ppo", low=0.2, high=0.2),
    kl=Kl("k1", coefficient=0.01, place="reward"),
    aggregate=Aggregate("token_mean"),
)

REINFORCE_PP_BASELINE = Objective(
    advantage=Advantage("reinforce_pp_baseline"),
    clip=Clip("ppo", low=0.2, high=0.2),
    kl=Kl("k2", coefficient=0.01, place="loss"),
    aggregate=Aggregate("token_mean"),
)
