"""Transfer weights from the trainer to an engine: validate names and shapes first, compare hashes afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from atomrl.models.decoder_spec import fitting_weights
from atomrl.protocols import RolloutEngine, TrainingBackend, WeightHash, WeightUpdate
from atomrl.weight_sync.hashes import device_hash, fetch_hashes

log = logging.getLogger(__name__)

ROUNDED_TO = (torch.float32, torch.bfloat16, torch.float16)
Expected = dict[tuple[str, torch.dtype], int]
"""(weight name, dtype of the engine's copy) -> expected hash."""


class WeightMismatch(RuntimeError):
    """An engine does not hold the trainer's weights, so its completions must not be trained on."""


class InProcessTransfer:
    """Copy the trainer's weights to an engine, and verify the engine's copy by hashes.

    The engine copies from the trainer's tensors into its own, without an intermediate copy. (Engines in other processes
    forward them through a `WeightChannel`.) With LoRA only what is trained is sent each time. The base weights are sent
    once, or not at all if the engine's hashes show that it has loaded the same ones. They are verified every time.

    Args:
        trainer: source of the weights.
        engine: destination of the weights.
        note: called with a line after the first transfer: how many tensors were verified.
        shared: the engine uses the trainer's base weights (`FrozenBase`): they are never sent, and must not change from
            now on.
    """

    def __init__(
        self,
        trainer: TrainingBackend,
        engine: RolloutEngine,
        note: Callable[[str], None] = log.info,
        shared: bool = False,
    ) -> None:
        self.trainer, self.engine, self.read_back, self.note = trainer, engine, ReadBack(engine), note
        self.base: Expected | None = None
        """Hashes of the base weights below the adapters, once the engine has them."""
        if shared:
            held = engine.weight_hashes()
            self.base = {(weight.name, weight.dtype): weight.value for weight in held if weight.value is not None}
        self.dtypes: Mapping[str, set[torch.dtype]] = {}
        """The engine's dtypes of each weight, known after the first transfer."""

    def __call__(self, version: int) -> None:
        """Transfer the trainer's current weights.

        Args:
            version: number of the training step that made them; 0: the initial weights.

        Raises:
            ValueError: names or shapes do not match; the engine's weights are unchanged.
            WeightMismatch: afterwards the engine has another version or other weights.
        """
        update = self.trainer.weight_update(version, adapters_alone=self.base is not None)
        update = checked_update(update, self.engine.weight_shapes(), partial=self.base is not None)
        if update.adapters and self.base is None:
            self.base = self._matching_base(update)
            if self.base is not None:
                update = replace(update, tensors=(), outline=None)
            elif update.outline is not None:  # `_matching_base` has consumed the lazily gathered tensors
                update = checked_update(self.trainer.weight_update(version), self.engine.weight_shapes())
        hashes: dict[tuple[str, torch.dtype], Tensor] = {}

        def hashed(parts: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in parts:
                hashes.update(_device_hashes([(name, tensor)], self.dtypes))
                yield name, tensor

        # Hash tensors while the engine reads them: lazily gathered ones are freed afterwards.
        tensors = hashed(update.tensors)
        self.engine.update_weights(replace(update, tensors=tensors))
        # Hash the tensors that the engine did not read, and the adapters.
        for _ in chain(tensors, hashed(replace(update, tensors=()).parts())):
            pass
        held = self.read_back(version)
        is_first, self.dtypes = not self.dtypes, dtypes_of(held)
        expected = {**(self.base or {}), **dict(zip(hashes, fetch_hashes([*hashes.values()]), strict=True))}
        compare(held, expected, version)
        verified = [weight for weight in held if weight.value is not None]
        if is_first and verified:
            engines = len({weight.holder for weight in verified})
            where = "the engine" if engines == 1 else f"{engines} engines"
            self.note(f"weights verified: {len(verified)} tensors read back from {where} have the trainer's hashes")
        base = {key: value for key, value in expected.items() if ".lora_" not in key[0]}
        self.base = base if update.adapters else None

    def _matching_base(self, update: WeightUpdate) -> Expected | None:
        """Return the hashes of the base weights if the engine already holds these weights, else None.

        None also if the engine cannot read its weights back.
        """
        held = [weight for weight in self.engine.weight_hashes() if ".lora_" not in weight.name]
        if all(weight.value is None for weight in held):
            return None
        base = expected_hashes(update.tensors, dtypes_of(held))
        try:
            compare(held, base, update.version)
        except WeightMismatch as different:
            log.info("sending the base weights of the adapters to the engine: %s", different)
            return None
        return base


class ReadBack:
    """Read an engine's weight hashes after a transfer. Warns once about weights that the engine cannot read back.

    Args:
        engine: the engine that received an update.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.unread: set[str] = set()

    def __call__(self, version: int) -> list[WeightHash]:
        """Return the engine's hashes.

        Raises:
            WeightMismatch: its weights have another version.
        """
        if self.engine.version != version:
            raise WeightMismatch(f"the engine has weights of version {self.engine.version}, not {version}")
        held = self.engine.weight_hashes()
        unread = {weight.name for weight in held if weight.value is None}
        if unread - self.unread:
            log.warning("%d weights cannot be read back from the engine, such as %s", len(unread), min(unread))
        self.unread |= unread
        return held


def dtypes_of(held: Iterable[WeightHash]) -> dict[str, set[torch.dtype]]:
    """Return the dtypes in which engines hold each weight."""
    dtypes: dict[str, set[torch.dtype]] = {}
    for weight in held:
        dtypes.setdefault(weight.name, set()).add(weight.dtype)
    return dtypes


def expected_hashes(parts: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, set[torch.dtype]]) -> Expected:
    """Compute the hashes that an engine must have after it received `parts`.

    Args:
        parts: (name, tensor) pairs.
        dtypes: the engine's dtypes of each weight. A weight that is not in it is hashed in every possible dtype.
    """
    hashes = _device_hashes(parts, dtypes)
    return dict(zip(hashes, fetch_hashes([*hashes.values()]), strict=True))


def _device_hashes(
    parts: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, set[torch.dtype]]
) -> dict[tuple[str, torch.dtype], Tensor]:
    """Compute `expected_hashes` as tensors on the weights' device: reading each value would synchronize."""
    return {
        (name, dtype): device_hash(tensor, dtype)
        for name, tensor in parts
        for dtype in dtypes.get(name, {tensor.dtype, *ROUNDED_TO})
    }


def compare(held: Iterable[WeightHash], expected: Mapping[tuple[str, torch.dtype], int], version: int) -> None:
    """Check that every engine holds exactly the expected weights.

    Args:
        held: hashes that the engines read back. Weights without a value are skipped.
        expected: expected hash of each weight.
        version: version of the weights, for the error message.

    Raises:
        WeightMismatch: names the engine, the version and up to four weights.

    Example:
        >>> import torch
        >>> held = [WeightHash("a", torch.float32, 1), WeightHash("b", torch.float32, 3, "replica 2")]
        >>> compare(held[:1], {("a", torch.float32): 1}, version=7)
        >>> compare(held[1:], {("b", torch.float32): 2}, version=7)
        Traceback (most recent call last):
        ...
        atomrl.weight_sync.transfer.WeightMismatch: replica 2 does not have the weights of version 7: b differs
    """
    by_holder: dict[str, list[WeightHash]] = {}
    for weight in held:
        by_holder.setdefault(weight.holder, []).append(weight)
    names = {name for name, _ in expected}
    for holder, own in (by_holder or {"the engine": []}).items():
        problems = {}
        for name, dtype, value, _ in own:
            if value is None:
                continue
            if name not in names:
                problems[name] = f"{name} is unexpected"
            elif value != expected.get((name, dtype)):
                problems[name] = f"{name} differs"
        problems |= {name: f"{name} is missing" for name in names - {weight.name for weight in own}}
        if problems:
            shown = [problems[name] for name in sorted(problems)[:4]]
            more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise WeightMismatch(f"{holder} does not have the weights of version {version}: {', '.join(shown)}{more}")


def checked_update(update: WeightUpdate, shapes: Mapping[str, tuple[int, ...]], partial: bool = False) -> WeightUpdate:
    """Check that an update has each weight exactly once, with the engine's shapes, and return it.

    The second name of a tied weight is dropped. Only an update with adapters may have no weights. If the update has an
    `outline`, only that is checked, so that nothing is gathered.

    Args:
        shapes: of the engine's weights.
        partial: the engine has the base weights already, and the update only those that are trained beside adapters.

    Raises:
        ValueError: names the weights that are missing, unexpected, repeated or of a wrong shape.

    Example:
        >>> import torch
        >>> checked_update(WeightUpdate(version=1, tensors=[("a", torch.ones(2))]), {"a": (3,)})
        Traceback (most recent call last):
        ...
        atomrl.common.errors.ConfigError: the weights were refused: a has shape (2,), not (3,)
    """
    tensors = list(update.tensors if update.outline is None else update.outline)
    for name, adapter in update.adapters.items():
        (rank, inputs), (outputs, same_rank), shape = adapter.a.shape, adapter.b.shape, shapes.get(name)
        # GPT-2 stores its linear layers as [in, out].
        if rank != same_rank or shape not in ((outputs, inputs), (inputs, outputs)):
            there = f"the weight has shape {shape}" if shape else "no such weight exists"
            raise ValueError(
                f"the weights were refused: adapter of {name} has shapes {tuple(adapter.a.shape)} and "
                f"{tuple(adapter.b.shape)}; {there}"
            )
    if update.outline is not None:
        fitting_weights(tensors, shapes)
        return update
    if partial:
        shapes = {name: shapes[name] for name, _ in tensors if name in shapes}
    if tensors or not update.adapters:
        storages = {tensor.data_ptr() for name, tensor in tensors if name in shapes}
        tied = [name for name, tensor in tensors if name not in shapes and tensor.data_ptr() in storages]
        tensors = list(fitting_weights(tensors, shapes, tied).items())
    return replace(update, tensors=tensors)
