"""The reference back end: one process, one device."""

import json
from pathlib import Path

import torch

from atomrl.config import ConfigError, ModelConfig
from atomrl.models.loading import fill_weights, model_weights
from atomrl.models.lora import adapter_state, adapter_weights, has_adapters
from atomrl.protocols import WeightUpdate
from atomrl.training.base import BaseBackend
from atomrl.training.role_models import SHARDS, STATE_FOLDER, load_role, role_prefix, save_role
from atomrl.training.roles import RoleName


class LocalBackend(BaseBackend):
    """Trains in one process on one device: AdamW on float32 weights, micro-batches by token budget."""

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> torch.nn.Module:
        """A role's model, whole, on the device."""
        return load_role(name, path, config, self.device)

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
            save_role(name, self.roles[name].model, self.tokenizer, folder)
            save_file(optimizer.state(), state / f"{role_prefix(name, '_')}optimizer.safetensors")
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        own = role_prefix(next(iter(self.trained)), "_")
        save_file(random, state / f"{own}random.safetensors")
        skipped = {name: optimizer.skipped_in_a_row for name, optimizer in self.trained.items()}
        text = json.dumps({"updates": self.updates, "skipped_in_a_row": skipped}) + "\n"
        (state / f"{own}trainer.json").write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`, also where policy and critic were in one back end then and are not now, or the
        other way round; and from what several ranks saved, within rounding.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        from safetensors.torch import load_file

        state = folder / STATE_FOLDER
        if (state / SHARDS).is_dir():
            from atomrl.training.shards import load_shards  # half a second, for which no other run waits

            self.updates = load_shards(self.trained, self.collective, folder)
            return
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
            fill_weights(own, folder / role_prefix(name))
            optimizer.load(load_file(state / f"{role_prefix(name, '_')}optimizer.safetensors"), self.device)
            optimizer.skipped_in_a_row = skipped[name]
        saved = state / f"{role_prefix(next(iter(self.trained)), '_')}random.safetensors"
        random = load_file(saved if saved.is_file() else state / "random.safetensors")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)
        self.updates = trainer["updates"]
