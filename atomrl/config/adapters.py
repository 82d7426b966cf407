"""Settings of trained adapters in peft's layout, as a config has them."""

import json
import math
from pathlib import Path
from typing import Any

from atomrl.common.errors import ConfigError, reraise_as

SAME = True, False, "gaussian"
"""Values of `init_lora_weights` that leave the base weights as they are."""
HEADS = "classifier", "score"
"""Modules that peft adds to `modules_to_save` of a sequence classifier."""


def adapters_section(folder: str) -> dict[str, Any]:
    """Return the keys of `model.lora` that adapter_config.json in a folder sets; none if there is no such file.

    Other settings change names or shapes of the weights, so they are found when those are loaded.

    Raises:
        ConfigError: the file is not readable, or the adapters are of a kind that is not supported.
    """
    file = Path(folder) / "adapter_config.json"
    if not file.is_file():
        return {}
    with reraise_as(ConfigError, f"{file} is not readable as settings of adapters", OSError, ValueError, KeyError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("not a JSON object")
        rank, alpha, targets = stored["r"], stored["lora_alpha"], stored["target_modules"]
        if stored.get("use_rslora"):  # peft divides by sqrt(rank)
            alpha *= math.sqrt(rank)
    if stored.get("alpha_pattern") or stored.get("init_lora_weights", True) not in SAME:
        raise ConfigError(f"{file}: alpha_pattern and changed base weights (init_lora_weights) are not supported")
    whole = stored.get("modules_to_save") or []
    if stored.get("task_type") == "SEQ_CLS":
        whole = [name for name in whole if name not in HEADS]
    return {
        "rank": rank,
        "alpha": float(alpha),
        "dropout": stored.get("lora_dropout", 0.0),
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "modules_to_save": sorted(whole),
    }
