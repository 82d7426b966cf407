"""PPO: proximal policy optimization with a critic, as it is used with language models.

    A_{i,t} = whiten_batch( sum_{l >= 0} (gamma lam)^l delta_{i,t+l} )
    delta_{i,t} = r_{i,t} + gamma V_{i,t+1} - V_{i,t},   r_{i,t} = r_i [t = last] - beta k1_{i,t}
    maximise  1/sum_j |o_j| sum_{i,t} min(rho A, clip(rho, 0.8, 1.2) A)
    minimise  1/sum_j |o_j| sum_{i,t} max((v - R)^2, (clip(v, V - 0.2, V + 0.2) - R)^2) / 2

R is A before whitening, plus V.

Differs from GRPO: a second model, the critic, predicts the return from each token on, so advantages are per token and
one completion per prompt suffices. The KL is in the reward, per token, with a coefficient that adapts to a target: 6
nats for a continuation of 24 tokens.

Paper: arXiv:1707.06347; whitening, KL in the reward and its controller from arXiv:1909.08593; gamma, lambda, the clip
and a coefficient of 0.02 from arXiv:2203.02155. The clip of values is that of PPO's reference implementation.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary

PPO = PolicyObjective(
    name="ppo",
    advantage=advantage.GAEAdvantage(gamma=1.0, lam=0.95, whiten=True),
    kl=auxiliary.K1(coefficient=0.02, apply_to="reward", target=0.25, horizon=10000.0),
    value=auxiliary.ClippedValue(clip=0.2),
)
