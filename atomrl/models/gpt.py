"""The decoder of Llama, Qwen2 and Qwen3 in plain PyTorch, from its transformers config.

Parameters have the names of the Hugging Face state dict, so a `GPT` is saved and loaded without conversion. Weights can
be float32 while the forward pass computes in `compute_dtype`: they are rounded at each use, also in the backward pass
(`FusedLinear`), or once for all micro-batches (`round_once`). Gradients are float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atomrl.atoms.logprobs import head_logits
from atomrl.common.devices import to_device
from atomrl.config import ConfigError
from atomrl.config.schema import check_heads
from atomrl.models.adapted import adapted_linear, computes_here, is_adapted
from atomrl.models.attention import PackedAttention, row_attention, stream_attention
from atomrl.models.decoder_spec import DecoderSpec, read_spec, rope_table
from atomrl.models.kernel_switches import apply, are_plain, stacked
from atomrl.models.kernels import FusedLinear, rms_norm, swiglu
from atomrl.models.stream import Stream, packs_rows, row_stream

Attend = Callable[[Tensor], Tensor]
BMM_MAX_TOKENS = 256
"""On a CPU, attention uses explicit matrix products for rows up to this length, and SDPA for longer ones
(docs/development/benchmarks/training.md)."""


class Linear(nn.Linear):
    """`nn.Linear` that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return fused_linear(x, self)


def fused_linear(x: Tensor, *linears: nn.Module) -> Tensor:
    """Apply several linear layers to x in one matrix product; return their outputs concatenated, [..., sum of out]."""
    plain = [linear for linear in linears if type(linear) is Linear]
    if len(plain) < len(linears):
        if all(is_adapted(linear) and computes_here(linear) for linear in linears):
            return adapted_linear(x, *linears)
        return torch.cat([linear(x) for linear in linears], dim=-1)
    weights = [linear.weight for linear in plain]
    biases = [linear.bias for linear in plain if linear.bias is not None]
    if (len(plain) > 1 or weights[0].dtype != x.dtype) and not are_plain():
        return apply(FusedLinear, x, len(weights), *weights, *biases)
    return F.linear(x, stacked(weights, x.dtype), stacked(biases, x.dtype) if biases else None)


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

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = spec.heads, spec.kv_heads, spec.head_dim
        query, key, value = spec.qkv_widths
        self.q_proj = Linear(spec.hidden, query, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden, key, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden, value, bias=spec.qkv_bias)
        self.o_proj = Linear(query, spec.hidden, bias=spec.output_bias)
        self.q_norm = RMSNorm(self.size, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.size, spec.norm_eps) if spec.qk_norm else None

    def project(self, x: Tensor) -> Tensor:
        """Project x [..., H] to queries, keys and values, [..., heads + 2 kv_heads, D]."""
        qkv: Tensor = fused_linear(x, self.q_proj, self.k_proj, self.v_proj).unflatten(-1, (-1, self.size))
        if self.q_norm is None or self.k_norm is None:
            return qkv
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=-2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.up_proj = Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def gated(self, x: Tensor) -> Tensor:
        """Return silu(gate(x)) * up(x), the input of `down_proj`."""
        return swiglu(fused_linear(x, self.gate_proj, self.up_proj))


class Layer(nn.Module):
    """A pre-norm decoder layer: attention and MLP, each added to the residual stream."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps)

    def forward(self, x: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """Compute the layer.

        Args:
            x: [..., H].
            attend: attention, from fused queries, keys and values.
            keep: indices of the tokens of a stream to return; None: all.
        """
        mixed = attend(self.before_attention(x))
        if keep is not None:
            x, mixed = x.index_select(0, keep), mixed.index_select(0, keep)
        return self.after_attention(x, mixed)

    def before_attention(self, x: Tensor) -> Tensor:
        """Norm and project x [..., H] to queries, keys and values, [..., heads + 2 kv_heads, D]."""
        return self.self_attn.project(self.input_layernorm(x))

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's output projection and the MLP to the residual stream x, [..., H]."""
        x = _add_linear(x, self.self_attn.o_proj, mixed)
        return _add_linear(x, self.mlp.down_proj, self.mlp.gated(self.post_attention_layernorm(x)))


def _add_linear(x: Tensor, linear: Linear, y: Tensor) -> Tensor:
    """Return x + linear(y), in one operation (addmm) if the layer is a float32 product without bias."""
    if type(linear) is not Linear or linear.bias is not None or y.dtype.itemsize == 2 or x.dim() > 2:
        y = linear(y)
        return x + y
    return torch.addmm(x, y, linear.weight.T)


