"""Low-rank adapters by peft: W + (alpha / rank) B A, with only A and B trained (arXiv:2106.09685).

Needs the `lora` extra. Adapters are put into the model in place and saved in peft's own layout, so that
`PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)` loads them.

Modules of `modules_to_save` are trained in full beside them, and so is the score head of a reward model. They keep
their place and name in the model: the policy's have a frozen copy of each weight beside it, for the reference.
"""

import json
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from atomrl.common.errors import reraise_as
from atomrl.common.files import model_identity
from atomrl.config import ConfigError, LoraConfig, Quantization
from atomrl.models.adapted import ADAPTER, UNTRAINED, adapted_linear, computes_here, is_adapted
from atomrl.models.gpt import GPT
from atomrl.models.published import published_names
from atomrl.models.quantized import QuantizedLinear, quantized_layers, round_as_quantized
from atomrl.models.shapes import language_model, text_config, tower_weights
from atomrl.models.transformers_model import HFModel
from atomrl.protocols import Adapter

log = logging.getLogger(__name__)
ADAPTER_FILE = "adapter_model.safetensors"
SCORE = "score"
"""Name of a reward model's head."""
QUANTIZATION, QUANTIZED_FROM, BASE = "base_quantization", "base_dtype", "base_identity"
"""Keys in the metadata of adapter_model.safetensors."""


def _peft() -> Any:
    with reraise_as(ConfigError, "low-rank adapters need peft: pip install 'atomrl[lora]'", ImportError):
        import peft
    return peft


def _inner(model: Any) -> nn.Module:
    return cast(nn.Module, getattr(model, "inner", model))


def target_names(inner: nn.Module, head: Tensor, config: LoraConfig) -> list[str] | str:
    """Return `target_modules` for peft, after checking that each matches linear layers that can have adapters.

    The output matrix and a tied embedding cannot: engines and log-probs use their weights directly.

    Args:
        inner: the model; may be on the meta device.
        head: its output matrix.

    Raises:
        ConfigError: a name matches no module, or one that is not a linear layer or is the output matrix.
    """
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    tower = {name.rpartition(".")[0] for name in tower_weights(inner)}
    modules = {name: module for name, module in inner.named_modules() if name and name not in tower}
    linears = {n for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and m.weight is not head}
    short = sorted({name.rpartition(".")[2] for name in linears})
    if experts := [name for name, weight in inner.named_parameters() if weight.dim() > 2 and "expert" in name]:
        log.warning("model.lora: the weights of experts are not linear layers and get no adapters: %s, ...", experts[0])
    targets = config.target_modules
    # Layers of a vision tower may have the same names: only those of the language model are meant.
    inside = rf"{re.escape(language_model(inner)[0])}\..*?" if tower else ""
    if targets == "all-linear":
        return f"{inside}({'|'.join(short)})" if tower else short
    for target in [targets] if isinstance(targets, str) else targets:
        key, could = f"model.lora.target_modules: {target!r}", f"linear layers: {', '.join(short)}"
        if isinstance(targets, str):
            with reraise_as(ConfigError, f"{key} is not a regular expression", re.error):
                matches = [name for name in modules if re.fullmatch(target, name)]
        else:
            matches = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not matches:
            raise ConfigError(f"{key} matches no module of this model; {could}")
        for name in matches:
            if name not in linears:
                module = modules[name]
                kind = "the output matrix" if getattr(module, "weight", None) is head else type(module).__name__
                kind = "an embedding" if isinstance(module, nn.Embedding) else kind
                raise ConfigError(
                    f"{key}: {name} is {kind}, which does not support adapters; remove it ({could}), or train "
                    "all weights without model.lora"
                )
    if tower and not isinstance(targets, str):
        return f"{inside}({'|'.join(map(re.escape, targets))})"
    return targets


