"""Which layers the adapters of peft are on, as `model.lora.target_modules` names them."""

import re
from collections.abc import Sequence
from typing import Any

from atomrl.config import ConfigError
from atomrl.models.memory import empty_model
from atomrl.models.shapes import tower_weights


def adapted_targets(base: Any) -> list[str]:
    """Return the layers with adapters of a model that is in a `PeftModel`, without those of a vision tower: the ends of
    their names if all layers with these ends have some, else their names."""
    tower = _tower(base)
    adapted = {name for name in _adapted(base) if name not in tower}
    ends = {name.rpartition(".")[2] for name in adapted}
    there = {name for name, module in base.named_modules() if name.rpartition(".")[2] in ends and _has_weight(module)}
    return sorted(ends if there - tower == adapted else adapted)


def tower_adapters(base: Any) -> list[str]:
    """Return the layers of a vision tower that have adapters, of a model that is in a `PeftModel`."""
    tower = _tower(base)
    return [name for name in _adapted(base) if name in tower]


def default_targets(model_type: str) -> list[str] | str:
    """Return the layers that peft adapts if a `LoraConfig` names none.

    Raises:
        ConfigError: peft has none for this type of model.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    if model_type not in KNOWN:
        raise ConfigError(
            f"peft_config: peft has no default of target_modules for a {model_type} model; name them, or 'all-linear'"
        )
    targets = KNOWN[model_type]
    return targets if isinstance(targets, str) else list(targets)


def tower_targets(config: Any, targets: Sequence[str] | str) -> list[str]:
    """Return the layers of a vision tower that peft would adapt.

    Args:
        config: transformers config of a whole model.
        targets: a regular expression, ends of names, or `all-linear`.
    """
    inner = empty_model(config)
    tower = _tower(inner)
    linear = [name for name, module in inner.named_modules() if name in tower and _has_weight(module)]
    linear = [name for name in linear if inner.get_submodule(name).weight.dim() == 2]
    if targets == "all-linear":
        return linear
    if isinstance(targets, str):
        return [name for name in linear if re.fullmatch(targets, name)]
    return [name for name in linear if any(f".{name}".endswith(f".{target}") for target in targets)]


def _tower(model: Any) -> set[str]:
    """Return the modules of a vision tower that have weights, and the layers with adapters on them."""
    modules = {name.rpartition(".")[0] for name in tower_weights(model)}
    return modules | {re.split(r"\.(?:base_layer|lora_\w+)\b", name)[0] for name in modules}


def _adapted(base: Any) -> list[str]:
    return [name for name, module in base.named_modules() if hasattr(module, "lora_A")]


def _has_weight(module: Any) -> bool:
    return getattr(getattr(module, "base_layer", module), "weight", None) is not None
