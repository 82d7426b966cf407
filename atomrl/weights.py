"""Weight transfer: how a trainer's weights come to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from atomrl.models.spec import fitting_weights
from atomrl.protocols import RolloutEngine, TrainingBackend, WeightUpdate


class InProcessTransfer:
    """Copies weights from a trainer to an engine in the same process, in place.

    Where the policy has adapters, the base is sent once and the adapters alone from then on.

    Args:
        trainer: gives the weights.
        engine: takes them.
    """

    def __init__(self, trainer: TrainingBackend, engine: RolloutEngine) -> None:
        self.trainer, self.engine = trainer, engine
        self.base_sent = False

    def __call__(self, version: int) -> None:
        """Hand over the trainer's weights as they are now; `version` is how many updates they have seen.

        Raises:
            ValueError: names or shapes do not fit; the engine keeps what it has.
        """
        update = self.trainer.weight_update(version, adapters_alone=self.base_sent)
        self.engine.update_weights(checked_update(update, self.engine.weight_shapes()))
        self.base_sent = bool(update.adapters)


def checked_update(update: WeightUpdate, shapes: Mapping[str, tuple[int, ...]]) -> WeightUpdate:
    """The update, once every weight is there exactly once and everything in it fits the engine's `shapes`.

    A tied weight that comes under its second name too is left out. Only an update with adapters may bring no weights.

    Raises:
        ValueError: names what is missing, unexpected, repeated or of a wrong shape.

    Example:
        >>> import torch
        >>> checked_update(WeightUpdate(version=1, tensors=[("a", torch.ones(2))]), {"a": (3,)})
        Traceback (most recent call last):
        ...
        atomrl.config.base.ConfigError: the weights were refused: a has shape (2,), not (3,)
    """
    tensors = list(update.tensors)
    for name, adapter in update.adapters.items():
        (rank, inputs), (outputs, same_rank), shape = adapter.a.shape, adapter.b.shape, shapes.get(name)
        # GPT-2 stores its linear layers as [in, out].
        if rank != same_rank or shape not in ((outputs, inputs), (inputs, outputs)):
            there = f"the weight has shape {shape}" if shape else "there is no such weight"
            raise ValueError(
                f"the weights were refused: adapter of {name} has shapes {tuple(adapter.a.shape)} and "
                f"{tuple(adapter.b.shape)}; {there}"
            )
    if tensors or not update.adapters:
        known = {tensor.data_ptr() for name, tensor in tensors if name in shapes}
        tied = [name for name, tensor in tensors if name not in shapes and tensor.data_ptr() in known]
        tensors = list(fitting_weights(tensors, shapes, tied).items())
    return replace(update, tensors=tensors)
