"""A transfer from trainer to engine: checked before, verified after."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from atomrl.common.processes import progress
from atomrl.models.gpt import fitting_weights
from atomrl.protocols import RolloutEngine, TrainingBackend, WeightHash, WeightUpdate

# --------------------------------------------------------------------------------------------------------------------
# A hash of weights, cheap enough to take after every transfer and the same in whatever layout an engine holds them.

# Elements of a piece: on a CPU they stay in a core's cache; on a GPU few pieces are few launches.
_AT_ONCE, _AT_ONCE_ON_GPU = 2**17, 2**25


@lru_cache(maxsize=64)
def _odd(count: int, salt: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Odd numbers [count] without a pattern: places, mixed as in splitmix64 (doi:10.1145/2660193.2660195)."""
    with torch.inference_mode(False):
        mixed = torch.arange(1, count + 1) * 0x1E3779B97F4A7C15 + salt
        mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 27)) * 0x14D049BB133111EB
        return ((mixed ^ (mixed >> 31)) | 1).to(dtype).to(device)


def _bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As integers, those of -0 being those of 0."""
    return values.to(dtype).add(0).view(torch.int32 if dtype.itemsize == 4 else torch.int16)


def tensor_hash(tensor: Tensor, dtype: torch.dtype) -> int:
    """A 64-bit hash of a tensor's values as `dtype` (of 2 or 4 bytes) holds them, whatever its layout in memory.

    Values and places count: a flipped bit always changes it (but for the sign of a zero), and any other change is
    missed in about one of 2^32. It finds accidents; against an attacker it is no protection.

    It is the sum of the values' bits, each times an odd number of its column, modulo 2^32, and of a row's sum times an
    odd number of the row, modulo 2^64. These are integers, so the order of the sums does not matter, and a matrix that
    is held as its transpose is read as it lies. It is computed on the tensor's own device, in pieces.

    Example:
        >>> weight = torch.arange(6.0).view(2, 3)
        >>> tensor_hash(weight, torch.float32) == tensor_hash(weight.T.contiguous().T, torch.float32)
        True
        >>> tensor_hash(weight, torch.float32) == tensor_hash(weight.flip(0), torch.float32)
        False
    """
    [value] = tensor_hashes([(tensor, dtype)])
    return value


def tensor_hashes(parts: Iterable[tuple[Tensor, torch.dtype]]) -> list[int]:
    """The `tensor_hash` of each part, fetched from their device in one transfer.

    Example:
        >>> weight = torch.arange(6.0).view(2, 3)
        >>> parts = [(weight, torch.float32), (weight.T, torch.bfloat16)]
        >>> tensor_hashes(parts) == [tensor_hash(*part) for part in parts]
        True
    """
    return fetch_hashes([device_hash(tensor, dtype) for tensor, dtype in parts])


def device_hash(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The `tensor_hash` as a number on the tensor's device, int64 without dimensions; `fetch_hashes` reads it."""
    progress()
    return _hash_of_rows(row_sums(tensor, dtype))


def fetch_hashes(hashes: Sequence[Tensor]) -> list[int]:
    """The values of hashes that lie on devices; each device is waited for once."""
    values = [0] * len(hashes)
    for device in dict.fromkeys(each.device for each in hashes):
        places = [place for place, each in enumerate(hashes) if each.device == device]
        for place, value in zip(places, torch.stack([hashes[place] for place in places]).tolist(), strict=True):
            values[place] = value % 2**64
    return values


