"""A checkpoint of nanoGPT (github.com/karpathy/nanoGPT) as a Hugging Face GPT-2. Nothing in the file is executed."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atomrl.config import ConfigError

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
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


def expected_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Every weight of a nanoGPT model with biases, by name."""
    width, vocabulary = sizes["n_embd"], sizes["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocabulary, width),
        "transformer.wpe.weight": (sizes["block_size"], width),
        "lm_head.weight": (vocabulary, width),
    }
    outputs = {"attn.c_attn": 3 * width, "attn.c_proj": width, "mlp.c_fc": 4 * width, "mlp.c_proj": width}
    for layer in range(sizes["n_layer"]):
        for name in ("ln_1", "ln_2"):
            shapes |= _norm(f"transformer.h.{layer}.{name}", width)
        for name, out in outputs.items():
            start = f"transformer.h.{layer}.{name}"
            shapes |= {f"{start}.weight": (out, 4 * width if name == "mlp.c_proj" else width), f"{start}.bias": (out,)}
    return shapes | _norm("transformer.ln_f", width)


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _check_shapes(weights: Mapping[str, Any], sizes: Mapping[str, int], path: Path) -> None:
    shapes = expected_shapes(sizes)
    problems = [f"{name} is unexpected" for name in weights if name not in shapes]
    for name, shape in shapes.items():
        found = weights.get(name)
        if found is None:
            if not name.endswith(".bias") and name != "lm_head.weight":  # bias=False has none; the head may be tied
                problems.append(f"{name} is missing")
        elif not isinstance(found, Tensor) or not found.is_floating_point():
            problems.append(f"{name} is no tensor of floating-point numbers")
        elif tuple(found.shape) != shape:
            problems.append(f"{name} has shape {tuple(found.shape)}, not {shape}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConfigError(f"the weights in {path} do not fit its model_args: {'; '.join(problems[:8])}{more}")


def to_gpt2(sizes: Mapping[str, int], weights: Mapping[str, Tensor], end_of_text: int | None) -> Any:
    """The same model as transformers' `GPT2LMHeadModel`: equal logits. Biases that the checkpoint lacks are 0.

    nanoGPT's GELU is the exact one (`gelu`; GPT-2's own is the approximation `gelu_new`). Dropout is off.

    Args:
        sizes: as `read_nanogpt` gives them.
        weights: likewise.
        end_of_text: the id of the token that ends a text; None where there is none.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    head, embedding = weights.get("lm_head.weight"), weights["transformer.wte.weight"]
    tied = head is None or torch.equal(head, embedding)
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
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        tie_word_embeddings=tied,
        architectures=["GPT2LMHeadModel"],
    )
    state = {}
    for name, shape in expected_shapes(sizes).items():
        tensor = weights.get(name)
        if tensor is None:
            tensor = embedding if name == "lm_head.weight" else torch.zeros(shape)
        linear = name.removesuffix(".weight").endswith(LINEAR)
        state[name] = tensor.t().contiguous() if linear and name.endswith(".weight") else tensor
    model = GPT2LMHeadModel(config)
    model.load_state_dict(state)
    return model.eval()
