"""Triton kernels for a base in nf4: dequantize into rows of a wider matrix, and multiply by the codes.

A weight is table[code] * scale, with a scale per 64 weights; scales are codes of 8 bits, with a scale per 256 of them.
bitsandbytes writes whole matrices only; a rollout engine needs them beside the columns of its adapters, without a copy.

No GPU has run them yet: they are compared with bitsandbytes on the CPU, in Triton's interpreter. `check` compares them
on a GPU before they are used there.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors


@triton.jit
def _weights(codes, table, scales, scale_map, scale_scales, mean, at, inside):
    """Dequantize the weights at some places of the flat matrix, in float32."""
    pair = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
    code = tl.where(at % 2 == 0, pair >> 4, pair & 15)
    block = at // 64
    scale = tl.load(scale_map + tl.load(scales + block, mask=inside, other=0).to(tl.int32))
    scale = scale * tl.load(scale_scales + block // 256, mask=inside, other=0.0) + tl.load(mean)
    return tl.load(table + code) * scale


@triton.jit
def dequantize_kernel(
    codes, table, scales, scale_map, scale_scales, mean, out, out_stride, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    values = _weights(codes, table, scales, scale_map, scale_scales, mean, at, inside)
    tl.store(out + at // WIDTH * out_stride + at % WIDTH, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(
    x, x_stride, codes, table, scales, scale_map, scale_scales, mean, b, b_stride, start, start_stride, out, out_stride,
    rows, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr, OUTPUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """out = start + x [:, :INPUTS] W^T + x[:, INPUTS:] b^T, accumulated in float32 and rounded once."""
    row = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    output = tl.program_id(0) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    is_row, is_output = row < rows, output < OUTPUTS
    total = tl.zeros((ROW_BLOCK, OUTPUT_BLOCK), tl.float32)
    from_row = x + row.to(tl.int64)[:, None] * x_stride
    for first in range(0, INPUTS, INPUT_BLOCK):
        place = first + tl.arange(0, INPUT_BLOCK)
        is_place = place < INPUTS
        values = tl.load(from_row + place[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
        at = output.to(tl.int64)[:, None] * INPUTS + place[None, :]
        inside = is_output[:, None] & is_place[None, :]
        weights = _weights(codes, table, scales, scale_map, scale_scales, mean, at, inside)
        weights = tl.where(inside, weights, 0.0).to(values.dtype)
        total += tl.dot(values, tl.trans(weights), input_precision="ieee")
    if COLUMNS > 0:
        column = tl.arange(0, COLUMN_BLOCK)
        is_column = column < COLUMNS
        values = tl.load(from_row + INPUTS + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        from_output = b + output.to(tl.int64)[:, None] * b_stride
        own = tl.load(from_output + column[None, :], mask=is_output[:, None] & is_column[None, :], other=0.0)
        total += tl.dot(values, tl.trans(own), input_precision="ieee")
    mask = is_row[:, None] & is_output[None, :]
    if STARTS:
        target = start + row.to(tl.int64)[:, None] * start_stride + output[None, :]
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * out_stride + output[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def dequantize(layer: Any, out: Tensor) -> Tensor:
    """Dequantize the weight of a `QuantizedLinear` into `out` [out, in], whose rows may be parts of wider ones."""
    size = layer.out_features * layer.in_features
    # Without fusion, as bitsandbytes rounds: a product and a sum of scales are two operations.
    dequantize_kernel[(triton.cdiv(size, 1024),)](
        *layer.quantized(), out, out.stride(0), size, layer.in_features, 1024, enable_fp_fusion=False
    )
    return out


def multiply(x: Tensor, layer: Any, b: Tensor, start: Tensor | None, out: Tensor) -> Tensor:
    """Compute start + x [:, :in] W^T + x[:, in:] b^T of a `QuantizedLinear` from its codes, rounded once.

    Args:
        x: [rows, in + columns].
        b: [out, columns].
        start: [rows, out], or [1, out] for a bias; may be `out`. None: 0.
        out: [rows, out]; the rows of it and of `start` may be parts of wider ones.
    """
    rows, columns = len(x), b.shape[1]
    row_block = max(16, min(64, triton.next_power_of_2(rows)))
    stride = 0 if start is None or len(start) == 1 else start.stride(0)
    product_kernel[(triton.cdiv(layer.out_features, 64), triton.cdiv(rows, row_block))](
        x, x.stride(0), *layer.quantized(), b, b.stride(0), out if start is None else start, stride, out, out.stride(0),
        rows, layer.out_features, layer.in_features, columns, max(16, triton.next_power_of_2(columns)),
        row_block, 64, 64, start is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def check(layer: Any) -> None:
    """Compare the kernels with bitsandbytes on the device of a `QuantizedLinear`.

    Raises:
        RuntimeError: one differs.
    """
    chance, weight = torch.Generator().manual_seed(0), layer.weight
    outputs, inputs = weight.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance).to(weight)

    wide = normal(outputs, inputs + 32)
    if not torch.equal(dequantize(layer, wide[:, :inputs]), weight):
        raise RuntimeError("the Triton kernel for nf4 differs from bitsandbytes")
    for rows in (3, 70):
        x, start = normal(rows, inputs + 32), normal(rows, outputs)
        right = start.float() + x.float() @ wide.float().t()
        mine = multiply(x, layer, wide[:, inputs:], start, torch.empty_like(start))
        error = float((mine.float() - right).norm() / right.norm())
        if not error <= (1e-5 if weight.dtype == torch.float32 else 1e-2):
            raise RuntimeError(f"the Triton product for nf4 differs from PyTorch's by {error:.1e}")