def whole_modules(inner: nn.Module, head: Tensor, names: Collection[str]) -> list[str]:
    """Return the modules whose names end like one of `model.lora.modules_to_save`, as in peft.

    Args:
        inner: the model; may be on the meta device.
        head: its output matrix, or its score head.

    Raises:
        ConfigError: a name matches no module, or one that cannot be trained in full beside adapters.
    """
    modules = {name: module for name, module in inner.named_modules() if name}
    embeddings = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    tower, found = {*tower_weights(inner)}, list[str]()
    for ending in names:
        key = f"model.lora.modules_to_save: {ending!r}"
        matches = [name for name in modules if name.endswith(ending)]
        if not matches:
            raise ConfigError(
                f"{key} matches no module of this model (an output matrix that is tied to the embedding is none)"
            )
        for name in matches:
            weights = dict(modules[name].named_parameters())
            if any(isinstance(module, QuantizedLinear) for module in modules[name].modules()):
                raise ConfigError(f"{key}: {name} is quantised, and quantised weights cannot be trained; remove it")
            if any(weight is head and id(weight) in embeddings for weight in weights.values()):
                raise ConfigError(
                    f"{key}: this model ties embedding and output matrix, of which peft would train two copies; "
                    "remove it, or train all weights without model.lora"
                )
            if any(f"{name}.{weight}" in tower for weight in weights):
                raise ConfigError(f"{key}: {name} is in the vision tower, which is not trained; use a longer name")
        found += matches
    return found


def trained_places(
    inner: nn.Module, head: Tensor | None, config: LoraConfig
) -> tuple[list[str] | str, list[str], list[str]]:
    """Return `target_modules` and `modules_to_save` for peft, and the modules that the latter names, checked.

    Args:
        inner: the model; may be on the meta device.
        head: its output matrix; None: it is a reward model, whose head is trained in full.

    Raises:
        ConfigError: as `target_names` and `whole_modules`, or the head of the reward model is not `score`.
    """
    names, score = [*config.modules_to_save], getattr(inner, SCORE, None)
    if head is None:
        if not isinstance(score, nn.Linear):
            raise ConfigError(
                f"model.lora: the head of a {type(inner).__name__} is not a linear layer named {SCORE}; remove "
                "model.lora to train all weights"
            )
        head, names = score.weight, [*dict.fromkeys([*names, SCORE])]
    return target_names(inner, head, config), names, whole_modules(inner, head, names)


def refuse_adapted(path: str | Path) -> None:
    """Raise ConfigError if the base of new adapters is a folder with adapters: saved, the new ones would name a base
    without the old ones."""
    from atomrl.models import loading

    if loading.adapted_path(path) is not None:
        raise ConfigError(
            f"model.path={path} has adapters, and new ones on top of them (model.lora) cannot be saved. "
            f"Merge them first (atomrl export {path} MERGED) and use model.path=MERGED; or remove model.lora to "
            "train all weights"
        )


def add_adapters(model: Any, config: LoraConfig, base: str, scores: bool = False) -> None:
    """Add float32 adapters to a model with frozen weights; initially they change nothing (B = 0), unless the config
    names trained ones to start from. The modules of `modules_to_save` are unfrozen, in float32.

    Args:
        base: path of the model, saved in adapter_config.json.
        scores: the model is a reward model: its score head is trained in full too.

    Raises:
        ConfigError: peft is not installed, the base is a folder with adapters, or as `target_names` and
            `whole_modules`.
    """
    peft = _peft()
    refuse_adapted(base)
    inner = _inner(model)
    targets, names, whole = trained_places(inner, None if scores else model.head_weight, config)
    base_name, _, revision = (base, "", "") if Path(base).is_dir() else base.partition("@")
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        base_model_name_or_path=base_name,
        revision=revision or None,
    )
    with reraise_as(ConfigError, f"model.lora.target_modules={config.target_modules}", ValueError):
        peft.inject_adapter_in_model(settings, inner, adapter_name=ADAPTER)
    for name, parameter in inner.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
    weights = _whole_weights(inner, whole)
    if not scores and config.reference == "base":
        _keep_copies(inner, weights)
    for name in weights:
        inner.get_parameter(name).data = inner.get_parameter(name).data.float()
        inner.get_parameter(name).requires_grad_(True)
    settings.modules_to_save = names or None
    model.lora_settings, model.whole_modules = settings, whole
    model.reference_disables = config.reference == "base"
    if config.start is not None:
        _load_adapters(model, config.start)
    if config.reference == "start":
        _keep_copies(inner, [name for name, weight in inner.named_parameters() if weight.requires_grad])
    for _, layer in _lora_layers(inner):
        layer.forward = partial(_forward, layer)


