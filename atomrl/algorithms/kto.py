"""KTO and BCO: completions that are labelled good or bad one by one.

    KTO:  L = w (1 - sigmoid(+-beta (z - z_0))),    z_0 = max(0, mean z' of completions of other prompts)
    BCO:  L = -log sigmoid(+-(beta z - delta)),      delta = running mean of beta z

with z = log pi_theta(y) - log pi_ref(y), and the sign of the label. Pairs serve too: each completion then is a row with
its label.

Papers: KTO, arXiv:2402.01306; BCO, arXiv:2404.04656 (without its weights by prompt). `apo_zero_unpaired` is KTO with a
reference point of 0 (after APO, arXiv:2408.06266).
"""

from atomrl.objectives import PreferenceObjective
from atomrl.objectives.preference_loss import ApoZeroUnpairedLoss, BcoLoss, KtoLoss

KTO = PreferenceObjective(name="kto", loss=(KtoLoss(beta=0.1),))
BCO = PreferenceObjective(name="bco", loss=(BcoLoss(beta=0.1),))
APO_ZERO_UNPAIRED = PreferenceObjective(name="apo_zero_unpaired", loss=(ApoZeroUnpairedLoss(beta=0.1),))
