"""The transformer that `NativeEngine` decodes with: Llama, Qwen2 and Qwen3 as one shape with switches.

Weights are held fused (q, k and v as one matrix, gate and up as another) in the layout that the device multiplies
fastest. The attention itself is the cache's (`atomrl.rollout.attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.rollout.kernel import Kernels

# (layer, q|k|v of the tokens [N, (heads + 2 * kv_heads) * head_dim]) -> [N, heads * head_dim]
Attend = Callable[[int, Tensor], Tensor]

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Unsupported(ValueError):
    """The model is none that the native engine knows; the hf engine runs it."""


@dataclass(frozen=True)
class DecoderSpec:
    """The shape of a model, read from its Hugging Face config."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int

    @property
    def qkv_widths(self) -> list[int]:
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]


def unsupported_reason(config: Any) -> str | None:
    """Why the native engine cannot run a model of this Hugging Face config, or None if it can.

    Example:
        >>> from transformers import GPT2Config, LlamaConfig
        >>> unsupported_reason(LlamaConfig()) is None
        True
        >>> unsupported_reason(GPT2Config())
        "model_type 'gpt2' is none of llama, qwen2, qwen3"
    """
    if config.model_type not in ("llama", "qwen2", "qwen3"):
        return f"model_type {config.model_type!r} is none of llama, qwen2, qwen3"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not silu"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope_parameters {rope} are not one of the types {', '.join(_ROPE_TYPES)} over the whole head"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some layers have sliding-window attention"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    return None


def read_spec(config: Any) -> DecoderSpec:
    """The shape of a supported model.

    Raises:
        Unsupported: with the reason.
    """
    reason = unsupported_reason(config)
    if reason is not None:
        raise Unsupported(f"the native engine cannot run this model: {reason}; use the hf engine")
    attention_bias = bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied_head=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=config.model_type == "qwen3",
        max_positions=config.max_position_embeddings,
    )


