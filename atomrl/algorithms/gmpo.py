"""GMPO: the geometric mean of a completion's ratios.

    maximise  1/N sum_i A_i exp( 1/|o_i| sum_t clip_A(log rho_{i,t}, -0.4, 0.4) ),   A of GRPO

Differs from GRPO: an outlier counts little in a geometric mean, so the bounds are wider; each token's log-ratio is
clipped on the advantage's side. Differs from GSPO: it clips tokens, before the mean.

Paper: arXiv:2507.20673, equations 3 and 4.
"""

from atomrl.objectives import PolicyObjective, policy_loss

GMPO = PolicyObjective(name="gmpo", clip=policy_loss.GMPOClip(low=0.4, high=0.4), loss_agg=policy_loss.SequenceMean())
