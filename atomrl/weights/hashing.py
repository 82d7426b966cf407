"""A hash of weights, cheap enough to take after every transfer and the same in whatever layout an engine holds them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

_LANES = 2**14
_AT_ONCE = 2**17  # elements, which stay in a core's cache


def _odd(count: int, salt: int) -> Tensor:
    """Odd numbers [count] int64 without a pattern: places, mixed in the manner of splitmix64
    (doi:10.1145/2660193.2660195)."""
    mixed = torch.arange(1, count + 1) * 0x1E3779B97F4A7C15 + salt
    mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x14D049BB133111EB
    return (mixed ^ (mixed >> 31)) | 1


@lru_cache(maxsize=8)
def _lanes(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _odd(_LANES, 1).to(torch.int32).to(device)


@torch.no_grad()
def tensor_hash(tensor: Tensor, dtype: torch.dtype) -> int:
    """A 64-bit hash of a tensor's values as `dtype` holds them, whatever its layout in memory.

    Values and places count: a flipped bit always changes it (but for the sign of a zero), and any other change is
    missed in one of 2^32 (in one of 2^16 where all values differ in their upper 16 bits alone, as bfloat16 numbers in
    float32 do). It finds accidents; against an attacker it is no protection.

    It is a sum of the values' bits, each times an odd number of its place, modulo 2^32 in rows of 16,384 and modulo
    2^64 over the rows: integers alone, so that the order of the sum does not matter, on the tensor's own device, in
    pieces of half a megabyte.

    Example:
        >>> weight = torch.arange(6.0).view(2, 3)
        >>> tensor_hash(weight, torch.float32) == tensor_hash(weight.T.contiguous().T, torch.float32)
        True
        >>> tensor_hash(weight, torch.float32) == tensor_hash(weight.flip(0), torch.float32)
        False
    """
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    at_once = max(1, _AT_ONCE * len(rows) // max(1, rows.numel()))
    lanes, sums = _lanes(tensor.device), []
    for piece in rows.split(at_once):
        if piece.dim() == 2 and piece.stride(0) == 1:
            piece = piece.t().contiguous().t()  # of such a block alone torch has a fast transposition
        values = piece.to(dtype).add(0).reshape(-1)  # -0 + 0 is 0
        if short := -len(values) % (4 * _LANES // dtype.itemsize):
            values = F.pad(values, (0, short))
        sums.append((values.view(torch.int32).view(-1, _LANES) * lanes).sum(1, dtype=torch.int32))
    total = torch.cat(sums).cpu().long()
    return int((total * _odd(len(total), 2)).sum()) % 2**64
