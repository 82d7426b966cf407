"""A frozen base quantized to 4 or 8 bits beneath adapters (QLoRA, arXiv:2305.14314).

Linear layers store codes, and dequantize them at each use, also in the backward pass. Engines receive the dequantized
weights, so they sample from exactly the policy that is trained. `nf4` is bitsandbytes' (the `quant` extra): blocks of
64 weights with a scale each, and the scales in 8 bits. `int8` has a scale per output. Unlike bitsandbytes' layer of
that name, it does not quantize activations, because an engine would not do so.
"""

import ctypes
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError, Quantization
from atomrl.models.kernel_library import call, usable
from atomrl.models.kernel_switches import apply

log = logging.getLogger(__name__)
BLOCK, SCALE_BLOCK = 64, 256
"""nf4: weights per scale, and scales per second-level scale."""
ROUNDED_AT_ONCE = 2**18
"""Weights of int8 that a CPU dequantizes at once."""
LARGE = 2**20
"""Bytes of a tensor that is returned to the system when it is freed (`_free_at_once`)."""
_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of malloc.h."""


def bitsandbytes() -> Any:
    """Import bitsandbytes.

    Raises:
        ConfigError: it is not installed.
    """
    with reraise_as(
        ConfigError, "nf4 and 8-bit optimizers need bitsandbytes: pip install 'atomrl[quant]'", ImportError
    ):
        import bitsandbytes
    return bitsandbytes


@cache
def _scale_map(device: torch.device) -> Tensor:
    """Return the values of the 8-bit codes of nf4's scales, [256]."""
    return cast(Tensor, bitsandbytes().functional.create_dynamic_map().to(device))


@cache
def _nf4_table(device: torch.device) -> Tensor:
    """Return the values of nf4's codes, [16]."""
    return cast(Tensor, bitsandbytes().functional.get_4bit_type("nf4", device=device))


@cache
def nf4_kernels(device: torch.device) -> Any | None:
    """Return the Triton kernels for nf4 (`atomrl.models.nf4_kernels`) of a GPU; None on a CPU, and where they fail."""
    if device.type != "cuda":
        return None
    try:
        from atomrl.models import nf4_kernels as kernels

        with torch.cuda.device(device):
            kernels.check(_example(96, 320, torch.bfloat16, device))
    except Exception as error:
        log.warning("nf4: rollouts dequantize with bitsandbytes, with one copy more: %s", error)
        return None
    return kernels


def _example(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device | None = None) -> "QuantizedLinear":
    """Return a layer in nf4 for comparing kernels. It draws no random numbers, on which a seeded run depends."""
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    values = torch.arange(outputs * inputs, dtype=torch.float32).sin_()
    linear.weight = nn.Parameter(values.view(outputs, inputs).to(device, dtype))
    return QuantizedLinear(linear, "nf4")


