"""TRPO: a natural-gradient step within a bound on the KL.

    maximise  1/sum_j |o_j| sum_{i,t} pi(a_{i,t}) / pi_old(a_{i,t}) A_{i,t}   subject to  KL(pi_before || pi) <= 0.01
    A_{i,t} = sum_{s >= t} r_{i,s} - V_{i,t}
    x = (F + damping I)^{-1} grad by 10 conjugate gradients,   theta <- theta + 0.8^j sqrt(2 kl_bound / x^T F x) x
    minimise  1/sum_j |o_j| sum_{i,t} (v_{i,t} - R_{i,t})^2 / 2

j is the smallest for which the measured KL (of whole distributions, averaged over the batch's tokens) is within the
bound and the surrogate improves; if there is none, the weights do not change. If a full step ends far below the bound,
one longer step is tried (`line_search`), which the paper does not do.

Differs from PPO: the KL itself is bounded at each step, by the step size instead of a clip. Only the bound sets the
step size, so the policy has no learning rate. A step costs about forty times as much.

Paper: arXiv:1502.05477, with a critic as in arXiv:1506.02438; the Fisher matrix is over all tokens of the batch and
exact. Any other objective takes the same step with `update: {type: trust_region}`, as `advantage: rloo` does without
a critic.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary, policy_loss

TRPO = PolicyObjective(
    name="trpo",
    advantage=advantage.GAEAdvantage(gamma=1.0, lam=1.0, whiten=False),
    clip=policy_loss.NoClip(),
    value=auxiliary.SquaredValue(),
    update=policy_loss.TrustRegion(kl_bound=0.01),
)
