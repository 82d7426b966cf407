"""RLOO: REINFORCE with the other completions of the prompt as the baseline.

    A_i = r_i - mean_{j != i} r_j,   r_i minus the KL to the reference of the whole completion
    maximise  1/N sum_i A_i log pi(o_i)

Differs from GRPO: an unbiased baseline, no division by the standard deviation, no ratio or clip, the KL in the
reward, and the log-prob of a completion is the sum over its tokens (`constant_length` with a length of 1).

Paper: arXiv:2402.14740.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary, policy_loss

RLOO = PolicyObjective(
    name="rloo",
    advantage=advantage.RLOOAdvantage(),
    clip=policy_loss.ReinforceClip(),
    kl=auxiliary.K1(coefficient=0.05, apply_to="reward"),
    loss_agg=policy_loss.ConstantLength(length=1),
)
