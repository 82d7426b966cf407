"""SimPO and CPO: DPO's loss without a reference.

    SimPO:  L = -log sigmoid(beta (log pi(y_c) / |y_c| - log pi(y_r) / |y_r|) - gamma)
    CPO:    L = -log sigmoid(beta (log pi(y_c) - log pi(y_r))) - log pi(y_c) / mean |y_c|

Papers: SimPO, arXiv:2405.14734, equation 6 (gamma is `target_margin`, in units of the reward); CPO, arXiv:2401.08417.
"""

from atomrl.objectives import PreferenceObjective
from atomrl.objectives.preference_loss import LogprobScore, SigmoidLoss, TokenMeanNll

SIMPO = PreferenceObjective(
    name="simpo", score=LogprobScore(length_normalised=True), loss=(SigmoidLoss(beta=2.0, target_margin=1.0),)
)
CPO = PreferenceObjective(
    name="cpo", score=LogprobScore(), loss=(SigmoidLoss(beta=0.1),), nll=TokenMeanNll(coefficient=1.0)
)
