"""SimPO and CPO: DPO's loss without a reference.

    SimPO:  L = -log sigmoid(beta (log pi(y_c) / |y_c| - log pi(y_r) / |y_r|) - gamma)
    CPO:    L = -log sigmoid(beta (log pi(y_c) - log pi(y_r))) - log pi(y_c) / mean |y_c|

Papers: SimPO, arXiv:2405.14734, equation 6 (gamma is `target_margin`, in units of the reward); CPO, arXiv:2401.08417.
"""

from __future__ import annotations

from atomrl.objective import Loss, Nll, PreferenceObjective, Score

SIMPO = PreferenceObjective(
    score=Score("logprob", length_normalised=True), loss=(Loss("sigmoid", beta=2.0, target_margin=1.0),)
)
CPO = PreferenceObjective(
    score=Score("logprob"), loss=(Loss("sigmoid", beta=0.1),), nll=Nll("token_mean", coefficient=1.0)
)
