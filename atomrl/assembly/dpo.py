"""A policy trained on preferences from a config: `atomrl dpo`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atomrl.algorithms.table import preference_objective
from atomrl.assembly.preferences import train_on_preferences
from atomrl.config import RunConfig
from atomrl.loop.preferences import mismatched
from atomrl.protocols import TrainingBackend
from atomrl.stages import RowBatch


def preferences(config: RunConfig, resume: bool = False, allow_changes: bool = False) -> dict[str, Any]:
    """`atomrl dpo`: training on pairs of completions, or on completions that are labelled good or bad.

    A step draws `train.rows_per_update` of them. Otherwise as `train`.
    """
    objective = preference_objective(config.algorithm.name, config.algorithm.axes)
    algorithm = objective.algorithm(config.algorithm.name, report_entropy=config.train.report_entropy)

    def scores(trainer: TrainingBackend, rows: RowBatch) -> dict[str, Tensor]:
        return objective.row_scores(trainer.annotate(rows, algorithm.needs | {"old_logprobs"}))

    return train_on_preferences(
        config,
        resume,
        allow_changes,
        algorithm=algorithm,
        scores=scores,
        takes_single=objective.unpaired,
        add=mismatched if objective.needs_mismatched else None,
    )
