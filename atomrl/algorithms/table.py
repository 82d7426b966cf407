"""Algorithms by name. To add one: its file, and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from atomrl.algorithms.a2c import A2C
from atomrl.algorithms.cispo import CISPO
from atomrl.algorithms.dapo import DAPO
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
from atomrl.algorithms.maxrl import MAXRL
from atomrl.algorithms.on_policy_distillation import ON_POLICY_DISTILLATION
from atomrl.algorithms.opo import OPO
from atomrl.algorithms.pass_at_k import PASS_AT_K
from atomrl.algorithms.ppo import PPO
from atomrl.algorithms.reinforce_pp import REINFORCE_PP, REINFORCE_PP_BASELINE
from atomrl.algorithms.remax import REMAX
from atomrl.algorithms.rloo import RLOO
from atomrl.algorithms.sapo import SAPO
from atomrl.objective import Objective, override
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
}


def objective_of(name: str, axes: Mapping[str, Any]) -> Objective:
    """The axes of an algorithm as a config has them.

    Args:
        name: a key of `ALGORITHMS`.
        axes: what the config overrides, by axis.

    Raises:
        ValueError: an unknown name, axis, parameter or type, with the nearest valid one.

    Example:
        >>> objective_of("dapo", {"clip": {"high": 0.3}}).clip
        Clip('ppo', high=0.3)
    """
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(ALGORITHMS)}"
        raise ValueError(f"algorithm.name: unknown algorithm {name!r}; {hint}")
    return override(ALGORITHMS[name], axes)


def build_algorithm(
    name: str, axes: Mapping[str, Any], *, report_entropy: bool = False, max_completion_tokens: int | None = None
) -> Algorithm:
    """The algorithm of a config.

    Args:
        name: a key of `ALGORITHMS`.
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
