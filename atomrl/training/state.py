"""What a back end writes and reads again to go on exactly: weights, optimizers and random state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atomrl.config import ConfigError
from atomrl.models.loading import policy_weights, read_safetensors, save_model
from atomrl.models.lora import has_adapters, load_adapters, save_adapters
from atomrl.models.scalar import ScalarModel, save_scalar
from atomrl.training.optimizer import Optimizer

STATE_FOLDER = "training_state"
"""Beside the model, so that a server that loads every *.safetensors of the folder does not meet it."""
CRITIC_FOLDER = "critic"
OPTIMIZER_FILES = ("optimizer.safetensors", "critic_optimizer.safetensors")


@dataclass(frozen=True)
class State:
    """What is trained: the policy (or a reward model), the critic where there is one, and an optimizer for each."""

    policy: Any
    critic: ScalarModel | None
    optimizers: Sequence[Optimizer]
    device: torch.device

    def save(self, folder: Path, tokenizer: Any, updates: int) -> None:
        """Write a folder that transformers loads, the critic in a folder in it, and the rest beside them."""
        state_folder = folder / STATE_FOLDER
        state_folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.policy, ScalarModel):
            save_scalar(self.policy, tokenizer, folder)
        elif has_adapters(self.policy):
            save_adapters(self.policy, folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        else:
            save_model(self.policy, tokenizer, folder)
        if self.critic is not None:
            save_scalar(self.critic, tokenizer, folder / CRITIC_FOLDER)
        random = {"rng/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        for name, optimizer, extra in zip(OPTIMIZER_FILES, self.optimizers, (random, {}), strict=False):
            optimizer.save(state_folder / name, extra)
        skipped = [optimizer.skipped_in_a_row for optimizer in self.optimizers]
        text = json.dumps({"updates": updates, "skipped_in_a_row": skipped}) + "\n"
        (state_folder / "trainer.json").write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> int:
        """Continue exactly from `save`. Returns the number of updates.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        state_folder = folder / STATE_FOLDER
        if not (state_folder / "trainer.json").is_file():
            raise ConfigError(f"{folder} holds no {STATE_FOLDER}/trainer.json: it is no checkpoint of this back end")
        if isinstance(self.policy, ScalarModel):
            _copy_weights(self.policy.state(), set(), folder)
        elif has_adapters(self.policy):
            load_adapters(self.policy, folder)
        else:
            tied = {"lm_head.weight"} if self.policy.config.tie_word_embeddings else set()
            _copy_weights(dict(policy_weights(self.policy)), tied, folder)
        if self.critic is not None:
            _copy_weights(self.critic.state(), set(), folder / CRITIC_FOLDER)
        random: dict[str, Tensor] = {}
        for name, optimizer in zip(OPTIMIZER_FILES, self.optimizers, strict=False):
            random |= optimizer.load(state_folder / name, self.device)
        torch.set_rng_state(random["rng/cpu"])
        if "rng/cuda" in random:
            torch.cuda.set_rng_state(random["rng/cuda"], self.device)
        state = json.loads((state_folder / "trainer.json").read_text(encoding="utf-8"))
        for optimizer, skipped in zip(self.optimizers, state["skipped_in_a_row"], strict=True):
            optimizer.skipped_in_a_row = skipped
        return state["updates"]


@torch.no_grad()
def _copy_weights(own: dict[str, Tensor], tied: set[str], folder: Path) -> None:
    found = dict(read_safetensors(folder))
    wrong = [name for name in found if name not in own or own[name].shape != found[name].shape]
    missing = own.keys() - found.keys() - tied
    if wrong or missing:
        raise ConfigError(f"checkpoint {folder} is of another model: {sorted([*wrong, *missing])[:5]} do not fit")
    for name, tensor in found.items():
        own[name].copy_(tensor)
