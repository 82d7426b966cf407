"""A checkpoint of nanoGPT (github.com/karpathy/nanoGPT) as a Hugging Face GPT-2. Nothing in the file is executed."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atomrl.config import ConfigError
from atomrl.models.spec import fitting_weights

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""Stored by nanoGPT as [out, in], by GPT-2 as [in, out]."""
GPT2_VOCABULARY, GPT2_PADDED = 50257, 50304
"""Tokens of GPT-2, and what nanoGPT rounds them up to."""


def read_nanogpt(path: str | Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The sizes and weights of a checkpoint, loaded as plain tensors.

    Returns:
        `model_args` (n_layer, n_head, n_embd, block_size, vocab_size), and the weights by nanoGPT's names without
        the prefix that `torch.compile` puts before them, in float32.

    Raises:
        ConfigError: the file is absent, is no checkpoint, holds more than tensors and plain values (which is not
            executed), or its weights have not the shapes of its sizes.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"checkpoint {path} does not exist" if not path.exists() else f"{path} is not a file")
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its message advises to load the file without protection
        raise ConfigError(
            f"{path} was refused: it is no checkpoint, or holds more than tensors and plain values; nothing in it was "
            "executed"
        ) from None
    except Exception as error:  # of the archive, of torch, of half a file
        raise ConfigError(f"{path} is not readable as a checkpoint: {type(error).__name__}: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise ConfigError(f"{path} is no checkpoint of nanoGPT: it has no dictionary 'model'")
    given = tree.get("model_args")
    if not isinstance(given, dict) or any(type(given.get(name)) is not int or given[name] < 1 for name in SIZES):
        raise ConfigError(f"{path} is no checkpoint of nanoGPT: 'model_args' must have the sizes {', '.join(SIZES)}")
    sizes = {name: given[name] for name in SIZES}
    if sizes["n_embd"] % sizes["n_head"]:
        raise ConfigError(f"{path}: n_head={sizes['n_head']} does not divide n_embd={sizes['n_embd']}")
    weights = {str(name).removeprefix("_orig_mod."): tensor for name, tensor in tree["model"].items()}
    # Masks, which early versions stored.
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith((".attn.bias", ".masked_bias"))}
    _check_shapes(weights, sizes, path)
    return sizes, {name: tensor.float() for name, tensor in weights.items()}


def _check_shapes(weights: Mapping[str, Any], sizes: Mapping[str, int], path: Path) -> None:
    odd = [name for name, held in weights.items() if not isinstance(held, Tensor) or not held.is_floating_point()]
    with torch.device("meta"):
        expected = _gpt2(sizes).state_dict()
    shapes = {  # bias=False has no biases; the head may be tied
        name: _turned(name, tensor).shape
        for name, tensor in expected.items()
        if name in weights or not (name.endswith(".bias") or name == "lm_head.weight")
    }
    try:
        if odd:
            raise ValueError(f"{odd[0]} is no tensor of floating-point numbers")
        fitting_weights(weights.items(), shapes)
    except ValueError as error:
        raise ConfigError(f"the weights in {path} do not fit its model_args: {error}") from None


def _turned(name: str, tensor: Tensor) -> Tensor:
    """A weight of nanoGPT as GPT-2 has it, and the other way."""
    return tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor


def _gpt2(sizes: Mapping[str, int], **settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes["vocab_size"],
        n_positions=sizes["block_size"],
        n_embd=sizes["n_embd"],
        n_layer=sizes["n_layer"],
        n_head=sizes["n_head"],
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        architectures=["GPT2LMHeadModel"],
        **settings,
    )
    return GPT2LMHeadModel(config)


def to_gpt2(sizes: Mapping[str, int], weights: Mapping[str, Tensor], end_of_text: int | None) -> Any:
    """The same model as transformers' `GPT2LMHeadModel`: equal logits. Biases that the checkpoint lacks are 0.

    nanoGPT's GELU is the exact one (`gelu`; GPT-2's own is the approximation `gelu_new`). Dropout is off.

    Args:
        sizes: as `read_nanogpt` gives them.
        weights: likewise.
        end_of_text: the id of the token that ends a text; None where there is none.
    """
    embedding = weights["transformer.wte.weight"]
    head = weights.get("lm_head.weight", embedding)
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    model = _gpt2(sizes, tie_word_embeddings=torch.equal(head, embedding), **ends)
    state = {name: tensor.zero_() for name, tensor in model.state_dict().items()}
    state |= {name: _turned(name, tensor) for name, tensor in weights.items()} | {"lm_head.weight": head}
    model.load_state_dict(state)
    return model.eval()
