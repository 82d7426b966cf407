"""Linear layers with low-rank adapters: x (W + scale B A)^T, with only A and B trained (arXiv:2106.09685).

Products with A and B run in the dtype of the input (bfloat16: on tensor cores), from float32 masters. The adapters'
part is added before the base's product is rounded, as in the engine (`engines/decoder.py`). Added after rounding,
updates below half a unit in the last place would be lost.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomrl.models.kernel_switches import apply, are_plain, rounded
from atomrl.models.quantized import QuantizedLinear

ADAPTER = "default"
"""peft's name for a model's only set of adapters."""
UNTRAINED = "untrained_"
"""Prefix of the frozen copy of a weight that is trained in full beside adapters, in the same module."""


def is_adapted(linear: nn.Module) -> bool:
    """Return True if a layer is peft's, with adapters on a base layer."""
    return hasattr(linear, "lora_A") and hasattr(linear, "base_layer")


def is_added(name: str) -> bool:
    """Return True for the name of a weight that the base model does not have."""
    return ".lora_" in name or f".{UNTRAINED}" in name


def computes_here(linear: Any) -> bool:
    """Return True if `adapted_linear` supports a layer of peft: its base weight is quantized, or an ordinary, unsharded
    tensor."""
    base = linear.base_layer
    plain = isinstance(base, nn.Linear) and type(_weight(base)) in (Tensor, nn.Parameter, QuantizedLinear)
    return plain and ADAPTER in linear.lora_A


def _weight(base: nn.Linear) -> Tensor | QuantizedLinear:
    """Return the weight of a layer; of a quantized one the layer, because reading its weight dequantizes it."""
    return base if isinstance(base, QuantizedLinear) else base.weight


