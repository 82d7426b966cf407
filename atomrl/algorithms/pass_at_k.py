"""Pass@k training: what is raised is the best of a group, not its mean.

    A_i = r_i - max_{j != i} r_j   for the single best of the group,   0 elsewhere

Differs from GRPO: only the completion that the group's best reward hangs on has credit, so groups that are solved twice
teach nothing and hard problems count most. k is the number of completions of a prompt.

Paper: arXiv:2503.19595.
"""

from __future__ import annotations

from atomrl.objective import Advantage, Aggregate, Clip, Kl, Objective

PASS_AT_K = Objective(
    advantage=Advantage("pass_at_k"),
    clip=Clip("ppo", low=0.2, high=0.2),
    kl=Kl(coefficient=0.0),
    aggregate=Aggregate("token_mean"),
)
