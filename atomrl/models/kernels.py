"""Pieces of a decoder layer whose backward pass is written by hand.

Autograd's own version of each reads and writes large tensors several times more often, which on a CPU costs as much
as the matrix products. In float32 on a CPU, norm and SwiGLU run in C++ where it can be built (`cpp`).
`tests/models/test_kernels.py` holds each against the plain formula and finite differences.

A backward pass written by hand is differentiated in one way only. Within `plain_formulas()` a decoder is made of
PyTorch's own operations instead, which autograd differentiates forward and any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atomrl.models import cpp

_plain = False


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Within it, models compute by operations that autograd differentiates in every mode; slower, the same values.

    `GPT` leaves its kernels, shared prompts and compiled layers; transformers' models leave fused attention.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    global _plain
    before, _plain = _plain, True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _plain = before


def are_plain() -> bool:
    """Whether `plain_formulas` is in force."""
    return _plain


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, with the mean square in float32 or wider.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0)
        tensor([0.8485, 1.1314])
    """
    if _plain:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)
    if x.device.type == "cpu":
        return RMSNormFunction.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side in one tensor [..., 2 I]."""
    if _plain:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    return SwiGLUFunction.apply(both)


def plain_attention(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
    """`AttentionFunction` in PyTorch's own operations, for rows of any length.

    Args:
        qkv: [B, T, heads + 2 kv_heads, D].
        cos, sin: [T, heads + kv_heads, D/2].

    Returns:
        [B, T, heads * D].
    """
    qk, v = qkv.split([qkv.shape[2] - kv_heads, kv_heads], dim=2)
    first, second = qk.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
    q, k = turned.split([turned.shape[2] - kv_heads, kv_heads], dim=2)
    scores = torch.einsum("btkgd,bskd->bkgts", q.unflatten(2, (kv_heads, -1)), k)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=qkv.device).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    return torch.einsum("bkgts,bskd->btkgd", shares, v).flatten(2)


class RMSNormFunction(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps); statistics in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.fast = cpp.usable(x)
        if ctx.fast:
            x, out, scale = cpp.norm_forward(x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if ctx.fast:
            return *cpp.norm_backward(x, weight, scale, grad), None
        normed = x * scale
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = (along @ weight.to(along.dtype)).unsqueeze_(-1).div_(x.shape[-1])
        grad_x = (grad * weight.to(scale.dtype)).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, of gate and up side by side in one tensor."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        ctx.fast = cpp.usable(both) and both.is_contiguous()
        if ctx.fast:
            return cpp.swiglu_forward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        if ctx.fast:
            return cpp.swiglu_backward(both, grad)
        gate, up = both.chunk(2, dim=-1)
        result = torch.empty_like(both)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(F.silu(gate), grad, out=grad_up)
        return result


class AttentionFunction(torch.autograd.Function):
    """Rotation and causal attention by explicit matrix products, from fused queries, keys and values.

    All query heads of one key head go through one product, so that no key or value is repeated.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, kv_heads: int) -> Tensor:
        """qkv [B, T, heads + 2 kv_heads, D]; cos, sin [T, heads + kv_heads, D/2]; mask [T, T] -> [B, T, heads * D]."""
        rows, tokens, all_heads, size = qkv.shape
        group = (all_heads - 2 * kv_heads) // kv_heads
        q = qkv.new_empty(rows, kv_heads, group, tokens, size)
        k, v = (qkv.new_empty(rows, kv_heads, tokens, size) for _ in range(2))
        from_q, from_k, from_v = _heads(qkv, kv_heads)
        (q_cos, k_cos), (q_sin, k_sin) = _tables(cos, kv_heads), _tables(sin, kv_heads)
        _rotate_into(q, from_q, q_cos, q_sin)
        _rotate_into(k, from_k, k_cos, k_sin)
        v.copy_(from_v)
        q, k, v = (x.view(rows * kv_heads, -1, size) for x in (q, k, v))
        shares = torch.baddbmm(mask.repeat(group, 1), q, k.transpose(1, 2)).softmax(dim=-1)
        mixed = torch.bmm(shares, v)
        ctx.save_for_backward(q, k, v, shares, cos, sin)
        ctx.shape = (rows, tokens, kv_heads, group, size)
        return mixed.view(rows, kv_heads, group, tokens, size).permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        q, k, v, shares, cos, sin = ctx.saved_tensors
        rows, tokens, kv_heads, group, size = ctx.shape
        grad = grad.view(rows, tokens, kv_heads, group, size).permute(0, 2, 3, 1, 4).reshape(q.shape)
        grad_v = torch.bmm(shares.transpose(1, 2), grad)
        grad_shares = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch.ops.aten._softmax_backward_data(grad_shares, shares, -1, shares.dtype)
        grad_q, grad_k = torch.bmm(grad_scores, k), torch.bmm(grad_scores.transpose(1, 2), q)
        result = grad.new_empty(rows, tokens, kv_heads * (group + 2), size)
        to_q, to_k, to_v = _heads(result, kv_heads)
        (q_cos, k_cos), (q_sin, k_sin) = _tables(cos, kv_heads), _tables(sin, kv_heads)
        _rotate_into(to_q, grad_q.view(to_q.shape), q_cos, -q_sin)
        _rotate_into(to_k, grad_k.view(to_k.shape), k_cos, -k_sin)
        to_v.copy_(grad_v.view(to_v.shape))
        return result, None, None, None, None


