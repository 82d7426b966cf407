"""REINFORCE++: returns standardised over the whole batch, in the place of a group.

    A_{i,t} = whiten_batch( sum_{s >= t} (r_i [s = last] - beta k1_{i,s}) )
    maximise  1/sum_j |o_j| sum_{i,t} min(rho A, clip(rho, 0.8, 1.2) A)

Differs from GRPO: no group is needed (one completion of each prompt will do); the KL is in the reward, token by token.

Its baseline variant first takes the group's mean off and moves the KL into the loss, as k2:

    A_{i,t} = whiten_batch( r_i - mean_group r )

Paper: arXiv:2501.03262.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary

REINFORCE_PP = PolicyObjective(
    name="reinforce_pp",
    advantage=advantage.ReinforcePPAdvantage(gamma=1.0),
    kl=auxiliary.K1(coefficient=0.01, apply_to="reward"),
)

REINFORCE_PP_BASELINE = PolicyObjective(
    name="reinforce_pp_baseline",
    advantage=advantage.ReinforcePPBaselineAdvantage(),
    kl=auxiliary.K2(coefficient=0.01, apply_to="loss"),
)