@torch.no_grad()
def row_sums(tensor: Tensor, dtype: torch.dtype, first_column: int = 0) -> Tensor:
    """The sums that `tensor_hash` takes of each row, [rows] int32 on the tensor's device.

    They add up over pieces of a row: of a matrix that is cut by columns, those of each piece, with the column that it
    begins with, give the whole one's.

    Args:
        first_column: of the whole matrix, which the tensor's first one is.

    Example:
        >>> weight = torch.arange(6.0).view(2, 3)
        >>> pieces = row_sums(weight[:, :1], torch.float32) + row_sums(weight[:, 1:], torch.float32, first_column=1)
        >>> hash_of_rows(pieces) == tensor_hash(weight, torch.float32)
        True
    """
    values = tensor.detach()
    matrix = values.flatten(1) if values.dim() > 1 else values.reshape(1, -1)
    rows, columns = matrix.shape
    piece_size = _AT_ONCE if tensor.device.type == "cpu" else _AT_ONCE_ON_GPU
    factors = _odd(first_column + columns, 1, torch.int32, tensor.device)[first_column:]
    if matrix.stride(0) == 1 and rows > 1:
        at_once = max(1, piece_size // rows)
        sums = torch.zeros(rows, dtype=torch.int32, device=tensor.device)
        for piece, own in zip(matrix.t().split(at_once), factors.split(at_once), strict=True):
            sums += (_bits(piece, dtype) * own[:, None]).sum(0, dtype=torch.int32)
        return sums
    pieces = matrix.split(max(1, piece_size // max(1, columns)))
    return torch.cat([(_bits(piece, dtype) * factors).sum(1, dtype=torch.int32) for piece in pieces])


def hash_of_rows(sums: Tensor) -> int:
    """The `tensor_hash` of a tensor with these `row_sums`."""
    [value] = fetch_hashes([_hash_of_rows(sums)])
    return value


def _hash_of_rows(sums: Tensor) -> Tensor:
    return (sums.long() * _odd(len(sums), 2, torch.int64, sums.device)).sum()


log = logging.getLogger(__name__)
ROUNDED_TO = (torch.float32, torch.bfloat16, torch.float16)
Expected = dict[tuple[str, torch.dtype], int]
"""(name, what the engine rounds it to) -> the hash that it must have."""


class WeightMismatch(RuntimeError):
    """An engine has other weights than the trainer thinks; nothing that it draws may be trained on."""


class InProcessTransfer:
    """Brings a trainer's weights to an engine: names and shapes are checked before the engine sees a tensor, and hashes
    of what it then computes with are compared with those of what was sent.

    The engine copies out of the trainer's own tensors into its own; there is no copy between them. (Engines in other
    processes send them on by a channel.) Where the policy has adapters, they travel alone: an engine that has read the
    base from the same folder is not sent it, which its hashes say; another one is sent it once. It is verified each
    time.

    Args:
        trainer: gives the weights.
        engine: takes them.
    """

    def __init__(self, trainer: TrainingBackend, engine: RolloutEngine) -> None:
        self.trainer, self.engine, self.read_back = trainer, engine, ReadBack(engine)
        self.base: Expected | None = None
        """Of the weights beneath the adapters, once the engine has them."""
        self.dtypes: Mapping[str, set[torch.dtype]] = {}
        """What the engine rounds each weight to, once it has said so."""

    def __call__(self, version: int) -> None:
        """Hand over the trainer's weights as they are now; `version` is how many updates they have seen.

        Raises:
            ValueError: names or shapes do not fit; the engine keeps what it has.
            WeightMismatch: the engine has another version or other weights afterwards.
        """
        update = self.trainer.weight_update(version, adapters_alone=self.base is not None)
        update = checked_update(update, self.engine.weight_shapes())
        if update.adapters and self.base is None:
            self.base = self._base_there(update)
            if self.base is not None:
                update = replace(update, tensors=(), outline=None)
            elif update.outline is not None:  # gathered as they were read, and gone
                update = checked_update(self.trainer.weight_update(version), self.engine.weight_shapes())
        hashes: dict[tuple[str, torch.dtype], Tensor] = {}

        def hashed(parts: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in parts:
                hashes.update(_device_hashes([(name, tensor)], self.dtypes))
                yield name, tensor

        tensors = hashed(update.tensors)  # as they are read: they may be gone afterwards
        self.engine.update_weights(replace(update, tensors=tensors))
        for _ in chain(tensors, hashed(replace(update, tensors=()).parts())):
            pass
        held = self.read_back(version)
        self.dtypes = dtypes_of(held)
        expected = {**(self.base or {}), **dict(zip(hashes, fetch_hashes([*hashes.values()]), strict=True))}
        compare(held, expected, version)
        base = {key: value for key, value in expected.items() if ".lora_" not in key[0]}
        self.base = base if update.adapters else None

    def _base_there(self, update: WeightUpdate) -> Expected | None:
        """The hashes of the weights beneath the adapters, if the engine holds just these; None if it holds others, or
        cannot be read."""
        held = [found for found in self.engine.weight_hashes() if ".lora_" not in found.name]
        if all(found.value is None for found in held):
            return None
        base = expected_hashes(update.tensors, dtypes_of(held))
        try:
            compare(held, base, update.version)
        except WeightMismatch as different:
            log.info("the weights beneath the adapters are sent to the engine: %s", different)
            return None
        return base


class ReadBack:
    """Reads back what an engine holds after a transfer, and says once which weights it cannot read.

    Args:
        engine: that took an update.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.unread: set[str] = set()

    def __call__(self, version: int) -> list[WeightHash]:
        """Its hashes.

        Raises:
            WeightMismatch: it has weights of another version.
        """
        if self.engine.version != version:
            raise WeightMismatch(f"the engine has weights of version {self.engine.version}, not {version}")
        held = self.engine.weight_hashes()
        unread = {found.name for found in held if found.value is None}
        if unread - self.unread:
            log.warning("%d weights cannot be read back from the engine, such as %s", len(unread), min(unread))
        self.unread |= unread
        return held


def dtypes_of(held: Iterable[WeightHash]) -> dict[str, set[torch.dtype]]:
    """What engines round each weight to."""
    dtypes: dict[str, set[torch.dtype]] = {}
    for found in held:
        dtypes.setdefault(found.name, set()).add(found.dtype)
    return dtypes


def expected_hashes(parts: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, set[torch.dtype]]) -> Expected:
    """The hashes that an engine must have after it was sent `parts`, rounded as it rounds each; of one of which this is
    not known, all that may be."""
    hashes = _device_hashes(parts, dtypes)
    return dict(zip(hashes, fetch_hashes([*hashes.values()]), strict=True))


def _device_hashes(
    parts: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, set[torch.dtype]]
) -> dict[tuple[str, torch.dtype], Tensor]:
    """As `expected_hashes`, still on the weights' device: reading each one would wait for it."""
    return {
        (name, dtype): device_hash(tensor, dtype)
        for name, tensor in parts
        for dtype in dtypes.get(name, {tensor.dtype, *ROUNDED_TO})
    }


def compare(held: Iterable[WeightHash], expected: Mapping[tuple[str, torch.dtype], int], version: int) -> None:
    """That every engine holds exactly what is expected.

    Args:
        held: as engines have read it back; weights that they cannot read back are left out of it.
        expected: hash of each weight.
        version: of the weights, for the message.

    Raises:
        WeightMismatch: names engine, version and weights.

    Example:
        >>> import torch
        >>> held = [WeightHash("a", torch.float32, 1), WeightHash("b", torch.float32, 3, "replica 2")]
        >>> compare(held[:1], {("a", torch.float32): 1}, version=7)
        >>> compare(held[1:], {("b", torch.float32): 2}, version=7)
        Traceback (most recent call last):
        ...
        atomrl.weight_sync.transfer.WeightMismatch: replica 2 has not the weights of version 7: b differs
    """
    by_holder: dict[str, list[WeightHash]] = {}
    for found in held:
        by_holder.setdefault(found.holder, []).append(found)
    wanted = {name for name, _ in expected}
    for holder, own in (by_holder or {"the engine": []}).items():
        problems = {}
        for name, dtype, value, _ in own:
            if value is None:
                continue
            if name not in wanted:
                problems[name] = f"{name} is unexpected"
            elif value != expected.get((name, dtype)):
                problems[name] = f"{name} differs"
        problems |= {name: f"{name} is missing" for name in wanted - {found.name for found in own}}
        if problems:
            shown = [problems[name] for name in sorted(problems)[:4]]
            more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise WeightMismatch(f"{holder} has not the weights of version {version}: {', '.join(shown)}{more}")


def checked_update(update: WeightUpdate, shapes: Mapping[str, tuple[int, ...]]) -> WeightUpdate:
    """The update, once every weight is there exactly once and everything in it fits the engine's `shapes`.

    A tied weight that comes under its second name too is left out. Only an update with adapters may bring no weights.
    Of one with an `outline` that is looked at, and nothing is gathered.

    Raises:
        ValueError: names what is missing, unexpected, repeated or of a wrong shape.

    Example:
        >>> import torch
        >>> checked_update(WeightUpdate(version=1, tensors=[("a", torch.ones(2))]), {"a": (3,)})
        Traceback (most recent call last):
        ...
        atomrl.config.schema.ConfigError: the weights were refused: a has shape (2,), not (3,)
    """
    tensors = list(update.tensors if update.outline is None else update.outline)
    for name, adapter in update.adapters.items():
        (rank, inputs), (outputs, same_rank), shape = adapter.a.shape, adapter.b.shape, shapes.get(name)
        # GPT-2 stores its linear layers as [in, out].
        if rank != same_rank or shape not in ((outputs, inputs), (inputs, outputs)):
            there = f"the weight has shape {shape}" if shape else "there is no such weight"
            raise ValueError(
                f"the weights were refused: adapter of {name} has shapes {tuple(adapter.a.shape)} and "
                f"{tuple(adapter.b.shape)}; {there}"
            )
    if update.outline is not None:
        fitting_weights(tensors, shapes)
        return update
    if tensors or not update.adapters:
        known = {tensor.data_ptr() for name, tensor in tensors if name in shapes}
        tied = [name for name, tensor in tensors if name not in shapes and tensor.data_ptr() in known]
        tensors = list(fitting_weights(tensors, shapes, tied).items())
    return replace(update, tensors=tensors)
