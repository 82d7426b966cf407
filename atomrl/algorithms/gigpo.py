"""GiGPO: group-in-group policy optimization, for episodes of many turns.

    A_{i,k} = rel_group R_i + omega rel_{group, state} G_{i,k},   G_{i,k} = sum_{l >= k} gamma^{l-k} r_{i,l}
    rel_g x = (x - mean_g x) / (std_g x + eps)
    maximise  1/sum_j |o_j| sum_{i,t} min(rho A, clip(rho, 0.8, 1.2) A) - 0.01 k3_{i,t}

The group of a turn consists of the turns, in all completions of its prompt, that follow the same observation. R is the
reward of the whole episode, G the return from turn k on. With a single turn both parts are GRPO's, and the advantage is
twice as large.

Differs from GRPO: credit assignment per turn without a critic, from states that several completions of a prompt visit.
Where no state repeats (long free texts) the second part is 0.

Paper: arXiv:2505.10978; gamma, omega, the deviation and the KL are those of its runs on ALFWorld in verl-agent, where
each turn is a row of its own.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary

GIGPO = PolicyObjective(
    name="gigpo",
    advantage=advantage.GiGPOAdvantage(gamma=0.95, omega=1.0),
    kl=auxiliary.K3(coefficient=0.01),
)
