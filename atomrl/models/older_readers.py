"""Make saved configs and tokenizers readable by transformers 4.5x too, which many serving engines use.

transformers 5 writes `rope_parameters`, which 4.5x ignores: it then computes with the default frequency, without an
error. It names a tokenizer class that 4.5x does not have. Here the fields of 4.5x are written beside those of 5, which
reads both.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
"""Fields that a family of 4.5x calls otherwise, by model type."""
BY_LAYER_TYPE = ("gemma3_text", "gemma3n_text")
"""Families of 4.5x with other frequencies in layers with a window."""


def make_readable(folder: str | Path) -> None:
    """Add the fields of transformers 4.5x to config.json and tokenizer_config.json of a folder, if it has them."""
    for name, fields_of in (("config.json", config_fields), ("tokenizer_config.json", tokenizer_fields)):
        file = Path(folder) / name
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            if (after := fields_of(before)) != before:
                file.write_text(json.dumps(after, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with `rope_theta`, `rope_scaling` and `torch_dtype` beside what transformers 5 writes.

    Example:
        >>> config_fields({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})["rope_theta"]
        1000000.0
    """
    fields = {name: config_fields(value) if isinstance(value, dict) else value for name, value in config.items()}
    if "dtype" in config:
        fields["torch_dtype"] = config["dtype"]
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return fields
    fields["rope_parameters"] = rope
    added = {}
    if any(isinstance(value, dict) for value in rope.values()):  # of each type of layer
        if config.get("model_type") not in BY_LAYER_TYPE:
            return fields
        rope, local = rope["full_attention"], rope["sliding_attention"]
        added["rope_local_base_freq"] = local.get("rope_theta")
    added |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in added}
    if scaling.get("rope_type") == "longrope":  # Phi-3 accepts only these
        scaling = {name: scaling[name] for name in ("short_factor", "long_factor")} | {"type": "longrope"}
    if scaling not in ({}, {"rope_type": "default"}):
        added["rope_scaling"] = scaling
    names = NAMES.get(str(config.get("model_type")), {})
    return fields | {names.get(name, name): value for name, value in added.items() if value is not None}


def tokenizer_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer settings with a class, and with special tokens in a form, that both versions read.

    Example:
        >>> tokenizer_fields({"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]})
        {'tokenizer_class': 'PreTrainedTokenizerFast', 'additional_special_tokens': ['<a>']}
    """
    fields = dict(settings)
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    return fields
