"""Algorithms by name, collected from the files of this folder. To add one, add its file."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.objectives import PolicyObjective, PreferenceObjective
from atomrl.objectives.overrides import check_name

Kind = TypeVar("Kind", PolicyObjective, PreferenceObjective)


def _objectives(kind: type[Kind]) -> dict[str, Kind]:
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    pages = [vars(importlib.import_module(f"atomrl.algorithms.{name}")) for name in names]
    return {item.name: item for page in pages for item in page.values() if isinstance(item, kind)}


ALGORITHMS = _objectives(PolicyObjective)
PREFERENCES = _objectives(PreferenceObjective)
"""Preference algorithms: on a dataset of preferences, or on rollouts if `online`."""


SECTIONS = {
    "sft": ("sft", "configs/quickstart_sft.yaml"),
    "pretrain": ("pretrain", "configs/pretrain_gpt2.yaml"),
    "pretraining": ("pretrain", "configs/pretrain_gpt2.yaml"),
}
"""Kinds of run that are no algorithm -> (the section that selects them, an example)."""

Objective = PolicyObjective | PreferenceObjective | RewardModelObjective


def objective_of(value: Objective | Mapping[str, Any] | str) -> Objective:
    """Return the algorithm that a config's key `algorithm` describes.

    Args:
        value: `{name: grpo, clip: {high: 0.28}}`: a key of `ALGORITHMS` or of `PREFERENCES`, or `reward_model` (default
            `grpo`), and overrides by axis; or the name alone; or an objective, which is returned as it is.

    Raises:
        ValueError: not a mapping; or an unknown name, axis, parameter or type, with the nearest valid one.

    Example:
        >>> objective_of({"name": "dapo", "clip": {"high": 0.3}}).clip
        PPOClip(low=0.2, high=0.3, dual=None)
    """
    if isinstance(value, Objective):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"algorithm must be a mapping with a name, as in {{name: dapo}}, got {value!r}")
    named: dict[str, Objective] = {**ALGORITHMS, **PREFERENCES, "reward_model": RewardModelObjective()}
    name = str(value.get("name", "grpo"))
    if name.lower() in SECTIONS:
        section, example = SECTIONS[name.lower()]
        raise ValueError(
            f"algorithm.name: {name!r} is no algorithm; a section `{section}` makes such a run ({example}); remove "
            "algorithm"
        )
    check_name("algorithm.name", name, list(named))
    return named[name].override({axis: change for axis, change in value.items() if axis != "name"})
