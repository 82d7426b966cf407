"""Architectures that `GPT` and the native engine support: one spec with switches, read from a transformers config."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atomrl.config import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Unsupported(ValueError):
    """The built-in decoder does not support the architecture; transformers can run it."""


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and switches of a decoder."""

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
        """Output widths of the query, key and value projections."""
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]


def unsupported(config: Any) -> str | None:
    """Return why the built-in decoder does not support a transformers config; None if it does.

    Example:
        >>> from transformers import GPT2Config, LlamaConfig
        >>> unsupported(LlamaConfig()) is None
        True
        >>> unsupported(GPT2Config())
        "model_type 'gpt2' is not one of llama, qwen2, qwen3"
    """
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "it has sliding-window layers"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope_parameters {rope}: only the types {', '.join(ROPE_TYPES)} over the whole head are supported"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_key_value_heads} key-value heads do not divide {config.num_attention_heads} heads"
    return None


def read_spec(config: Any) -> DecoderSpec:
    """Read the spec of a decoder from its transformers config.

    Raises:
        Unsupported: the built-in decoder does not support the config; the message says why.
    """
    reason = unsupported(config)
    if reason is not None:
        raise Unsupported(f"the built-in decoder cannot run this model: {reason}; use the hf engine")
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
        output_bias=config.model_type != "qwen2" and attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=config.model_type == "qwen3",
        max_positions=config.max_position_embeddings,
    )


def rope_frequencies(config: Any) -> tuple[Tensor, float]:
    """Return the rotary frequencies, [D/2] float32, and the factor of cosine and sine (yarn's attention scaling)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, size = config.rope_parameters, read_spec(config).head_dim
    if rope.get("rope_type", "default") == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=torch.device("cpu"))
    return frequencies, factor


def rope_table(config: Any, device: torch.device, positions: int | None = None) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, [positions, D/2] float32: in bfloat16 their error would be 4e-3.

    Args:
        positions: number of positions; None: `max_position_embeddings`.
    """
    frequencies, factor = rope_frequencies(config)
    angles = torch.outer(torch.arange(positions or config.max_position_embeddings, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def fitting_weights(
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    unused: Collection[str] = (),
    what: str = "the weights were refused",
) -> dict[str, Tensor]:
    """Collect weights by name, and check that each is present once with the right shape.

    Args:
        weights: (name, tensor) pairs.
        shapes: expected shapes by name.
        unused: names to ignore; rotary frequencies of old checkpoints are ignored too.
        what: start of the error message.

    Raises:
        ConfigError: weights are missing, unexpected, repeated or of the wrong shape.

    Example:
        >>> fitting_weights([("a", torch.ones(2))], {"a": (3,)})
        Traceback (most recent call last):
        ...
        atomrl.common.errors.ConfigError: the weights were refused: a has shape (2,), not (3,)
    """
    collected: dict[str, Tensor] = {}
    problems = []
    for name, tensor in weights:
        if name in collected:
            problems.append(f"{name} occurs twice")
        elif name in shapes:
            collected[name] = tensor
            if tuple(tensor.shape) != tuple(shapes[name]):
                problems.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shapes[name])}")
        elif name not in unused and "rotary_emb" not in name:
            problems.append(f"{name} is unexpected")
    problems += [f"{name} is missing" for name in shapes if name not in collected]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConfigError(f"{what}: {'; '.join(problems[:8])}{more}")
    return collected