class Decoder(nn.Module):
    """Embedding, layers and final norm; `model.*` in the state dict."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = cast(Sequence[Layer], nn.ModuleList(Layer(spec) for _ in range(spec.layers)))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)


@cache
def weight_shapes(spec: DecoderSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every weight of a decoder by its name in the Hugging Face state dict."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    shapes = {f"model.{name}": tuple(weight.shape) for name, weight in decoder.named_parameters()}
    return shapes if spec.tied_head else shapes | {"lm_head.weight": (spec.vocab, spec.hidden)}


class GPT(nn.Module):
    """A causal language model of the Llama, Qwen2 or Qwen3 architecture.

    Args:
        config: transformers config.

    Raises:
        Unsupported: this decoder lacks something that the config needs (see `unsupported`).

    Example:
        >>> model = new_gpt(vocab_size=11, layers=1, hidden=32, heads=1)
        >>> model.forward_hidden(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 32])
        >>> [name for name, _ in model.named_parameters()][:2]
        ['model.embed_tokens.weight', 'model.layers.0.self_attn.q_proj.weight']
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.spec = config, read_spec(config)
        self.generation_config: Any = None
        self.compute_dtype: torch.dtype | None = None
        """None: compute in the dtype of the weights."""
        self.gradient_checkpointing = False
        self.is_compiled = False
        """True after `compile_layers`."""
        self.pack_rows: bool | None = None
        """The config key `model.pack_rows`."""
        self.sharing: Any = None
        """Process group for sequence parallelism (`attention.Share`); None: none."""
        self.model = Decoder(self.spec)
        if not self.spec.tied_head:
            self.lm_head = Linear(self.spec.hidden, self.spec.vocab, bias=False)
        self._tables: tuple[Tensor, Tensor] | None = None

    @property
    def head_weight(self) -> Tensor:
        """Output matrix [V, H]: logits are `hidden @ head_weight.T`."""
        return self.model.embed_tokens.weight if self.spec.tied_head else self.lm_head.weight

    def forward_hidden(self, tokens: Tensor) -> Tensor:
        """Compute hidden states after the final norm.

        Args:
            tokens: [B, T] int64, padded on the right. Causal attention ignores such padding without a mask.

        Returns:
            [B, T, H] in `compute_dtype`.
        """
        weight, (rows, length) = self.model.embed_tokens.weight, tokens.shape
        if self.shares_prompts:
            return self._stream_states(tokens, row_stream(rows, length)).view(rows, length, -1)
        x = F.embedding(tokens, weight).to(self.compute_dtype or weight.dtype)
        cos, sin = self.rope_tables(length, tokens.device)
        for layer in self.model.layers:
            attend = partial(row_attention, tables=(cos, sin), kv_heads=layer.self_attn.kv_heads)
            x = self._checkpointed(layer, x, attend)
        return cast(Tensor, self.model.norm(x))

    @property
    def shares_prompts(self) -> bool:
        """True if rows are computed as an `attention.Stream`."""
        dtype = self.compute_dtype or self.head_weight.dtype
        return not are_plain() and packs_rows(self.pack_rows, self.head_weight.device.type, dtype)

    def stream_states(self, tokens: Tensor, stream: Stream) -> Tensor:
        """Compute the states of a stream after the final norm, at its `before` tokens: [B, T] -> [n, H]."""
        return self._stream_states(tokens, stream)

    def _stream_states(self, tokens: Tensor, stream: Stream) -> Tensor:
        # A method of its own: FSDP gathers weights around each of its two callers, which must not call each other.
        weight = self.model.embed_tokens.weight
        kept, back = (to_device(part, tokens.device) for part in stream.before.unique(return_inverse=True))
        stream = stream.to(tokens.device)
        x = F.embedding(tokens.flatten()[stream.source], weight).to(self.compute_dtype or weight.dtype)
        attend = self._stream_attention(x, stream, stream.spans is None and tokens.shape[1] <= BMM_MAX_TOKENS)
        last = self.model.layers[-1]
        for layer in self.model.layers:
            keep = kept if layer is last and len(kept) < len(x) else None
            x = self._checkpointed(layer, x, attend, keep)
        at = stream.before if len(kept) == len(stream.source) else back
        normed: Tensor = self.model.norm(x)
        return normed.index_select(0, at)

    def _stream_attention(self, x: Tensor, stream: Stream, explicit: bool) -> Attend:
        """Return the attention function of all layers for a stream: [N, heads + 2 kv_heads, D] -> [N, heads * D]."""
        blocks, share, kv_heads = stream.blocks, stream.share, self.model.layers[0].self_attn.kv_heads  # of this rank
        if share is not None:
            kv_heads //= len(share.sizes)
        longest = max(int(block.seen.max()) + block.length for block in blocks)  # with the padding of blocks
        cos, sin = self.rope_tables(longest, x.device)
        positions = stream.positions if share is None else share.positions
        tables = (cos, sin) if explicit else (cos[positions, None], sin[positions, None])

        def attend(qkv: Tensor) -> Tensor:
            if explicit:
                return apply(PackedAttention, qkv, blocks, *tables, kv_heads)
            return stream_attention(qkv, blocks, *tables, kv_heads, stream.spans)

        if share is None:
            return attend
        # Sequence parallelism: exchange tokens for heads, attend, and exchange back.
        heads = [self.spec.heads, self.spec.kv_heads, self.spec.kv_heads]
        return lambda qkv: share.tokens(attend(torch.cat(share.heads(*qkv.split(heads, dim=1)), dim=1)))

    def _checkpointed(self, layer: Callable[..., Any], *arguments: Any) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(layer, *arguments, use_reentrant=False))
        return cast(Tensor, layer(*arguments))

    def compile_layers(self) -> None:
        """Compile the parts of a layer before and after attention; all layers share the compiled code.

        It is compiled once for the first shape and once for dynamic shapes. Attention is not compiled, because its
        sequences differ from step to step.
        """
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        before, after = torch.compile(Layer.before_attention), torch.compile(Layer.after_attention)
        for layer in self.model.layers:
            vars(layer).update(before_attention=partial(before, layer), after_attention=partial(after, layer))
        self.is_compiled = True

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits [B, T, V] of tokens [B, T], accumulated in float32."""
        return head_logits(self.forward_hidden(tokens), self.head_weight)

    def rope_tables(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, [T, D/2] float32; cached."""
        if self._tables is None or len(self._tables[0]) < tokens or self._tables[0].device != device:
            with torch.inference_mode(False):  # cached, so autograd must be able to use them later
                self._tables = rope_table(self.config, device, max(tokens, 256))
        return self._tables[0][:tokens], self._tables[1][:tokens]


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
    seed: int = 0,
    **settings: Any,
) -> GPT:
    """Create a small GPT with random weights, in a stock architecture that transformers and serving engines load.

    Weights are normal with standard deviation 1 / sqrt(hidden). GPT-2's 0.02 suits a far wider model; a small one
    learns markedly slower with it. As in GPT-2, the standard deviation of the projections into the residual stream is
    divided by sqrt(2 * layers).

    Args:
        head_dim: width of a head; None: hidden / heads.
        intermediate: width of the MLP; None: 8/3 of `hidden`, rounded up to a multiple of 32.
        family: `llama` (no biases) or `qwen2` (biases on q, k, v).
        max_tokens: maximum row length for serving engines (`max_position_embeddings`).
        settings: other fields of the transformers config, such as `eos_token_id`.

    Returns:
        A float32 model; deterministic for a seed and a torch version.

    Raises:
        ConfigError: heads do not divide evenly, or the family is unknown.

    Example:
        >>> sum(p.numel() for p in new_gpt(vocab_size=64, layers=2, hidden=64, heads=2, kv_heads=1).parameters())
        102720
    """
    from transformers import AutoConfig

    kv_heads = kv_heads or heads
    check_heads(hidden, heads, kv_heads, head_dim, family)
    kinds = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    if family not in kinds:
        raise ConfigError(f"gpt: family {family!r} is not one of {', '.join(kinds)}")
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate or math.ceil(hidden * 8 / 3 / 32) * 32,
        max_position_embeddings=max_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        architectures=[kinds[family]],
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **settings},
        **({} if head_dim is None else {"head_dim": head_dim}),
    )
    model = GPT(config)
    # Layers that write to the residual stream start smaller, as in GPT-2, so that its variance does not grow with
    # depth.
    generator, std = torch.Generator().manual_seed(seed), hidden**-0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, std / math.sqrt(2 * layers) if residual else std, generator=generator)
    return model
