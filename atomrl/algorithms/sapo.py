"""SAPO: a soft gate instead of a clip.

    maximise  1/N sum_i 1/|o_i| sum_t (4 / tau) sigmoid(tau (rho_{i,t} - 1)) A_i,   tau = 1.0 if A_i > 0 else 1.05

Differs from GRPO: the gradient decays smoothly as the ratio leaves 1, faster for negative advantages, which raise the
probability of all other tokens.

Paper: arXiv:2511.20347, equations 5 and 6.
"""

from atomrl.objectives import PolicyObjective, policy_loss

SAPO = PolicyObjective(
    name="sapo", clip=policy_loss.SAPOClip(tau_positive=1.0, tau_negative=1.05), loss_agg=policy_loss.SequenceMean()
)
