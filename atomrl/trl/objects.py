"""Models that a script gives as objects: what they were loaded from, their weights for a run, and the trained weights
back into them."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError
from atomrl.models.loading import adapted_path, load_tokenizer, model_config_only, resolve_folder
from atomrl.models.shapes import text_config, tower_weights
from atomrl.trl.adapters import adapted_targets
from atomrl.trl.inputs import lora_section

ADAPTERS = "adapter_model.safetensors"


def quantization_of(settings: Any, notes: list[str]) -> str | None:
    """Return `model.quantization` for a `BitsAndBytesConfig`, or for its fields.

    Args:
        notes: gets a line if the bits have another meaning here.

    Raises:
        ConfigError: it is another kind of quantization.
    """
    if settings is None:
        return None

    def get(name: str) -> Any:
        return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)

    if get("load_in_4bit"):
        if (kind := get("bnb_4bit_quant_type") or "fp4") not in ("nf4", "fp4"):
            raise ConfigError(f"quantization_config: bnb_4bit_quant_type={kind!r} is not known; 4 bits are nf4 here")
        if kind == "fp4":  # the default of transformers
            notes.append("differs from TRL: bnb_4bit_quant_type: TRL fp4; here nf4")
        return "nf4"
    if get("load_in_8bit"):
        return "int8"
    raise ConfigError(
        f"quantization_config: {type(settings).__name__} is not supported; BitsAndBytesConfig with load_in_4bit or "
        "load_in_8bit is"
    )


def with_template(tokenizer: Any, path: str) -> Any:
    """Return a copy of a tokenizer with the chat template of a Jinja file.

    Raises:
        ConfigError: it is no such file.
    """
    if not (file := Path(path)).is_file() or file.suffix not in (".jinja", ".j2"):
        raise ConfigError(f"chat_template_path: {path} is not a .jinja file; for another tokenizer's give its file")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def without_new_pad(tokenizer: Any, embeddings: int) -> Any:
    """Return a tokenizer without the pad token that a script has added to it, if the model has no embedding for it;
    None if there is no such token. Rows are not padded with it here.
    """
    extra = len(tokenizer) - embeddings
    if extra != 1 or tokenizer.pad_token_id != embeddings or not tokenizer.name_or_path:
        return None
    plain = load_tokenizer(tokenizer.name_or_path)
    if len(plain) > embeddings:
        return None
    plain.chat_template, plain.eos_token = tokenizer.chat_template, tokenizer.eos_token
    return plain


def with_adapters(model: Any, settings: Any) -> tuple[Any, Any]:
    """Add the adapters of a `peft_config` to a loaded model at once, as TRL does: `trainer.model` is a `PeftModel`
    before training.

    Returns:
        Model and settings for `GivenModel`: a `PeftModel` without settings, or both as they are.

    Raises:
        ConfigError: the model does not have the modules, or an option is not trained here.
    """
    if isinstance(model, str | Path) or not hasattr(model, "save_pretrained") or hasattr(model, "get_base_model"):
        return model, settings
    import peft

    lora_section(settings)  # which refuses what is not trained here
    with reraise_as(ConfigError, "peft_config", ValueError):
        return peft.get_peft_model(model, settings), None


class GivenModel:
    """A model that a script gives to a trainer: a name, a transformers model, or a `PeftModel`.

    Attributes:
        lora: the section `model.lora` of a `PeftModel`, or None.
        quantization: `model.quantization` of a quantised model, or None.
        notes: differences from what was given.

    Raises:
        ConfigError: it is none of these, or has adapters that no config can express.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.lora, self.quantization = model, None, None
        self.notes: list[str] = []
        self.adapted = False
        if isinstance(model, str | Path):
            return
        if not hasattr(model, "save_pretrained"):
            raise ConfigError(f"model must be a folder, a hub name or a transformers model, not {type(model).__name__}")
        self.adapted = hasattr(model, "get_base_model")
        if hasattr(model, "peft_config") and not self.adapted:
            raise ConfigError("model: its adapters were added without a PeftModel; use peft.get_peft_model")
        if self.adapted:
            if len(model.peft_config) > 1:
                raise ConfigError(f"model has several adapters ({', '.join(model.peft_config)}): keep one")
            self.lora = lora_section(next(iter(model.peft_config.values())))
            if self.lora is not None:  # without those that peft ignored, as they match nothing
                self.lora["target_modules"] = adapted_targets(self.base)
        settings = getattr(self.base.config, "quantization_config", None)
        if getattr(self.base, "is_quantized", False) or settings is not None:
            self.quantization = quantization_of(settings, self.notes)

    @property
    def base(self) -> Any:
        """The transformers model beneath the adapters."""
        return self.model.get_base_model() if self.adapted else self.model

    @property
    def is_name(self) -> bool:
        """True if the model is a name or a folder."""
        return isinstance(self.model, str | Path)

    @property
    def config(self) -> Any:
        """The transformers config."""
        return model_config_only(self.model) if self.is_name else self.base.config

    @property
    def embeddings(self) -> int:
        """Number of token embeddings."""
        if self.is_name:
            return int(text_config(self.config).vocab_size)
        return int(self.base.get_input_embeddings().num_embeddings)

    @property
    def frozen(self) -> str | None:
        """The frozen part of a loaded model: `tower`, its vision tower; `others`; None: no part."""
        weights = {} if self.is_name else dict(self.model.named_parameters())
        frozen = {name for name, weight in weights.items() if not weight.requires_grad}
        if len(frozen) in (0, len(weights)):
            return None
        return "tower" if frozen == set(tower_weights(self.model)) else "others"

    def write(self, folder: Path) -> tuple[str, str | None]:
        """Save the weights where a run reads them.

        Returns:
            The path for `model.path`, and the folder of trained adapters, if there are any. A quantised base is taken
            by the name that it was loaded from.

        Raises:
            ConfigError: a quantised model has no such name.
        """
        if self.is_name:
            return str(self.model), None
        adapters = self._write_adapters(folder.parent / "adapters") if self.adapted else None
        if self.quantization is not None:
            name = str(getattr(self.base.config, "_name_or_path", "") or "")
            if not name:
                raise ConfigError("model: a quantised model is read again from its name, but it has none")
            return name, adapters
        weights = {
            name.replace(".base_layer.", ".").replace(".original_module.", "."): value
            for name, value in self.base.state_dict().items()
            if ".lora_" not in name and ".modules_to_save." not in name
        }
        if self.adapted:
            self._save_base(folder, weights)
        else:
            self.base.save_pretrained(folder)
        return str(folder), adapters

    def _save_base(self, folder: Path, weights: Mapping[str, Any]) -> None:
        """Save the base of a PeftModel without the adapters' layers in its names."""
        from accelerate import init_empty_weights

        with init_empty_weights():
            plain = type(self.base)(self.base.config)
        plain.load_state_dict(dict(weights), assign=True, strict=False)
        plain.tie_weights()
        if hasattr(self.base, "generation_config"):  # a classifier has none
            plain.generation_config = self.base.generation_config
        plain.save_pretrained(folder)

    def _write_adapters(self, folder: Path) -> str | None:
        """Save the adapters, if they were trained before: those of a new PeftModel change nothing (B = 0)."""
        weights = self.model.state_dict()  # has tied weights under both names
        trained = any(bool(weight.any()) for name, weight in weights.items() if ".lora_B." in name or "_B" in name)
        trained |= any(
            not bool((weight == weights[name.replace(f".modules_to_save.{own}.", ".original_module.")]).all())
            for own in self.model.peft_config
            for name, weight in weights.items()
            if f".modules_to_save.{own}." in name
        )
        if not trained:
            return None
        self.model.save_pretrained(folder)
        return str(folder)

    def to_cpu(self) -> Any:
        """Move the model to the CPU while the run has its own copy; return its device, or None if it stays there."""
        if self.is_name:
            return None
        device = next(self.model.parameters()).device
        if device.type == "cpu":
            return None
        with suppress(ValueError, RuntimeError):  # a quantised model that cannot be moved
            self.model.to("cpu")
        return device

    def take(self, folder: str | Path, device: Any, load: Any, peft_config: Any) -> Any:
        """Put the trained weights of a run into the model, and return it.

        Args:
            folder: of the trained model.
            device: return value of `to_cpu`.
            load: loads a model folder.
            peft_config: of the trainer; its adapters are added to the model.
        """
        if device is not None:
            with suppress(ValueError, RuntimeError):
                self.model.to(device)
        if adapted_path(folder) is None:
            trained = load(folder)
            self.model.load_state_dict(trained.state_dict())
            self.model.generation_config = getattr(trained, "generation_config", None)  # has the trained end of turn
            return self.model
        return adapters_into(self.model, folder, peft_config)


def adapters_into(model: Any, folder: str | Path, peft_config: Any) -> Any:
    """Load trained adapters into a PeftModel, or into a plain model, which becomes one."""
    from peft import PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    if not hasattr(model, "get_base_model"):
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    set_peft_model_state_dict(model, load_file(Path(folder) / ADAPTERS), next(iter(model.peft_config)))
    return model


def load_trained(folder: str | Path, auto: Any, **options: Any) -> Any:
    """Load a trained model: a `PeftModel` if the folder has adapters."""
    if (base := adapted_path(folder)) is None:
        return auto.from_pretrained(folder, **options)
    return adapters_into(auto.from_pretrained(resolve_folder(base), **options), folder, None)