class PackedAttention(torch.autograd.Function):
    """`AttentionFunction` on a stream of tokens in blocks (`shared_prefix.Block`), some after a shared prompt."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, plans: list[tuple[Any, Tensor, Tensor, Tensor]], kv_heads: int) -> Tensor:
        """qkv [N, heads + 2 kv_heads, D] -> [N, heads * D].

        A plan is a block, its cos and sin [1 or R, C, heads + kv_heads, D/2], and what is added to its scores
        [1 or R * kv_heads, group * C, P + C]. Blocks after prompts follow the one that holds the prompts.
        """
        size, group = qkv.shape[2], qkv.shape[1] // kv_heads - 2
        out, saved, prompts = qkv.new_empty(len(qkv), kv_heads * group * size), [], None
        for block, cos, sin, bias in plans:
            from_q, from_k, from_v = _heads(block.spread(qkv), kv_heads)
            (q_cos, k_cos), (q_sin, k_sin) = _tables(cos, kv_heads), _tables(sin, kv_heads)
            q = torch.empty(from_q.shape, dtype=qkv.dtype)
            k, v = (qkv.new_empty(block.rows, kv_heads, bias.shape[2], size) for _ in range(2))
            before = bias.shape[2] - block.length
            _rotate_into(q, from_q, q_cos, q_sin)
            _rotate_into(k[:, :, before:], from_k, k_cos, k_sin)
            v[:, :, before:].copy_(from_v)
            if prompts is None:
                prompts = k, v
            if before:
                for part, theirs in zip((k, v), prompts, strict=True):
                    part[:, :, :before] = theirs.index_select(0, block.prompts)
            q, k, v = (x.view(block.rows * kv_heads, -1, size) for x in (q, k, v))
            scores = torch.baddbmm(bias, q, k.transpose(1, 2))
            shares = torch.softmax(scores, dim=-1, out=scores)
            mixed = torch.bmm(shares, v).view(from_q.shape).permute(0, 3, 1, 2, 4)
            if block.even:
                out[block.start : block.stop].view(mixed.shape).copy_(mixed)
            else:
                out[block.start : block.stop] = block.collect(mixed.flatten(2))
            saved += [q, k, v, shares]
        ctx.save_for_backward(*saved)
        ctx.plans, ctx.kv_heads, ctx.group = plans, kv_heads, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        plans, kv_heads, group, saved = ctx.plans, ctx.kv_heads, ctx.group, ctx.saved_tensors
        size = saved[0].shape[2]
        result = grad.new_empty(len(grad), kv_heads * (group + 2), size)
        shared: list[tuple[Tensor, Tensor, Tensor]] = []
        for number, (block, cos, sin, bias) in reversed(list(enumerate(plans))):
            q, k, v, shares = saved[4 * number : 4 * number + 4]
            own = block.spread(grad).unflatten(2, (kv_heads, group, size)).permute(0, 2, 3, 1, 4).reshape(q.shape)
            grad_v = torch.bmm(shares.transpose(1, 2), own)
            grad_shares = torch.bmm(own, v.transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_shares, shares, -1, shares.dtype)
            grad_q, grad_k = torch.bmm(grad_scores, k), torch.bmm(grad_scores.transpose(1, 2), q)
            grad_k, grad_v = (x.view(block.rows, kv_heads, -1, size) for x in (grad_k, grad_v))
            before = bias.shape[2] - block.length
            if before:
                shared.append((block.prompts, grad_k[:, :, :before], grad_v[:, :, :before]))
                grad_k, grad_v = grad_k[:, :, before:], grad_v[:, :, before:]
            if number == 0:
                for owners, more_k, more_v in shared:
                    grad_k.index_add_(0, owners, more_k)
                    grad_v.index_add_(0, owners, more_v)
            part = result[block.start : block.stop]
            rows = part.unflatten(0, (block.rows, -1)) if block.even else block.spread(result)
            to_q, to_k, to_v = _heads(rows, kv_heads)
            (q_cos, k_cos), (q_sin, k_sin) = _tables(cos, kv_heads), _tables(sin, kv_heads)
            _rotate_into(to_q, grad_q.view(to_q.shape), q_cos, -q_sin)
            _rotate_into(to_k, grad_k, k_cos, -k_sin)
            to_v.copy_(grad_v)
            if not block.even:
                part.copy_(block.collect(rows))
        return result, None, None


class Rotate(torch.autograd.Function):
    """Rotary positions alone, for attention by SDPA; the backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, heads, D]; cos, sin [T, heads, D/2]."""
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(x)
        _rotate_into(out, x, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        out = torch.empty_like(grad)
        _rotate_into(out, grad, cos, -sin)
        return out, None, None


def _heads(qkv: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, kv_heads, group, T, D] of the queries and [B, kv_heads, T, D] of keys and values."""
    q, k, v = qkv.split([qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
    return q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2)


def _tables(table: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """[..., T, heads + kv_heads, D/2] as views that fit `_heads`."""
    q, k = table.split([table.shape[-2] - kv_heads, kv_heads], dim=-2)
    return q.unflatten(-2, (kv_heads, -1)).movedim(-4, -2), k.transpose(-3, -2)


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the pairs (i, i + D/2) of the last dimension."""
    (out_first, out_second), (first, second) = out.chunk(2, dim=-1), x.chunk(2, dim=-1)
    if x.dtype == cos.dtype:
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    else:
        out_first.copy_(first * cos - second * sin)
        out_second.copy_(second * cos + first * sin)
