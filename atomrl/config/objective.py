"""The objective of a config, for `atomrl explain` and the web interface."""

from dataclasses import fields

from atomrl.algorithms.sft import PRETRAINING, SFT
from atomrl.config.run import RunConfig
from atomrl.objectives import Setting
from atomrl.objectives.objective import Objective


def objective_in(config: RunConfig) -> Objective:
    """Return the objective of a run, by the kind of run."""
    if config.kind in ("sft", "pretrain"):
        return SFT if config.kind == "sft" else PRETRAINING
    return config.algorithm.resolved(max_completion_tokens=config.rollout.max_completion_tokens)


def setting_in(config: RunConfig, objective: Objective) -> Setting:
    """Return the settings of a config that decide which parts of its objective have an effect."""
    names = {field.name for field in fields(Setting)}
    weights = [item.weight for item in config.reward.functions if item.weight]
    return Setting(
        axes=objective.axes,
        updates_per_step=config.updates_per_step,
        reward_parts=len(weights) + bool(config.reward.by_data_source),
        **config.rollout.model_dump(include=names),
    )
