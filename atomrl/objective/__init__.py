"""The axes of a policy objective as data, and the one composer that turns them into an `Algorithm`.

An axis (`axis.py`) is a table of functions, each of which nests atoms like its equation: those of credit in
`credit.py`, those of the policy term in `policy.py` and `correction.py`, those of a critic and of entropy in
`critic.py`. `Objective` makes one choice on each;
`compose` makes the functions that the loop and the back ends call. Preferences have axes (`preference.py`) and an
objective (`compose_preference.py`) of their own. A config overrides any axis (`override`).
"""

from __future__ import annotations

from atomrl.objective.compose import Objective, compose, credit, override, policy_loss, rollout_gap, with_limit
from atomrl.objective.compose_preference import PreferenceObjective
from atomrl.objective.correction import CORRECTIONS, Correction, Corrections
from atomrl.objective.credit import ADVANTAGES, AcceptGroup, Advantage, Credit, Scores, Shaping, mixed_outcomes
from atomrl.objective.critic import VALUE_LOSSES, Entropy, Predictions, Value
from atomrl.objective.distillation import Distillation
from atomrl.objective.policy import (
    AGGREGATES,
    CLIPS,
    KL_ESTIMATORS,
    RATIOS,
    SELECTIONS,
    Aggregate,
    Clip,
    Kl,
    Ratio,
    Selection,
)
from atomrl.objective.preference import LOSSES, SCORES, Loss, Nll, Score
from atomrl.objective.update import UPDATES, Update

__all__ = [
    "ADVANTAGES",
    "AGGREGATES",
    "CLIPS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LOSSES",
    "RATIOS",
    "SCORES",
    "SELECTIONS",
    "UPDATES",
    "VALUE_LOSSES",
    "AcceptGroup",
    "Advantage",
    "Aggregate",
    "Clip",
    "Correction",
    "Corrections",
    "Credit",
    "Distillation",
    "Entropy",
    "Kl",
    "Loss",
    "Nll",
    "Objective",
    "Predictions",
    "PreferenceObjective",
    "Ratio",
    "Score",
    "Scores",
    "Selection",
    "Shaping",
    "Update",
    "Value",
    "compose",
    "credit",
    "mixed_outcomes",
    "override",
    "policy_loss",
    "rollout_gap",
    "with_limit",
]
