"""Convert weights between the layouts of Hugging Face and of Megatron's tensor- and expert-parallel ranks.

Megatron fuses query, key and value projections into one matrix, grouped by key-value head (its queries, its key, its
value), and the gate and up projections into another. A tensor-parallel rank has some of the key-value heads, of the
MLP's width and of the vocabulary. An expert-parallel rank has some experts of a layer, each in full.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from atomrl.models.adapted import ADAPTER
from atomrl.models.decoder_spec import DecoderSpec

Read = Callable[[str], Tensor]
Key = tuple[str, int | None]
"""Megatron's name of a weight (of a layer: the part after the layer), and the index of its layer in the full model."""
PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Weights of a layer that are replicated on tensor-parallel ranks, with their Hugging Face names."""
BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Weights of a layer that are sharded along their inputs (row-parallel)."""
SEVERAL = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Fused weights of a layer, sharded along their outputs (column-parallel), with the weights they consist of."""
WHOLE = {"decoder.final_layernorm.weight": "model.norm.weight", "score.weight": "score.weight"}
BY_TOKENS = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
LOW_RANK = re.compile(r"(.+)\.(\w+_proj)\.(lora_[AB])")
"""Name of an adapter matrix: Megatron's module, the projection within it, and `lora_A` or `lora_B`."""
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
"""Name of an expert's weight: index of the expert in its layer, and the name within an MLP."""


def padded_vocabulary(vocab: int, tensor: int) -> int:
    """Round the vocabulary size up to a multiple of the tensor-parallel size.

    Example:
        >>> padded_vocabulary(11, 2)
        12
    """
    return -(-vocab // tensor) * tensor


def cut_along(name: str) -> int | None:
    """Return the dimension along which a weight is sharded over tensor-parallel ranks; None: it is replicated.

    Of an adapter B A, one matrix is sharded like the weight beneath, and the other is replicated.

    Example:
        >>> [cut_along(f"mlp.linear_fc2.down_proj.lora_{which}") for which in "AB"]
        [1, None]
    """
    if adapter := LOW_RANK.fullmatch(name):
        by_columns = f"{adapter[1]}.weight" in BY_COLUMNS
        return int(by_columns) if by_columns == (adapter[3] == "lora_A") else None
    return None if name in WHOLE or name in PLAIN else int(name in BY_COLUMNS)


def published_names(name: str, layer: int | None, tied: bool) -> list[str]:
    """Return the Hugging Face names of the weights that a Megatron weight consists of.

    Args:
        name, layer: a `Key`; layer None for weights outside of layers.
        tied: the output matrix is the embedding.

    Example:
        >>> published_names("mlp.experts.7.linear_fc2.weight", 0, tied=True)
        ['model.layers.0.mlp.experts.7.down_proj.weight']
    """
    if layer is None:
        return [WHOLE[name] if name in WHOLE else BY_TOKENS["embedding.word_embeddings.weight" if tied else name]]
    if adapter := LOW_RANK.fullmatch(name):
        beneath = published_names(f"{adapter[1]}.weight", layer, tied)
        own = next(part for part in beneath if part.endswith(f".{adapter[2]}.weight"))
        return [own.replace(".weight", f".{adapter[3]}.{ADAPTER}.weight")]
    expert = EXPERT.fullmatch(name)
    if expert:
        name = f"mlp.{expert[2]}"
    module, _, kind = name.rpartition(".")
    single = PLAIN.get(name) or BY_COLUMNS.get(name)
    names = [single] if single else [f"{part}.{kind}" for part in SEVERAL[module]]
    if expert:
        names = [part.replace("mlp.", f"mlp.experts.{expert[1]}.") for part in names]
    return [f"model.layers.{layer}.{part}" for part in names]


def cut(name: str, layer: int | None, read: Read, spec: DecoderSpec, rank: int, tensor: int) -> Tensor:
    """Return a tensor-parallel rank's part of a Megatron weight.

    Args:
        name, layer: a `Key`.
        read: returns a full weight by its Hugging Face name.
        rank, tensor: tensor-parallel rank and size.
    """
    weights = [read(published) for published in published_names(name, layer, spec.tied_head)]
    if name in BY_TOKENS:
        missing = padded_vocabulary(spec.vocab, tensor) - spec.vocab
        padding = weights[0].new_zeros(missing, weights[0].shape[1])
        return torch.cat([weights[0], padding]).chunk(tensor)[rank]
    if (along := cut_along(name)) is None:
        return weights[0]
    if EXPERT.fullmatch(name):
        return torch.cat(weights)
    if along == 1:
        return weights[0].chunk(tensor, dim=1)[rank]
    # Fused projections: of queries, keys and values grouped by key-value head, of gate and up this rank's rows.
    heads = spec.kv_heads if len(weights) == 3 else tensor
    by_head = [weight.unflatten(0, (heads, -1)).chunk(tensor)[rank] for weight in weights]
    return torch.cat(by_head, dim=1).flatten(0, 1)


def layer_names(experts: Iterable[int]) -> list[str]:
    """Return Megatron's names of all weights that a layer may have, with adapters and the given experts.

    Example:
        >>> [name for name in layer_names([7]) if "experts" in name]
        ['mlp.experts.7.linear_fc1.weight', 'mlp.experts.7.linear_fc2.weight']
    """
    names = [*PLAIN, *BY_COLUMNS, *(f"{module}.{kind}" for module in SEVERAL for kind in ("weight", "bias"))]
    names += [f"mlp.experts.{number}.{module}.weight" for number in experts for module in ("linear_fc1", "linear_fc2")]
    single = {name.removesuffix(".weight"): (part.removesuffix(".weight"),) for name, part in BY_COLUMNS.items()}
    for module, parts in (SEVERAL | single).items():
        names += [f"{module}.{part.rpartition('.')[2]}.lora_{which}" for part in parts for which in "AB"]
    return names


def cut_all(
    keys: Iterable[Key], weights: Mapping[str, Tensor], spec: DecoderSpec, rank: int, tensor: int
) -> dict[Key, Tensor]:
    """Copy a tensor-parallel rank's parts of a full model's weights, of those `keys` that the model has.

    Args:
        weights: full weights by Hugging Face name.
        rank, tensor: tensor-parallel rank and size.
    """
    return {
        key: cut(*key, weights.__getitem__, spec, rank, tensor).clone()
        for key in keys
        if all(name in weights for name in published_names(*key, spec.tied_head))
    }


def join_parts(name: str, layer: int | None, parts: Sequence[Tensor], spec: DecoderSpec) -> Mapping[str, Tensor]:
    """Join the parts of all tensor-parallel ranks into Hugging Face weights, by name; the inverse of `cut`."""
    names = published_names(name, layer, spec.tied_head)
    if name in BY_TOKENS:
        return {names[0]: torch.cat(list(parts))[: spec.vocab]}
    if (along := cut_along(name)) is None:
        return {names[0]: parts[0]}
    if EXPERT.fullmatch(name):
        return dict(zip(names, parts[0].chunk(len(names)), strict=True))
    if along == 1:
        return {names[0]: torch.cat(list(parts), dim=1)}
    if len(names) == 3:
        heads, widths = spec.kv_heads // len(parts), [width // spec.kv_heads for width in spec.qkv_widths]
    else:
        heads, widths = 1, [len(parts[0]) // len(names)] * len(names)
    pieces = zip(*(part.unflatten(0, (heads, -1)).split(widths, dim=1) for part in parts), strict=True)
    return {name: torch.cat(piece).flatten(0, 1) for name, piece in zip(names, pieces, strict=True)}
