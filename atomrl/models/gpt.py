"""The decoder of Llama, Qwen2 and Qwen3 in plain PyTorch: to read, to train from scratch, and to train fast.

Parameters have the names of the Hugging Face state dict, so a `GPT` is saved and loaded in that layout as it is.
Weights may be kept in float32 while the forward pass computes in `compute_dtype`; each use casts them, so gradients
arrive in float32 and no second copy of the weights is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atomrl.models.kernels import AttentionFunction, Rotate, are_plain, plain_attention, rms_norm, swiglu

FAMILIES = ("llama", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
BMM_MAX_TOKENS = 256
"""On a CPU, rows up to this length take explicit matrix products; beyond it SDPA (see docs/benchmarks/training.md)."""

COMPILED_SLACK = 1.25
"""Rows are padded up to a length that is compiled already if that is at most this many times as long."""


class Linear(nn.Linear):
    """`nn.Linear` that computes in the dtype of its input, whatever the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def fused_linear(x: Tensor, *linears: nn.Module) -> Tensor:
    """The outputs of several linear layers side by side, in one matrix product."""
    if any(type(linear) is not Linear for linear in linears):  # adapters
        return torch.cat([linear(x) for linear in linears], dim=-1)
    weight = torch.cat([linear.weight.to(x.dtype) for linear in linears])
    biased = linears[0].bias is not None
    return F.linear(x, weight, torch.cat([linear.bias.to(x.dtype) for linear in linears]) if biased else None)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean square in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Self-attention with rotary positions and grouped queries."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, heads, kv_heads, size = _shape(config)
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        bias = True if config.model_type == "qwen2" else config.attention_bias
        self.q_proj = Linear(hidden, heads * size, bias=bias)
        self.k_proj = Linear(hidden, kv_heads * size, bias=bias)
        self.v_proj = Linear(hidden, kv_heads * size, bias=bias)
        self.o_proj = Linear(heads * size, hidden, bias=bias and config.model_type != "qwen2")
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(size, config.rms_norm_eps), RMSNorm(size, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = None

    def project(self, x: Tensor) -> Tensor:
        """[..., H] -> queries, keys and values, [..., heads + 2 kv_heads, D]."""
        qkv = fused_linear(x, self.q_proj, self.k_proj, self.v_proj).unflatten(-1, (-1, self.size))
        if self.q_norm is None:
            return qkv
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=-2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        rows, tokens, _ = x.shape
        qkv = self.project(x)
        if are_plain():
            return self.o_proj(plain_attention(qkv, cos, sin, self.kv_heads))
        if mask is not None:
            return self.o_proj(AttentionFunction.apply(qkv, cos, sin, mask, self.kv_heads))
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        q, k = Rotate.apply(qk, cos, sin).split([self.heads, self.kv_heads], dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = self.heads > self.kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def gated(self, x: Tensor) -> Tensor:
        """What `down_proj` projects."""
        return swiglu(fused_linear(x, self.gate_proj, self.up_proj))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(x))


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each normed before and added to the residual stream."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def _run_layer(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    return layer(x, cos, sin, mask)


class Decoder(nn.Module):
    """Embedding, layers and final norm; `model.*` in the state dict."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class GPT(nn.Module):
    """A causal language model of the Llama, Qwen2 or Qwen3 architecture, from its transformers config.

    Raises:
        ValueError: the config asks for something that this decoder does not have (`unsupported` says what).

    Example:
        >>> model = new_gpt(vocab_size=11, layers=1, hidden=32, heads=1)
        >>> model.forward_hidden(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 32])
        >>> [name for name, _ in model.named_parameters()][:2]
        ['model.embed_tokens.weight', 'model.layers.0.self_attn.q_proj.weight']
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        reason = unsupported(config)
        if reason:
            raise ValueError(f"GPT cannot be built from this config: {reason}")
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        """None computes in the dtype of the weights."""
        self.gradient_checkpointing = False
        self.run_layer = _run_layer
        self._lengths: set[int] = set()
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tables: tuple[Tensor, Tensor] | None = None

    @property
    def head_weight(self) -> Tensor:
        """[V, H]: logits are `hidden @ head_weight.T`."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def compiled(self) -> bool:
        return self.run_layer is not _run_layer and not are_plain()

    def forward_hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: [B, T] int64, padded on the right: causality alone keeps padding from what is before it.

        Returns:
            [B, T, H] in `compute_dtype`.
        """
        weight, length = self.model.embed_tokens.weight, tokens.shape[1]
        if self.compiled:
            tokens = F.pad(tokens, (0, self._compiled_length(length) - length))
        x = F.embedding(tokens, weight).to(self.compute_dtype or weight.dtype)
        cos, sin = self.rope_tables(tokens.shape[1], tokens.device)
        mask, run_layer = None, self.run_layer if self.compiled else _run_layer
        if tokens.device.type == "cpu" and tokens.shape[1] <= BMM_MAX_TOKENS:
            mask = torch.full((tokens.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)
        for layer in self.model.layers:
            if self.compiled:
                torch._dynamo.maybe_mark_dynamic(x, 0)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(run_layer, layer, x, cos, sin, mask, use_reentrant=False)
            else:
                x = run_layer(layer, x, cos, sin, mask)
        return self.model.norm(x[:, :length])

    def compile_layers(self) -> None:
        """Compile one layer and run all through it; once for each of a few row lengths, for any number of rows."""
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self.run_layer = torch.compile(_run_layer, dynamic=False)

    def _compiled_length(self, length: int) -> int:
        known = [other for other in self._lengths if length <= other <= COMPILED_SLACK * length]
        if not known:
            known = [-(-length // 8) * 8]
            self._lengths |= set(known)
        return min(known)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]."""
        hidden = self.forward_hidden(tokens)
        return F.linear(hidden, self.head_weight.to(hidden.dtype))

    def rope_tables(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, heads + kv_heads, D/2] in float32; those of the query heads carry 1 / sqrt(D)."""
        if self._tables is None or len(self._tables[0]) < tokens or self._tables[0].device != device:
            _, heads, kv_heads, size = _shape(self.config)
            frequencies, factor = _rope_frequencies(self.config)
            with torch.inference_mode(False):  # kept, so they must be fit for autograd as well
                angles = torch.arange(max(tokens, 256), dtype=torch.float32)[:, None] * frequencies
                scale = torch.full((heads + kv_heads, 1), factor)
                scale[:heads] *= size**-0.5
                self._tables = (angles.cos()[:, None] * scale).to(device), (angles.sin()[:, None] * scale).to(device)
        return self._tables[0][:tokens], self._tables[1][:tokens]


def unsupported(config: Any) -> str | None:
    """Why `GPT` cannot compute a model of this transformers config; None where it can."""
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type!r} is none of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not silu"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "it has sliding-window layers"
    if config.attention_dropout:
        return "attention_dropout is not 0"
    rope = config.rope_parameters["rope_type"]
    if rope not in STATIC_ROPE or config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope_type {rope!r} is none of {', '.join(STATIC_ROPE)}, or it rotates a part of each head only"
    return None


def _shape(config: Any) -> tuple[int, int, int, int]:
    """hidden size, heads, key-value heads, head size."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.hidden_size, heads, config.num_key_value_heads, size


def _rope_frequencies(config: Any) -> tuple[Tensor, float]:
    """Angle per position of each pair of dimensions ([D/2] float32), and the factor on cos and sin."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        size = _shape(config)[3]
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=torch.device("cpu"))


