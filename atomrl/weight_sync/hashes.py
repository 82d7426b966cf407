"""The hash of a weight: cheap enough to compute after every transfer, and independent of the engine's memory layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from atomrl.common.hangs import progress

# Elements that are processed at a time: on a CPU they fit a core's cache, on a GPU the number of launches counts.
_PIECE_SIZE, _PIECE_SIZE_GPU = 2**17, 2**25


@lru_cache(maxsize=64)
def _odd_factors(count: int, salt: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return pseudo-random odd numbers [count]: indices mixed as in splitmix64 (doi:10.1145/2660193.2660195)."""
    with torch.inference_mode(False):
        mixed = torch.arange(1, count + 1) * 0x1E3779B97F4A7C15 + salt
        mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 27)) * 0x14D049BB133111EB
        return ((mixed ^ (mixed >> 31)) | 1).to(dtype).to(device)


def _bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of the values as integers. Adding 0 turns -0 into 0."""
    return values.to(dtype).add(0).view(torch.int32 if dtype.itemsize == 4 else torch.int16)


def tensor_hash(tensor: Tensor, dtype: torch.dtype) -> int:
    """Compute a 64-bit hash of a tensor's values in `dtype` (2 or 4 bytes), independent of its memory layout.

        row_sum[i] = sum_j bits[i, j] * odd[j]  mod 2^32
        hash       = sum_i row_sum[i] * odd'[i]  mod 2^64

    Integer sums do not depend on their order, so a transposed matrix is read in its own layout. Any flipped bit changes
    the hash (except the sign of a zero); other changes are missed with a probability of about 2^-32. It detects
    accidents, not attacks. It is computed on the tensor's device.

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
    """Compute the `tensor_hash` of each (tensor, dtype), with one transfer from the device for all.

    Example:
        >>> weight = torch.arange(6.0).view(2, 3)
        >>> parts = [(weight, torch.float32), (weight.T, torch.bfloat16)]
        >>> tensor_hashes(parts) == [tensor_hash(*part) for part in parts]
        True
    """
    return fetch_hashes([device_hash(tensor, dtype) for tensor, dtype in parts])


def device_hash(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the `tensor_hash` as a scalar int64 tensor on the tensor's device; `fetch_hashes` reads it."""
    progress()
    return _combine_rows(row_sums(tensor, dtype))


def fetch_hashes(hashes: Sequence[Tensor]) -> list[int]:
    """Read `device_hash` tensors, with one synchronization per device."""
    values = [0] * len(hashes)
    for device in dict.fromkeys(each.device for each in hashes):
        places = [place for place, each in enumerate(hashes) if each.device == device]
        for place, value in zip(places, torch.stack([hashes[place] for place in places]).tolist(), strict=True):
            values[place] = value % 2**64
    return values


@torch.no_grad()
def row_sums(tensor: Tensor, dtype: torch.dtype, first_column: int = 0) -> Tensor:
    """Compute the row sums of `tensor_hash`, [rows] int32 on the tensor's device.

    For a matrix that is sharded by columns, the row sums of the shards add up to those of the full matrix.

    Args:
        tensor: the matrix or shard; tensors of other dimensions are flattened to a matrix.
        dtype: dtype in which the values are hashed.
        first_column: index of the tensor's first column in the full matrix.

    Example:
        >>> weight = torch.arange(6.0).view(2, 3)
        >>> pieces = row_sums(weight[:, :1], torch.float32) + row_sums(weight[:, 1:], torch.float32, first_column=1)
        >>> hash_of_rows(pieces) == tensor_hash(weight, torch.float32)
        True
    """
    values = tensor.detach()
    matrix = values.flatten(1) if values.dim() > 1 else values.reshape(1, -1)
    rows, columns = matrix.shape
    piece_size = _PIECE_SIZE if tensor.device.type == "cpu" else _PIECE_SIZE_GPU
    factors = _odd_factors(first_column + columns, 1, torch.int32, tensor.device)[first_column:]
    if matrix.stride(0) == 1 and rows > 1:  # stored as the transpose
        at_once = max(1, piece_size // rows)
        sums = torch.zeros(rows, dtype=torch.int32, device=tensor.device)
        for piece, own in zip(matrix.t().split(at_once), factors.split(at_once), strict=True):
            sums += (_bits(piece, dtype) * own[:, None]).sum(0, dtype=torch.int32)
        return sums
    pieces = matrix.split(max(1, piece_size // max(1, columns)))
    return torch.cat([(_bits(piece, dtype) * factors).sum(1, dtype=torch.int32) for piece in pieces])


def hash_of_rows(sums: Tensor) -> int:
    """Compute the `tensor_hash` of a tensor from its `row_sums`."""
    [value] = fetch_hashes([_combine_rows(sums)])
    return value


def _combine_rows(sums: Tensor) -> Tensor:
    return (sums.long() * _odd_factors(len(sums), 2, torch.int64, sums.device)).sum()
