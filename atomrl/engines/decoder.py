"""The transformer of `NativeEngine`: `DecoderModel` computes Llama, Qwen2 and Qwen3.

Weights are fused (q|k|v is one matrix, gate|up another) in the layout that the device multiplies fastest, and updates
are copied into them. Attention is passed in by the KV cache (`atomrl.engines.cache`).
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atomrl.atoms.logprobs import bfloat16_matmul
from atomrl.common.hangs import progress
from atomrl.models.attention import rotate
from atomrl.models.gpt import Decoder, DecoderSpec, RMSNorm
from atomrl.models.kernels import load_library
from atomrl.models.loading import has_bfloat16
from atomrl.models.quantized import QuantizedLinear, nf4_kernels
from atomrl.protocols import Adapter, FrozenBase

# --------------------------------------------------------------------------------------------------------------------
# The C++ kernels of `kernels.cpp`.

_SOURCE = Path(__file__).with_name("kernels.cpp")

_TENSORS = "qkv out q_norm k_norm keys values prompt_keys prompt_values cosine sine slots groups prompt_lengths lengths"
_SIZES = "rows heads kv_heads head_dim blocks prompt_blocks threads act_bf16 cache_bf16"


class KernelArgs(ctypes.Structure):
    """`struct Args` of kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TENSORS.split()),
        *((name, ctypes.c_int64) for name in _SIZES.split()),
        ("eps", ctypes.c_double),
    )


class Kernels:
    """The functions of kernels.cpp on contiguous CPU tensors, float32 or bfloat16, with PyTorch's number of threads."""

    def __init__(self, library: ctypes.CDLL):
        address, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self.attention = library.decode_attention
        """Decode attention with a `KernelArgs`; see kernels.cpp."""
        self._norm = library.rms_norm
        self._silu_mul, self._sample = library.silu_mul, library.sample
        self.attention.argtypes = [ctypes.POINTER(KernelArgs)]
        self._norm.argtypes = [address] * 3 + [size] * 2 + [real] + [size] * 2
        self._silu_mul.argtypes = [address] * 2 + [size] * 4
        self._sample.argtypes = [address] * 5 + [size] * 2 + [real] + [size] * 2
        for function in (self.attention, self._norm, self._silu_mul, self._sample):
            function.restype = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm: [N, H], [H] -> [N, H]."""
        out, (rows, width) = torch.empty_like(x), x.shape
        ends = (torch.get_num_threads(), x.dtype == torch.bfloat16)
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps, *ends)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [N, 2 * I] -> [N, I]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        ends = (torch.get_num_threads(), out.dtype == torch.bfloat16)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, *ends)
        return out

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`atomrl.engines.sampling.sample` without top-k and top-p, for temperature > 0."""
        (rows, width), seeds, positions = logits.shape, seeds.contiguous(), positions.contiguous()
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        addresses = [tensor.data_ptr() for tensor in (logits, seeds, positions, tokens, logprobs)]
        ends = (torch.get_num_threads(), logits.dtype == torch.bfloat16)
        self._sample(*addresses, rows, width, temperature, *ends)
        return tokens, logprobs


@cache
def load_kernels() -> Kernels | None:
    """Build and load the kernels; None if they cannot be built. Logs which, and why."""
    library = load_library(_SOURCE, "native rollout")
    return None if library is None else Kernels(library)


# (layer, q|k|v of the tokens [N, (heads + 2 * kv_heads) * head_dim]) -> [N, heads * head_dim]
Attend = Callable[[int, Tensor], Tensor]

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
        # A tensor that is made in inference mode could not be used in the trainer's forward pass.
        with torch.inference_mode(shared is None and torch.is_inference_mode_enabled()), torch.no_grad():
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


@dataclass
class DecoderLayer:
    """The weights of one layer."""

    attention_norm: Tensor
    qkv: StackedLinear
    output: StackedLinear
    mlp_norm: Tensor
    gate_up: StackedLinear
    down: StackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None


