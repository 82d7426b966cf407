"""A frozen base in 4 or 8 bits beneath adapters (QLoRA, arXiv:2305.14314).

Linear layers keep codes, and compute with weights that are made of them at each use, also in the backward pass. An
engine is sent the same weights, so it draws from the very policy that is trained. `nf4` is bitsandbytes' (the `quant`
extra): blocks of 64 with a scale each, and the scales in 8 bits. `int8` has a scale for each output; unlike
bitsandbytes' layer of that name it leaves activations as they are, since an engine's would not be rounded so.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomrl.common.errors import said_as
from atomrl.config import ConfigError, Quantization
from atomrl.models.kernels import apply

BLOCK, SCALE_BLOCK = 64, 256
"""Of nf4: numbers with one scale, and scales with one scale of theirs."""


def bitsandbytes() -> Any:
    """The package's functions.

    Raises:
        ConfigError: it is not installed.
    """
    with said_as(ConfigError, "nf4 and 8-bit optimizers need bitsandbytes: pip install 'atomrl[quant]'", ImportError):
        import bitsandbytes
    return bitsandbytes


@cache
def _scale_map(device: torch.device) -> Tensor:
    """[256]: what the 8-bit codes of nf4's scales stand for."""
    return cast(Tensor, bitsandbytes().functional.create_dynamic_map().to(device))


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weight is kept in codes; its state dict has the weight that it computes with.

    Args:
        linear: whose weight is quantised, where it lies.
        kind: how.

    Example:
        >>> layer = nn.Linear(64, 32)
        >>> bool((QuantizedLinear(layer, "int8").weight - layer.weight).abs().max() < 1e-3)
        True
    """

    codes: Tensor
    scales: Tensor
    scale_scales: Tensor
    mean: Tensor
    """Of the scales of nf4, which are kept without it; [1]."""

    def __init__(self, linear: nn.Linear, kind: Quantization) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.dtype = linear.weight.dtype
        """Of the weight that was quantised, and of `weight`."""
        self.bias = linear.bias
        weight = linear.weight.detach()
        found = _to_nf4(weight) if kind == "nf4" else _to_int8(weight)
        for name, tensor in found.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in], made of the codes."""
        return self.weight_in(self.dtype)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in a dtype."""
        if self.kind == "int8":
            return (self.codes * self.scales).to(dtype)
        made = bitsandbytes().functional
        of_scales = made.QuantState(
            self.scale_scales, code=_scale_map(self.codes.device), blocksize=SCALE_BLOCK, dtype=torch.float32
        )
        # As one row: on a CPU, 0.50 takes wrong scales for rows that are no multiple of a block.
        row = torch.Size((1, self.out_features * self.in_features))
        state = made.QuantState(
            self.scales, row, dtype=dtype, blocksize=BLOCK, quant_type="nf4", offset=self.mean[0], state2=of_scales
        )
        return cast(Tensor, made.dequantize_4bit(self.codes, state)).view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return apply(_Product, x, self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # All of a model's at once, so not in a GPU's memory.
        destination[f"{prefix}weight"] = self.weight.cpu()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


class _Product(torch.autograd.Function):
    """x W^T + b: autograd would keep W from here to the backward pass, which makes it of the codes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight_in(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight_in(grad.dtype), None


def _to_nf4(weight: Tensor) -> dict[str, Tensor]:
    codes, state = bitsandbytes().functional.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return {
        "codes": codes,
        "scales": state.absmax,
        "scale_scales": state.state2.absmax,
        "mean": state.offset.reshape(1),
    }


def _to_int8(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True).clamp_min_(1e-12) / 127
    return {"codes": (weight / scales).round_().to(torch.int8), "scales": scales}


def quantize(inner: nn.Module, head: Tensor, kind: Quantization, device: torch.device) -> None:
    """Replace the linear layers of a model, one after the other, but for its output matrix.

    Args:
        inner: frozen from here on.
        head: the output matrix; it and the embedding stay as they are.
        kind: how.
        device: where it is done, and where the codes are kept.

    Raises:
        ConfigError: the model has no such layers; bitsandbytes is missing.
    """
    for name, linear in linears(inner, head, kind).items():
        parent, _, own = name.rpartition(".")
        setattr(inner.get_submodule(parent), own, QuantizedLinear(linear.to(device), kind))


def linears(inner: nn.Module, head: Tensor, kind: Quantization) -> dict[str, nn.Linear]:
    """The layers of a model that are quantised, by their names.

    Raises:
        ConfigError: there are none.
    """
    found = {name: m for name, m in inner.named_modules() if isinstance(m, nn.Linear) and m.weight is not head}
    if not found:
        raise ConfigError(
            f"model.quantization={kind}: this model has no nn.Linear layers (GPT-2 has Conv1D); leave it out"
        )
    return found


def quantized_layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    """Those of a model.

    Example:
        >>> list(quantized_layers(nn.Linear(2, 2)))
        []
    """
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


@torch.no_grad()
def round_as_quantized(inner: nn.Module, head: Tensor, kind: Quantization, dtype: torch.dtype) -> float:
    """Give the linear layers of a model the weights that they have in a quantised base, in place.

    Args:
        inner: with float32 weights.
        head: the output matrix.
        kind, dtype: how the base was quantised, and what it computed in.

    Returns:
        By how much the weights changed, relative to their size.
    """
    changed = size = 0.0
    for linear in linears(inner, head, kind).values():
        small = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        small.weight = nn.Parameter(linear.weight.detach().to(dtype))
        rounded = QuantizedLinear(small, kind).weight.float()
        changed += float((rounded - linear.weight).square().sum())
        size += float(linear.weight.square().sum())
        linear.weight.copy_(rounded)
    return float((changed / size) ** 0.5)
