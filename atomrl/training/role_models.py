"""How the model of a role comes from a folder, and goes into one."""

import logging
from pathlib import Path
from typing import Any, cast

import torch

from atomrl.config import ConfigError, ModelConfig
from atomrl.models.loading import load_policy, load_tokenizer, model_config_only, save_model
from atomrl.models.lora import has_adapters, save_adapters
from atomrl.models.reward_model import Reader
from atomrl.models.scalar import HFScalar, ScalarModel, load_scalar, save_scalar
from atomrl.models.transformers_model import HFModel
from atomrl.training.roles import TRAINED, RoleName

log = logging.getLogger(__name__)
STATE_FOLDER, SHARDS = "training_state", "shards"
"""Beside the model in a checkpoint, so that a server that loads every *.safetensors of the folder does not meet it."""


def check_shards(folder: Path) -> None:
    """Raise ConfigError where a checkpoint is not one of several ranks."""
    if not (folder / STATE_FOLDER / SHARDS).is_dir():
        raise ConfigError(
            f"{folder} holds no {STATE_FOLDER}/{SHARDS}: it is no checkpoint of several ranks; go on without the "
            "section backend, or start a new run from its model"
        )


def load_role(
    name: RoleName, path: str, config: ModelConfig, device: torch.device, dtype: str | torch.dtype | None = None
) -> torch.nn.Module:
    """A role's model; checkpointed and compiled as the config asks where it is trained.

    Args:
        device: where its weights are put.
        dtype: what it computes in; None: the config's.

    Raises:
        ConfigError: it is not there, or cannot be trained here.
    """
    trained = name in TRAINED
    common: dict[str, Any] = {"dtype": dtype or config.dtype, "device": device, "trainable": trained}
    common["trust_remote_code"] = config.trust_remote_code
    if name == "reward_model" and config.lora is not None:
        raise ConfigError("model.lora: reward models are trained whole; leave it out")
    if name in ("critic", "reward_model"):
        model: Any = load_scalar(path, **common)
        if name == "reward_model":
            tokenizer = load_tokenizer(config.tokenizer or path, config.trust_remote_code, path)
            shape = model_config_only(path, config.trust_remote_code)
            model.config.get_text_config().pad_token_id = Reader(tokenizer, shape, path).pad_token_id(shape)
    else:
        quantization = config.quantization if trained else None
        model = load_policy(path, lora=config.lora if trained else None, quantization=quantization, **common)
    model.pack_rows = config.pack_rows
    if config.pack_rows and isinstance(model, HFModel) and not model.streams:
        raise ConfigError(
            f"model.pack_rows=true: {path} ({model.config.model_type}) takes padded rows alone; leave it out"
        )
    if trained and config.checkpoints_layers:
        enable_checkpointing(model)
    if trained and config.compile:
        if isinstance(model, HFModel | HFScalar):
            log.warning("model.compile has no effect on models that are trained through transformers")
        else:
            model.compile_layers()
    return cast(torch.nn.Module, model.train(trained))


def enable_checkpointing(model: Any) -> None:
    """Have a model compute its layers again in the backward pass, in place of keeping what they computed."""
    if isinstance(model, HFModel | HFScalar):
        model.inner.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing = True


def save_role(name: RoleName, model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model (or its adapters) and the tokenizer for transformers; the critic into a folder in it."""
    if isinstance(model, ScalarModel):
        save_scalar(model, tokenizer, folder / role_prefix(name))
    elif has_adapters(model):
        save_adapters(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    else:
        save_model(model, tokenizer, folder)


def role_prefix(name: RoleName, end: str = "") -> str:
    """Of what is the critic's in a checkpoint."""
    return f"critic{end}" if name == "critic" else ""
