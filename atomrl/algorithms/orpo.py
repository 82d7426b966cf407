"""ORPO: NLL of the chosen completion plus an odds-ratio loss, without a reference.

    L = -log pi(y_c) / |y_c| - beta log sigmoid(log odds(y_c) - log odds(y_r)),    odds(y) = p / (1 - p)

p is the geometric mean of the tokens' probabilities.

Paper: ORPO, arXiv:2403.07691 (lambda is beta). The likelihood is that of the completion alone, not of the prompt.
"""

from atomrl.objectives import PreferenceObjective
from atomrl.objectives.preference_loss import LogprobScore, OddsRatioLoss, TokenMeanNll

ORPO = PreferenceObjective(
    name="orpo",
    score=LogprobScore(length_normalised=True),
    loss=(OddsRatioLoss(beta=0.1),),
    nll=TokenMeanNll(coefficient=1.0),
)
