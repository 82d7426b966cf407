"""Verification of a server's weights by SGLang's checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from atomrl.engines.server_weights import EMBEDDING, HEAD
from atomrl.protocols import WeightHash
from atomrl.weight_sync import tensor_hash

DIFFERS = -1
"""Stands for a hash, which is never negative: the server has other weights than it was sent."""
Digest = Callable[[Tensor], str]
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ROWS = 64  # SGLang pads the vocabulary with zeros to a multiple of this


def digest_of(device: str) -> Digest | None:
    """Return the checksum of SGLang's `/weights_checker` (0.5.23) for servers on a kind of device.

    None if it cannot be computed here: on a GPU it is a kernel of SGLang.

    Example:
        >>> digest_of("cpu")(torch.zeros(2))
        'af5570f5a1810b7a'
    """
    if device == "cpu":
        return lambda tensor: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()[:16]
    if device == "cuda" and torch.cuda.is_available() and find_spec("sglang") is not None:
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

        return lambda tensor: f"{gpu_tensor_hash(tensor.cuda()):016x}"
    return None


def held_hashes(
    names: Iterable[str], sent: Mapping[str, Tensor], checksums: Mapping[str, str], digest: Digest | None
) -> list[WeightHash]:
    """Return hashes of a server's weights by comparing its checksums with those of the weights it was sent.

    The value is `tensor_hash` if the server's weight is bitwise equal, `DIFFERS` if not, None if there is no checksum.
    SGLang has a checksum per parameter of its own, which may stack several weights: if it differs, all of them count as
    different.

    Args:
        names: published weights; each must be in `sent`.
        sent: in the server's dtype.
        checksums: by the server's own parameter names.
        digest: computes such a checksum.
    """
    values: dict[str, int] = {}
    for own, checksum in checksums.items() if digest else ():
        prefix, _, leaf = own.rpartition(".")
        parent, _, layer = prefix.rpartition(".")
        parts = [f"{parent}.{part}.{leaf}" for part in _STACKED.get(layer, (layer,))] if parent else [own]
        if digest and all(name in sent for name in parts):
            stacked = torch.cat([sent[name] for name in parts])
            if own in (EMBEDDING, HEAD):
                stacked = torch.nn.functional.pad(stacked, (0, 0, 0, -len(stacked) % _ROWS))
            same = digest(stacked) == checksum
            values |= {name: tensor_hash(sent[name], sent[name].dtype) if same else DIFFERS for name in parts}
    return [WeightHash(name, sent[name].dtype, values.get(name)) for name in names]