def _whole_weights(inner: nn.Module, whole: Collection[str]) -> list[str]:
    """Return the names of the weights of modules.

    Raises:
        ConfigError: a module has adapters.
    """
    modules = [own for name in whole for own in inner.get_submodule(name).named_modules(prefix=name)]
    for name, module in modules:
        if is_adapted(module):
            raise ConfigError(
                f"model.lora: {name} is in modules_to_save and in target_modules; it can be trained in full, or by "
                "adapters"
            )
    names = [f"{name}.{key}" for name, module in modules for key, _ in module.named_parameters(recurse=False)]
    return [*dict.fromkeys(names)]


def _keep_copies(inner: nn.Module, names: Collection[str]) -> None:
    """Keep a frozen copy of each of these weights in its module, for the reference; FSDP shards it with the module."""
    for name in names:
        module, _, key = name.rpartition(".")
        copy = nn.Parameter(inner.get_parameter(name).detach().clone(), requires_grad=False)
        inner.get_submodule(module).register_parameter(UNTRAINED + key, copy)


def whole_weights(model: Any) -> dict[str, nn.Parameter]:
    """Return the weights of `modules_to_save`, by their names in the model; not copied. Empty without any."""
    return {
        name: weight
        for module in getattr(model, "whole_modules", ())
        for name, weight in _inner(model).get_submodule(module).named_parameters(prefix=module)
        if weight.requires_grad
    }


@torch.no_grad()
def _load_adapters(model: Any, folder: str | Path) -> None:
    """Copy saved adapters, and modules that were trained in full, into new ones of the same rank and layers. Those of a
    policy may start a reward model, whose head is then a new one.

    Raises:
        ConfigError: they are of others, or there are none.
    """
    from safetensors.torch import load_file

    key = f"model.lora.start={folder}"
    with reraise_as(ConfigError, f"{key} has no readable {ADAPTER_FILE}", OSError, SafetensorError):
        saved = load_file(Path(folder) / ADAPTER_FILE)
    own, head = adapter_state(model), f"base_model.model.{SCORE}.weight"
    if model.lora_settings.task_type == "SEQ_CLS" and head not in saved:
        del own[head]
    if odd := sorted(
        name
        for name in own.keys() | saved.keys()
        if name not in own or name not in saved or own[name].shape != saved[name].shape
    ):
        raise ConfigError(
            f"{key}: {odd[0]} has another shape, or is on one side only; rank, layers and modules_to_save must be the "
            "same"
        )
    for name, weight in own.items():
        weight.copy_(saved[name])


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Replace peft's forward pass, which computes adapters in float32: on a GPU that doubles the layer's time."""
    return adapted_linear(x, layer) if computes_here(layer) else type(layer).forward(layer, x)


def is_adapter(name: str) -> bool:
    """Return True for the published name of an adapter's weight; these are float32."""
    return ".lora_" in name


def has_adapters(model: Any) -> bool:
    """Return True if `add_adapters` was called on the model."""
    return hasattr(model, "lora_settings")


@contextmanager
def adapters_disabled(model: Any) -> Iterator[None]:
    """Disable a model's adapters inside the block, and put back the modules that are trained in full: this gives the
    reference policy. With `model.lora.reference=start` put back the adapters that training started from."""
    layers = [module for _, module in _lora_layers(_inner(model))] if model.reference_disables else []
    for layer in layers:
        layer._disable_adapters = True
    try:
        with _untrained(model):
            yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def _untrained(model: Any) -> Iterator[None]:
    """Give the weights that have a frozen copy (`_keep_copies`) its values inside the block.

    They are copied in place, because FSDP would not use other tensors; it must not have gathered them either. Autograd
    does not notice, and need not: the values are back before a backward pass.
    """
    if model.reference_disables and not model.whole_modules:
        yield
        return
    reshard = getattr(model, "reshard", lambda: None)
    reshard()
    weights = [
        (getattr(module, key.removeprefix(UNTRAINED)).data, copy.data)
        for module in _inner(model).modules()
        for key, copy in module.named_parameters(recurse=False)
        if key.startswith(UNTRAINED)
    ]
    trained = [weight.clone() for weight, _ in weights]
    try:
        for weight, first in weights:
            weight.copy_(first)
        yield
    finally:
        reshard()
        for (weight, _), value in zip(weights, trained, strict=True):
            weight.copy_(value)


