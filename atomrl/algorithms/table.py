"""Algorithms by name. To add one: its file, and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from atomrl.algorithms.a2c import A2C
from atomrl.algorithms.cispo import CISPO
from atomrl.algorithms.dapo import DAPO
from atomrl.algorithms.dpo import CDPO, DPO, DPO_NORM, LD_DPO, MPO, ROBUST_DPO, RPO
from atomrl.algorithms.dpo_losses import (
    AOT,
    AOT_UNPAIRED,
    APO_DOWN,
    APO_ZERO,
    BCO_PAIR,
    DISCOPOP,
    EXO,
    HINGE_DPO,
    IPO,
    NCA,
    SPPO,
)
from atomrl.algorithms.dppo import DPPO
from atomrl.algorithms.dr_grpo import DR_GRPO
from atomrl.algorithms.entropy_mechanism import CLIP_COV, KL_COV
from atomrl.algorithms.gdpo import GDPO
from atomrl.algorithms.gkd import GKD
from atomrl.algorithms.gmpo import GMPO
from atomrl.algorithms.gpg import GPG
from atomrl.algorithms.grpo import GRPO
from atomrl.algorithms.gspo import GSPO, GSPO_TOKEN
from atomrl.algorithms.high_entropy import HIGH_ENTROPY
from atomrl.algorithms.kto import APO_ZERO_UNPAIRED, BCO, KTO
from atomrl.algorithms.maxrl import MAXRL
from atomrl.algorithms.on_policy_distillation import ON_POLICY_DISTILLATION
from atomrl.algorithms.online_dpo import ONLINE_DPO
from atomrl.algorithms.opo import OPO
from atomrl.algorithms.orpo import ORPO
from atomrl.algorithms.pass_at_k import PASS_AT_K
from atomrl.algorithms.ppo import PPO
from atomrl.algorithms.reinforce_pp import REINFORCE_PP, REINFORCE_PP_BASELINE
from atomrl.algorithms.remax import REMAX
from atomrl.algorithms.rloo import RLOO
from atomrl.algorithms.sapo import SAPO
from atomrl.algorithms.simpo import CPO, SIMPO
from atomrl.algorithms.trpo import TRPO
from atomrl.objective import Objective, PreferenceObjective, override
from atomrl.protocols import Algorithm

ALGORITHMS: dict[str, Objective] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "reinforce_pp": REINFORCE_PP,
    "reinforce_pp_baseline": REINFORCE_PP_BASELINE,
    "remax": REMAX,
    "opo": OPO,
    "gpg": GPG,
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "cispo": CISPO,
    "sapo": SAPO,
    "gmpo": GMPO,
    "clip_cov": CLIP_COV,
    "kl_cov": KL_COV,
    "dppo": DPPO,
    "gdpo": GDPO,
    "pass_at_k": PASS_AT_K,
    "maxrl": MAXRL,
    "high_entropy": HIGH_ENTROPY,
    "gkd": GKD,
    "on_policy_distillation": ON_POLICY_DISTILLATION,
    "ppo": PPO,
    "a2c": A2C,
    "trpo": TRPO,
}

PREFERENCES: dict[str, PreferenceObjective] = {
    "dpo": DPO,
    "cdpo": CDPO,
    "robust_dpo": ROBUST_DPO,
    "dpo_norm": DPO_NORM,
    "ld_dpo": LD_DPO,
    "rpo": RPO,
    "mpo": MPO,
    "hinge_dpo": HINGE_DPO,
    "ipo": IPO,
    "exo": EXO,
    "nca": NCA,
    "sppo": SPPO,
    "bco_pair": BCO_PAIR,
    "aot": AOT,
    "aot_unpaired": AOT_UNPAIRED,
    "apo_zero": APO_ZERO,
    "apo_down": APO_DOWN,
    "discopop": DISCOPOP,
    "kto": KTO,
    "bco": BCO,
    "apo_zero_unpaired": APO_ZERO_UNPAIRED,
    "orpo": ORPO,
    "simpo": SIMPO,
    "cpo": CPO,
    "online_dpo": ONLINE_DPO,
}
"""Those that compare completions: on given preferences (`atomrl dpo`), or on rollouts where they are `online`."""


def objective_of(name: str, axes: Mapping[str, Any]) -> Objective | PreferenceObjective:
    """The axes of an algorithm as a config has them.

    Args:
        name: a key of `ALGORITHMS` or of `PREFERENCES`.
        axes: what the config overrides, by axis.

    Raises:
        ValueError: an unknown name, axis, parameter or type, with the nearest valid one.

    Example:
        >>> objective_of("dapo", {"clip": {"high": 0.3}}).clip
        Clip('ppo', high=0.3)
    """
    if name in PREFERENCES:
        return PREFERENCES[name].override(axes)
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, [*ALGORITHMS, *PREFERENCES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*ALGORITHMS, *PREFERENCES])}"
        raise ValueError(f"algorithm.name: unknown algorithm {name!r}; {hint}")
    return override(ALGORITHMS[name], axes)


def preference_objective(name: str, axes: Mapping[str, Any]) -> PreferenceObjective:
    """The axes of an algorithm that is trained on given preferences.

    Raises:
        ValueError: as `objective_of`; or it is trained on rollouts.

    Example:
        >>> preference_objective("dpo", {"loss": {"beta": 0.3}}).loss
        (Loss('sigmoid', beta=0.3),)
    """
    objective = objective_of(name, axes)
    if isinstance(objective, PreferenceObjective) and not objective.online:
        return objective
    offline = ", ".join(key for key, item in PREFERENCES.items() if not item.online)
    raise ValueError(f"algorithm.name: {name} is trained on rollouts, by `atomrl train`; on preferences are {offline}")


def refuse_given_preferences(name: str) -> None:
    """Raise ValueError for an algorithm that is not trained on rollouts."""
    if name in PREFERENCES and not PREFERENCES[name].online:
        raise ValueError(
            f"algorithm.name: {name} is trained on given preferences, by `atomrl dpo`; on rollouts take online_dpo, or "
            f"one of {', '.join(ALGORITHMS)}"
        )


def build_algorithm(
    name: str, axes: Mapping[str, Any], *, report_entropy: bool = False, max_completion_tokens: int | None = None
) -> Algorithm:
    """The algorithm of a config.

    Args:
        name: a key of `ALGORITHMS` or of `PREFERENCES`.
        axes: what the config overrides, by axis.
        report_entropy: log the policy's entropy.
        max_completion_tokens: the rollout's, for the axes that take it unless the config gives them their own.

    Raises:
        ValueError: an unknown name, axis, parameter or type, with the nearest valid one; or a limit is needed.

    Example:
        >>> sorted(build_algorithm("grpo", {"kl": {"coefficient": 0.01}}).needs)
        ['old_logprobs', 'ref_logprobs']
    """
    objective = objective_of(name, axes)
    return objective.algorithm(name, report_entropy=report_entropy, max_completion_tokens=max_completion_tokens)
