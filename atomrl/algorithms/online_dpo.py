"""Online DPO: the policy's own completions, the best and the worst of each prompt as a pair.

    L = -log sigmoid(beta (z_best - z_worst)),    z = log pi_theta(y) - log pi_ref(y)

Paper: direct alignment from online AI feedback, arXiv:2402.04792, there with a model as the judge; here the reward is.
Prompts whose completions all earn the same are drawn again, as DAPO does.
"""

from __future__ import annotations

from atomrl.objective import AcceptGroup, Loss, PreferenceObjective, Score

ONLINE_DPO = PreferenceObjective(
    score=Score("log_ratio"),
    loss=(Loss("sigmoid", beta=0.1),),
    accept_group=AcceptGroup("mixed_outcomes"),
    online=True,
)