def new_gpt(
    vocab_size: int,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate: int | None = None,
    family: str = "llama",
    tied: bool = True,
    max_tokens: int = 2048,
    rope_theta: float = 10000.0,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
) -> GPT:
    """A small GPT with fresh weights, of a stock architecture that transformers and serving engines load.

    Weights are normal with standard deviation 1 / sqrt(hidden) (the 0.02 of GPT-2 is that of a far wider model; a small
    one learns markedly slower from it); the projections back into the residual stream have theirs divided by
    sqrt(2 * layers), as in GPT-2.

    Args:
        intermediate: width of the MLP; None is 8/3 of `hidden`, rounded up to a multiple of 32.
        family: `llama` (no biases) or `qwen2` (biases on q, k, v; the head size is then hidden / heads).
        max_tokens: the longest row that a serving engine will accept.

    Returns:
        A float32 model, the same for the same seed on the same torch version.

    Raises:
        ValueError: heads do not divide evenly, or the family is unknown.

    Example:
        >>> sum(p.numel() for p in new_gpt(vocab_size=64, layers=2, hidden=64, heads=2, kv_heads=1).parameters())
        102720
    """
    from transformers import LlamaConfig, Qwen2Config

    kv_heads = kv_heads or heads
    head_dim = head_dim or hidden // heads
    if heads % kv_heads or (head_dim * heads != hidden and family == "qwen2"):
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}, and divide hidden={hidden}")
    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config}
    if family not in kinds:
        raise ValueError(f"family {family!r} is none of {', '.join(kinds)}")
    config = kinds[family](
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate or math.ceil(hidden * 8 / 3 / 32) * 32,
        max_position_embeddings=max_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=tied,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        architectures=["LlamaForCausalLM" if family == "llama" else "Qwen2ForCausalLM"],
        **({"head_dim": head_dim} if family == "llama" else {}),
    )
    model = GPT(config)
    generator, std = torch.Generator().manual_seed(seed), hidden**-0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, std / math.sqrt(2 * layers) if residual else std, generator=generator)
    return model
