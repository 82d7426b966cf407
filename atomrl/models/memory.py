"""Memory estimates of models from their configs: parameters and activations."""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError
from atomrl.models.decoder_spec import unsupported
from atomrl.models.gpt import BMM_MAX_TOKENS
from atomrl.models.shapes import auto_class, size, text_config, tower_weights
from atomrl.models.vision import why_no_images

FLOAT32 = 4
MOST_TOKENS = 16384
"""Tokens per micro-batch beyond which a GPU gets no faster."""
_parameters: dict[str, int] = {}
_active: dict[str, int] = {}
"""Caches of parameter counts by config: a dry run needs those of one model many times."""
QUANTIZED = {"nf4": 0.5 + 1 / 64 + FLOAT32 / (64 * 256), "int8": 1.0}
"""Bytes per quantized weight: its code, a scale per 64 weights, and a scale per 256 scales."""
SAVED_BY_AUTOGRAD = 2
"""Activations of a layer of transformers, relative to those of `gpt.Layer`. Counted on tiny models of 41 mixtures of
experts and 3 dense families: 1.2 to 2.4 for most, up to 2.8 for some (Llama 4, minimax, Qwen3.5), 0.5 to 1.2 with
latent attention (DeepSeek V3.2). A few with linear attention or compressed keys save 4 to 108 times as much when tiny
(Kimi Linear)."""
IN_CPU_MEMORY = "in the CPU's memory"
"""Part of the memory estimate for offloaded shards; not in the total of the device."""
SHARDED = ("trainer weights", "optimizer", "gradients", "reference", "teacher", "critic")
"""Parts of the memory estimate that are sharded over ranks."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
"""Names of the numbers of experts, of all and of those that a token runs through, in the configs of transformers."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the policy, for the memory estimate of a back end with several ranks."""

    shape: Any
    """Transformers config."""
    total: int
    """Number of parameters."""
    trained: int
    """Number of trained parameters: all, or those of the adapters."""
    compute: int
    """Bytes of an element in the forward pass."""
    kept: float
    """Bytes of a layer's weight as it is stored and communicated between ranks."""


def count_parameters(config: Any, trust_remote_code: bool = False) -> int:
    """Count the parameters of a model from its transformers config.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> count_parameters(new_gpt(vocab_size=64, layers=2, hidden=64, heads=2, kv_heads=1).config)
        102720
    """
    text = config.to_json_string(use_diff=False)
    if text not in _parameters:
        model = empty_model(config, trust_remote_code)
        _parameters[text] = sum(weight.numel() for weight in model.parameters())
    return _parameters[text]


def active_parameters(config: Any, trust_remote_code: bool = False) -> int:
    """Count the parameters that a token of text runs through: its experts only, and no vision tower.

    Example:
        >>> from transformers import MixtralConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        >>> config = MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2)
        >>> count_parameters(config) - active_parameters(config) == 2 * 6 * 3 * 32 * 64
        True
    """
    text = config.to_json_string(use_diff=False)
    if text not in _active:
        model, experts = empty_model(config, trust_remote_code), size(config, *EXPERTS)
        tower = {*tower_weights(model)} if text_config(config) is not config else set()
        used = {name: weight for name, weight in model.named_parameters() if name not in tower}
        routed = sum(
            weight.numel() for name, weight in used.items()
            if ".experts." in name or (weight.dim() == 3 and len(weight) == experts)
        )  # fmt: skip
        idle = 0 if not experts else routed - routed * min(experts, size(config, *EXPERTS_PER_TOKEN) or 1) // experts
        _active[text] = sum(weight.numel() for weight in used.values()) - idle
    return _active[text]


def empty_model(config: Any, trust_remote_code: bool = False, scalar: bool = False) -> Any:
    """Create the model of a transformers config on the meta device.

    Args:
        scalar: create a sequence classifier with one label.

    Raises:
        ConfigError: transformers cannot, because the sizes contradict each other or a package is missing.
    """
    from transformers import AutoModelForSequenceClassification

    message = f"transformers cannot create a {config.model_type} model from the config.json of this model"
    with reraise_as(ConfigError, message, Exception), torch.device("meta"):
        if scalar:
            config = copy.deepcopy(config)
            config.num_labels = 1
        kind: Any = AutoModelForSequenceClassification if scalar else auto_class(config)
        return kind.from_config(config, trust_remote_code=trust_remote_code)


def trained_parameters(config: Any, trust_remote_code: bool = False) -> int:
    """Count the parameters that are trained without adapters: all but those of a vision tower."""
    total = count_parameters(config, trust_remote_code)
    if text_config(config) is config:
        return total
    inner = empty_model(config, trust_remote_code)
    return int(total - sum(inner.get_parameter(name).numel() for name in tower_weights(inner)))


def tower_bytes(config: Any, tokens: int, size: int, trained: bool) -> int:
    """Return the bytes of a vision tower's activations for pictures of so many tokens; 0 without a tower.

    A frozen tower holds one layer's at a time, for one picture; a trained one those of all layers. A token is made of
    `spatial_merge_size` squared patches, and a patch has about the activations of a token in a layer of this width.

    Args:
        config: transformers config of a model of `vision.FAMILIES`.
        tokens: of one picture; if the tower is trained, of a micro-batch.
        size: bytes of an element in the forward pass.
    """
    if why_no_images(config, ""):
        return 0
    vision = config.vision_config
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
    patches = tokens * vision.spatial_merge_size**2
    pixels = 3 * vision.temporal_patch_size * vision.patch_size**2
    layers = vision.depth if trained else 1
    return int(patches * (FLOAT32 * pixels + layers * SAVED_BY_AUTOGRAD * size * (8 * hidden + 3 * inner)))


