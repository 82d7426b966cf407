"""KTO and BCO: train on completions labelled good or bad, without pairs.

    KTO:  L = w (1 - sigmoid(+-beta (z - z_0))),    z_0 = max(0, mean z' of completions of other prompts)
    BCO:  L = -log sigmoid(+-(beta z - delta)),      delta = running mean of beta z

z = log pi_theta(y) - log pi_ref(y), and +- is the sign of the label. Pairs are split into two labelled completions.

Papers: KTO, arXiv:2402.01306; BCO, arXiv:2404.04656 (without its weights per prompt). `apo_zero_unpaired` is KTO with a
reference point of 0 (after APO, arXiv:2408.06266).
"""

from atomrl.objectives import PreferenceObjective
from atomrl.objectives.preference_loss import ApoZeroUnpairedLoss, BcoLoss, KtoLoss

KTO = PreferenceObjective(name="kto", loss=(KtoLoss(beta=0.1),))
BCO = PreferenceObjective(name="bco", loss=(BcoLoss(beta=0.1),))
APO_ZERO_UNPAIRED = PreferenceObjective(name="apo_zero_unpaired", loss=(ApoZeroUnpairedLoss(beta=0.1),))
