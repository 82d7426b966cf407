"""GDPO: several rewards, each standardised separately.

    A_i = zscore_batch( sum_k w_k zscore_group(r_k)_i )

Differs from GRPO: the sum of standardised rewards, not the standardised sum. So a reward of small scale still counts,
and combinations that add up to the same sum get different advantages. The parts are those of `reward.functions`, with
their weights.

Paper: arXiv:2601.05242.
"""

from atomrl.objectives import PolicyObjective, advantage

GDPO = PolicyObjective(name="gdpo", advantage=advantage.GDPOAdvantage(eps=1e-4))
