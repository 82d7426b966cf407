"""A2C: advantage actor-critic, without a ratio and without a clip.

    A_{i,t} = sum_{s >= t} r_{i,s} - V_{i,t}
    maximise  1/sum_j |o_j| sum_{i,t} [ A_{i,t} log pi(a_{i,t}) + 0.01 H_{i,t} ]
    minimise  1/sum_j |o_j| sum_{i,t} (v_{i,t} - R_{i,t})^2 / 2

Differs from PPO: one update per batch of rollouts, Monte Carlo returns (lambda is 1), and an entropy bonus; no
whitening, no KL. The paper discounts by 0.99 in games without an end; completions are not discounted.

Paper: arXiv:1602.01783 (A3C, of which this is the synchronous form).
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary, policy_loss

A2C = PolicyObjective(
    name="a2c",
    advantage=advantage.GAEAdvantage(gamma=1.0, lam=1.0, whiten=False),
    clip=policy_loss.ReinforceClip(),
    value=auxiliary.SquaredValue(),
    entropy=auxiliary.Entropy(coefficient=0.01),
)
