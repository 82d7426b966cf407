"""Low-rank adapters on Megatron's layers: W + scale B A, with only A and B trained.

Megatron fuses several matrices in one layer; each has its own adapter, as in peft. Of a column-parallel layer, B is
sharded along its rows and A is replicated; of a row-parallel one, A is sharded along its columns and B is replicated.
So ranks exchange tensors of the adapter's rank only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomrl.backends.megatron.layout import BY_COLUMNS, SEVERAL, published_names
from atomrl.backends.megatron.shapes import MIXTURE
from atomrl.config import ConfigError, ModelConfig
from atomrl.models.decoder_spec import DecoderSpec
from atomrl.models.loading import model_config_only
from atomrl.protocols import Adapter

Linear = Callable[[Tensor], tuple[Tensor, Tensor | None]]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_adapters(model: ModelConfig) -> None:
    """Raise ConfigError if the config has adapters that Megatron's layers do not support."""
    if model.lora is None:
        return
    modules = model.lora.target_modules
    targets = [] if modules == "all-linear" else [modules] if isinstance(modules, str) else modules
    if others := [name for name in targets if name.rpartition(".")[2] not in PROJECTIONS]:
        raise ConfigError(
            f"model.lora.target_modules: {', '.join(others)}: on Megatron adapters are supported on "
            f"{', '.join(PROJECTIONS)}; use those, or backend.type=fsdp"
        )
    if model.lora.modules_to_save:
        raise ConfigError("model.lora.modules_to_save: not supported on Megatron; leave it out, or use fsdp")
    if model.quantization is not None:
        raise ConfigError("model.quantization: Megatron's layers are not quantised; leave it out, or use fsdp")
    path = model.path
    if path is not None and model_config_only(path, model.trust_remote_code).model_type == MIXTURE:
        raise ConfigError(f"model.lora: {path} has experts, which do not support adapters on Megatron; use fsdp")


class LowRank(nn.Module):
    """A tensor-parallel rank's part of the adapter of one matrix.

    Args:
        adapter: the full adapter.
        by_columns: the layer is row-parallel (sharded along its inputs); False: column-parallel.
        dropout: dropout probability of the adapter's input.
        tensor: tensor-parallel size.
    """

    def __init__(self, adapter: Adapter, by_columns: bool, dropout: float, tensor: int, device: torch.device) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        inputs, outputs = adapter.a.shape[1], len(adapter.b)
        shapes = (inputs // tensor, outputs) if by_columns else (inputs, outputs // tensor)
        self.scale = adapter.scale
        self.lora_A = nn.Parameter(torch.empty(len(adapter.a), shapes[0], device=device))
        self.lora_B = nn.Parameter(torch.empty(shapes[1], len(adapter.a), device=device))
        replicated: Any = self.lora_B if by_columns else self.lora_A
        replicated.sequence_parallel = tensor > 1  # Megatron sums the gradients of the ranks' tokens


class Adapters:
    """Adds the adapters of a stage to its layers; weights are loaded later, with those of the layers.

    Args:
        layers: Megatron's layers of this stage.
        spec: spec of the model.
        adapted: full adapters by the Hugging Face name of the weight that they add to.
        dropout: dropout probability of the adapters' inputs.
        group: tensor-parallel process group.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        spec: DecoderSpec,
        adapted: Mapping[str, Adapter],
        dropout: float,
        group: Any,
        device: torch.device,
    ) -> None:
        self.spec, self.dropout, self.group, self.tensor, self._on = spec, dropout, group, group.size(), True
        modules = [*SEVERAL, *(name.removesuffix(".weight") for name in BY_COLUMNS)]
        for layer in layers if adapted else ():
            for module in modules:
                self._add(layer.get_submodule(module), module, layer.layer_number - 1, adapted, device)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters inside the block, which gives the reference policy."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def _add(self, linear: Any, module: str, layer: int, adapted: Mapping[str, Adapter], device: torch.device) -> None:
        """Add adapters to a module of a layer, for those of its fused matrices that have one."""
        names = published_names(f"{module}.weight", layer, self.spec.tied_head)
        by_columns, parts = f"{module}.weight" in BY_COLUMNS, dict[int, LowRank]()
        for number, name in enumerate(names):
            if name in adapted:
                parts[number] = LowRank(adapted[name], by_columns, self.dropout, self.tensor, device)
                linear.add_module(name.split(".")[-2], parts[number])
        if parts:
            heads = self.spec.kv_heads // self.tensor if len(names) == 3 else 1
            linear.forward = partial(self._forward, linear.forward, by_columns, heads, len(names), parts)

    def _forward(
        self, plain: Linear, by_columns: bool, heads: int, made_of: int, parts: Mapping[int, LowRank], x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Forward pass of a layer with its adapters.

        Args:
            plain: forward pass without adapters.
            by_columns: as in `LowRank`.
            heads: groups into which the layer's outputs are split: key-value heads of a fused QKV, else 1.
            made_of: number of fused matrices.
            parts: adapters by number of the fused matrix.
        """
        from megatron.core.tensor_parallel import (
            gather_from_sequence_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        y, bias = plain(x)
        if not self._on:
            return y, bias
        exchange = reduce_scatter_to_sequence_parallel_region if by_columns else gather_from_sequence_parallel_region
        wide = x.float()
        low = exchange(
            torch.cat([F.linear(part.dropout(wide), part.lora_A) for part in parts.values()], -1), group=self.group
        )
        size = y.shape[-1] // heads
        widths = [size // made_of] * made_of
        if made_of == 3:
            widths = [width // self.spec.kv_heads for width in self.spec.qkv_widths]
        pieces = list(y.unflatten(-1, (heads, size)).split(widths, -1))
        for (number, part), own in zip(parts.items(), low.chunk(len(parts), -1), strict=True):
            added = F.linear(own, part.lora_B) * part.scale
            pieces[number] = (pieces[number] + added.unflatten(-1, (heads, -1))).to(y.dtype)
        return torch.cat(pieces, -1).flatten(-2), bias
