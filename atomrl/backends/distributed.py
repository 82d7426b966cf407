"""`DistributedBackend`, the back end that a run calls: it forwards each call to the handles of other processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from atomrl.backends.roles import SOURCES, TRAINED, RoleName
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.common.metrics import Metrics, merge
from atomrl.config import ConfigError
from atomrl.protocols import Algorithm, ModelInput, WeightUpdate
from atomrl.tracking.checkpoint_format import STATE_FOLDER


class Handle(Protocol):
    """Calls the methods of a back end elsewhere."""

    def share(self, value: Any) -> Any:
        """Return an argument for several calls of `start`, stored where all actors can read it."""

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Start a call; return a function that waits for its result.

        Raises:
            RankFailed: here or in the function: a process is gone or hangs, or a rank failed.
            Exception: likewise, the error of the method.
        """

    def close(self) -> None:
        """End the processes."""


class DistributedBackend:
    """A `TrainingBackend` whose models are in other processes.

    With the same number of threads, results equal those of a local back end bit for bit. Models with a handle of their
    own compute at the same time as those of the trainer.

    Args:
        trainer: has the policy, and all models that are not in `apart`.
        apart: handles of the models that have their own, by role.
    """

    def __init__(self, trainer: Handle, apart: Mapping[RoleName, Handle] | None = None) -> None:
        self.trainer, self.apart = trainer, dict(apart or {})
        self.concurrent = bool(self.apart)
        self._handles = [trainer, *self.apart.values()]
        self._trained = [trainer, *(handle for role, handle in self.apart.items() if role in TRAINED)]

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the trainer."""
        return self.trainer.start(method, *arguments)()

    def _call_each(self, handles: Sequence[Handle], method: str, *arguments: Any) -> list[Any]:
        """Call a method of several handles at the same time."""
        calls = [handle.start(method, *arguments) for handle in handles]
        return [wait() for wait in calls]

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """Compute the needs without gradient, each where its model is, and add them to the rows."""
        needs_of: dict[Handle, set[ModelInput]] = {}
        for name in needs:
            needs_of.setdefault(self.apart.get(SOURCES[name][0], self.trainer), set()).add(name)
        shared = self.trainer.share(rows)
        calls = {h: h.start("forward_only", shared, frozenset(names)) for h, names in needs_of.items()}
        for handle, wait in calls.items():
            computed = wait()
            rows = replace(rows, **{name: getattr(computed, name) for name in needs_of[handle]})
        return rows

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """Take one optimizer step on the whole batch; policy and critic step in parallel if they are apart."""
        return merge(self._call_each(self._trained, "train_step", self.trainer.share(batch), algorithm))

    def token_numbers(self) -> Mapping[str, Tensor]:
        """Return the per-token values of the trainer's last update."""
        values: Mapping[str, Tensor] = self._call("token_numbers")
        return values

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """Return the policy's weights for an engine.

        If the ranks have them in parts, each part is gathered when it is read. From an actor on this machine they are
        read without a copy.
        """
        update: WeightUpdate = self._call("weight_update", version, adapters_alone)
        return update if update.outline is None else replace(update, tensors=self._read_parts())

    def _read_parts(self) -> Iterator[tuple[str, Tensor]]:
        for number in itertools.count():
            if not (part := self._call("weight_part", number)):
                return
            yield from part
            del part  # before the next one is gathered

    def frozen_base(self) -> None:
        """Return None: the weights are in other processes."""

    rounded_weights = frozen_base

    def free_memory(self) -> None:
        """Return the allocators' cached memory to the GPUs."""
        self._call_each(self._handles, "free_memory")

    def save(self, folder: Path) -> Callable[[], None]:
        """Start writing a checkpoint in the layout of a local back end; return a function that waits for it.

        Steps may be taken before that. All processes must share the folder's file system.
        """
        self._call_each(self._trained, "save", folder.resolve())

        def wait() -> None:
            self._call_each(self._trained, "saved")
            if not (folder / STATE_FOLDER).exists():
                raise ConfigError(
                    f"{folder} is not shared with {self.trainer}: set output_dir to a folder that all machines share"
                )

        return wait

    def load(self, folder: Path) -> None:
        """Resume exactly from `save`."""
        self._call_each(self._trained, "load", folder.resolve())

    def close(self) -> None:
        """End the processes."""
        for handle in self._handles:
            handle.close()
