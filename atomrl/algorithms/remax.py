"""ReMax: REINFORCE with the reward of the prompt's greedy completion as the baseline.

    A_i = r_i - r(greedy completion of the same prompt)
    maximise  1/N sum_i sum_t A_i log pi(a_{i,t})

Differs from RLOO: the baseline is an additional greedy rollout, which is scored but not trained on, so one completion
per prompt suffices.

Paper: arXiv:2310.10505.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary, policy_loss

REMAX = PolicyObjective(
    name="remax",
    advantage=advantage.ReMaxAdvantage(),
    clip=policy_loss.ReinforceClip(),
    kl=auxiliary.K1(coefficient=0.05, apply_to="reward"),
    loss_agg=policy_loss.ConstantLength(length=1),
)
