"""Algorithms by name: the objectives of the pages in this folder. To add one: its page."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from atomrl import algorithms
from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.objective import PolicyObjective, PreferenceObjective
from atomrl.protocols import Algorithm

Kind = TypeVar("Kind", PolicyObjective, PreferenceObjective)


def _objectives(kind: type[Kind]) -> dict[str, Kind]:
    names = [module.name for module in pkgutil.iter_modules(algorithms.__path__) if module.name != "table"]
    pages = [vars(importlib.import_module(f"atomrl.algorithms.{name}")) for name in names]
    return {item.name: item for page in pages for item in page.values() if isinstance(item, kind)}


ALGORITHMS = _objectives(PolicyObjective)
PREFERENCES = _objectives(PreferenceObjective)
"""Those that compare completions: on given preferences (`atomrl dpo`), or on rollouts where they are `online`."""


Objective = PolicyObjective | PreferenceObjective | RewardModelObjective


def objective_of(name: str, axes: Mapping[str, Any]) -> Objective:
    """A named algorithm with what a config changes of it.

    Args:
        name: a key of `ALGORITHMS` or of `PREFERENCES`, or `reward_model`.
        axes: what the config overrides, by axis.

    Raises:
        ValueError: an unknown name, axis, parameter or type, with the nearest valid one.

    Example:
        >>> objective_of("dapo", {"clip": {"high": 0.3}}).clip
        PPOClip(type='ppo', low=0.2, high=0.3, dual=None)
    """
    named: dict[str, Objective] = {**ALGORITHMS, **PREFERENCES, "reward_model": RewardModelObjective()}
    if name not in named:
        near = difflib.get_close_matches(name, named, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(named)}"
        raise ValueError(f"algorithm.name: unknown algorithm {name!r}; {hint}")
    return named[name].override(axes)


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
    return objective.resolved(max_completion_tokens=max_completion_tokens, report_entropy=report_entropy)
