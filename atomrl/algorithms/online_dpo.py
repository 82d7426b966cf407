"""Online DPO: the policy's own completions, the best and the worst of each prompt as a pair.

    L = -log sigmoid(beta (z_best - z_worst)),    z = log pi_theta(y) - log pi_ref(y)

Paper: direct alignment from online AI feedback, arXiv:2402.04792, there with a model as the judge; here the reward is.
Prompts whose completions all earn the same are drawn again, as DAPO does.
"""

from atomrl.objectives import PreferenceObjective
from atomrl.objectives.preference_loss import SigmoidLoss
from atomrl.objectives.shaping import MixedOutcomes

ONLINE_DPO = PreferenceObjective(
    name="online_dpo", loss=(SigmoidLoss(beta=0.1),), group_filter=MixedOutcomes(), online=True
)
