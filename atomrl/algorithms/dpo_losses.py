"""DPO with other losses of a pair.

The score of a completion is DPO's, z = log pi_theta(y) - log pi_ref(y); what a pair costs is another function of it.
`hinge_dpo` is of RSO, arXiv:2309.06657, after SLiC-HF, arXiv:2305.10425; `ipo` of arXiv:2310.12036, on scores per token
as its authors advise; `exo` of arXiv:2402.00856; `nca` of arXiv:2402.05369; `sppo` of arXiv:2405.00675 (hard labels);
`bco_pair` of arXiv:2404.04656; `aot` and `aot_unpaired` of arXiv:2406.05882; `apo_zero` and `apo_down` of
arXiv:2408.06266; `discopop` of arXiv:2406.08414.
"""

from __future__ import annotations

from atomrl.objective import Loss, PreferenceObjective, Score

HINGE_DPO = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("hinge", beta=0.1),))
IPO = PreferenceObjective(score=Score("log_ratio", length_normalised=True), loss=(Loss("ipo", beta=0.1),))
EXO = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("exo_pair", beta=0.1, label_smoothing=1e-3),))
NCA = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("nca_pair", beta=0.1),))
SPPO = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("sppo_hard", beta=0.1),))
BCO_PAIR = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("bco_pair", beta=0.1),))
AOT = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("aot", beta=0.1),))
AOT_UNPAIRED = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("aot_unpaired", beta=0.1),))
APO_ZERO = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("apo_zero", beta=0.1),))
APO_DOWN = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("apo_down", beta=0.1),))
DISCOPOP = PreferenceObjective(score=Score("log_ratio"), loss=(Loss("discopop", beta=0.1, tau=0.05),))
