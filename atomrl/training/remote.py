"""`RemoteBackend`: a training back end in Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from atomrl.batches import RowBatch, TrainingBatch
from atomrl.cluster.ray_cluster import Actor, ActorDied, RayCluster
from atomrl.config import ConfigError
from atomrl.metrics import Metrics, merge
from atomrl.models.memory import memory_metrics
from atomrl.protocols import Algorithm, ModelInput, TrainingBackend, WeightUpdate
from atomrl.training.roles import SOURCES, TRAINED, RoleName


class ServedBackend:
    """A back end in a process of its own, as `RemoteBackend` calls it.

    Args:
        build: makes it, there.
    """

    def __init__(self, build: Callable[[], TrainingBackend]) -> None:
        self.backend = build()
        self.load, self.free_memory = self.backend.load, self.backend.free_memory
        self.token_numbers = self.backend.token_numbers

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """With the memory of this process, which the run's own does not show."""
        return merge([self.backend.train_step(batch, algorithm), memory_metrics()])

    def save(self, folder: Path) -> None:
        """All is written when this returns."""
        if (written := self.backend.save(folder)) is not None:
            written()

    def forward_only(self, rows: RowBatch, needs: frozenset[ModelInput]) -> dict[str, Tensor]:
        """What was asked for alone."""
        found = self.backend.forward_only(rows, needs)
        return {name: getattr(found, name) for name in needs}

    def weight_update(self, version: int, adapters_alone: bool) -> WeightUpdate:
        """With names of one tensor as names of one object, so that they still are where it arrives."""
        update, seen = self.backend.weight_update(version, adapters_alone), dict[int, Tensor]()
        tensors = [(name, seen.setdefault(t.data_ptr(), t)) for name, t in update.tensors]
        return replace(update, tensors=tensors, outline=None)


class RemoteBackend:
    """A `TrainingBackend` in a Ray actor, with some of the models beside the policy in actors of their own.

    It is the same back end there as here would be, so the numbers are the same to the last bit where it has the same
    number of threads. Models apart compute at the same time as those of the trainer. A process that dies ends the run
    (`ActorDied`), which goes on from its checkpoint.

    Args:
        build: makes a back end with the models of some roles, in the actor; must be picklable.
        cluster: where the actors of the role `trainer` and of those in `apart` run.
        apart: the roles with an actor of their own.
    """

    concurrent = True

    def __init__(
        self,
        build: Callable[[Collection[RoleName]], TrainingBackend],
        cluster: RayCluster,
        apart: Sequence[RoleName] = (),
    ) -> None:
        self.cluster = cluster
        rest = [role for role in get_args(RoleName) if role not in apart]
        self.trainer = cluster.start("trainer", 0, partial(ServedBackend, partial(build, rest)))
        self.apart: dict[RoleName, Actor] = {
            role: cluster.start(role, 0, partial(ServedBackend, partial(build, [role]))) for role in apart
        }
        for actor in (self.trainer, *self.apart.values()):
            with self._named(actor):
                cluster.know(actor)

    @contextmanager
    def _named(self, actor: Actor) -> Iterator[None]:
        """Raise `ActorDied` where its process is gone."""
        try:
            yield
        except self.cluster.died as error:
            reason = str(error).strip().partition("\n")[0]
            raise ActorDied(f"{actor} died, with what it learned since the last checkpoint: {reason}") from error

    def _at_once(self, method: str, arguments: Mapping[RoleName | None, Sequence[Any]]) -> list[Any]:
        """A method of the actors of some roles (None: the trainer's), which work at the same time."""
        asked = []
        for role, given in arguments.items():
            actor = self.apart[role] if role else self.trainer
            asked.append((actor, self.cluster.submit(actor, method, *given)))
        self.cluster.wait(asked)
        answers = []
        for actor, found in asked:
            with self._named(actor):
                answers.append(self.cluster.get(actor, found))
        return answers

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        """The rows with what is asked for, each by the actor that has the model; all at the same time."""
        shares: dict[RoleName | None, set[ModelInput]] = {}
        for name in needs:
            role = SOURCES[name][0]
            shares.setdefault(role if role in self.apart else None, set()).add(name)
        shared = self.cluster.put(rows)
        found = self._at_once("forward_only", {role: (shared, frozenset(names)) for role, names in shares.items()})
        return replace(rows, **{name: tensor for part in found for name, tensor in part.items()})

    def train_step(self, batch: TrainingBatch, algorithm: Algorithm) -> Metrics:
        """One optimizer step on the whole batch, of policy and critic at the same time where they are apart."""
        shared = self.cluster.put(batch)
        return merge(self._at_once("train_step", dict.fromkeys(self._trained, (shared, algorithm))))

    def token_numbers(self) -> dict[str, Tensor]:
        """Of the trainer's last update."""
        (found,) = self._at_once("token_numbers", {None: ()})
        assert isinstance(found, dict)
        return found

    @property
    def _trained(self) -> list[RoleName | None]:
        return [None, *(role for role in self.apart if role in TRAINED)]

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine; this process sees those of its machine without a copy."""
        (update,) = self._at_once("weight_update", {None: (version, adapters_alone)})
        assert isinstance(update, WeightUpdate)
        return update

    def free_memory(self) -> None:
        """Give all devices what the actors keep for later."""
        self._at_once("free_memory", dict.fromkeys([None, *self.apart], ()))

    def save(self, folder: Path) -> None:
        """Model, optimizer, schedule and random state, as one back end writes them.

        Raises:
            ConfigError: the folder is not there for the actors too.
        """
        self._at_once("save", dict.fromkeys(self._trained, (folder.resolve(),)))
        if not any(folder.iterdir()):
            raise ConfigError(f"{folder} is not shared with {self.trainer}: put output_dir where all machines see it")

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`."""
        self._at_once("load", dict.fromkeys(self._trained, (folder.resolve(),)))

    def close(self) -> None:
        """End the actors."""
        for actor in (self.trainer, *self.apart.values()):
            self.cluster.end(actor)