def _lora_layers(inner: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, m) for name, m in inner.named_modules() if is_adapted(m))


def adapter_weights(model: GPT | HFModel) -> dict[str, Adapter]:
    """Return a policy's adapters, unmerged and not copied, by the Hugging Face name of the weight that each adds to.

    Merged into bfloat16 weights, updates below half a unit of rounding would be lost, so engines add adapters to the
    layer's output instead. Empty if the model has no adapters.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> adapter_weights(new_gpt(vocab_size=11, layers=1, hidden=32, heads=1))
        {}
    """
    names = published_names(model.inner) if isinstance(model, HFModel) and has_adapters(model) else {}
    return {
        names.get(f"{name}.weight", f"{name}.weight"): Adapter(
            module.lora_A[ADAPTER].weight.detach(),
            module.lora_B[ADAPTER].weight.detach(),
            module.scaling[ADAPTER],
        )
        for name, module in _lora_layers(_inner(model))
    }


def published_whole_weights(model: GPT | HFModel) -> dict[str, Tensor]:
    """Return the weights of `modules_to_save` by their published names, for an engine; not copied."""
    own = whole_weights(model)
    names = published_names(model.inner) if isinstance(model, HFModel) and own else {}
    return {names.get(name, name): weight.detach() for name, weight in own.items()}


def adapter_state(model: Any) -> dict[str, Tensor]:
    """Return the adapters' weights, and those of `modules_to_save`, by the names that peft saves; not copied."""
    inner = _inner(model)
    own = {name: weight for name, weight in inner.named_parameters() if is_adapter(name) and weight.requires_grad}
    state = _peft().get_peft_model_state_dict(inner, own, adapter_name=ADAPTER) | whole_weights(model)
    return {f"base_model.model.{name}": tensor.detach() for name, tensor in state.items()}


def save_adapters(model: Any, folder: str | Path) -> None:
    """Save adapter_config.json and adapter_model.safetensors in peft's layout.

    The metadata of the latter identify the base, if it is on this machine, and its quantization, if any.
    """
    from safetensors.torch import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in adapter_state(model).items()}
    header = {"format": "pt"}
    with suppress(ConfigError):
        settings = model.lora_settings
        header[BASE] = _identity(settings.base_model_name_or_path + f"@{settings.revision}" * bool(settings.revision))
    if (layer := next(quantized_layers(model), None)) is not None:
        header |= {QUANTIZATION: layer.kind, QUANTIZED_FROM: str(layer.dtype).removeprefix("torch.")}
    (folder / ADAPTER_FILE).write_bytes(_in_order(save(state, metadata=header)))
    model.lora_settings.save_pretrained(str(folder))


def _in_order(data: bytes) -> bytes:
    """Sort the metadata of a safetensors file: their order is random, so files of equal adapters would differ."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    assert len(text) == size, "the same keys and values in another order"
    return data[:8] + text + data[8 + size :]


@dataclass(frozen=True)
class MergeError:
    """Changes of the adapted layers' weights by merging, as norms relative to the weights' norm."""

    quantization: str | None
    """Quantization of the base that the adapters were trained on."""
    of_base: float
    """Difference between the dequantized weights, which the merged model has, and the base's own."""
    added: float
    """Norm of what the adapters add."""
    rounding: float
    """Rounding error in the dtype of the saved model."""


def merge_adapters(inner: Any, folder: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, MergeError]:
    """Merge adapters saved by `save_adapters` or peft into a transformers model.

    Adapters that were trained on a quantized base are added to its dequantized weights, because these are the policy.

    Args:
        inner: the base model, in float32.
        folder: folder of the adapters.
        dtype: dtype for the rounding error; the model stays in float32.

    Returns:
        The merged model, and the errors of merging.

    Raises:
        ConfigError: peft is not installed, or the adapters are damaged or do not fit the model.
    """
    message, kind, of_base = f"the adapters in {folder} do not fit their base model", None, 0.0
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    if (file := Path(folder) / ADAPTER_FILE).is_file():
        with reraise_as(ConfigError, message, OSError, SafetensorError):
            header = _header(file)
        if (kind := header.get(QUANTIZATION)) is not None:
            trained_in = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(header.get(QUANTIZED_FROM, ""))
            if kind not in get_args(Quantization) or trained_in is None:
                raise ConfigError(f"{file}: its header has an unknown {QUANTIZATION} or {QUANTIZED_FROM}")
            of_base = round_as_quantized(inner, (head or inner.get_submodule(SCORE)).weight, kind, trained_in)
    with reraise_as(ConfigError, message, ValueError, RuntimeError, OSError, KeyError):
        model = _peft().PeftModel.from_pretrained(inner, folder)
        if head is not None and head.weight is embedding.weight:
            _refuse_tied(inner, embedding.weight, folder)
        error = MergeError(kind, of_base, *_merge_error(model, dtype))
        return model.merge_and_unload(), error


