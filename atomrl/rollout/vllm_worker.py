"""What vLLM's own worker does for us: reading back the weights that it computes with.

vLLM mixes `WeightReader` into its worker (`worker_extension_cls`), so it is there in process and behind the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atomrl.weights.hashing import tensor_hash

WORKER_EXTENSION = f"{__name__}.WeightReader"
_COLUMNS = 256
# Its kernels for bfloat16 use a CPU's tiles, for which a process has to ask the system once; it does not by itself.
torch.cpu._init_amx()


class WeightReader:
    """A worker's own weights by their published names; called by `collective_rpc`."""

    model_runner: Any

    def published_hashes(
        self, shapes: Mapping[str, tuple[int, ...]], tied: bool, ranks: Mapping[str, int]
    ) -> list[tuple[str, str, int | None]]:
        """(name, dtype, `tensor_hash`) of every weight; None where it cannot be told.

        Args:
            shapes: of the published weights.
            tied: the head has no name of its own: its copy comes under the embedding's.
            ranks: of the adapters in use, by the name of the weight that they sit on.
        """
        model, dtype = self.model_runner.get_model(), self.model_runner.model_config.dtype
        found = []
        for name, tensor in _held(model, shapes, tied):
            value = None if tensor is None else tensor_hash(tensor, dtype)
            found.append((name, str(dtype).removeprefix("torch."), value))
        if ranks:
            for name, tensor in _adapters(model, ranks):
                found.append((name, str(tensor.dtype).removeprefix("torch."), tensor_hash(tensor, tensor.dtype)))
        return found


def _find(model: nn.Module, name: str) -> tuple[Any, int | None]:
    """The layer that has a published weight or its adapter, and its place there where vLLM has stacked several."""
    layers = dict(model.named_modules())
    path = name.rpartition(".")[0]
    if path in layers:
        return layers[path], None
    stacked: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    before, _, end = path.rpartition(".")
    for whole, parts in stacked.items():
        if end in parts and f"{before}.{whole}" in layers:
            return layers[f"{before}.{whole}"], parts.index(end)
    return None, None


def _held(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> Iterator[tuple[str, Tensor | None]]:
    """Every published weight, and a tied head's copy under the embedding's name."""
    for name, shape in shapes.items():
        layer, part = _find(model, name)
        yield name, _read(getattr(layer, "base_layer", layer), name.rpartition(".")[2], part, shape)
    if tied:
        name = "model.embed_tokens.weight"
        yield name, _multiplied(model.get_submodule("lm_head"))[: shapes[name][0]]


def _read(layer: Any, leaf: str, part: int | None, shape: tuple[int, ...]) -> Tensor | None:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    multiplies = leaf == "weight" and isinstance(layer, LinearBase | ParallelLMHead)
    tensor = _multiplied(layer) if multiplies else getattr(layer, leaf, None)
    if tensor is None:
        return None
    start = sum(layer.output_partition_sizes[:part]) if part else 0
    found: Tensor = tensor[start : start + shape[0]]
    return found if tuple(found.shape) == tuple(shape) else None


def _multiplied(layer: Any) -> Tensor:
    """The matrix [out, in] that a layer multiplies with.

    On a CPU vLLM packs it for its kernels and drops the parameter. The product with the identity gives every element
    back exactly, since all other terms of its sum are zero; only the sign of a zero is lost.
    """
    weight: Tensor = layer.weight
    if not hasattr(layer, "cpu_linear"):
        return weight
    inputs = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    identity = torch.eye(inputs, dtype=layer.params_dtype if weight.numel() == 0 else weight.dtype)
    columns = [layer.cpu_linear(rows, weight, None) for rows in identity.split(_COLUMNS)]
    return torch.cat(columns).t()


def _adapters(model: nn.Module, ranks: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """A and B of the only adapter slot, named as in `WeightUpdate.parts`."""
    for name, rank in ranks.items():
        layer, part = _find(model, name)
        a, b = layer.lora_a_stacked[part or 0][0, 0], layer.lora_b_stacked[part or 0][0, 0]
        yield f"{name}.lora_A", a[:rank]
        yield f"{name}.lora_B", b[:, :rank]
