"""Switches: plain operations, and weights rounded once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

_plain = False
_rounded: dict[tuple[int, ...], tuple[list[int], Tensor]] | None = None
_places: Mapping[tuple[int, ...], Tensor] = {}


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Make models compute by operations with all modes of differentiation inside the block; slower, the same values.

    `GPT` then does without kernels, shared prompts and compiled layers; transformers models without fused attention.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    global _plain
    before, _plain = _plain, True
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _plain = before


def are_plain() -> bool:
    """Return True inside `plain_formulas`, and inside `torch.compile`, which fuses plain operations itself."""
    return _plain or torch.compiler.is_compiling()


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call `function.apply`, with a type for its result."""
    return cast(Tensor, function.apply(*arguments))


def stacked(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate matrices of the same width, or vectors, in this dtype."""
    converted = [tensor.to(dtype) for tensor in tensors]
    return converted[0] if len(converted) == 1 else torch.cat(converted)


@contextmanager
def round_once(places: Mapping[tuple[int, ...], Tensor] | None = None) -> Iterator[None]:
    """Round weights to the compute dtype once for all micro-batches inside the block, instead of at each use.

    This takes the memory of a rounded copy of the decoder's linear weights.

    Args:
        places: addresses of concatenated weights -> memory for them in the compute dtype; others get their own.
    """
    global _rounded, _places
    before, _rounded, _places = (_rounded, _places), {}, places or {}
    try:
        yield
    finally:
        _rounded, _places = before


def rounded(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate weights in the compute dtype; cached inside `round_once` until a weight changes."""
    if _rounded is None or tensors[0].dtype == dtype:  # without rounding, a cached copy is not worth its memory
        return stacked(tensors, dtype)
    # Keyed by address: saved-tensor hooks return other tensor objects in the backward pass.
    key, versions = tuple(tensor.data_ptr() for tensor in tensors), [tensor._version for tensor in tensors]
    if key not in _rounded or _rounded[key][0] != versions:
        place = _places.get(key)
        if place is None or place.dtype != dtype:
            place = stacked(tensors, dtype)
        else:
            for part, tensor in zip(place.split([len(tensor) for tensor in tensors]), tensors, strict=True):
                part.copy_(tensor)
        _rounded[key] = versions, place
    return _rounded[key][1]
