"""A hash of weights, cheap enough to take after every transfer and the same in whatever layout an engine holds them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from atomrl.progress import progress

_AT_ONCE = 2**17  # elements, which stay in a core's cache


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


@torch.no_grad()
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
    progress()
    values = tensor.detach()
    matrix = values.flatten(1) if values.dim() > 1 else values.reshape(1, -1)
    rows, columns = matrix.shape
    factors = _odd(columns, 1, torch.int32, tensor.device)
    if matrix.stride(0) == 1 and rows > 1:
        at_once = max(1, _AT_ONCE // rows)
        sums = torch.zeros(rows, dtype=torch.int32, device=tensor.device)
        for piece, own in zip(matrix.t().split(at_once), factors.split(at_once), strict=True):
            sums += (_bits(piece, dtype) * own[:, None]).sum(0, dtype=torch.int32)
    else:
        pieces = matrix.split(max(1, _AT_ONCE // max(1, columns)))
        sums = torch.cat([(_bits(piece, dtype) * factors).sum(1, dtype=torch.int32) for piece in pieces])
    return int((sums.long() * _odd(rows, 2, torch.int64, tensor.device)).sum()) % 2**64