@cache
def _nf4_in_cpp() -> bool:
    """Return True if the C++ kernel for nf4 gives the weights of the installed bitsandbytes."""
    layer, out = _example(30, 100, torch.float32), torch.empty(30, 100)
    call("dequantize_nf4", out, *layer.quantized(), *out.shape, out.stride(0))
    agrees = torch.equal(out, layer._nf4(torch.float32))
    if not agrees:
        log.warning("nf4: the C++ kernel differs from bitsandbytes, whose own code is used, which is slower")
    return agrees


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantized weight; its state dict has the dequantized weight.

    Args:
        linear: layer to quantize, on its device.
        kind: `nf4` or `int8`.

    Example:
        >>> layer = nn.Linear(64, 32)
        >>> bool((QuantizedLinear(layer, "int8").weight - layer.weight).abs().max() < 1e-3)
        True
    """

    codes: Tensor
    scales: Tensor
    scale_scales: Tensor
    mean: Tensor
    """Mean of nf4's scales, [1]; it is subtracted before they are quantized."""

    def __init__(self, linear: nn.Linear, kind: Quantization) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a weight
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.dtype = linear.weight.dtype
        """Dtype of the original weight, and of `weight`."""
        self.bias = linear.bias
        weight = linear.weight.detach()
        quantized = _to_nf4(weight) if kind == "nf4" else _to_int8(weight)
        for name, tensor in quantized.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight, [out, in]."""
        return self.weight_in(self.dtype)

    def weight_in(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Dequantize the weight, [out, in], in this dtype; into `out`, whose rows may be parts of wider ones."""
        if out is None and self.kind == "nf4" and self.codes.device.type != "cpu":
            return self._nf4(dtype)
        shape = self.out_features, self.in_features
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=self.codes.device)
        if self.kind == "nf4" and usable(out) and _nf4_in_cpp():
            call("dequantize_nf4", out, *self.quantized(), *shape, out.stride(0))
        elif self.kind == "nf4":
            kernels = nf4_kernels(out.device)
            out.copy_(self._nf4(dtype)) if kernels is None else kernels.dequantize(self, out)
        else:
            # The product is in float32 and rounded once. A CPU stores it before it rounds, so it gets a few rows at a
            # time.
            rows = self.out_features if out.is_cuda else max(1, ROUNDED_AT_ONCE // self.in_features)
            for codes, scales, into in zip(*(each.split(rows) for each in (*self.quantized(), out)), strict=True):
                torch.mul(codes, scales, out=into)
        return out

    def quantized(self) -> tuple[Tensor, ...]:
        """Return the codes and scales; of nf4 with the values of its codes [16] and of the codes of its scales [256]:
        codes, values, scales, their values, their scales, their mean."""
        if self.kind == "int8":
            return self.codes, self.scales
        values, scale_map = _nf4_table(self.codes.device), _scale_map(self.codes.device)
        return self.codes, values, self.scales, scale_map, self.scale_scales, self.mean

    def _nf4(self, dtype: torch.dtype) -> Tensor:
        library = bitsandbytes().functional
        scale_state = library.QuantState(
            self.scale_scales, code=_scale_map(self.codes.device), blocksize=SCALE_BLOCK, dtype=torch.float32
        )
        # One row: on a CPU, bitsandbytes 0.50 uses wrong scales unless the row length is a multiple of the block size.
        row = torch.Size((1, self.out_features * self.in_features))
        state = library.QuantState(
            self.scales, row, dtype=dtype, blocksize=BLOCK, quant_type="nf4", offset=self.mean[0], state2=scale_state
        )
        return cast(Tensor, library.dequantize_4bit(self.codes, state)).view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return apply(_Product, x, self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # On the CPU, because a state dict has the dequantized weights of all layers at once.
        destination[f"{prefix}weight"] = self.weight.cpu()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


class _Product(torch.autograd.Function):
    """x W^T + b; the backward pass dequantizes W again, instead of saving it."""

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
    """Quantize the linear layers of a model in place, one after the other, except the output matrix.

    Args:
        inner: the model.
        head: its output matrix; it and the embedding are not quantized.
        kind: `nf4` or `int8`.
        device: device of the quantized layers.

    Raises:
        ConfigError: the model has no linear layers, or bitsandbytes is not installed.
    """
    layers = linears(inner, head, kind)
    if device.type == "cpu":
        _free_at_once()
    for name in [*layers]:  # each full weight is freed before the next one is moved
        parent, _, own = name.rpartition(".")
        setattr(inner.get_submodule(parent), own, QuantizedLinear(layers.pop(name).to(device), kind))


def _free_at_once() -> None:
    """Let malloc take memory for dequantized weights from the system, and return it when they are freed.

    Between smaller tensors it would be kept, and a run would take several times the memory of its tensors (glibc).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)


def linears(inner: nn.Module, head: Tensor, kind: Quantization) -> dict[str, nn.Linear]:
    """Return the layers of a model to quantize, by name.

    Raises:
        ConfigError: there are none.
    """
    layers = {name: m for name, m in inner.named_modules() if isinstance(m, nn.Linear) and m.weight is not head}
    if not layers:
        raise ConfigError(
            f"model.quantization={kind}: this model has no nn.Linear layers (GPT-2 has Conv1D); leave it out"
        )
    return layers


def quantized_layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    """Iterate over the quantized layers of a model.

    Example:
        >>> list(quantized_layers(nn.Linear(2, 2)))
        []
    """
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


@torch.no_grad()
def round_as_quantized(inner: nn.Module, head: Tensor, kind: Quantization, dtype: torch.dtype) -> float:
    """Quantize and dequantize the linear layers of a float32 model in place.

    Args:
        inner: the model.
        head: its output matrix.
        kind, dtype: quantization of the base, and the dtype it was quantized from.

    Returns:
        Norm of the change, relative to that of the weights.
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
