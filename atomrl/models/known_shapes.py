"""Shapes of well-known models, for planning a run without a network, weights or a GPU."""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from atomrl.models.loading import model_config_only

_SUFFIXES = ("-Instruct", "-it", "-pt", "-Base", "-SFT", "-DPO")


@cache
def _entries() -> list[tuple[list[str], dict[str, Any]]]:
    """Return the hub names of each shape, and its config fields with `model_type`."""
    file = yaml.safe_load((files("atomrl.models") / "known_shapes.yaml").read_text(encoding="utf-8"))
    entries = []
    for entry in file["models"]:
        kind, names = entry.pop("type"), entry.pop("names")
        sizes = dict(zip(file["columns"], entry.pop("shape"), strict=True))
        vision, text = entry.pop("vision", None), {**file["families"].get(kind, {}), **sizes, **entry}
        tied = text.get("tie_word_embeddings")
        whole = {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
        entries.append((names, {"model_type": kind, **(whole if vision else text)}))
    return entries


@cache
def _table() -> dict[str, dict[str, Any]]:
    """Return config fields by hub name in lower case."""
    return {name.lower(): fields for names, fields in _entries() for name in names}


@cache
def known_shapes() -> dict[str, Any]:
    """Return the transformers configs of well-known models: one hub name of each shape -> its config.

    Example:
        >>> known_shapes()["Qwen/Qwen2.5-7B"].hidden_size
        3584
    """
    return {first: known_shape(first) for (first, *_), _ in _entries()}


def known_shape(path: str | Path) -> Any | None:
    """Return the transformers config of a well-known hub model; None if it is not in the table.

    Instruction-tuned variants have the shape of their base model. Token ids and RoPE settings differ from the hub's:
    the config is for counting parameters and memory only.

    Example:
        >>> known_shape("Qwen/Qwen2.5-7B-Instruct").hidden_size
        3584
    """
    from transformers import AutoConfig

    name = str(path).lower()
    names = [name, *(name.removesuffix(suffix.lower()) for suffix in _SUFFIXES)]
    fields = next((_table()[candidate] for candidate in names if candidate in _table()), None)
    if fields is None:
        # Mistral's instruction-tuned versions carry the word in the middle of the name
        fields = _table().get(name.replace("-instruct-", "-"))
    if fields is None:
        return None
    return AutoConfig.for_model(**fields)


def planning_shape(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Return a model's config for planning: of a folder its own, of a hub name the table's if it is there.

    Raises:
        ConfigError: the model is not a folder, not in the table, and cannot be downloaded.
    """
    if not Path(path).is_dir() and (shape := known_shape(path)) is not None:
        return shape
    return model_config_only(path, trust_remote_code)
