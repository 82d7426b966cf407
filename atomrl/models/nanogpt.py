"""Import a nanoGPT checkpoint (github.com/karpathy/nanoGPT) as a Hugging Face GPT-2, without executing its code."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atomrl.config import ConfigError
from atomrl.models.decoder_spec import fitting_weights

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""Stored by nanoGPT as [out, in], by GPT-2 as [in, out]."""
GPT2_VOCABULARY, GPT2_PADDED = 50257, 50304
"""Vocabulary size of GPT-2, and the size that nanoGPT pads it to."""
GPT2_VOCABULARY, GPT2_PADDED = 50257, 50304
"""Vocabulary size of GPT-2, and the size that nanoGPT pads it to."""


def read_nanogpt(path: str | Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Read the sizes and weights of a nanoGPT checkpoint, as plain tensors.

    Returns:
        `model_args` (n_layer, n_head, n_embd, block_size, vocab_size), and the weights by nanoGPT's names without
        the prefix that `torch.compile` puts before them, in float32.

    Raises:
        ConfigError: the file does not exist, is not a nanoGPT checkpoint, or has more than tensors and plain values.
            Nothing is executed.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"checkpoint {path} does not exist" if not path.exists() else f"{path} is not a file")
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its message advises to load the file without protection
        raise ConfigError(
            f"{path} was refused: it is not a checkpoint, or contains more than tensors and plain values; nothing in "
            "it was "
            "executed"
        ) from None
    except Exception as error:  # of the archive, of torch, of half a file
        raise ConfigError(f"{path} is not readable as a checkpoint: {type(error).__name__}: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise ConfigError(f"{path} is not a nanoGPT checkpoint: it has no dictionary 'model'")
    args = tree.get("model_args")
    if not isinstance(args, dict) or any(type(args.get(name)) is not int or args[name] < 1 for name in SIZES):
        raise ConfigError(f"{path} is not a nanoGPT checkpoint: 'model_args' must have the sizes {', '.join(SIZES)}")
    sizes = {name: args[name] for name in SIZES}
    if sizes["n_embd"] % sizes["n_head"]:
        raise ConfigError(f"{path}: n_head={sizes['n_head']} does not divide n_embd={sizes['n_embd']}")
    weights = {str(name).removeprefix("_orig_mod."): tensor for name, tensor in tree["model"].items()}
    # Early versions stored attention masks.
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith((".attn.bias", ".masked_bias"))}
    odd = [name for name, value in weights.items() if not isinstance(value, Tensor) or not value.is_floating_point()]
    if odd:
        raise ConfigError(f"{path}: {odd[0]} is not a tensor of floating-point numbers")
    return sizes, {name: tensor.float() for name, tensor in weights.items()}


def to_gpt2(sizes: Mapping[str, int], weights: Mapping[str, Tensor], end_of_text: int | None) -> Any:
    """Convert a nanoGPT model to transformers' `GPT2LMHeadModel`, with equal logits.

    Biases that the checkpoint lacks are 0. nanoGPT uses the exact GELU (`gelu`), GPT-2 its approximation (`gelu_new`).
    Dropout is off.

    Args:
        sizes, weights: returned by `read_nanogpt`.
        end_of_text: id of the end-of-text token; None: there is none.

    Raises:
        ConfigError: the weights do not have the shapes that the sizes imply.
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
    shapes = {name: _transposed(name, tensor).shape for name, tensor in expected.items() if name not in biases | tied}
    fitting = fitting_weights(weights.items(), shapes, tied, "the weights of the checkpoint do not fit its model_args")
    for name, tensor in expected.items():
        if name not in tied:
            tensor.copy_(_transposed(name, fitting[name]) if name in fitting else torch.zeros_like(tensor))
    return model.eval()


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """Transpose a weight if nanoGPT and GPT-2 store it in different layouts."""
    return tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
