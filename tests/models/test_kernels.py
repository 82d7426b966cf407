"""Hand-written backward passes against the plain formulas, in float64 by finite differences and in bfloat16."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from atomrl.models import attention
from atomrl.models.attention import PackedAttention, rotate
from atomrl.models.gpt import Linear, fused_linear
from atomrl.models.kernel_switches import round_once
from atomrl.models.kernels import FusedLinear, RMSNormFunction, SwiGLUFunction
from atomrl.models.stream import row_stream

ROWS, TOKENS, HEADS, KV_HEADS, SIZE = 2, 5, 4, 2, 6


def tables(dtype):
    angles = torch.arange(TOKENS, dtype=dtype)[:, None] * torch.tensor([1.0, 0.3, 0.1], dtype=dtype)
    return angles.cos(), angles.sin()


def causal(dtype):
    return torch.full((TOKENS, TOKENS), -torch.inf, dtype=dtype).triu(1)


def plain_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def plain_swiglu(both):
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rotation(x, cos, sin):
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return x * cos + torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1) * sin


def packed_attention(qkv, cos, sin):
    rows = row_stream(ROWS, TOKENS).blocks
    return PackedAttention.apply(qkv.flatten(0, 1), rows, cos, sin, KV_HEADS).view(ROWS, TOKENS, -1)


def repeated_attention(qkv, cos, sin, kv_heads=KV_HEADS):
    qk, v = qkv[:, :, :-kv_heads], qkv[:, :, -kv_heads:]
    turned = plain_rotation(qk, cos[:, None], sin[:, None]).to(qkv.dtype)
    q, k = turned[:, :, :-kv_heads], turned[:, :, -kv_heads:]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
    shares = (torch.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5 + causal(qkv.dtype)).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2)


def cases(dtype):
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in [(3, 4, 8), (8,)])
    qkv = torch.randn(ROWS, TOKENS, HEADS + 2 * KV_HEADS, SIZE, dtype=dtype, requires_grad=True)
    qk = torch.randn(ROWS, TOKENS, HEADS + KV_HEADS, SIZE, dtype=dtype, requires_grad=True)
    turn = tables(torch.promote_types(dtype, torch.float32))
    return {
        "norm": (RMSNormFunction.apply, plain_norm, (x, weight, 1e-6)),
        "swiglu": (SwiGLUFunction.apply, plain_swiglu, (x,)),
        "rotation": (rotate, plain_rotation, (qk, *(table[:, None] for table in turn))),
        "attention": (packed_attention, repeated_attention, (qkv, *turn)),
        "rows": (lambda *a: attention.row_attention(a[0], a[1:], KV_HEADS), repeated_attention, (qkv, *turn)),
    }


NAMES = ["norm", "swiglu", "rotation", "attention", "rows"]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_float64_are_those_of_finite_differences(name):
    ours, plain, arguments = cases(torch.float64)[name]
    torch.testing.assert_close(ours(*arguments), plain(*arguments))
    assert torch.autograd.gradcheck(ours, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_bfloat16_are_near_the_exact_ones(name):
    ours, plain, arguments = cases(torch.bfloat16)[name]
    exact = [a.detach().double().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in arguments]
    expected, actual = plain(*exact), ours(*arguments)
    assert actual.dtype == torch.bfloat16
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (actual * direction.bfloat16()).sum().backward()
    pairs = [(expected, actual)] + [(a.grad, b.grad) for a, b in zip(exact, arguments, strict=True) if a is not b]
    for right, rough in pairs:
        if right is not None:
            assert (rough.double() - right).norm() / right.norm() < 0.02


def test_frozen_norm_weight_gets_no_gradient():
    x, weight = torch.randn(2, 4, requires_grad=True), torch.ones(4)
    RMSNormFunction.apply(x, weight, 1e-6).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_weights_are_rounded_once_and_again_when_they_change():
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.nn.Parameter(torch.randn(4, 8))
    product = partial(FusedLinear.apply, x, 1, weight)
    with round_once():
        first = product()
        assert torch.equal(first, x @ weight.to(torch.bfloat16).T)
        with torch.no_grad():
            weight.data.neg_()  # unseen: `data` has versions of its own
            assert torch.equal(product(), first)
            weight.mul_(2.0)
        assert torch.equal(product(), first * -2.0)
        weight.grad = None
        product().sum().backward()
    assert torch.equal(weight.grad, x.sum(0).float().expand(4, 8))
    assert torch.equal(product(), first * -2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_side_by_side_keep_their_weights_and_no_copy_of_them(dtype):
    torch.manual_seed(0)
    x, (one, other) = torch.randn(5, 8, dtype=dtype, requires_grad=True), (Linear(8, size) for size in (4, 6))
    weights, biases = [one.weight, other.weight], [one.bias, other.bias]
    expected = F.linear(x, torch.cat(weights).to(dtype), torch.cat(biases).to(dtype))
    direction, parameters = torch.randn_like(expected), [x, *weights, *biases]
    gradients = torch.autograd.grad(expected, parameters, direction)
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.data_ptr()) or t, lambda t: t), round_once():
        outputs = fused_linear(x, one, other)
        assert torch.equal(outputs, expected) and kept == {tensor.data_ptr() for tensor in parameters}
        for mine, theirs in zip(torch.autograd.grad(outputs, parameters, direction), gradients, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("value", [1.00390625, 1.01171875, -30.0, float("inf"), float("nan")])
def test_bfloat16_is_rounded_as_torch_rounds(value):
    both = torch.full((1, 66), value, dtype=torch.float32).bfloat16()
    both[:, 33:] = 1.0
    assert torch.equal(SwiGLUFunction.apply(both).isnan(), plain_swiglu(both.float()).bfloat16().isnan())
    torch.testing.assert_close(SwiGLUFunction.apply(both), plain_swiglu(both.float()).bfloat16(), equal_nan=True)
