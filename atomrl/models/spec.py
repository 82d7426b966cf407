"""The decoder architectures that training's `GPT` and the native engine know: Llama, Qwen2 and Qwen3.

One shape with switches, read from a transformers config, and the names and shapes of its weights.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atomrl.config import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Unsupported(ValueError):
    """The architecture is none that the built-in decoders know; transformers runs it."""


@dataclass(frozen=True)
class DecoderSpec:
    """The shape of a model."""

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
        """Of the outputs of the query, key and value projections."""
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]


def unsupported(config: Any) -> str | None:
    """Why the built-in decoders cannot compute a model of this transformers config; None where they can.

    Example:
        >>> from transformers import GPT2Config, LlamaConfig
        >>> unsupported(LlamaConfig()) is None
        True
        >>> unsupported(GPT2Config())
        "model_type 'gpt2' is none of llama, qwen2, qwen3"
    """
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type!r} is none of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "it has sliding-window layers"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope_parameters {rope} are not one of the types {', '.join(ROPE_TYPES)} over the whole head"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_key_value_heads} key-value heads do not divide {config.num_attention_heads} heads"
    return None


def read_spec(config: Any) -> DecoderSpec:
    """The shape of a supported model.

    Raises:
        Unsupported: with the reason.
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
    """By what the angles of each pair grow with the position, `[D/2]` float32, and what cosine and sine are multiplied
    by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, size = config.rope_parameters, read_spec(config).head_dim
    if rope.get("rope_type", "default") == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=torch.device("cpu"))
    return frequencies, factor


def rope_table(config: Any, device: torch.device, positions: int | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[positions, D/2]`, always float32: rounded to bfloat16 they are wrong by 4e-3.

    Args:
        positions: None is the longest row that the config allows.
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
    """All weights by name, each exactly once and of the right shape.

    Args:
        shapes: of every weight that has to be there.
        unused: names that may come and are left out, as are rotary frequencies, which old checkpoints hold.
        what: the beginning of the error.

    Raises:
        ConfigError: names what is missing, unexpected, repeated or of a wrong shape.

    Example:
        >>> fitting_weights([("a", torch.ones(2))], {"a": (3,)})
        Traceback (most recent call last):
        ...
        atomrl.config.base.ConfigError: the weights were refused: a has shape (2,), not (3,)
    """
    found: dict[str, Tensor] = {}
    problems = []
    for name, tensor in weights:
        if name in found:
            problems.append(f"{name} came twice")
        elif name in shapes:
            found[name] = tensor
            if tuple(tensor.shape) != tuple(shapes[name]):
                problems.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shapes[name])}")
        elif name not in unused and "rotary_emb" not in name:
            problems.append(f"{name} is unexpected")
    problems += [f"{name} is missing" for name in shapes if name not in found]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConfigError(f"{what}: {'; '.join(problems[:8])}{more}")
    return found