def _refuse_tied(inner: nn.Module, embedding: Tensor, folder: str | Path) -> None:
    """Raise ConfigError if adapters or trained modules are on a tied embedding: merged, they would change the output
    matrix too."""
    for name, module in inner.named_modules():
        base = getattr(module, "base_layer", getattr(module, "original_module", None))
        if getattr(base, "weight", None) is embedding:
            raise ConfigError(
                f"the adapters in {folder} change {name}, and their base model ties embedding and output matrix "
                "(tie_word_embeddings): merged, they would change both. Use adapters of other layers, or a base model "
                "without tied weights"
            )


@cache
def _identity(base: str | Path) -> str:
    # Cached: it reads megabytes, and every checkpoint needs it.
    from atomrl.models import loading

    return model_identity(loading.resolve_folder(loading.base_path(base)))


def _header(file: Path) -> dict[str, Any]:
    """Return the metadata of adapter_model.safetensors."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        return stored.metadata() or {}


@torch.no_grad()
def _merge_error(model: nn.Module, dtype: torch.dtype) -> tuple[float, float]:
    """Return the norms of the adapters' part and of the rounding error, relative to that of the weights."""
    size = added = lost = 0.0
    for _, layer in _lora_layers(model):
        weight, delta = layer.base_layer.weight, layer.get_delta_weight(ADAPTER)
        merged = weight + delta
        size += float(weight.square().sum())
        added += float(delta.square().sum())
        lost += float((merged.to(dtype).float() - merged).square().sum())
    return (added / size) ** 0.5, (lost / size) ** 0.5


def export(
    adapter_folder: str | Path, folder: str | Path, base: str | Path | None = None, trust_remote_code: bool = False
) -> MergeError:
    """Merge adapters into their base model and write it as a full folder in Hugging Face layout.

    Args:
        adapter_folder: has adapter_config.json and adapter_model.safetensors.
        folder: folder for the merged model, in the dtype of the base's files.
        base: the base model; None: the one in adapter_config.json.
        trust_remote_code: allow the base's own code to run.

    Returns:
        The errors of merging.

    Raises:
        ConfigError: as `merge_adapters`.
    """
    from atomrl.models import loading, scalar

    base = base or loading.adapted_path(adapter_folder) or adapter_folder
    config = loading.model_config_only(adapter_folder, trust_remote_code)
    scores, stored = scalar.is_classifier(config), config.dtype or torch.float32
    inner = loading.load_transformers(base, torch.float32, trust_remote_code, scores)
    merged, error = merge_adapters(inner, adapter_folder, stored)
    file = Path(adapter_folder) / ADAPTER_FILE
    trained_on = _header(file).get(BASE) if file.is_file() else None
    if trained_on not in (None, _identity(base)):
        log.warning(
            "%s: its files differ from those that the adapters in %s were trained on; unless it is the same model "
            "saved again, the exported model is not the trained policy",
            base, adapter_folder,
        )  # fmt: skip
    own = Path(adapter_folder) if (Path(adapter_folder) / "tokenizer_config.json").is_file() else base
    tokenizer = loading.load_tokenizer(own, trust_remote_code, base)
    if not scores:
        loading.save_model(HFModel(merged), tokenizer, folder, dtype=stored)
        return error
    text_config(merged.config).pad_token_id = text_config(config).pad_token_id
    reward_model = scalar.HFScalar(merged)
    loading.save_model(reward_model, tokenizer, folder, dtype=stored, **scalar.scalar_settings(reward_model, tokenizer))
    return error
