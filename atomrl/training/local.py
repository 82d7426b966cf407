"""The reference back end: one process, one device."""

import json
import logging
from pathlib import Path
from typing import Any, cast

import torch

from atomrl.config import ConfigError, ModelConfig
from atomrl.models.loading import fill_weights, load_policy, model_weights, save_model
from atomrl.models.lora import adapter_state, adapter_weights, has_adapters, save_adapters
from atomrl.models.scalar import HFScalar, ScalarModel, load_scalar, save_scalar
from atomrl.models.transformers_model import HFModel
from atomrl.protocols import WeightUpdate
from atomrl.training.base import BaseBackend
from atomrl.training.roles import TRAINED, RoleName

log = logging.getLogger(__name__)
STATE_FOLDER = "training_state"
"""Beside the model, so that a server that loads every *.safetensors of the folder does not meet it."""


class LocalBackend(BaseBackend):
    """Trains in one process on one device: AdamW on float32 weights, micro-batches by token budget."""

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> torch.nn.Module:
        """A role's model, whole, on the device; checkpointed and compiled as the config asks where it is trained.

        Raises:
            ConfigError: it is not there, or cannot be trained here.
        """
        trained = name in TRAINED
        common: dict[str, Any] = {"dtype": config.dtype, "device": self.device, "trainable": trained}
        common["trust_remote_code"] = config.trust_remote_code
        if name == "reward_model" and config.lora is not None:
            raise ConfigError("model.lora: reward models are trained whole; leave it out")
        if name in ("critic", "reward_model"):
            model: Any = load_scalar(path, **common)
        else:
            model = load_policy(path, lora=config.lora if trained else None, **common)
        if trained and isinstance(model, HFModel | HFScalar):
            if config.gradient_checkpointing:
                model.inner.gradient_checkpointing_enable({"use_reentrant": False})
            if config.compile:
                log.warning("model.compile has no effect on models that are trained through transformers")
        elif trained:
            model.gradient_checkpointing = config.gradient_checkpointing
            if config.compile:
                model.compile_layers()
        return cast(torch.nn.Module, model.train(trained))

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine, not copied, and its adapters apart: merged into bfloat16 weights, their
        first updates would be lost."""
        model = self.policy.model
        return WeightUpdate(version, () if adapters_alone else model_weights(model), adapter_weights(model))

    def save(self, folder: Path) -> None:
        """Write model (or adapters) and tokenizer for transformers, the critic in a folder in it, and beside them what
        it takes to go on exactly."""
        from safetensors.torch import save_file

        state = folder / STATE_FOLDER
        state.mkdir(parents=True, exist_ok=True)
        for name, optimizer in self.trained.items():
            model = self.roles[name].model
            if isinstance(model, ScalarModel):
                save_scalar(model, self.tokenizer, folder / _prefix(name))
            elif has_adapters(model):
                save_adapters(model, folder)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(folder)
            else:
                save_model(model, self.tokenizer, folder)
            save_file(optimizer.state(), state / f"{_prefix(name, '_')}optimizer.safetensors")
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        own = _prefix(next(iter(self.trained)), "_")
        save_file(random, state / f"{own}random.safetensors")
        skipped = {name: optimizer.skipped_in_a_row for name, optimizer in self.trained.items()}
        text = json.dumps({"updates": self.updates, "skipped_in_a_row": skipped}) + "\n"
        (state / f"{own}trainer.json").write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`, also where policy and critic were in one back end then and are not now, or the
        other way round.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        from safetensors.torch import load_file

        state = folder / STATE_FOLDER
        if not (state / "trainer.json").is_file():
            raise ConfigError(f"{folder} holds no {STATE_FOLDER}/trainer.json: it is no checkpoint of this back end")
        trainer = json.loads((state / "trainer.json").read_text(encoding="utf-8"))
        skipped = trainer["skipped_in_a_row"]
        if (apart := state / "critic_trainer.json").is_file():
            skipped |= json.loads(apart.read_text(encoding="utf-8"))["skipped_in_a_row"]
        missing, unknown = self.trained.keys() - skipped.keys(), skipped.keys() - self.trained.keys()
        if missing or (unknown and self.here is None):
            raise ConfigError(f"checkpoint {folder} was written with{'' if 'critic' in skipped else 'out'} a critic")
        for name, optimizer in self.trained.items():
            model = self.roles[name].model
            own = adapter_state(model) if has_adapters(model) else dict(model_weights(model))
            fill_weights(own, folder / _prefix(name))
            optimizer.load(load_file(state / f"{_prefix(name, '_')}optimizer.safetensors"), self.device)
            optimizer.skipped_in_a_row = skipped[name]
        saved = state / f"{_prefix(next(iter(self.trained)), '_')}random.safetensors"
        random = load_file(saved if saved.is_file() else state / "random.safetensors")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)
        self.updates = trainer["updates"]


def _prefix(name: RoleName, end: str = "") -> str:
    """Of what is the critic's in a checkpoint."""
    return f"critic{end}" if name == "critic" else ""
