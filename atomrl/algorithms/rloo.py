"""RLOO: REINFORCE with the other completions of the prompt as the baseline.

    A_i = r_i - mean_{j != i} r_j,   r_i with the KL to the reference of the whole completion taken off
    maximise  1/N sum_i A_i log pi(o_i)

Differs from GRPO: an unbiased baseline, no division by the standard deviation, no ratio or clip, the KL in the
reward, and the log-prob of a completion is the sum over its tokens (`constant_length` with a length of 1).

Paper: arXiv:2402.14740.
"""

from __future__ import annotations

from atomrl.objective import Advantage, Aggregate, Clip, Kl, Objective

RLOO = Objective(
    advantage=Advantage("rloo"),
    clip=Clip("reinforce"),
    kl=Kl("k1", coefficient=0.05, place="reward"),
    aggregate=Aggregate("constant_length", length=1),
)
