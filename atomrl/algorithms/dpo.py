"""DPO: a policy from preferences, without a reward model.

    L = -log sigmoid(beta (z_c - z_r)),    z = log pi_theta(y) - log pi_ref(y)

Paper: DPO, arXiv:2305.18290, equation 7. cDPO (Mitchell, "A note on DPO with noisy preferences", 2023) smooths the
label; robust DPO, arXiv:2403.00409, is unbiased under flipped ones; DPO by token (`dpo_norm`; Tulu 3, arXiv:2411.15124)
and LD-DPO, arXiv:2409.06411, take out the advantage of length; RPO, arXiv:2404.19733, adds the likelihood of the chosen
completion, per token; MPO, arXiv:2411.10442, is a sum of three losses.
"""

from __future__ import annotations

from atomrl.objective import Loss, Nll, PreferenceObjective, Score

DPO = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("sigmoid", beta=0.1),))
CDPO = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("sigmoid", beta=0.1, label_smoothing=0.1),))
ROBUST_DPO = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("robust", beta=0.1, label_smoothing=0.1),))
DPO_NORM = PreferenceObjective(score=Score("log_ratio", length_normalised=True), loss=(Loss("sigmoid", beta=5.0),))
LD_DPO = PreferenceObjective(score=Score("log_ratio", ld_alpha=0.5), loss=(Loss("sigmoid", beta=0.1),))
RPO = PreferenceObjective(
    score=Score("log_ratio"), loss=(Loss("sigmoid", beta=0.1),), nll=Nll("sequence_mean", coefficient=1.0)
)
MPO = PreferenceObjective(
    score=Score("log_ratio"),
    loss=(Loss("sigmoid", beta=0.1), Loss("bco_pair", beta=0.1)),
    loss_weights=(0.8, 0.2),
    nll=Nll("token_mean", coefficient=1.0),
)
