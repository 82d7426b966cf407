"""CISPO: the clipped ratio as a detached weight.

    maximise  1/sum_j |o_j| sum_{i,t} sg[clip(rho_{i,t}, 0, 5)] A_i log pi(a_{i,t}),   A of GRPO

Differs from GRPO: tokens whose ratio is out of bounds keep their gradient, among them the rare words that begin a
reflection. The paper gives no value of its upper bound; here it is 5, 1 + `high`.

Paper: MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
"""

from atomrl.objectives import PolicyObjective, policy_loss

CISPO = PolicyObjective(name="cispo", clip=policy_loss.CISPOClip(low=1.0, high=4.0))
