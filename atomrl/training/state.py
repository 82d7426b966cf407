"""What a back end writes and reads again to go on exactly: weights, optimizers and random state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atomrl.config import ConfigError
from atomrl.models.loading import model_weights, read_safetensors, save_model
from atomrl.models.lora import has_adapters, load_adapters, save_adapters
from atomrl.models.scalar import ScalarModel, save_scalar
from atomrl.models.spec import fitting_weights
from atomrl.training.optimizer import Optimizer
from atomrl.training.roles import Role, RoleName

STATE_FOLDER = "training_state"
"""Beside the model, so that a server that loads every *.safetensors of the folder does not meet it."""


def save_state(
    roles: Mapping[RoleName, Role], folder: Path, tokenizer: Any, updates: int, device: torch.device
) -> None:
    """Write a folder that transformers loads, the critic in a folder in it, and the rest beside them."""
    state_folder, skipped = folder / STATE_FOLDER, []
    state_folder.mkdir(parents=True, exist_ok=True)
    extra = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        extra["rng/cuda"] = torch.cuda.get_rng_state(device)
    for file, where, model, optimizer in _trained(roles):
        if isinstance(model, ScalarModel):
            save_scalar(model, tokenizer, folder / where)
        elif has_adapters(model):
            save_adapters(model, folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        else:
            save_model(model, tokenizer, folder)
        optimizer.save(state_folder / file, extra)
        skipped.append(optimizer.skipped_in_a_row)
        extra = {}
    text = json.dumps({"updates": updates, "skipped_in_a_row": skipped}) + "\n"
    (state_folder / "trainer.json").write_text(text, encoding="utf-8")


def load_state(roles: Mapping[RoleName, Role], folder: Path, device: torch.device) -> int:
    """Continue exactly from `save_state`. Returns the number of updates.

    Raises:
        ConfigError: the folder holds no such state, or it is another model's.
    """
    state_folder = folder / STATE_FOLDER
    if not (state_folder / "trainer.json").is_file():
        raise ConfigError(f"{folder} holds no {STATE_FOLDER}/trainer.json: it is no checkpoint of this back end")
    state = json.loads((state_folder / "trainer.json").read_text(encoding="utf-8"))
    trained, counts = list(_trained(roles)), state["skipped_in_a_row"]
    if len(trained) != len(counts):
        raise ConfigError(f"checkpoint {folder} was written with{'' if len(counts) > 1 else 'out'} a critic")
    random: dict[str, Tensor] = {}
    for (file, where, model, optimizer), skipped in zip(trained, counts, strict=True):
        if has_adapters(model):
            load_adapters(model, folder)
        else:
            _copy_weights(dict(model_weights(model)), folder / where)
        random |= optimizer.load(state_folder / file, device)
        optimizer.skipped_in_a_row = skipped
    torch.set_rng_state(random["rng/cpu"])
    if "rng/cuda" in random:
        torch.cuda.set_rng_state(random["rng/cuda"], device)
    return int(state["updates"])


def _trained(roles: Mapping[RoleName, Role]) -> Iterator[tuple[str, str, Any, Optimizer]]:
    """The optimizer's file, the model's folder, model and optimizer of each role that is trained."""
    for name, role in roles.items():
        if role.optimizer:
            critic = name == "critic"
            file = "critic_optimizer.safetensors" if critic else "optimizer.safetensors"
            yield file, "critic" if critic else "", role.model, role.optimizer


@torch.no_grad()
def _copy_weights(own: dict[str, Tensor], folder: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    try:
        for name, tensor in fitting_weights(read_safetensors(folder), shapes).items():
            own[name].copy_(tensor)
    except ValueError as error:
        raise ConfigError(f"checkpoint {folder} is of another model: {error}") from None
