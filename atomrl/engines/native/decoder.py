"""The transformer of `NativeEngine`: `DecoderModel` computes Llama, Qwen2 and Qwen3.

Weights are fused (q|k|v is one matrix, gate|up another) in the layout that the device multiplies fastest, and updates
are copied into them. Attention is passed in by the KV cache (`atomrl.engines.native.cache`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atomrl.common.hangs import progress
from atomrl.engines.native.cpu_kernels import Kernels
from atomrl.engines.native.linear import (
    QuantizedStack,
    Scratch,
    Shared,
    StackedLinear,
    WideLinear,
    compute_dtype,
    copy_rounded,
)
from atomrl.models.attention import rotate
from atomrl.models.decoder_spec import DecoderSpec
from atomrl.models.gpt import Decoder, RMSNorm
from atomrl.models.quantized import QuantizedLinear
from atomrl.protocols import Adapter, FrozenBase, RoundedWeights

# (layer, q|k|v of the tokens [N, (heads + 2 * kv_heads) * head_dim]) -> [N, heads * head_dim]
Attend = Callable[[int, Tensor], Tensor]


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

    def offer(self, rounded: RoundedWeights) -> None:
        """Let the trainer round its weights into those of the layers; only the layout of a GPU is the trainer's."""
        for linear in {id(linear): linear for linear, _ in self.linears.values()}.values():
            if linear is not self.head and isinstance(linear, WideLinear):
                names = [name for name, (other, _) in self.linears.items() if other is linear]  # in their order
                rounded.offer(names, linear.store)

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
