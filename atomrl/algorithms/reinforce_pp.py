"""REINFORCE++: returns standardised over the whole batch instead of a group.

    A_{i,t} = whiten_batch( sum_{s >= t} (r_i [s = last] - beta k1_{i,s}) )
    maximise  1/sum_j |o_j| sum_{i,t} min(rho A, clip(rho, 0.8, 1.2) A)

Differs from GRPO: it needs no group (one completion per prompt suffices); the KL is in the reward, per token.

Its baseline variant first subtracts the group's mean, and has the KL in the loss, as k2:

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
