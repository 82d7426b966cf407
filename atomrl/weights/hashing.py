"""A hash of weights, cheap enough to take after every transfer and the same in whatever layout an engine holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from atomrl.progress import progress

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
