"""Print the objective that a config defines: equation, atoms with their lines and papers, and known faults.

atomrl explain configs/algorithms/dapo.yaml
atomrl explain configs/quickstart.yaml algorithm.name=gspo algorithm.kl.coefficient=0.01
atomrl explain configs/algorithms/gmpo.yaml --latex
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from atomrl.cli.config_arguments import add_config_arguments, config_from, join_overrides

if TYPE_CHECKING:
    from atomrl.config import RunConfig
    from atomrl.objective import Setting
    from atomrl.objective.base import Objective

prepare = join_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--latex", action="store_true", help="print the equation alone, as LaTeX")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.objective.explain import latex, page

    config = config_from(arguments)
    objective = objective_in(config)
    print(latex(objective) if arguments.latex else page(objective, setting_in(config, objective)))
    return 0


def objective_in(config: RunConfig) -> Objective:
    """What a run of this config minimises or maximises, by the kind of run it is."""
    from atomrl.algorithms.sft import PRETRAINING, SFT

    if config.kind in ("sft", "pretrain"):
        return SFT if config.kind == "sft" else PRETRAINING
    return config.algorithm.resolved(max_completion_tokens=config.rollout.max_completion_tokens)


def setting_in(config: RunConfig, objective: Objective) -> Setting:
    """What the config says beside the objective."""
    from atomrl.objective import Setting

    names = {field.name for field in fields(Setting)}
    weights = [item.weight for item in config.reward.functions if item.weight]
    return Setting(
        axes=objective.axes,
        updates_per_step=config.updates_per_step,
        reward_parts=len(weights) + bool(config.reward.by_data_source),
        **config.rollout.model_dump(include=names),
    )
