"""A checkpoint of nanoGPT (github.com/karpathy/nanoGPT) as a Hugging Face GPT-2. Nothing in the file is executed."""

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
        ConfigError: the file is absent, is no checkpoint, or holds more than tensors and plain values (which is
            not executed).
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
    odd = [name for name, held in weights.items() if not isinstance(held, Tensor) or not held.is_floating_point()]
    if odd:
        raise ConfigError(f"{path}: {odd[0]} is no tensor of floating-point numbers")
    return sizes, {name: tensor.float() for name, tensor in weights.items()}


def to_gpt2(sizes: Mapping[str, int], weights: Mapping[str, Tensor], end_of_text: int | None) -> Any:
    """The same model as transformers' `GPT2LMHeadModel`: equal logits. Biases that the checkpoint lacks are 0.

    nanoGPT's GELU is the exact one (`gelu`; GPT-2's own is the approximation `gelu_new`). Dropout is off.

    Args:
        sizes: as `read_nanogpt` gives them.
        weights: likewise.
        end_of_text: the id of the token that ends a text; None where there is none.

    Raises:
        ConfigError: the weights have not the shapes of the sizes.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    embedding, head = weights.get("transformer.wte.weight"), weights.get("lm_head.weight")
    settings: dict[str, Any] = {name: size for name, size in sizes.items() if name != "block_size"}
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text)
    settings["tie_word_embeddings"] = head is None or embedding is None or torch.equal(head, embedding)
    config = GPT2Config(**settings, n_positions=sizes["block_size"], activation_function="gelu")
    model = GPT2LMHeadModel(config)
    expected = model.state_dict()
    biases = {name for name in expected if name.endswith(".bias") and name not in weights}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes = {name: _turned(name, tensor).shape for name, tensor in expected.items() if name not in biases | tied}
    found = fitting_weights(weights.items(), shapes, tied, "the weights of the checkpoint do not fit its model_args")
    for name, tensor in expected.items():
        if name not in tied:
            tensor.copy_(_turned(name, found[name]) if name in found else torch.zeros_like(tensor))
    return model.eval()


def _turned(name: str, tensor: Tensor) -> Tensor:
    """A weight of nanoGPT as GPT-2 has it, and the other way."""
    return tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
