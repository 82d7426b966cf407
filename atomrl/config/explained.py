"""What a config says that `atomrl explain` and the web interface explain."""

from dataclasses import fields

from atomrl.algorithms.sft import PRETRAINING, SFT
from atomrl.config import RunConfig
from atomrl.objective import Setting
from atomrl.objective.base import Objective


def objective_in(config: RunConfig) -> Objective:
    """What a run of this config minimises or maximises, by the kind of run it is."""
    if config.kind in ("sft", "pretrain"):
        return SFT if config.kind == "sft" else PRETRAINING
    return config.algorithm.resolved(max_completion_tokens=config.rollout.max_completion_tokens)


def setting_in(config: RunConfig, objective: Objective) -> Setting:
    """What the config says beside the objective."""
    names = {field.name for field in fields(Setting)}
    weights = [item.weight for item in config.reward.functions if item.weight]
    return Setting(
        axes=objective.axes,
        updates_per_step=config.updates_per_step,
        reward_parts=len(weights) + bool(config.reward.by_data_source),
        **config.rollout.model_dump(include=names),
    )
