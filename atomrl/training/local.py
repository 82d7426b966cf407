"""The reference back end: one process, one device."""

from __future__ import annotations

from pathlib import Path

import torch

from atomrl.config import ModelConfig
from atomrl.models.loading import model_weights
from atomrl.models.lora import adapter_weights
from atomrl.protocols import WeightUpdate
from atomrl.training.base import BaseBackend
from atomrl.training.roles import RoleName, load_role
from atomrl.training.state import load_state, save_state


class LocalBackend(BaseBackend):
    """Trains in one process on one device: AdamW on float32 weights, micro-batches by token budget."""

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> torch.nn.Module:
        return load_role(name, path, config, self.device)

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine, not copied, and its adapters apart: merged into bfloat16 weights, their
        first updates would be lost."""
        model = self.policy.model
        tensors = () if adapters_alone else model_weights(model)
        return WeightUpdate(version, tensors, adapter_weights(model))

    def save(self, folder: Path) -> None:
        """Write model (or adapters) and tokenizer for transformers, and beside them what it takes to go on exactly."""
        save_state(self.roles, Path(folder), self.tokenizer, self.updates, self.device)

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        self.updates = load_state(self.roles, Path(folder), self.device)
