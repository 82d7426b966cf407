"""Online DPO: DPO on pairs of the policy's own completions, the best and the worst of each prompt.

    L = -log sigmoid(beta (z_best - z_worst)),    z = log pi_theta(y) - log pi_ref(y)

Paper: direct alignment from online AI feedback, arXiv:2402.04792, with a reward function instead of a model as judge.
Groups with equal rewards are replaced by others, as in DAPO.
"""

from atomrl.objectives import PreferenceObjective
from atomrl.objectives.advantage import MixedOutcomes
from atomrl.objectives.preference_loss import SigmoidLoss

ONLINE_DPO = PreferenceObjective(
    name="online_dpo", loss=(SigmoidLoss(beta=0.1),), group_filter=MixedOutcomes(), online=True
)
