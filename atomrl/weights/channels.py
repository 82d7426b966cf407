"""Ways for weights to travel to engines in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from atomrl.protocols import Adapter, WeightUpdate


class WeightReference(Protocol):
    """Where an update lies; small, can be pickled, opened in the process of the engine."""

    def open(self) -> WeightUpdate:
        """The update. Its tensors are to be read once, and copied by whoever keeps them."""


class WeightChannel(Protocol):
    """Brings an update to engines in other processes."""

    def publish(self, update: WeightUpdate, readers: int) -> WeightReference:
        """Lay out an update for so many engines; what was laid out before may go."""

    def again(self) -> WeightReference:
        """All that an engine must have by now, the weights beneath adapters too, for one that starts again."""

    def close(self) -> None:
        """Remove what is laid out."""


class TransferBroken(RuntimeError):
    """An update did not arrive whole; it can be sent again."""


def adapters_of(parts: Mapping[str, Tensor]) -> dict[str, Adapter]:
    """The adapters among parts that are named as in `WeightUpdate.parts`; their scale is in B."""
    names = [name.removesuffix(".lora_A") for name in parts if name.endswith(".lora_A")]
    return {name: Adapter(parts[f"{name}.lora_A"], parts[f"{name}.lora_B"], 1.0) for name in names}


def update_of(version: int, publications: Iterable[Iterable[tuple[str, Tensor]]]) -> WeightUpdate:
    """An update from the parts of several, oldest first: the weights of all, and the adapters of the last."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for publication in publications:
        parts = dict(publication)
        tensors |= {name: tensor for name, tensor in parts.items() if ".lora_" not in name}
    return WeightUpdate(version, tensors.items(), adapters_of(parts))


class ObjectStoreChannel:
    """Shared memory: Ray's object store, where all processes of a machine read one copy, and other machines fetch one.

    Args:
        put: what puts into the store, with tensors as arrays (`cluster.hosted`).
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self.put, self.version = put, 0
        self.kept: tuple[Any, ...] = ()

    def publish(self, update: WeightUpdate, readers: int) -> ObjectStoreReference:
        """Copy the update into the store."""
        tensors = list(update.tensors)
        self.kept = () if tensors else self.kept[:1]  # the store has room for the next where the last has gone
        parts = WeightUpdate(update.version, tensors, update.adapters).parts()
        new = self.put(dict(parts))
        self.version, self.kept = update.version, (*self.kept, new)
        return ObjectStoreReference(self.version, (new,))

    def again(self) -> ObjectStoreReference:
        """The same objects."""
        return ObjectStoreReference(self.version, self.kept)

    def close(self) -> None:
        """Let the store forget them."""
        self.kept = ()


@dataclass(frozen=True)
class ObjectStoreReference:
    """Objects in Ray's store, oldest first."""

    version: int
    objects: tuple[Any, ...]

    def open(self) -> WeightUpdate:
        """Tensors over the store's own memory, which may only be read."""
        import ray

        return update_of(self.version, (ray.get(found).items() for found in self.objects))
