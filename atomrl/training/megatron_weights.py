"""Weights between the layout of Hugging Face and the one that Megatron cuts over its tensor-parallel ranks.

Megatron has queries, keys and values in one matrix, key head by key head (its queries, its key, its value), and a gated
MLP's two inputs in another. A rank has some of the key heads, of the MLP's width and of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from atomrl.models.spec import DecoderSpec

Read = Callable[[str], Tensor]
PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
"""Of a layer, what every rank has whole."""
BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Of a layer, what is cut along its inputs."""
SEVERAL = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Of a layer, what is made of several."""
WHOLE = {"decoder.final_layernorm.weight": "model.norm.weight", "score.weight": "score.weight"}
BY_TOKENS = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}


def padded_vocabulary(vocab: int, tensor: int) -> int:
    """Rows of embedding and output matrix, equally many on each rank.

    Example:
        >>> padded_vocabulary(11, 2)
        12
    """
    return -(-vocab // tensor) * tensor


def cut(name: str, layer: int | None, read: Read, spec: DecoderSpec, rank: int, tensor: int) -> Tensor:
    """A weight of a tensor-parallel rank.

    Args:
        name: Megatron's; of a layer, without what stands before the layer's own part.
        layer: of the whole model; None: the weight is of none.
        read: gives a weight by its published name.
        rank, tensor: which of how many.
    """
    if layer is None:
        if name in WHOLE:
            return read(WHOLE[name])
        published = BY_TOKENS["embedding.word_embeddings.weight" if spec.tied_head else name]
        weight = read(published)
        missing = padded_vocabulary(spec.vocab, tensor) - spec.vocab
        return torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]).chunk(tensor)[rank]
    start = f"model.layers.{layer}."
    if name in PLAIN:
        return read(start + PLAIN[name])
    if name in BY_COLUMNS:
        return read(start + BY_COLUMNS[name]).chunk(tensor, dim=1)[rank]
    module, _, kind = name.rpartition(".")
    parts = [read(f"{start}{part}.{kind}") for part in SEVERAL[module]]
    heads = spec.kv_heads if len(parts) == 3 else tensor
    by_head = [part.unflatten(0, (heads, -1)).chunk(tensor)[rank] for part in parts]
    return torch.cat(by_head, dim=1).flatten(0, 1)


def joined(name: str, layer: int | None, parts: Sequence[Tensor], spec: DecoderSpec) -> Mapping[str, Tensor]:
    """The published weights that a weight of all tensor-parallel ranks is made of; the inverse of `cut`."""
    if layer is None:
        if name in WHOLE:
            return {WHOLE[name]: parts[0]}
        return {BY_TOKENS[name]: torch.cat(list(parts))[: spec.vocab]}
    start = f"model.layers.{layer}."
    if name in PLAIN:
        return {start + PLAIN[name]: parts[0]}
    if name in BY_COLUMNS:
        return {start + BY_COLUMNS[name]: torch.cat(list(parts), dim=1)}
    module, _, kind = name.rpartition(".")
    names = [f"{start}{part}.{kind}" for part in SEVERAL[module]]
    if len(names) == 3:
        heads, widths = spec.kv_heads // len(parts), [width // spec.kv_heads for width in spec.qkv_widths]
    else:
        heads, widths = 1, [spec.intermediate // len(parts)] * 2
    pieces = zip(*(part.unflatten(0, (heads, -1)).split(widths, dim=1) for part in parts), strict=True)
    return {name: torch.cat(piece).flatten(0, 1) for name, piece in zip(names, pieces, strict=True)}
