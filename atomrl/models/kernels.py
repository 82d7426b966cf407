"""Kernels of a decoder layer with hand-written backward passes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atomrl.models import kernel_library as cpp
from atomrl.models.kernel_switches import apply, are_plain, rounded, stacked

_NORM_PARTS = 32
"""Partial sums of a norm's weight gradient: a fixed number, so that results do not depend on the number of threads."""


class FusedLinear(torch.autograd.Function):
    """Several linear layers as one product, with weights rounded to the dtype of x.

    Autograd would save the concatenated and rounded weights: a copy of most of the model, also with FSDP, which gathers
    one layer at a time. This saves the weights themselves, and concatenates and rounds them again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        """x [..., H]; `count` weights [out, H], then their biases, if any -> [..., sum of out]."""
        ctx.save_for_backward(x, *parameters)
        ctx.count = count
        weights, biases = parameters[:count], parameters[count:]
        return F.linear(x, rounded(weights, x.dtype), stacked(biases, x.dtype) if biases else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        sizes = [len(weight) for weight in weights]
        grad_x = grad @ rounded(weights, grad.dtype) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, None, *(None for _ in parameters)
        grads = grad.flatten(0, -2)
        weight_grads = (grads.T @ x.flatten(0, -2)).split(sizes)
        bias_grads = grads.sum(0).split(sizes) if biases else ()
        own = [part.to(p.dtype) for part, p in zip((*weight_grads, *bias_grads), parameters, strict=True)]
        return grad_x, None, *own


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, with the mean square in float32 or wider.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0)
        tensor([0.8485, 1.1314])
    """
    if are_plain():
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)
    if x.device.type == "cpu":
        return apply(RMSNormFunction, x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(both: Tensor) -> Tensor:
    """Compute silu(gate) * up from gate and up concatenated, [..., 2 I] -> [..., I]."""
    if are_plain():
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    return apply(SwiGLUFunction, both)


class RMSNormFunction(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps); statistics in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.fast = cpp.usable(x)
        if ctx.fast:
            x, scale = x.contiguous(), x.new_empty(x.shape[:-1], dtype=torch.float32)
            normed = torch.empty_like(x)
            cpp.call("norm_forward", x, weight, normed, scale, scale.numel(), x.shape[-1], eps)
        else:
            wide = torch.promote_types(x.dtype, torch.float32)
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
            scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            normed = (x * scale).mul_(weight).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if ctx.fast:
            grad_x, parts = torch.empty_like(x), scale.new_zeros(_NORM_PARTS, x.shape[-1])
            sizes = scale.numel(), x.shape[-1], _NORM_PARTS
            cpp.call("norm_backward", x, weight, scale, grad.contiguous(), grad_x, parts, *sizes)
            return grad_x, parts.sum(0).to(weight.dtype), None
        normed = x * scale
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = (along @ weight.to(along.dtype)).unsqueeze_(-1).div_(x.shape[-1])
        grad_x = (grad * weight.to(scale.dtype)).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, from gate and up concatenated."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        ctx.fast = cpp.usable(both) and both.is_contiguous()
        gate, up = both.chunk(2, dim=-1)
        if not ctx.fast:
            return F.silu(gate).mul_(up)
        out = both.new_empty(gate.shape)
        cpp.call("swiglu_forward", both, out, out.numel() // out.shape[-1], out.shape[-1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        result = torch.empty_like(both)
        if ctx.fast:
            cpp.call("swiglu_backward", both, grad.contiguous(), result, grad.numel() // grad.shape[-1], grad.shape[-1])
            return result
        gate, up = both.chunk(2, dim=-1)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(F.silu(gate), grad, out=grad_up)
        return result