def _matrix(weight: Tensor | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Return a weight [out, H] in the compute dtype; a quantized one is dequantized."""
    return weight.weight.to(dtype) if isinstance(weight, QuantizedLinear) else rounded([weight], dtype)


def _height(weight: Tensor | QuantizedLinear) -> int:
    return weight.out_features if isinstance(weight, QuantizedLinear) else len(weight)


def adapted_linear(x: Tensor, *linears: Any) -> Tensor:
    """Apply several layers with adapters to x; return their outputs concatenated.

    Args:
        x: [..., H].
        linears: layers of peft for which `computes_here` is True.

    Returns:
        [..., sum of out].
    """
    adapted = [linear for linear in linears if not linear.disable_adapters]
    dropout = any(linear.training and not isinstance(linear.lora_dropout[ADAPTER], nn.Identity) for linear in adapted)
    if dropout or are_plain() or len(adapted) not in (0, len(linears)):
        return torch.cat([_plain(x, linear) for linear in linears], dim=-1)
    bases = [linear.base_layer for linear in linears]
    parts = [part for linear in linears for part in (linear.lora_A[ADAPTER].weight, linear.lora_B[ADAPTER].weight)]
    scales = tuple(linear.scaling[ADAPTER] if adapted else 0.0 for linear in linears)
    weights = [_weight(base) for base in bases]
    y = apply(AdaptedLinear, x, scales, *weights, *parts)
    if all(base.bias is None for base in bases):
        return y
    pairs = zip(bases, weights, strict=True)
    wide = [y.new_zeros(_height(weight)) if base.bias is None else base.bias for base, weight in pairs]
    return y + torch.cat([bias.to(y.dtype) for bias in wide])


def _plain(x: Tensor, linear: Any) -> Tensor:
    """Compute one layer by operations that autograd and the compiler support, with dropout."""
    base = linear.base_layer
    quantized = isinstance(base, QuantizedLinear) and not are_plain()
    if linear.disable_adapters:
        if quantized:
            return cast(Tensor, base(x))
        return F.linear(x, base.weight.to(x.dtype), None if base.bias is None else base.bias.to(x.dtype))
    a, b = (part[ADAPTER].weight.to(x.dtype) for part in (linear.lora_A, linear.lora_B))
    added = F.linear(F.linear(linear.lora_dropout[ADAPTER](x), a) * linear.scaling[ADAPTER], b)
    if quantized:
        y = apply(_AddedProduct, added, x, base)
    else:
        y = torch.addmm(added.flatten(0, -2), x.flatten(0, -2), base.weight.to(x.dtype).T).view_as(added)
    return y if base.bias is None else y + base.bias.to(x.dtype)


class _AddedProduct(torch.autograd.Function):
    """added + x W^T of a quantized layer; the backward pass dequantizes W again, instead of saving it."""

    @staticmethod
    def forward(ctx: Any, added: Tensor, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        matrix = _matrix(layer, x.dtype)
        return torch.addmm(added.flatten(0, -2), x.flatten(0, -2), matrix.T).view_as(added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad, grad @ _matrix(ctx.layer, grad.dtype) if ctx.needs_input_grad[1] else None, None


class AdaptedLinear(torch.autograd.Function):
    """n frozen linear layers with adapters: one product for all A, then for each layer B's product, to which the base's
    product is added before rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: tuple[float, ...], *parameters: Any) -> Tensor:
        """x [..., H]; n weights [out, H] or quantized layers, then A [r, H] and B [out, r] of each
        -> [..., sum of out]."""
        count, rows = len(scales), x.flatten(0, -2)
        weights, adapters = parameters[:count], parameters[count:]
        inner = rows @ rounded(adapters[::2], x.dtype).T
        y = x.new_empty(len(rows), sum(_height(weight) for weight in weights))
        parts = zip(weights, adapters[1::2], scales, _split(inner, adapters[::2]), _split(y, weights), strict=True)
        for weight, b, scale, own, out in parts:
            torch.addmm(out, own, rounded([b], x.dtype).T, beta=0, alpha=scale, out=out)
            out.addmm_(rows, _matrix(weight, x.dtype).T)
        ctx.quantized = [weight if isinstance(weight, QuantizedLinear) else None for weight in weights]
        ctx.save_for_backward(x, inner, *(None if isinstance(w, QuantizedLinear) else w for w in weights), *adapters)
        ctx.scales = scales
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, *parameters = ctx.saved_tensors
        count, rows, grads = len(ctx.scales), x.flatten(0, -2), grad.flatten(0, -2)
        weights = [layer or weight for layer, weight in zip(ctx.quantized, parameters[:count], strict=True)]
        adapters = parameters[count:]
        grad_x = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        grad_inner, grads_b = torch.empty_like(inner), []
        parts = zip(
            weights, adapters[1::2], ctx.scales, _split(inner, adapters[::2]), _split(grads, weights),
            _split(grad_inner, adapters[::2]), strict=True,
        )  # fmt: skip
        for weight, b, scale, own, of_out, of_inner in parts:
            torch.addmm(of_inner, of_out, rounded([b], grad.dtype), beta=0, alpha=scale, out=of_inner)
            if grad_x is not None:
                grad_x.addmm_(of_out, _matrix(weight, grad.dtype))
            grads_b.append((of_out.T @ own).mul_(scale).to(b.dtype))
        a = rounded(adapters[::2], grad.dtype)
        grads_a = (grad_inner.T @ rows).to(adapters[0].dtype).split([len(each) for each in adapters[::2]])
        if grad_x is not None:
            grad_x = grad_x.addmm_(grad_inner, a).view_as(x)
        grads_adapters = (part for pair in zip(grads_a, grads_b, strict=True) for part in pair)
        return grad_x, None, *(None for _ in weights), *grads_adapters


def _split(x: Tensor, matrices: Sequence[Tensor | QuantizedLinear]) -> tuple[Tensor, ...]:
    """Split the columns of x over matrices, by their numbers of rows."""
    return torch.split(x, [_height(matrix) for matrix in matrices], dim=1)
