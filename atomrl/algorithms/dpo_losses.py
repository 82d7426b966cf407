"""DPO with other losses of a pair.

Scores are DPO's, z = log pi_theta(y) - log pi_ref(y); the loss of a pair is another function of them. Papers:
`hinge_dpo` is RSO, arXiv:2309.06657, after SLiC-HF, arXiv:2305.10425; `ipo` arXiv:2310.12036, with scores per token as
its authors recommend; `exo` arXiv:2402.00856; `nca` arXiv:2402.05369; `sppo` arXiv:2405.00675 (hard labels); `bco_pair`
arXiv:2404.04656; `aot` and `aot_unpaired` arXiv:2406.05882; `apo_zero` and `apo_down` arXiv:2408.06266; `discopop`
arXiv:2406.08414.
"""

from atomrl.objectives import PreferenceObjective, preference_loss
from atomrl.objectives.preference_loss import LogRatioScore

HINGE_DPO = PreferenceObjective(name="hinge_dpo", loss=(preference_loss.HingeLoss(beta=0.1),))
IPO = PreferenceObjective(
    name="ipo", score=LogRatioScore(length_normalised=True), loss=(preference_loss.IpoLoss(beta=0.1),)
)
EXO = PreferenceObjective(name="exo", loss=(preference_loss.ExoPairLoss(beta=0.1, label_smoothing=1e-3),))
NCA = PreferenceObjective(name="nca", loss=(preference_loss.NcaPairLoss(beta=0.1),))
SPPO = PreferenceObjective(name="sppo", loss=(preference_loss.SppoHardLoss(beta=0.1),))
BCO_PAIR = PreferenceObjective(name="bco_pair", loss=(preference_loss.BcoPairLoss(beta=0.1),))
AOT = PreferenceObjective(name="aot", loss=(preference_loss.AotLoss(beta=0.1),))
AOT_UNPAIRED = PreferenceObjective(name="aot_unpaired", loss=(preference_loss.AotUnpairedLoss(beta=0.1),))
APO_ZERO = PreferenceObjective(name="apo_zero", loss=(preference_loss.ApoZeroLoss(beta=0.1),))
APO_DOWN = PreferenceObjective(name="apo_down", loss=(preference_loss.ApoDownLoss(beta=0.1),))
DISCOPOP = PreferenceObjective(name="discopop", loss=(preference_loss.DiscopopLoss(beta=0.1, tau=0.05),))
