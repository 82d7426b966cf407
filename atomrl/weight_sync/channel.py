"""`WeightChannel`: a published update, and the reference with which an engine opens it."""

from __future__ import annotations

from typing import Protocol

from atomrl.protocols import WeightUpdate


class WeightReference(Protocol):
    """A picklable reference to a published update, opened in the engine's process."""

    def open(self) -> WeightUpdate:
        """Return the update. Its tensors may be iterated once; copy those that you keep."""


class WeightChannel(Protocol):
    """Publishes weight updates to engines in other processes."""

    def publish(self, update: WeightUpdate, readers: int) -> WeightReference:
        """Publish an update for this number of engines. Earlier updates may be deleted."""

    def republish(self) -> WeightReference:
        """Publish the current state for one engine that restarts: the newest adapters, and the weights below them."""

    def close(self) -> None:
        """Delete the published updates."""


class TransferBroken(RuntimeError):
    """An update did not arrive completely. It can be sent again."""
