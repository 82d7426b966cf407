"""DPPO: a trust region on the change of probabilities, not on their ratio.

    keep_{i,t} = not (A > 0 and pi > pi_old and D > high) and not (A < 0 and pi < pi_old and D > low)
    maximise  1/sum_j |o_j| sum_{i,t} keep_{i,t} sg[min(rho, 20)] A_i log pi(a_{i,t}),   D = |pi - pi_old|, A of GRPO

Differs from GRPO: a ratio exaggerates changes of unlikely tokens and understates those of likely ones. With
`clip: dppo_kl`, D is the KL of the binary distribution "this token or another".

Paper: arXiv:2602.04879, equation 10.
"""

from atomrl.objectives import PolicyObjective, policy_loss

DPPO = PolicyObjective(name="dppo", clip=policy_loss.DPPOTVClip(low=0.2, high=0.2, cap=20.0))
