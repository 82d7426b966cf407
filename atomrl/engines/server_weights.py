"""Weights and KV-cache sizes for vLLM and SGLang, in process and behind servers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from atomrl.common.files import new_folder
from atomrl.models.loading import read_weights
from atomrl.models.memory import is_tied, layer_count, widths
from atomrl.models.shapes import text_config
from atomrl.protocols import WeightUpdate
from atomrl.weight_sync.files import write_update

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_CPU_CACHE, _SPARE_CACHE = 4 * 2**30, 2**26


def tied_embedding(config: Any, names: Iterable[str]) -> str | None:
    """Return the published name of the embedding that is also the output matrix; None if they are two weights.

    In checkpoints with a vision tower it has another prefix.

    Example:
        >>> from transformers import Qwen2Config
        >>> tied_embedding(Qwen2Config(tie_word_embeddings=True), ["model.embed_tokens.weight", "model.norm.weight"])
        'model.embed_tokens.weight'
    """
    tail = EMBEDDING.removeprefix("model")
    return next((name for name in names if name.endswith(tail)), EMBEDDING) if is_tied(config) else None


def published_shapes(folder: str, config: Any, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of every published weight of a model; a tied head has none."""
    weights = read_weights(folder, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights}
    if is_tied(config):
        shapes.pop(HEAD, None)
    return shapes


def write_weights(update: WeightUpdate, folder: Path, dtype: torch.dtype, tied: str | None) -> Path:
    """Write an update's weights as safetensors into a new folder, which is renamed into place when complete.

    Args:
        update: its tensors are written, its adapters are not.
        folder: must not exist.
        dtype: the tensors are cast to it.
        tied: name of a weight to write under the head's name too (`tied_embedding`); else vLLM and SGLang keep the
            old head.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> name = "model.embed_tokens.weight"
        >>> update = WeightUpdate(version=3, tensors=[(name, torch.ones(2, 2))])
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = write_weights(update, Path(parent) / "3", torch.float32, tied=name)
        ...     sorted(load_file(folder / "model.safetensors"))
        ['lm_head.weight', 'model.embed_tokens.weight']
    """
    tensors = weights_for_engines(update, dtype, tied)
    with new_folder(folder) as partial:
        write_update(WeightUpdate(update.version, tensors.items()), partial)
    return folder


def weights_for_engines(
    update: WeightUpdate, dtype: torch.dtype, tied: str | None, copy: bool = False
) -> dict[str, torch.Tensor]:
    """Return an update's weights on the CPU as vLLM and SGLang load them; arguments as for `write_weights`."""
    tensors = {name: tensor.detach().to("cpu", dtype, copy=copy).contiguous() for name, tensor in update.tensors}
    return tensors | ({HEAD: tensors[tied]} if tied in tensors else {})


def cpu_cache_tokens(config: Any, rows: int, dtype: torch.dtype) -> int:
    """KV-cache size in tokens for an engine on a CPU: enough for all rows, at most 4 GiB."""
    longest = getattr(text_config(config), "max_position_embeddings", None) or _MAX_CPU_CACHE  # some have no limit
    return min(rows * int(longest), _MAX_CPU_CACHE // max(1, cache_bytes_per_token(config, dtype)))


def cpu_cache_bytes(config: Any, rows: int, dtype: torch.dtype) -> int:
    """`cpu_cache_tokens` in bytes, with 64 MiB to spare."""
    return cpu_cache_tokens(config, rows, dtype) * cache_bytes_per_token(config, dtype) + _SPARE_CACHE


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all layers."""
    return 2 * layer_count(config) * widths(config)[2] * dtype.itemsize
