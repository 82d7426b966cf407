"""Weight updates in shared memory: Ray's object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atomrl.protocols import Adapter, WeightUpdate


def adapters_of(parts: Mapping[str, Tensor]) -> dict[str, Adapter]:
    """Collect the adapters from tensors named as in `WeightUpdate.parts`. Their scale is 1, because B is scaled."""
    names = [name.removesuffix(".lora_A") for name in parts if name.endswith(".lora_A")]
    return {name: Adapter(parts[f"{name}.lora_A"], parts[f"{name}.lora_B"], 1.0) for name in names}


def update_of(version: int, publications: Iterable[Iterable[tuple[str, Tensor]]]) -> WeightUpdate:
    """Merge the tensors of several updates, oldest first: all weights, and the adapters of the last one."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for publication in publications:
        parts = dict(publication)
        tensors |= {name: tensor for name, tensor in parts.items() if ".lora_" not in name}
    return WeightUpdate(version, tensors.items(), adapters_of(parts))


class ObjectStoreChannel:
    """Weights in Ray's object store. All processes of a machine share one copy; other machines fetch one.

    Args:
        put: function that stores an object and returns its reference (`RayCluster.put`).
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self.put, self.version = put, 0
        self.published: tuple[Any, ...] = ()
        """References to the last full update and, if adapters were sent since, to the newest of these."""

    def publish(self, update: WeightUpdate, readers: int) -> ObjectStoreReference:
        """Copy the update into the store."""
        tensors = list(update.tensors)
        # Released before `put`, so that the store need not hold two updates at once.
        self.published = () if tensors else self.published[:1]
        parts = WeightUpdate(update.version, tensors, update.adapters).parts()
        new = self.put(dict(parts))
        self.version, self.published = update.version, (*self.published, new)
        return ObjectStoreReference(self.version, (new,))

    def republish(self) -> ObjectStoreReference:
        """Return a reference to the same objects."""
        return ObjectStoreReference(self.version, self.published)

    def close(self) -> None:
        """Release the objects."""
        self.published = ()


@dataclass(frozen=True)
class ObjectStoreReference:
    """References to objects in Ray's store, oldest first."""

    version: int
    objects: tuple[Any, ...]

    def open(self) -> WeightUpdate:
        """Return the update. Its tensors are read-only views of the store's shared memory."""
        import ray

        return update_of(self.version, (ray.get(reference).items() for reference in self.objects))
