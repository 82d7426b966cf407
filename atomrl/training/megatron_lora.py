"""Low-rank adapters on the layers that Megatron cuts: W + scale B A, with only A and B trained.

Megatron has several matrices in one layer; each keeps an adapter of its own, as peft gives it. Of a layer whose outputs
are cut, a rank has the rows of B that go with its own, and all of A; where inputs are cut, the columns of A, and all of
B. So what ranks exchange for an adapter is as wide as its rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomrl.config import ConfigError, ModelConfig
from atomrl.models.loading import model_config_only
from atomrl.models.spec import DecoderSpec
from atomrl.protocols import Adapter
from atomrl.training.megatron_shape import MIXTURE
from atomrl.training.megatron_weights import BY_COLUMNS, SEVERAL, published_names

Linear = Callable[[Tensor], tuple[Tensor, Tensor | None]]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_adapters(model: ModelConfig) -> None:
    """Raise ConfigError where a config asks for adapters that Megatron's layers do not take."""
    if model.lora is None:
        return
    given = model.lora.target_modules
    targets = [given] if isinstance(given, str) and given != "all-linear" else [] if given == "all-linear" else given
    if others := [name for name in targets if name.rpartition(".")[2] not in PROJECTIONS]:
        raise ConfigError(
            f"model.lora.target_modules: {', '.join(others)}: on Megatron adapters are of {', '.join(PROJECTIONS)}; "
            "take those, or backend.type=fsdp"
        )
    if model.quantization is not None:
        raise ConfigError("model.quantization: Megatron's layers are not quantised; leave it out, or take fsdp")
    path = model.path
    if path is not None and model_config_only(path, model.trust_remote_code).model_type == MIXTURE:
        raise ConfigError(f"model.lora: {path} has experts, which take no adapters on Megatron; take fsdp")


class LowRank(nn.Module):
    """A rank's part of the adapter of one matrix.

    Args:
        adapter: the whole one.
        by_columns: whether ranks share the inputs, not the outputs.
        dropout: share of the inputs that it does not see.
        tensor: how many ranks share a layer.
    """

    def __init__(self, adapter: Adapter, by_columns: bool, dropout: float, tensor: int, device: torch.device) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        inputs, outputs = adapter.a.shape[1], len(adapter.b)
        shapes = (inputs // tensor, outputs) if by_columns else (inputs, outputs // tensor)
        self.scale = adapter.scale
        self.lora_A = nn.Parameter(torch.empty(len(adapter.a), shapes[0], device=device))
        self.lora_B = nn.Parameter(torch.empty(shapes[1], len(adapter.a), device=device))
        whole: Any = self.lora_B if by_columns else self.lora_A
        whole.sequence_parallel = tensor > 1  # a rank has the gradient of its tokens: Megatron adds these up


class Adapters:
    """The adapters of a stage's layers, put into these; their weights are filled as the layers' own.

    Args:
        layers: Megatron's, of this stage.
        spec: of the model.
        adapted: whole adapters by the published names of the matrices that they add to.
        dropout: as of `LowRank`.
        group: the ranks that share a layer.
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
        """The model without them: the reference policy."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def _add(self, linear: Any, module: str, layer: int, adapted: Mapping[str, Adapter], device: torch.device) -> None:
        """To one of a layer's modules, for those of the matrices it is made of that have one."""
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
        """What a layer gives with its adapters; `parts` are of the matrices, by number, that it is made of."""
        from megatron.core.tensor_parallel import (
            gather_from_sequence_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        found, bias = plain(x)
        if not self._on:
            return found, bias
        exchange = reduce_scatter_to_sequence_parallel_region if by_columns else gather_from_sequence_parallel_region
        wide = x.float()
        low = exchange(
            torch.cat([F.linear(part.dropout(wide), part.lora_A) for part in parts.values()], -1), group=self.group
        )
        size = found.shape[-1] // heads
        widths = [size // made_of] * made_of
        if made_of == 3:
            widths = [width // self.spec.kv_heads for width in self.spec.qkv_widths]
        pieces = list(found.unflatten(-1, (heads, size)).split(widths, -1))
        for (number, part), own in zip(parts.items(), low.chunk(len(parts), -1), strict=True):
            added = F.linear(own, part.lora_B) * part.scale
            pieces[number] = (pieces[number] + added.unflatten(-1, (heads, -1))).to(found.dtype)
        return torch.cat(pieces, -1).flatten(-2), bias
