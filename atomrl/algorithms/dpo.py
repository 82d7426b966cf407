"""DPO: train on preferences without a reward model.

    L = -log sigmoid(beta (z_c - z_r)),    z = log pi_theta(y) - log pi_ref(y)

Paper: DPO, arXiv:2305.18290, equation 7. cDPO (Mitchell, "A note on DPO with noisy preferences", 2023) smooths the
label; robust DPO, arXiv:2403.00409, is unbiased if labels are flipped; length-normalised DPO (`dpo_norm`; Tulu 3,
arXiv:2411.15124) and LD-DPO, arXiv:2409.06411, reduce the preference for length; RPO, arXiv:2404.19733, adds the NLL of
the chosen completion, per token; MPO, arXiv:2411.10442, is a sum of three losses, with a running reward shift in its
quality loss (TRL 1.16 uses `bco_pair`, without the shift).
"""

from atomrl.objectives import PreferenceObjective
from atomrl.objectives.preference_loss import (
    BcoPairShiftLoss,
    LogRatioScore,
    RobustLoss,
    SequenceMeanNll,
    SigmoidLoss,
    TokenMeanNll,
)

DPO = PreferenceObjective(name="dpo", loss=(SigmoidLoss(beta=0.1),))
CDPO = PreferenceObjective(name="cdpo", loss=(SigmoidLoss(beta=0.1, label_smoothing=0.1),))
ROBUST_DPO = PreferenceObjective(name="robust_dpo", loss=(RobustLoss(beta=0.1, label_smoothing=0.1),))
DPO_NORM = PreferenceObjective(
    name="dpo_norm", score=LogRatioScore(length_normalised=True), loss=(SigmoidLoss(beta=5.0),)
)
LD_DPO = PreferenceObjective(name="ld_dpo", score=LogRatioScore(ld_alpha=0.5), loss=(SigmoidLoss(beta=0.1),))
RPO = PreferenceObjective(name="rpo", loss=(SigmoidLoss(beta=0.1),), nll=SequenceMeanNll(coefficient=1.0))
MPO = PreferenceObjective(
    name="mpo",
    loss=(SigmoidLoss(beta=0.1, weight=0.8), BcoPairShiftLoss(beta=0.1, weight=0.2)),
    nll=TokenMeanNll(coefficient=1.0),
)
