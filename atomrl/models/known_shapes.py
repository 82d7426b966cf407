"""Shapes of well-known models, for planning a run without a network, weights or a GPU."""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from atomrl.models.loading import model_config_only

_SUFFIXES = ("-Instruct", "-it", "-pt", "-Base", "-SFT", "-DPO")


@cache
def _table() -> dict[str, dict[str, Any]]:
    """By the repository's name in lower case: `model_type` and fields of the transformers config."""
    read = yaml.safe_load((files("atomrl.models") / "known_shapes.yaml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for entry in read["models"]:
        kind, names = entry.pop("type"), entry.pop("names")
        sizes = dict(zip(read["columns"], entry.pop("shape"), strict=True))
        fields = {"model_type": kind, **read["families"].get(kind, {}), **sizes, **entry}
        found |= {name.lower(): fields for name in names}
    return found


def known_shape(path: str | Path) -> Any | None:
    """The transformers config of a well-known model by its hub name; None where it is not in the table.

    Instruction-tuned variants share the shape of their base model. Token ids and RoPE settings are not those of the
    hub: it is for counting parameters and memory, never for computing.

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
    """The config of a model to plan with: of a folder its own, of a well-known hub name the table's, else the hub's.

    Raises:
        ConfigError: the model is in no folder, not in the table, and the hub does not give it.
    """
    if not Path(path).is_dir() and (shape := known_shape(path)) is not None:
        return shape
    return model_config_only(path, trust_remote_code)
