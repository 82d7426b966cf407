"""Models of a training run by role: policy, reference, critic, teacher, reward model.

All back ends have the same roles with the same outputs. A back end decides where the weights are stored.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from atomrl.backends.optimizer import Optimizer
from atomrl.config import ConfigError, CriticConfig, ModelConfig
from atomrl.models.loading import load_policy, load_tokenizer, model_config_only, save_model
from atomrl.models.lora import has_adapters, save_adapters
from atomrl.models.older_readers import make_readable
from atomrl.models.reward_model import Reader
from atomrl.models.scalar import HFScalar, ScalarModel, load_scalar, save_scalar
from atomrl.models.shapes import text_config
from atomrl.models.transformers_model import HFModel
from atomrl.protocols import Algorithm, Output, needs_teacher

log = logging.getLogger(__name__)


RoleName = Literal["policy", "reference", "critic", "teacher", "reward_model"]

SOURCES: Mapping[str, tuple[RoleName, Output]] = {
    "logprobs": ("policy", "logprobs"),
    "entropy": ("policy", "entropy"),
    "distributions": ("policy", "distributions"),
    "old_logprobs": ("policy", "logprobs"),
    "old_entropy": ("policy", "entropy"),
    "old_squared_probs": ("policy", "squared_probs"),
    "ref_logprobs": ("reference", "logprobs"),
    "teacher_logprobs": ("teacher", "logprobs"),
    "teacher_distributions": ("teacher", "distributions"),
    "values": ("critic", "values"),
    "scores": ("reward_model", "scores"),
}
"""Role and output of the forward pass that each input of an algorithm comes from."""

TRAINED: Mapping[RoleName, str] = {"policy": "actor", "reward_model": "actor", "critic": "critic"}
"""Roles that are trained, and the prefix of their optimizer's metrics."""


def sources(names: Iterable[str], roles: Collection[RoleName]) -> dict[RoleName, dict[str, Output]]:
    """Group inputs by the role that computes them, in a fixed order: {role: {name: output}}.

    Raises:
        ValueError: a name needs a role that is not in `roles`.

    Example:
        >>> sources({"old_logprobs", "values"}, ["policy", "critic"])
        {'policy': {'old_logprobs': 'logprobs'}, 'critic': {'values': 'values'}}
    """
    outputs: dict[RoleName, dict[str, Output]] = {}
    for name, (role, output) in SOURCES.items():
        if name in names:
            if role not in roles:
                raise ValueError(f"{name} are needed, but the back end was built without a {role}: {', '.join(roles)}")
            outputs.setdefault(role, {})[name] = output
    return outputs


@dataclass(frozen=True)
class Role:
    """A model with its optimizer, if it is trained."""

    model: Any
    optimizer: Optimizer | None = None
    """None: frozen."""
    without_adapters: bool = False
    """True for the reference of a run with adapters: it is the policy's model with adapters disabled."""


def paths_of_roles(
    algorithm: Algorithm, model: ModelConfig, critic: CriticConfig, teacher: str | None
) -> dict[RoleName, str | None]:
    """Return the model of each role, policy or reward model first; None: the algorithm does not need the role, or the
    reference is the policy without its adapters."""
    needs = algorithm.needs | algorithm.outputs
    return {
        "reward_model" if "scores" in needs else "policy": model.path,
        "reference": model.path if "ref_logprobs" in needs and model.lora is None else None,
        "teacher": teacher if needs_teacher(algorithm) else None,
        "critic": (critic.path or model.path) if "values" in needs else None,
    }


def load_role(
    name: RoleName, path: str, config: ModelConfig, device: torch.device, dtype: str | torch.dtype | None = None
) -> torch.nn.Module:
    """Load the model of a role; with gradient checkpointing and compilation as configured if it is trained.

    Args:
        device: device of its weights.
        dtype: dtype of the forward pass; None: the config's.

    Raises:
        ConfigError: the model does not exist, or cannot be trained with this config.
    """
    trained = name in TRAINED
    common: dict[str, Any] = {"dtype": dtype or config.dtype, "device": device, "trainable": trained}
    common["trust_remote_code"] = config.trust_remote_code
    # Critics and reward models have a scalar head. A reward model is saved with the padding token that its readers need
    # to find the last token.
    if name in ("critic", "reward_model"):
        if name == "reward_model":
            common |= {"lora": config.lora, "quantization": config.quantization}
        model: Any = load_scalar(path, **common)
        if name == "reward_model":
            tokenizer = load_tokenizer(config.tokenizer or path, config.trust_remote_code, path)
            shape = model_config_only(path, config.trust_remote_code)
            text_config(model.config).pad_token_id = Reader(tokenizer, shape, path).pad_token_id(shape)
    else:
        quantization = config.quantization if trained else None
        common["freeze_vision"] = config.freeze_vision
        model = load_policy(path, lora=config.lora if trained else None, quantization=quantization, **common)
    model.pack_rows = config.pack_rows
    if config.pack_rows and isinstance(model, HFModel) and not model.streams:
        raise ConfigError(
            f"model.pack_rows=true: {path} ({model.config.model_type}) supports only padded rows; leave it out"
        )
    if trained and config.checkpoints_layers:
        enable_checkpointing(model)
    if trained and config.compile:
        if isinstance(model, HFModel | HFScalar):
            log.warning("model.compile has no effect on models that are trained with transformers")
        else:
            model.compile_layers()
    return cast(torch.nn.Module, model.train(trained))


def enable_checkpointing(model: Any) -> None:
    """Turn on gradient checkpointing: layers are recomputed in the backward pass."""
    if isinstance(model, HFModel | HFScalar):
        model.inner.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing = True


def save_role(name: RoleName, model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model (or its adapters) and the tokenizer in Hugging Face layout; the critic into a subfolder."""
    if has_adapters(model):
        save_adapters(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            make_readable(folder)
    elif isinstance(model, ScalarModel):
        save_scalar(model, tokenizer, folder / role_prefix(name))
    else:
        save_model(model, tokenizer, folder)


def role_prefix(name: RoleName, end: str = "") -> str:
    """Return the prefix of a role's files in a checkpoint: `critic` + end for the critic, else empty."""
    return f"critic{end}" if name == "critic" else ""
