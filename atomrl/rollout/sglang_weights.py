"""What SGLang tells of the weights that it holds, beside those that it was sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from atomrl.protocols import WeightHash
from atomrl.rollout.checkpoints import EMBEDDING, HEAD
from atomrl.weights import tensor_hash

DIFFERS = -1
"""In the place of a hash, which is never negative: the server holds something else."""
Digest = Callable[[Tensor], str]
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ROWS = 64  # of which the vocabulary's rows are made a multiple, with zeros


def digest_of(device: str) -> Digest | None:
    """How a server on a kind of device sums a tensor up for `/weights_checker` (0.5.23); None where it cannot be done
    here: on a GPU it is a kernel of SGLang's own.

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
    """What a server holds of the weights that it was sent: `tensor_hash` where it has them bit by bit, `DIFFERS` where
    it has not, and None where it does not tell.

    SGLang tells a checksum of each of its own parameters, in which several weights may be stacked; where they are not
    what was sent, all of them differ.

    Args:
        names: of the published weights, all of which were `sent`.
        sent: in the server's own dtype.
        checksums: by the server's own names.
        digest: makes such a checksum of a tensor.
    """
    values: dict[str, int] = {}
    for own, checksum in checksums.items() if digest else ():
        prefix, _, leaf = own.rpartition(".")
        before, _, layer = prefix.rpartition(".")
        parts = [f"{before}.{part}.{leaf}" for part in _STACKED.get(layer, (layer,))] if before else [own]
        if digest and all(name in sent for name in parts):
            whole = torch.cat([sent[name] for name in parts])
            if own in (EMBEDDING, HEAD):
                whole = torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % _ROWS))
            same = digest(whole) == checksum
            values |= {name: tensor_hash(sent[name], sent[name].dtype) if same else DIFFERS for name in parts}
    return [WeightHash(name, sent[name].dtype, values.get(name)) for name in names]
