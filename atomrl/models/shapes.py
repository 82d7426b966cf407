"""Configs of transformers models: which part has the sizes of the language model, and which class loads the weights."""

import json
from pathlib import Path
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError

SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
HEADS = ("num_attention_heads", "num_key_value_heads")
"""Sizes that every language model has, and those of attention, which state space models do not have."""
PARTS = ("text_config", "llm_config", "thinker_config", "language_config")
"""Names of the text part of a composite config."""


def text_config(config: Any) -> Any:
    """Return the config that has the sizes of the language model: the text part of a composite one, else `config`.

    Checkpoints with a vision tower have a composite config (Qwen3.5, Gemma 3, Llama 4).

    Example:
        >>> from transformers import Gemma3Config
        >>> text_config(Gemma3Config(text_config={"hidden_size": 64})).hidden_size
        64
    """
    return config.get_text_config()


def size(config: Any, *names: str) -> int:
    """Return the first of these sizes that the language model's config has; 0 if it has none.

    Of a size that differs by layer it is the largest.

    Example:
        >>> from transformers import GPT2Config
        >>> size(GPT2Config(), "intermediate_size", "n_embd")
        768
    """
    text = text_config(config)
    for part in (text, getattr(text, "ffn_config", None)):  # DBRX has a config for its experts
        for name in names:
            if largest := max((each for each in _values(part, name) if isinstance(each, int)), default=0):
                return largest
    return 0


def _values(part: Any, name: str) -> list[Any]:
    try:
        value = getattr(part, name, None)
    except RuntimeError:  # transformers refuses the common value if there are others by layer (Gemma 4)
        return [getattr(layer, name, None) for layer in part.per_layer_config]
    return [*value] if isinstance(value, list | tuple) else [value]


def is_whole(config: Any) -> bool:
    """Return True if a checkpoint is one with a vision tower, which `AutoModelForImageTextToText` loads.

    A family may have both classes for one config: `architectures` then decides, and without it, the tower is part of
    the model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    named = [str(kind) for kind in config.architectures or ()]
    text_only = any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in named)
    whole = {kind.__name__ for kind in _classes(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])}
    return bool(whole & {*named}) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not text_only


def _classes(entry: Any) -> tuple[Any, ...]:
    return tuple(entry) if isinstance(entry, list | tuple) else (entry,)


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a language model: with its vision tower if the checkpoint has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_whole(config) else AutoModelForCausalLM


def check_fields(folder: Path) -> None:
    """Check the sizes that a config.json names, before transformers computes with them (0 heads: a division by zero).

    Raises:
        ConfigError: one is not a positive integer, or the file is no JSON object.
    """
    file = folder / "config.json"
    with reraise_as(ConfigError, f"{file} is not readable as JSON", OSError, ValueError):
        fields = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} is not a JSON object")
    for key, part in [("", fields), *((f"{key}.", fields.get(key)) for key in PARTS)]:
        if not isinstance(part, dict):
            continue
        for name in (*SIZES, *HEADS):
            value = part.get(name)
            if value is None or isinstance(value, list):  # a default, or one for each layer
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{file}: {key}{name} is {value!r}, and must be a positive integer")


def check_sizes(config: Any, path: object) -> None:
    """Check that a model has a text config with the sizes that everything is computed from.

    Raises:
        ConfigError: one is missing, or the heads do not divide.
    """
    text = text_config(config)
    for name in SIZES:
        if None in _values(text, name):
            kinds = ", ".join(config.architectures or ()) or "no architectures"
            raise ConfigError(
                f"{path} is a {config.model_type} model ({kinds}), "
                f"whose config has no {name}, and is not a causal language model: use one whose config.json names a "
                "...ForCausalLM in `architectures`"
            )
    heads, keys = size(config, "num_attention_heads"), size(config, "num_key_value_heads")
    if keys and heads % keys:
        raise ConfigError(
            f"config of model {path}: num_key_value_heads={keys} does not divide num_attention_heads={heads}"
        )


def language_model(inner: Any) -> tuple[str, Any]:
    """Return name and module of the language model inside a transformers model with a vision tower.

    Raises:
        ConfigError: transformers does not name it.
    """
    decoder = inner.get_decoder()
    name = next((name for name, module in inner.named_modules() if module is decoder), "")
    if not name or decoder is inner.base_model:
        raise ConfigError(
            f"{type(inner).__name__}: its language model cannot be told from its vision tower, which must not be "
            "trained on text; use a model that is text only"
        )
    return name, decoder


def tower_weights(inner: Any) -> list[str]:
    """Return the names of the weights that text does not use (vision tower, projector); none in a model of text only.

    Args:
        inner: a transformers model; may be on the meta device.

    Raises:
        ConfigError: as `language_model`.
    """
    if text_config(inner.config) is inner.config or not is_whole(inner.config):
        return []
    ends = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    used = {id(weight) for part in (language_model(inner)[1], *ends) for weight in part.parameters()}
    return [name for name, weight in inner.named_parameters() if id(weight) not in used]
