"""The transformer that `NativeEngine` decodes with: Llama, Qwen2 and Qwen3 as one shape with switches.

Weights are held fused (q, k and v as one matrix, gate and up as another) in the layout that the device multiplies
fastest, and new ones are copied into them. The attention itself is the cache's (`atomrl.rollout.attention`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atomrl.atoms.logits import bfloat16_matmul
from atomrl.models.attention import rotate
from atomrl.models.gpt import Decoder, RMSNorm
from atomrl.models.loading import has_bfloat16
from atomrl.models.spec import DecoderSpec
from atomrl.progress import progress
from atomrl.protocols import Adapter
from atomrl.rollout.kernel import Kernels

# (layer, q|k|v of the tokens [N, (heads + 2 * kv_heads) * head_dim]) -> [N, heads * head_dim]
Attend = Callable[[int, Tensor], Tensor]

COPIED_AT_ONCE = 2**22  # elements that are rounded on their way


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What is multiplied: float32 instead of bfloat16 on CPUs without bfloat16 instructions, where it is both more
    exact and several times as fast. The weights are rounded to `dtype` in either case.
    """
    slow = device.type == "cpu" and dtype == torch.bfloat16 and not has_bfloat16("cpu")
    return torch.float32 if slow else dtype


def copy_rounded(target: Tensor, source: Tensor, dtype: torch.dtype) -> None:
    """Copy what `dtype` can hold of a tensor into one that may be wider; no second copy of it is made."""
    rows = len(source) if target.dtype == dtype else max(1, COPIED_AT_ONCE * len(source) // source.numel())
    for into, part in zip(target.split(rows), source.split(rows), strict=True):
        into.copy_(part if target.dtype == dtype else part.to(dtype))


class StackedLinear:
    """Projections of one input as one matrix, in the layout that is fastest for few rows (`[N, in] -> [N, out]`).

    Adapters are added to the output in float32: merged into the rounded matrix, small updates of them would vanish.

    Args:
        widths: of the outputs of each projection.
        inputs: width of the input.
        dtype: what weights are rounded to; `compute_dtype` is multiplied.
        wide: give float32, also of a product of bfloat16 (logits); without a bias.
    """

    def __init__(
        self, widths: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype, device: torch.device, wide: bool
    ) -> None:
        on_cpu = device.type == "cpu"
        # CPUs have no product of bfloat16 that gives float32.
        compute = torch.float32 if wide and on_cpu else compute_dtype(dtype, device)
        self.dtype, self.wide = dtype, wide
        ends = list(accumulate(widths, initial=0))
        self.parts = [slice(start, end) for start, end in pairwise(ends)]
        self.bias = torch.empty(ends[-1], dtype=compute, device=device) if bias else None
        self.packed = on_cpu and compute == torch.bfloat16
        self.unpacked: dict[int, Tensor] = {}
        # [in, out] on a CPU: MKL is up to six times as slow on the transposed one at 16 rows.
        shape = (inputs, ends[-1]) if on_cpu else (ends[-1], inputs)
        self.weight = torch.empty(0 if self.packed else shape, dtype=compute, device=device)
        if not on_cpu:
            self.weight = self.weight.t()
        self.adapters: dict[int, tuple[Tensor, Tensor]] = {}
        """By projection: A^T and scale x B^T, float32."""

    def load(self, part: int, weight: Tensor) -> None:
        """Take a projection's weight [out, in] or bias [out], in place."""
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

    def set_adapter(self, part: int, adapter: Adapter) -> None:
        """Add a projection's adapter."""
        a, b = (tensor.to(self.weight.device, torch.float32).t().contiguous() for tensor in (adapter.a, adapter.b))
        self.adapters[part] = a, b * adapter.scale

    def weight_of(self, part: int) -> Tensor:
        """A projection's weight [out, in] as it is multiplied, read back from its layout."""
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
        if self.wide and (x.is_cuda or x.dtype == torch.bfloat16) and x.dtype != torch.float32:
            y = torch.mm(x, self.weight, out_dtype=torch.float32) if x.is_cuda else bfloat16_matmul(x, self.weight)
            return y if added is None else y.add_(added)
        x = x.to(self.weight.dtype)
        if added is None:
            return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        y = torch.addmm(added.to(x.dtype), x, self.weight)
        return y if self.bias is None else y.add_(self.bias)

    def _added(self, x: Tensor) -> Tensor:
        """The adapters' part, float32. It goes into the product before that is rounded: behind, what is less than half
        of its last place would vanish."""
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
        spec: the shape.
        dtype: what the weights are rounded to; `compute_dtype` says what is computed in.
        device: where.
        kernels: used where they are given.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, kernels: Kernels | None) -> None:
        self.spec, self.weight_dtype, self.dtype = spec, dtype, compute_dtype(dtype, device)
        self.device, self.kernels = device, kernels
        self.linears: dict[str, tuple[StackedLinear, int]] = {}
        """By the name of the weight."""
        self.vectors: dict[str, Tensor] = {}
        """Norms and the embedding, by name."""
        with torch.device("meta"):
            plain = Decoder(spec)  # names and shapes
        self.names: dict[Tensor, str] = {weight: name for name, weight in plain.named_parameters("model")}
        self.head = StackedLinear([spec.vocab], spec.hidden, False, dtype, device, wide=True)
        self.linears["model.embed_tokens.weight" if spec.tied_head else "lm_head.weight"] = (self.head, 0)
        if spec.tied_head and device.type != "cpu":
            self.embedding = self.head.weight.t()  # follows the head
        else:
            self.embedding = self._vector(plain.embed_tokens)
        self.norm = self._vector(plain.norm)
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
            for layer in plain.layers
        ]

    def _vector(self, module: nn.Embedding | RMSNorm) -> Tensor:
        """Room for a module's weight."""
        vector = torch.empty(module.weight.shape, dtype=self.dtype, device=self.device)
        self.vectors[self.names[module.weight]] = vector
        return vector

    def _linear(self, *parts: nn.Linear) -> StackedLinear:
        """Linear layers of one input as one."""
        widths, inputs, bias = [part.out_features for part in parts], parts[0].in_features, parts[0].bias is not None
        linear = StackedLinear(widths, inputs, bias, self.weight_dtype, self.device, wide=False)
        self.linears.update({self.names[part.weight]: (linear, place) for place, part in enumerate(parts)})
        return linear

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights, named as in the published checkpoint and of the right shapes, into those there are."""
        for name, tensor in weights:
            if name in self.vectors:
                copy_rounded(self.vectors[name], tensor, self.weight_dtype)
            linear, part = self.linears.get(name.removesuffix("bias") + "weight" * name.endswith("bias"), (None, 0))
            if linear is not None:
                linear.load(part, tensor)

    def set_adapters(self, adapters: Mapping[str, Adapter]) -> None:
        """Replace all adapters by these, named by the weights they sit on."""
        for linear, _ in self.linears.values():
            linear.adapters.clear()
        for name, adapter in adapters.items():
            linear, part = self.linears[name]
            linear.set_adapter(part, adapter)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """All that is computed with, by its published name: a tied head beside the embedding comes under that name too.
        Adapters as in `WeightUpdate.parts`."""
        yield from self.vectors.items()
        for name, (linear, part) in self.linears.items():
            yield name, linear.weight_of(part)
            if linear.bias is not None:
                yield f"{name.removesuffix('weight')}bias", linear.bias[linear.parts[part]]
            if part in linear.adapters:
                a, b = linear.adapters[part]
                yield from ((f"{name}.lora_A", a.t()), (f"{name}.lora_B", b.t()))

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Over the last axis."""
        if self.kernels is not None and x.dim() == 2:
            return self.kernels.rms_norm(x, weight, self.spec.norm_eps)
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def hidden(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Final hidden states, before the last norm: tokens `[N]` int64 -> `[N, hidden]`."""
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
        """`[N, hidden]` -> `[N, vocab]` float32."""
        progress()
        return self.head(self.rms_norm(hidden, self.norm))

    def heads_of(self, layer: int, qkv: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `[N, heads, D]`, k and v `[N, kv_heads, D]`, normed (Qwen3) and rotated; cosine, sine `[N, D / 2]`."""
        parts = qkv.split(self.spec.qkv_widths, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in parts)
        weights = self.layers[layer]
        if weights.q_norm is not None and weights.k_norm is not None:
            query, key = self.rms_norm(query, weights.q_norm), self.rms_norm(key, weights.k_norm)
        cosine, sine = cosine[:, None], sine[:, None]
        return rotate(query, cosine, sine), rotate(key, cosine, sine), value
