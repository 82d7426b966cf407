"""Weights of the decoder: fused matrices in the layout that the device multiplies fastest, and adapters beside them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from atomrl.atoms.logprobs import bfloat16_matmul
from atomrl.models.loading import has_bfloat16
from atomrl.models.quantized import QuantizedLinear, nf4_kernels
from atomrl.protocols import Adapter, FrozenBase

FUSED_ROWS = 128
"""Most rows that are multiplied by the codes of nf4; more pay for dequantized weights. Estimated: no GPU has run it."""
COPIED_AT_ONCE = 2**22  # elements rounded at once by `copy_rounded`


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of computation: float32 for bfloat16 on CPUs without bfloat16 instructions, else `dtype`.

    There float32 is more exact and several times as fast. The weights are rounded to `dtype` in either case.
    """
    slow = device.type == "cpu" and dtype == torch.bfloat16 and not has_bfloat16("cpu")
    return torch.float32 if slow else dtype


def copy_rounded(target: Tensor, source: Tensor, dtype: torch.dtype) -> None:
    """Copy a tensor, rounded to `dtype`, into one that may be wider, without a full temporary copy."""
    rows = len(source) if target.dtype == dtype else max(1, COPIED_AT_ONCE * len(source) // source.numel())
    for into, part in zip(target.split(rows), source.split(rows), strict=True):
        into.copy_(part if target.dtype == dtype else part.to(dtype))


class Shared(NamedTuple):
    """Weights of a fused layer that are the trainer's."""

    base: FrozenBase
    names: list[str]
    """Published names of the projections' weights."""

    @property
    def columns(self) -> int:
        """Columns that the adapters' B take behind the weights."""
        return lora_columns(self.base.ranks[name] for name in self.names if name in self.base.ranks)

    def place(self, own: str, views: Iterable[Tensor]) -> None:
        """Move the projections' weights (`own` is `weight`) or biases into views of the engine's memory."""
        for name, view in zip(self.names, views, strict=True):
            self.base.place(f"{name.removesuffix('weight')}{own}", view)


def lora_columns(ranks: Iterable[int]) -> int:
    """Round the sum of ranks up, so that rows of `[W | scale x B]` stay aligned to 32 bytes."""
    return -(-sum(ranks) // 16) * 16


class StackedLinear:
    """Linear projections of one input, fused to one matrix in the layout that CPUs multiply fastest for few rows.

    [N, in] -> [N, out]. Adapters are added to the output in float32; merged into the rounded matrix, small updates
    would be lost.

    Args:
        widths: output width of each projection.
        inputs: input width.
        dtype: the weights are rounded to it; `compute_dtype` is what is multiplied.
        wide: return float32, also for bfloat16 weights (logits); without a bias.
        shared: the trainer's weights to use. None: weights of its own, without values until `load`.
    """

    def __init__(
        self,
        widths: Sequence[int],
        inputs: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        wide: bool,
        shared: Shared | None = None,
    ) -> None:
        # PyTorch has no product of bfloat16 with float32 output on CPUs.
        compute = torch.float32 if wide and device.type == "cpu" else compute_dtype(dtype, device)
        self.dtype, self.wide, self.inputs = dtype, wide, inputs
        ends = list(accumulate(widths, initial=0))
        self.outputs = ends[-1]
        self.parts = [slice(start, end) for start, end in pairwise(ends)]
        self.adapters: dict[int, tuple[Tensor, Tensor]] = {}
        """Projection -> A^T and scale x B^T, float32."""
        self.shared = shared
        # A tensor that is made in inference mode could not be used, or written, by the trainer.
        with torch.inference_mode(False), torch.no_grad():
            self.bias = torch.empty(ends[-1], dtype=compute, device=device) if bias else None
            if shared is not None and self.bias is not None:
                shared.place("bias", (self.bias[part] for part in self.parts))
            self._make(compute, device)

    def _make(self, compute: torch.dtype, device: torch.device) -> None:
        self.packed = compute == torch.bfloat16
        self.unpacked: dict[int, Tensor] = {}
        # [in, out]: with [out, in] MKL is up to six times as slow at 16 rows.
        shape = 0 if self.packed else (self.inputs, self.outputs)
        self.weight = torch.empty(shape, dtype=compute, device=device)
        if self.shared is not None:
            assert not self.packed, "packed weights cannot be shared"
            self.shared.place("weight", (self.weight[:, part].t() for part in self.parts))

    def load(self, part: int, weight: Tensor) -> None:
        """Copy a projection's weight [out, in] or bias [out] in place."""
        if weight.dim() == 1:
            assert self.bias is not None
            copy_rounded(self.bias[self.parts[part]], weight, self.dtype)
            return
        if not self.packed:
            copy_rounded(self.weight[:, self.parts[part]].t(), weight, self.dtype)
            return
        self.unpacked[part] = weight.to(self.dtype)
        if len(self.unpacked) == len(self.parts):
            stacked = torch.cat([self.unpacked.pop(index) for index in range(len(self.parts))])
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(stacked, 128)
            self.weight = self.weight.copy_(packed) if self.weight.is_mkldnn else packed

    def set_adapters(self, adapters: Mapping[int, Adapter]) -> bool:
        """Replace all adapters (projection -> adapter). Returns whether a tensor that is multiplied was reallocated."""
        self.adapters = {}
        for part, adapter in adapters.items():
            a, b = (tensor.to(self.weight.device, torch.float32).t().contiguous() for tensor in (adapter.a, adapter.b))
            self.adapters[part] = a, b * adapter.scale
        return bool(adapters)

    def weight_of(self, part: int) -> Tensor:
        """Return a projection's weight [out, in], read back from the packed layout."""
        stacked = self.weight.to_dense() if self.packed else self.weight.t()
        return stacked[self.parts[part]]

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor
        added = self._added(x) if self.adapters else None
        if self.packed:
            if added is None:
                y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            else:
                y = torch.ops.mkldnn._linear_pointwise.binary(x, added.to(x.dtype), self.weight, self.bias, "add")
            return y
        if self.wide and x.dtype == torch.bfloat16:
            y = bfloat16_matmul(x, self.weight)
            return y if added is None else y.add_(added)
        x = x.to(self.weight.dtype)
        if added is None:
            return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        y = torch.addmm(added.to(x.dtype), x, self.weight)
        return y if self.bias is None else y.add_(self.bias)

    def _added(self, x: Tensor) -> Tensor:
        """Return the adapters' part in float32.

        It goes into the product before rounding. Added afterwards, changes below half a unit in the last place would be
        lost.
        """
        added = torch.zeros(len(x), self.parts[-1].stop, device=x.device)
        for part, (a, b) in self.adapters.items():
            added[:, self.parts[part]] = (x.float() @ a) @ b
        return added

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, in place."""
        if self.packed or self.adapters:
            return residual.add_(self(x))
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self.weight)


class WideLinear(StackedLinear):
    """Fused projections on a GPU, with LoRA's B stored in columns behind the weights.

    The input is `[x | x A^T]` and the matrix `[W | scale x B]`. One product then accumulates both in float32 and rounds
    once; added afterwards, changes below half a unit in the last place of `x W^T` would be lost. The A of all
    projections are one matrix, and their B are blocks of the columns behind W.
    """

    def _make(self, compute: torch.dtype, device: torch.device) -> None:
        self.packed, self.columns = False, 0 if self.shared is None else self.shared.columns
        self.a = torch.zeros(self.inputs, self.columns, dtype=compute, device=device)
        self._make_store(compute, device)

    def _make_store(self, compute: torch.dtype, device: torch.device) -> None:
        self.store = torch.empty(self.outputs, self.inputs + self.columns, dtype=compute, device=device)
        """[out, in + columns]"""
        self.store[:, self.inputs :] = 0
        if self.shared is not None:
            self.shared.place("weight", (self.store[part, : self.inputs] for part in self.parts))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[in, out], without the adapters."""
        return self.store[:, : self.inputs].t()

    @property
    def b(self) -> Tensor:
        """scale x B of all projections, [out, columns]."""
        return self.store[:, self.inputs :]

    def set_adapters(self, adapters: Mapping[int, Adapter]) -> bool:
        """See the base class. Adapters of unchanged ranks are copied in place."""
        ranks = {part: len(adapter.a) for part, adapter in sorted(adapters.items())}
        columns = lora_columns(ranks.values())
        reallocate = columns != self.columns
        if reallocate:
            assert self.shared is None, "the trainer's weights lie in the columns of its ranks"
            store = self.store.new_zeros(self.outputs, self.inputs + columns)
            store[:, : self.inputs] = self.store[:, : self.inputs]
            self.store, self.columns = store, columns
            self.a = store.new_zeros(self.inputs, columns)
        else:
            self.a.zero_()
            self.b.zero_()
        self.adapters, start = {}, 0
        for part, rank in ranks.items():
            a, b = self.a[:, start : start + rank], self.b[self.parts[part], start : start + rank]
            a.copy_(adapters[part].a.t())
            b.copy_(adapters[part].b.to(b.device) * adapters[part].scale)
            self.adapters[part], start = (a, b.t()), start + rank
        return reallocate

    def room(self, rows: int) -> Tensor:
        """Allocate the input of `multiply` [rows, in + columns]; the caller fills the first `in` columns."""
        return self.a.new_empty(rows, self.inputs + self.columns)

    def multiply(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the output for a filled `room`; with `residual`, add it to that in place."""
        if self.columns:
            torch.mm(x[:, : self.inputs], self.a, out=x[:, self.inputs :])
        if residual is not None:
            if self.bias is not None:
                residual.add_(self.bias)
            return residual.addmm_(x, self.store.t())
        if self.wide and x.dtype != torch.float32:
            weight = self.store.t()
            return bfloat16_matmul(x, weight) if x.is_cpu else torch.mm(x, weight, out_dtype=torch.float32)
        return torch.mm(x, self.store.t()) if self.bias is None else torch.addmm(self.bias, x, self.store.t())

    def _filled(self, x: Tensor) -> Tensor:
        """Return `room` with x in it."""
        if not self.columns:
            return x.to(self.a.dtype)
        room = self.room(len(x))
        room[:, : self.inputs] = x
        return room

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(self._filled(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, in place."""
        return self.multiply(self._filled(x), residual)


class Scratch:
    """Memory for one dequantized layer, shared by all layers of an engine: they compute one after the other."""

    def __init__(self) -> None:
        self.size = 0
        """Elements of the largest layer."""
        self.free()

    def free(self) -> None:
        """Free the memory; CUDA graphs that use it must be gone."""
        self.memory = torch.empty(0)

    def view(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return memory as [rows, columns]; at the same address until `free`."""
        if self.memory.numel() < self.size:
            self.memory = like.new_empty(self.size)
        return self.memory[: rows * columns].view(rows, columns)


class QuantizedStack(WideLinear):
    """Fused projections whose weights are the trainer's codes, dequantized at each use into `[W | scale x B]`.

    The product is that of `WideLinear`, with the same rounding.
    """

    scratch: Scratch

    def _make_store(self, compute: torch.dtype, device: torch.device) -> None:
        assert self.shared is not None
        modules = (self.shared.base.modules[name.removesuffix(".weight")] for name in self.shared.names)
        self.layers = [cast(QuantizedLinear, module) for module in modules]
        self.fused = {layer.kind for layer in self.layers} == {"nf4"} and compute != torch.float32
        """Few rows are multiplied by the codes themselves, where there are kernels for it."""
        self.own_b = torch.zeros(self.outputs, self.columns, dtype=compute, device=device)
        self.shared.base.bytes += self.outputs * self.inputs * compute.itemsize

    def use(self, scratch: Scratch) -> None:
        """Dequantize into this memory."""
        self.scratch = scratch
        scratch.size = max(scratch.size, self.outputs * (self.inputs + self.columns))

    @property
    def b(self) -> Tensor:
        """See the base class."""
        return self.own_b

    @property
    def store(self) -> Tensor:  # type: ignore[override]
        """The dequantized weights and scale x B, [out, in + columns], until another layer is used."""
        store = self.scratch.view(self.outputs, self.inputs + self.columns, self.own_b)
        for part, layer in zip(self.parts, self.layers, strict=True):
            layer.weight_in(store.dtype, out=store[part, : self.inputs])
        store[:, self.inputs :] = self.own_b
        return store

    def multiply(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See the base class. Few rows are multiplied by the codes themselves, without dequantized weights in memory.

        Either way adapters are added before the product is rounded.
        """
        kernels = nf4_kernels(x.device) if self.fused and len(x) <= FUSED_ROWS else None
        if kernels is None:
            return super().multiply(x, residual)
        if self.columns:
            torch.mm(x[:, : self.inputs], self.a, out=x[:, self.inputs :])
        out = x.new_empty(len(x), self.outputs) if residual is None else residual
        if self.bias is not None and residual is not None:
            residual.add_(self.bias)
        start = residual if residual is not None else self.bias[None] if self.bias is not None else None
        for part, layer in zip(self.parts, self.layers, strict=True):
            kernels.multiply(x, layer, self.b[part], None if start is None else start[:, part], out[:, part])
        return out

    def weight_of(self, part: int) -> Tensor:
        """Return a projection's dequantized weight [out, in]."""
        return self.layers[part].weight_in(self.own_b.dtype)
