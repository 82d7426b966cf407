"""TRL's `trainer.state`: where a run stands."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from atomrl.config import RunConfig
from atomrl.tracking.checkpoint_format import PROGRESS
from atomrl.tracking.reading.lines import GrowingFile, loads
from atomrl.trl.arguments import in_trl_names


class RunState(TrainerState):
    """The state of a trainer, one object from before `train` to after it; callbacks and rewards get it.

    `global_step`, `max_steps` and the `step` of a row of `log_history` count optimizer steps, as in TRL. The rows are
    those of `metrics.jsonl`, also with TRL's metric names.
    """

    def begin(self, config: RunConfig, items: int, updates: int, resume: bool) -> None:
        """Set the state to the first step of a run, or to the step of its newest checkpoint.

        Args:
            config: of the run, with its number of steps.
            items: number of training examples.
            updates: what a step adds to `global_step`.
            resume: whether the run continues.
        """
        self._updates, self._file, self._rows = updates, GrowingFile(config.run_dir / "metrics.jsonl"), list[Any]()
        of_all = config.train.steps * config.items_per_step / items
        self._epochs = config.train.total_epochs or (None if config.sft is not None and config.sft.packing else of_all)
        self._steps, self.max_steps = config.train.steps, config.train.steps * updates
        self.num_train_epochs = math.ceil(self._epochs or 1)
        self._at(_saved_step(config.run_dir) if resume else 0)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Add a step, whose row is not in the file yet; returns its row."""
        row = {"step": step, **metrics}
        self._at(step, row)
        return self.log_history[-1]

    def end(self, steps: int) -> None:
        """Set the state after the run."""
        self._at(steps)

    def _at(self, step: int, *unwritten: Mapping[str, Any]) -> None:
        while True:
            restarted, lines = self._file.read()
            if restarted:
                self._rows.clear()
            if not lines:
                break
            self._rows += [self._named(loads(line)) for line in lines]
        self.log_history[:] = [*self._rows, *map(self._named, unwritten)]
        self.global_step = step * self._updates
        self.epoch = self._epoch(step)  # type: ignore[assignment]  # None: unknown

    def _named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return in_trl_names({**row, "step": row["step"] * self._updates, "epoch": self._epoch(row["step"])})

    def _epoch(self, step: int) -> float | None:
        """Return the passes over the data; None for packed rows and `max_steps`, whose blocks are not counted."""
        return None if self._epochs is None else self._epochs * step / max(1, self._steps)


def _saved_step(run: Path) -> int:
    progress = run / "model" / PROGRESS
    return int(json.loads(progress.read_text(encoding="utf-8"))["step"]) if progress.is_file() else 0