class DecoderModel:
    """The model's weights and its forward pass over a flat list of tokens. Without weights until `load`.

    Args:
        spec: shapes of the model.
        dtype: the weights are rounded to it; computation is in `compute_dtype`.
        device: of the weights.
        kernels: C++ kernels, or None.
        linear: layout of the weights.
        base: the trainer's frozen weights, used in place of weights of its own.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None,
        linear: type[StackedLinear] = StackedLinear,
        base: FrozenBase | None = None,
    ) -> None:
        self.spec, self.weight_dtype, self.dtype = spec, dtype, compute_dtype(dtype, device)
        self.device, self.kernels, self.base, self.scratch = device, kernels, base, Scratch()
        quantized = base is not None and any(isinstance(module, QuantizedLinear) for module in base.modules.values())
        self.stack = QuantizedStack if quantized else linear
        """Layout of a layer's weights; the head's is `linear`."""
        self.adapter_dtype = self.dtype if issubclass(self.stack, WideLinear) else torch.float32
        """dtype of the adapters."""
        self.layout = 0
        """Increases when a weight tensor is reallocated, which invalidates CUDA graphs."""
        self.linears: dict[str, tuple[StackedLinear, int]] = {}
        """Published name -> fused layer and index of the projection."""
        self.vectors: dict[str, Tensor] = {}
        """Norms and the embedding, by published name."""
        with torch.device("meta"):
            reference = Decoder(spec)  # for names and shapes
        self.names: dict[Tensor, str] = {weight: name for name, weight in reference.named_parameters("model")}
        head_name = "model.embed_tokens.weight" if spec.tied_head else "lm_head.weight"
        # On a CPU a tied head has a layout of its own, beside the embedding's.
        shares_head = base is not None and (linear is WideLinear or not spec.tied_head)
        shared = Shared(base, [head_name]) if base is not None and shares_head else None
        self.head = linear([spec.vocab], spec.hidden, False, dtype, device, wide=True, shared=shared)
        self.linears[head_name] = (self.head, 0)
        if base is not None and not shares_head:
            self.head.load(0, base.parameter(head_name).detach())
        self.one_embedding = spec.tied_head and linear is WideLinear and self.head.weight.dtype == self.dtype
        if not self.one_embedding:
            self.embedding = self._vector(reference.embed_tokens)
        self._tie()
        self.norm = self._vector(reference.norm)
        self.layers = [
            DecoderLayer(
                attention_norm=self._vector(layer.input_layernorm),
                qkv=self._linear(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                output=self._linear(layer.self_attn.o_proj),
                mlp_norm=self._vector(layer.post_attention_layernorm),
                gate_up=self._linear(layer.mlp.gate_proj, layer.mlp.up_proj),
                down=self._linear(layer.mlp.down_proj),
                q_norm=self._vector(layer.self_attn.q_norm) if layer.self_attn.q_norm else None,
                k_norm=self._vector(layer.self_attn.k_norm) if layer.self_attn.k_norm else None,
            )
            for layer in reference.layers
        ]

    def _tie(self) -> None:
        """Use the head's matrix as the embedding, if its layout allows."""
        if self.one_embedding:
            self.embedding = self.head.weight.t()

    def _vector(self, module: nn.Embedding | RMSNorm) -> Tensor:
        """Allocate a module's weight."""
        name = self.names[module.weight]
        if self.base is not None:
            self.vectors[name] = self.base.use(name)
        else:
            self.vectors[name] = torch.empty(module.weight.shape, dtype=self.dtype, device=self.device)
        return self.vectors[name]

    def _linear(self, *parts: nn.Linear) -> StackedLinear:
        """Fuse linear layers that have the same input."""
        widths, inputs, bias = [part.out_features for part in parts], parts[0].in_features, parts[0].bias is not None
        names = [self.names[part.weight] for part in parts]
        shared = None if self.base is None else Shared(self.base, names)
        linear = self.stack(widths, inputs, bias, self.weight_dtype, self.device, wide=False, shared=shared)
        if isinstance(linear, QuantizedStack):
            linear.use(self.scratch)
        self.linears.update({name: (linear, place) for place, name in enumerate(names)})
        return linear

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in place, by published name. Shapes must match.

        Raises:
            RuntimeError: the weights are the trainer's.
        """
        for name, tensor in weights:
            if self.base is not None:
                raise RuntimeError(f"{name} was sent to an engine that uses the trainer's own weights")
            if name in self.vectors:
                copy_rounded(self.vectors[name], tensor, self.weight_dtype)
            linear, part = self.linears.get(name.removesuffix("bias") + "weight" * name.endswith("bias"), (None, 0))
            if linear is not None:
                linear.load(part, tensor)

    def set_adapters(self, adapters: Mapping[str, Adapter]) -> None:
        """Replace all adapters, by the name of the weight that they adapt.

        Raises:
            RuntimeError: the base weights are no longer the trainer's (`FrozenBase.check`).
        """
        if self.base is not None:
            self.base.check()
        by_linear: dict[int, dict[int, Adapter]] = {id(linear): {} for linear, _ in self.linears.values()}
        for name, adapter in adapters.items():
            linear, part = self.linears[name]
            by_linear[id(linear)][part] = adapter
        linears = {id(linear): linear for linear, _ in self.linears.values()}
        reallocated = sum(linear.set_adapters(by_linear[key]) for key, linear in linears.items())
        self.layout += reallocated
        self._tie()
        if reallocated and self.device.type == "cuda":  # the old blocks fit none of the new sizes
            torch.cuda.empty_cache()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights in use by published name, and adapters as in `WeightUpdate.parts`.

        A tied head that has a matrix of its own comes under the embedding's name.
        """
        yield from self.vectors.items()
        for name, (linear, part) in self.linears.items():
            yield name, linear.weight_of(part)
            if linear.bias is not None:
                yield f"{name.removesuffix('weight')}bias", linear.bias[linear.parts[part]]
            if part in linear.adapters:
                a, b = linear.adapters[part]
                yield from ((f"{name}.lora_A", a.t()), (f"{name}.lora_B", b.t()))

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last axis."""
        if self.kernels is not None and x.dim() == 2:
            return self.kernels.rms_norm(x, weight, self.spec.norm_eps)
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def hidden(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Return final hidden states before the last norm: tokens [N] int64 -> [N, hidden]."""
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            mixed = attend(index, layer.qkv(self.rms_norm(x, layer.attention_norm)))
            x = layer.output.add_to(x, mixed)
            x = layer.down.add_to(x, self._gated(layer.gate_up(self.rms_norm(x, layer.mlp_norm))))
        return x

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits: [N, hidden] -> [N, vocab] float32."""
        progress()
        return self.head(self.rms_norm(hidden, self.norm))

    def heads_of(self, layer: int, qkv: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split q|k|v, apply q/k norm (Qwen3) and RoPE: q [N, heads, D], k and v [N, kv_heads, D]."""
        parts = qkv.split(self.spec.qkv_widths, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in parts)
        weights = self.layers[layer]
        if weights.q_norm is not None and weights.k_norm is not None:
            query, key = self.rms_norm(query, weights.q_norm), self.rms_norm(key, weights.k_norm)
        cosine, sine = cosine[:, None], sine[:, None]
        return rotate(query, cosine, sine), rotate(key, cosine, sine), value
