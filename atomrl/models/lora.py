"""Low-rank adapters by peft: W + (alpha / rank) B A, with only A and B trained (arXiv:2106.09685).

Needs the `lora` extra. Adapters are put into the model in place and saved in peft's own layout, so that
`PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)` loads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomrl.config import ConfigError, LoraConfig

ADAPTER = "default"


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("low-rank adapters need peft: pip install 'atomrl[lora]'") from None
    return peft


def _inner(model: Any) -> nn.Module:
    return getattr(model, "inner", model)


def add_adapters(model: Any, config: LoraConfig, base: str) -> None:
    """Put fresh adapters into a model whose weights are frozen; they start as no change and are float32.

    Args:
        base: path of the model, noted in adapter_config.json.

    Raises:
        ConfigError: peft is missing, or no module has one of the names in `target_modules`.
    """
    peft = _peft()
    inner = _inner(model)
    targets = config.target_modules
    if targets == "all-linear":
        head = model.head_weight
        linears = (nn.Linear, *_conv1d())
        targets = sorted(
            {
                name.rpartition(".")[2]
                for name, m in inner.named_modules()
                if isinstance(m, linears) and m.weight is not head
            }
        )
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        peft.inject_adapter_in_model(settings, inner, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules={config.target_modules}: {error}") from None
    for name, parameter in inner.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    model.lora_settings = settings


def _conv1d() -> tuple[type, ...]:
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    return (Conv1D,)


def has_adapters(model: Any) -> bool:
    """Whether `add_adapters` was called on it."""
    return hasattr(model, "lora_settings")


@contextmanager
def adapters_disabled(model: Any) -> Iterator[None]:
    """The model without its adapters: the reference policy."""
    layers = _lora_layers(_inner(model))
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _lora_layers(inner: nn.Module) -> list[Any]:
    return [module for module in inner.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")]


@torch.no_grad()
def merged_weights(inner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name without adapters, W + delta where there is one. The model is not changed."""
    state = inner.state_dict(keep_vars=False)
    modules = dict(inner.named_modules())
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            if leaf == "weight":
                tensor = (tensor.float() + modules[owner].get_delta_weight(ADAPTER).float()).to(tensor.dtype)
        yield f"{owner}.{leaf}", tensor.detach()


def adapter_state(model: Any) -> dict[str, Tensor]:
    """The adapters' weights under the names that peft writes."""
    state = _peft().get_peft_model_state_dict(_inner(model), adapter_name=ADAPTER)
    return {f"base_model.model.{name}": tensor.detach() for name, tensor in state.items()}


def save_adapters(model: Any, folder: str | Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors as peft does."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in adapter_state(model).items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.lora_settings.save_pretrained(str(folder))


def load_adapters(model: Any, folder: str | Path) -> None:
    """Fill the model's adapters from a folder that `save_adapters` or peft wrote.

    Raises:
        ConfigError: the folder has none, or they do not fit.
    """
    from safetensors.torch import load_file

    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        raise ConfigError(f"{folder} holds no adapter_model.safetensors")
    state = load_file(file)
    ours = adapter_state(model)
    if {name: t.shape for name, t in state.items()} != {name: t.shape for name, t in ours.items()}:
        raise ConfigError(f"the adapters in {folder} do not fit the model: other modules or another rank")
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(state[name])


def export(adapter_folder: str | Path, folder: str | Path, base: str | Path | None = None) -> None:
    """Merge adapters into their base model and write it as a full folder in Hugging Face layout.

    Args:
        adapter_folder: holds adapter_config.json and adapter_model.safetensors.
        folder: where the merged model goes, in float32 or the dtype that the base's files have.
        base: the base model; None takes the one that adapter_config.json names.

    Raises:
        ConfigError: the adapters are scaled in a way of peft's that is not known here.
    """
    from atomrl.models import loading

    settings = _peft().LoraConfig.from_pretrained(str(adapter_folder))
    if settings.use_rslora or settings.alpha_pattern:  # any other variant has other tensors, which are refused
        raise ConfigError(f"{adapter_folder} has use_rslora or alpha_pattern: merge it with peft's merge_and_unload")
    base = base or settings.base_model_name_or_path
    targets = settings.target_modules
    config = LoraConfig(
        rank=settings.r,
        alpha=settings.lora_alpha,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
    )
    stored = loading.model_config_only(base).dtype or torch.float32
    model = loading.load_policy(base, dtype=torch.float32, lora=config)
    load_adapters(model, adapter_folder)
    loading.save_model(model, loading.load_tokenizer(base), folder, dtype=stored)