def rope_table(config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[max_positions, head_dim / 2]`, always float32: rounded to bfloat16 they are wrong by 4e-3."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), rotary.inv_freq.float())
    scale = rotary.attention_scaling
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def weight_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name in the Hugging Face state dict -> shape, of every weight that the decoder needs."""
    hidden, inner = spec.hidden, spec.intermediate
    query, key, _ = spec.qkv_widths
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab, hidden)}
    for layer in range(spec.layers):
        linear = {
            "self_attn.q_proj": (query, hidden, spec.qkv_bias),
            "self_attn.k_proj": (key, hidden, spec.qkv_bias),
            "self_attn.v_proj": (key, hidden, spec.qkv_bias),
            "self_attn.o_proj": (hidden, query, spec.output_bias),
            "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
            "mlp.up_proj": (inner, hidden, spec.mlp_bias),
            "mlp.down_proj": (hidden, inner, spec.mlp_bias),
        }
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if spec.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied_head:
        shapes["lm_head.weight"] = (spec.vocab, hidden)
    return shapes


def check_weights(weights: Iterable[tuple[str, Tensor]], spec: DecoderSpec) -> dict[str, Tensor]:
    """All weights by name, each exactly once and of the right shape.

    Raises:
        ValueError: names what is missing, unexpected, repeated or of a wrong shape. A tied head's `lm_head.weight`,
            which state dicts carry, is accepted and not used.
    """
    shapes = weight_shapes(spec)
    found: dict[str, Tensor] = {}
    problems = []
    for name, tensor in weights:
        if name in found:
            problems.append(f"{name} came twice")
        elif name in shapes:
            found[name] = tensor
            if tuple(tensor.shape) != shapes[name]:
                problems.append(f"{name} has shape {tuple(tensor.shape)}, not {shapes[name]}")
        elif not (spec.tied_head and name == "lm_head.weight"):
            problems.append(f"{name} is unexpected")
    problems += [f"{name} is missing" for name in shapes if name not in found]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("the weights were refused, the old ones stay: " + "; ".join(problems[:8]) + more)
    return found


def read_weights(folder: str) -> Iterable[tuple[str, Tensor]]:
    """Names and tensors of a model folder, from its safetensors one tensor at a time; else through transformers."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        from transformers import AutoModelForCausalLM

        yield from AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict().items()
        return
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (a handle is no dict)
                yield name, handle.get_tensor(name)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What is multiplied: float32 instead of bfloat16 on CPUs without bfloat16 instructions, where it is both more
    exact and several times as fast. The weights are rounded to `dtype` in either case.
    """
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 and not fast else dtype


class Linear:
    """One matrix of stacked projections, in the layout that is fastest for few rows (`[N, in] -> [N, out]`)."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor], device: torch.device, dtypes: list[torch.dtype]):
        for dtype in dtypes:  # to the precision that was asked for, then to the one that is computed in
            weights, biases = [w.to(device, dtype) for w in weights], [b.to(device, dtype) for b in biases]
        self.bias = torch.cat(biases) if biases else None
        self.packed = device.type == "cpu" and dtypes[-1] == torch.bfloat16
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights).contiguous(), 128)
        else:  # [in, out]: MKL is up to six times as slow on the transposed one at 16 rows
            self.weight = torch.cat([weight.t() for weight in weights], dim=1)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, in place."""
        if self.packed:
            return residual.add_(self(x))
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self.weight)


@dataclass
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None


class Decoder:
    """The model's weights and its forward pass over a flat list of tokens.

    Args:
        spec: the shape.
        weights: as `check_weights` returns them.
        dtype: what the weights are rounded to; `compute_dtype` says what is computed in.
        device: where.
        kernels: used where they are given.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None,
    ):
        self.spec, self.weight_dtype, self.dtype = spec, dtype, compute_dtype(dtype, device)
        self.kernels = kernels
        dtypes = list(dict.fromkeys([dtype, self.dtype]))

        def vector(name: str) -> Tensor:
            return weights[name].to(device, dtype).to(self.dtype)

        def linear(prefix: str, *names: str) -> Linear:
            names = tuple(f"{prefix}{name}" for name in names)
            biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
            return Linear([weights[f"{name}.weight"] for name in names], biases, device, dtypes)

        self.embedding = vector("model.embed_tokens.weight").clone()
        self.norm = vector("model.norm.weight").clone()
        self.head = linear("", "model.embed_tokens" if spec.tied_head else "lm_head")
        self.layers = []
        for index in range(spec.layers):
            prefix = f"model.layers.{index}."
            attention = f"{prefix}self_attn."
            self.layers.append(
                _Layer(
                    attention_norm=vector(f"{prefix}input_layernorm.weight").clone(),
                    qkv=linear(attention, "q_proj", "k_proj", "v_proj"),
                    output=linear(attention, "o_proj"),
                    mlp_norm=vector(f"{prefix}post_attention_layernorm.weight").clone(),
                    gate_up=linear(prefix, "mlp.gate_proj", "mlp.up_proj"),
                    down=linear(prefix, "mlp.down_proj"),
                    q_norm=vector(f"{attention}q_norm.weight").clone() if spec.qk_norm else None,
                    k_norm=vector(f"{attention}k_norm.weight").clone() if spec.qk_norm else None,
                )
            )

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
        """`[N, hidden]` -> `[N, vocab]`."""
        return self.head(self.rms_norm(hidden, self.norm))

    def heads_of(self, layer: int, qkv: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `[N, heads, D]`, k and v `[N, kv_heads, D]`, normed (Qwen3) and rotated; cosine, sine `[N, D / 2]`."""
        parts = qkv.split(self.spec.qkv_widths, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in parts)
        weights = self.layers[layer]
        if weights.q_norm is not None and weights.k_norm is not None:
            query, key = self.rms_norm(query, weights.q_norm), self.rms_norm(key, weights.k_norm)
        return rotate(query, cosine, sine), rotate(key, cosine, sine), value


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of `[N, heads, D]` in float32, by `[N, D / 2]` each."""
    first, second = heads.float().chunk(2, dim=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(heads.dtype)
