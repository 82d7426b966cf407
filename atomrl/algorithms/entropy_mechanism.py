"""Clip-Cov and KL-Cov: regularise the few tokens that cause entropy collapse.

    cov_{i,t} = (A_i - mean A) (log pi_old(a_{i,t}) - mean log pi_old)
    Clip-Cov: GRPO's loss, 0 for a random 0.02% of tokens with 1 < cov < 5
    KL-Cov:   rho A without a clip, minus |log pi - log pi_old| on the 0.2% of tokens with the highest cov

Differ from GRPO: likely tokens with a high advantage lower the entropy, so these tokens get no gradient (Clip-Cov) or a
KL penalty (KL-Cov). The covariance is that of the policy at the start of the step, over all its rows, so no split into
updates or micro-batches changes the selection; the authors' code computes it per micro-batch.

Paper: arXiv:2505.22617, equations 10 to 13.
"""

from atomrl.objectives import PolicyObjective, policy_loss, token_weights

CLIP_COV = PolicyObjective(name="clip_cov", token_filter=token_weights.ClipCov(fraction=2e-4, low=1.0, high=5.0))

KL_COV = PolicyObjective(
    name="kl_cov", clip=policy_loss.NoClip(), token_filter=token_weights.KLCov(fraction=2e-3, coefficient=1.0)
)
