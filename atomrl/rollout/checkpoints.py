"""Weights as files, for engines that read them from disk; and what is known of a model before that."""

from pathlib import Path
from typing import Any

import torch

from atomrl.files import new_folder
from atomrl.models.loading import read_weights
from atomrl.protocols import WeightUpdate
from atomrl.weights.files import write_update

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MOST_CPU_CACHE, _SPARE_CACHE = 4 * 2**30, 2**26


def published_shapes(folder: str, config: Any, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Every weight of a model in a folder, by its published name; a tied head has none."""
    weights = read_weights(folder, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights}
    if is_tied(config):
        shapes.pop(HEAD, None)
    return shapes


def is_tied(config: Any) -> bool:
    """Whether a model's head is its embedding."""
    return bool(getattr(config, "tie_word_embeddings", False))


def write_weights(update: WeightUpdate, folder: Path, dtype: torch.dtype, tied: bool) -> Path:
    """Write an update's weights as safetensors into a folder, which is then whole: it is renamed into place.

    Args:
        update: its tensors are read; its adapters are not written.
        folder: to be made.
        dtype: that they are cast to.
        tied: write the embedding under the head's name too, without which vLLM and SGLang keep the old head.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> update = WeightUpdate(version=3, tensors=[("model.embed_tokens.weight", torch.ones(2, 2))])
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = write_weights(update, Path(parent) / "3", torch.float32, tied=True)
        ...     sorted(load_file(folder / "model.safetensors"))
        ['lm_head.weight', 'model.embed_tokens.weight']
    """
    tensors = weights_for_engines(update, dtype, tied)
    with new_folder(folder) as aside:
        write_update(WeightUpdate(update.version, tensors.items()), aside)
    return folder


def weights_for_engines(
    update: WeightUpdate, dtype: torch.dtype, tied: bool, copy: bool = False
) -> dict[str, torch.Tensor]:
    """An update's weights on the CPU, as engines of others take them; arguments as of `write_weights`."""
    tensors = {name: tensor.detach().to("cpu", dtype, copy=copy).contiguous() for name, tensor in update.tensors}
    return tensors | ({HEAD: tensors[EMBEDDING]} if tied and EMBEDDING in tensors else {})


def cpu_cache_tokens(config: Any, rows: int, dtype: torch.dtype) -> int:
    """Tokens of keys and values that an engine on a CPU keeps: what all rows may need, and at most 4 GiB."""
    return min(rows * int(config.max_position_embeddings), _MOST_CPU_CACHE // cache_bytes_per_token(config, dtype))


def cpu_cache_bytes(config: Any, rows: int, dtype: torch.dtype) -> int:
    """The same in bytes, with a little to spare."""
    return cpu_cache_tokens(config, rows, dtype) * cache_bytes_per_token(config, dtype) + _SPARE_CACHE


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Of keys and values in all layers."""
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * int(width) * dtype.itemsize