def adapter_parameters(config: Any, rank: int) -> int:
    """Count the parameters of adapters on all linear layers of a Llama or Qwen model."""
    hidden, query, keys, inner = widths(config)
    ends = 2 * (hidden + query) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return layer_count(config) * rank * ends


def activation_bytes_per_token(
    config: Any, row_tokens: int, size: int, on_cpu: bool, tensor: int = 1
) -> tuple[int, int]:
    """Return the activation bytes of one layer per token, without and with gradient checkpointing.

    Counted from `gpt.Layer`: twice the residual stream and its norm; queries and attention outputs; keys and values;
    gate, up and their product; with explicit attention products also the scores of each head. All but the residual
    stream and its norms are divided by the tensor-parallel size. Models that `gpt` does not support keep what autograd
    saves (`SAVED_BY_AUTOGRAD`).
    """
    hidden, query, keys, inner = widths(config)
    attention = head_count(config) * row_tokens if on_cpu and row_tokens <= BMM_MAX_TOKENS else 0
    saved = SAVED_BY_AUTOGRAD if unsupported(config) else 1
    return saved * size * (4 * hidden + (2 * query + 2 * keys + 3 * inner + attention) // tensor), size * hidden


def tokens_without_gradient(config: Any, tokens: int, size: int, checkpointed: bool) -> int:
    """Return the tokens per micro-batch of a pass without gradient that use as much memory as `tokens` in an update.

    Without gradient, activations of only one layer are in memory. The result is at most `MOST_TOKENS`, and at least
    `tokens`.

    Args:
        config: transformers config of the model.
        tokens: tokens per micro-batch of an update.
        size: bytes of an element in the forward pass.
        checkpointed: updates use gradient checkpointing.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> config = new_gpt(vocab_size=64, layers=8, hidden=64, heads=2).config
        >>> tokens_without_gradient(config, 1024, 2, False), tokens_without_gradient(config, 1024, 2, True)
        (8192, 1505)
        >>> tokens_without_gradient(config, 32768, 2, True)
        32768
    """
    layer, checkpoint = activation_bytes_per_token(config, 1, size, on_cpu=False)
    layers = layer_count(config)
    kept = layer + layers * checkpoint if checkpointed else layers * layer
    return max(tokens, min(MOST_TOKENS, tokens * kept // layer))


def critic_parameters(config: Any, trust_remote_code: bool = False) -> int:
    """Count the parameters of a critic: a decoder with a scalar head instead of the output matrix."""
    text = text_config(config)
    output = 0 if is_tied(config) else text.vocab_size * text.hidden_size
    return count_parameters(config, trust_remote_code) - output + int(text.hidden_size)


def head_count(config: Any) -> int:
    """Return the number of attention heads; 0 for a state space model."""
    return size(config, "num_attention_heads")


def layer_count(config: Any) -> int:
    """Return the number of layers of the language model."""
    return int(text_config(config).num_hidden_layers)


def is_tied(config: Any) -> bool:
    """Return True if embedding and output matrix are one weight. In a composite config the outer field decides."""
    return bool(getattr(config, "tie_word_embeddings", False))


def ends(config: Any) -> int:
    """Count the parameters of embedding and output matrix."""
    text = text_config(config)
    return int(text.vocab_size * text.hidden_size * (1 if is_tied(config) else 2))


def uncut(config: Any) -> int:
    """Count the parameters that tensor parallelism replicates: embedding, output matrix and norms."""
    return ends(config) + int((2 * layer_count(config) + 1) * text_config(config).hidden_size)


def widths(config: Any) -> tuple[int, int, int, int]:
    """Return the widths of the residual stream, of all query heads, of all key heads, and of the MLP.

    The MLP of a mixture of experts is as wide as the experts that a token runs through. A state space model has no
    heads. Of sizes that differ by layer it is the largest.
    """
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    width = size(config, "qk_head_dim", "head_dim") or (hidden // heads if heads else 0)  # the first: latent attention
    kv_heads = size(config, "num_key_value_heads") or heads
    return hidden, heads * width, kv_heads * width, _inner_width(config)


def _inner_width(config: Any) -> int:
    dense = size(config, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * size(
        config, "hidden_size"
    )
    if not size(config, *EXPERTS):
        return dense
    width = size(config, "moe_intermediate_size") or dense
    shared = size(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    shared = shared or width * size(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return (size(config, *EXPERTS_PER_TOKEN) or 1) * width + shared


def adapters_of_rank(config: Any, trained: int, tensor: int) -> int:
    """Return a tensor-parallel rank's part of `trained` adapter parameters: one matrix is sharded, the other is not."""
    hidden, query, keys, inner = widths(config)
    cut = 2 * query + 2 * keys + 3 * inner
    return trained * (7 * hidden + cut // tensor) // (7 * hidden + cut)


def expert_parameters(config: Any) -> int:
    """Count the parameters of all experts of a layer; 0 for a dense model."""
    width = size(config, "moe_intermediate_size", "intermediate_size")
    return 3 * size(config, *EXPERTS) * size(config, "hidden_size") * width
