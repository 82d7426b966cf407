"""The reference back end: one process, one device."""

from pathlib import Path

import torch

from atomrl.backends.base import BaseBackend
from atomrl.backends.roles import RoleName, load_role, role_prefix, save_role
from atomrl.config import ConfigError, ModelConfig
from atomrl.models.gpt import GPT
from atomrl.models.loading import fill_weights, model_weights
from atomrl.models.lora import adapter_state, adapter_weights, has_adapters, published_whole_weights, whole_weights
from atomrl.protocols import FrozenBase, RoundedWeights, WeightUpdate
from atomrl.tracking.checkpoint_format import OPTIMIZER, RANDOM, STATE_FOLDER, Counts, is_sharded, read_counts


class LocalBackend(BaseBackend):
    """Trains in one process on one device: AdamW on float32 weights, micro-batches by token budget."""

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> torch.nn.Module:
        """Load the model of a role onto the device."""
        return load_role(name, path, config, self.device)

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """Return the policy's weights for an engine, without copies, and its adapters separately.

        With `adapters_alone` of the weights only those of `model.lora.modules_to_save`.

        Adapters are not merged: rounded to bfloat16, W + BA would lose the updates of the first steps.
        """
        model = self.policy.model
        weights = published_whole_weights(model).items() if adapters_alone else model_weights(model)
        return WeightUpdate(version, weights, adapter_weights(model))

    def frozen_base(self) -> FrozenBase | None:
        """Return the frozen weights of a decoder with adapters.

        None without adapters, if modules are trained in full beside them, for models of transformers, whose layers are
        not the engine's, and for compiled layers, whose code is specialized on the strides of weights.
        """
        model = self.policy.model
        ranks = {name: len(adapter.a) for name, adapter in adapter_weights(model).items()}
        if not ranks or whole_weights(model) or not isinstance(model, GPT) or model.is_compiled:
            return None
        # A base layer comes after the layer of peft around it, and takes its name.
        modules = {name.removesuffix(".base_layer"): module for name, module in model.named_modules()}
        return FrozenBase(modules, ranks)

    def rounded_weights(self) -> RoundedWeights | None:
        """Return the trained weights of a decoder, if its forward pass rounds them; None with adapters, too."""
        model = self.policy.model
        if not isinstance(model, GPT) or has_adapters(model) or model.compute_dtype in (None, torch.float32):
            return None
        self.rounded = RoundedWeights(dict(model.named_parameters()))
        return self.rounded

    def save(self, folder: Path) -> None:
        """Save a checkpoint: models and tokenizer in Hugging Face layout, and the state for an exact resume.

        The critic goes into a subfolder; optimizer, random state and counters into `training_state`.
        """
        from safetensors.torch import save_file

        state = folder / STATE_FOLDER
        state.mkdir(parents=True, exist_ok=True)
        for name, optimizer in self.trained.items():
            save_role(name, self.roles[name].model, self.tokenizer, folder)
            save_file(optimizer.state(), state / f"{role_prefix(name, '_')}{OPTIMIZER}")
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        own = role_prefix(next(iter(self.trained)), "_")
        save_file(random, state / f"{own}{RANDOM}")
        skipped = {name: optimizer.skipped_in_a_row for name, optimizer in self.trained.items()}
        Counts(self.updates, skipped).write(state, own)

    def load(self, folder: Path) -> None:
        """Resume exactly from `save`, or within rounding from a checkpoint of several ranks.

        Policy and critic may have been in one back end when saved and be in two now, or the other way round.

        Raises:
            ConfigError: the folder has no training state, or that of another model.
        """
        from safetensors.torch import load_file

        if is_sharded(folder):
            from atomrl.backends.shards import load_shards  # imported here, because it takes half a second

            self.updates = load_shards(self.trained, self.collective, folder)
            return
        counts, state = read_counts(folder), folder / STATE_FOLDER
        skipped = counts.skipped_in_a_row
        missing, unknown = self.trained.keys() - skipped.keys(), skipped.keys() - self.trained.keys()
        if missing or (unknown and self.loaded_roles is None):
            raise ConfigError(f"checkpoint {folder} was written with{'' if 'critic' in skipped else 'out'} a critic")
        for name, optimizer in self.trained.items():
            model = self.roles[name].model
            own = adapter_state(model) if has_adapters(model) else dict(model_weights(model))
            fill_weights(own, folder / role_prefix(name))
            optimizer.load(load_file(state / f"{role_prefix(name, '_')}{OPTIMIZER}"), self.device)
            optimizer.skipped_in_a_row = skipped[name]
        saved = state / f"{role_prefix(next(iter(self.trained)), '_')}{RANDOM}"
        random = load_file(saved if saved.is_file() else state / RANDOM)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)
        self.updates = counts.updates
