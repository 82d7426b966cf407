"""Low-rank adapters by peft: W + (alpha / rank) B A, with only A and B trained (arXiv:2106.09685).

Needs the `lora` extra. Adapters are put into the model in place and saved in peft's own layout, so that
`PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)` loads them.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from atomrl.common.errors import said_as
from atomrl.common.files import model_identity
from atomrl.config import ConfigError, LoraConfig, Quantization
from atomrl.models.adapted import ADAPTER, adapted_linear, computes_here, is_adapted
from atomrl.models.gpt import GPT
from atomrl.models.quantized import quantized_layers, round_as_quantized
from atomrl.models.transformers_model import HFModel
from atomrl.protocols import Adapter

log = logging.getLogger(__name__)
ADAPTER_FILE = "adapter_model.safetensors"
QUANTIZATION, QUANTIZED_FROM, BASE = "base_quantization", "base_dtype", "base_identity"
"""In the header of a file of adapters."""


def _peft() -> Any:
    with said_as(ConfigError, "low-rank adapters need peft: pip install 'atomrl[lora]'", ImportError):
        import peft
    return peft


def _inner(model: Any) -> nn.Module:
    return cast(nn.Module, getattr(model, "inner", model))


def target_names(inner: nn.Module, head: Tensor, config: LoraConfig) -> list[str] | str:
    """`target_modules` as peft takes it, each of which is there and can be trained.

    Engine and log-probs compute with the output matrix itself, and so with the embedding where these are one.

    Args:
        inner: the model; its weights need no memory.
        head: its output matrix.

    Raises:
        ConfigError: a name is of no module, or of one that takes no adapters here: the output matrix, an embedding, or
            whatever else is no linear layer.
    """
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    modules = {name: module for name, module in inner.named_modules() if name}
    linears = {n for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and m.weight is not head}
    short = sorted({name.rpartition(".")[2] for name in linears})
    if experts := [name for name, weight in inner.named_parameters() if weight.dim() > 2 and "expert" in name]:
        log.warning("model.lora: the weights of experts are no linear layers and get no adapters: %s, ...", experts[0])
    given = config.target_modules
    if given == "all-linear":
        return short
    for target in [given] if isinstance(given, str) else given:
        key, could = f"model.lora.target_modules: {target!r}", f"linear layers here are {', '.join(short)}"
        if isinstance(given, str):
            with said_as(ConfigError, f"{key} is no regular expression", re.error):
                found = [name for name in modules if re.fullmatch(target, name)]
        else:
            found = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not found:
            raise ConfigError(f"{key} is the name of no module of this model; {could}")
        for name in found:
            if name not in linears:
                module = modules[name]
                kind = "the output matrix" if getattr(module, "weight", None) is head else type(module).__name__
                kind = "an embedding" if isinstance(module, nn.Embedding) else kind
                raise ConfigError(
                    f"{key}: {name} is {kind}, which is not trained by adapters here; leave it out ({could}), or train "
                    "all weights without model.lora"
                )
    return given


def refuse_adapted(path: str | Path) -> None:
    """Raise ConfigError where a model that is to get adapters is a folder of adapters itself: whoever loads those that
    are saved puts them onto the base without these."""
    from atomrl.models import loading

    if loading.adapted_path(path) is not None:
        raise ConfigError(
            f"model.path={path} holds adapters, and model.lora would put others onto them, which no folder can hold. "
            f"Merge them first (atomrl export {path} MERGED) and take model.path=MERGED; or leave out model.lora to "
            "train all weights"
        )


def add_adapters(model: Any, config: LoraConfig, base: str) -> None:
    """Put fresh adapters into a model whose weights are frozen; they start as no change and are float32.

    Args:
        base: path of the model, noted in adapter_config.json.

    Raises:
        ConfigError: peft is missing, the base is adapters itself, or as `target_names`.
    """
    peft = _peft()
    refuse_adapted(base)
    inner = _inner(model)
    targets = target_names(inner, model.head_weight, config)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with said_as(ConfigError, f"model.lora.target_modules={config.target_modules}", ValueError):
        peft.inject_adapter_in_model(settings, inner, adapter_name=ADAPTER)
    for name, parameter in inner.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
    for _, layer in _lora_layers(inner):
        layer.forward = partial(_forward, layer)
    model.lora_settings = settings


def _forward(layer: Any, x: Tensor) -> Tensor:
    """In place of peft's own, which multiplies adapters in float32, as slow on a GPU as all the rest of the layer."""
    return adapted_linear(x, layer) if computes_here(layer) else type(layer).forward(layer, x)


def is_adapter(name: str) -> bool:
    """Whether a weight of this published name is an adapter's; these are float32."""
    return ".lora_" in name


def has_adapters(model: Any) -> bool:
    """Whether `add_adapters` was called on it."""
    return hasattr(model, "lora_settings")


@contextmanager
def adapters_disabled(model: Any) -> Iterator[None]:
    """The model without its adapters: the reference policy."""
    layers = [module for _, module in _lora_layers(_inner(model))]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _lora_layers(inner: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, m) for name, m in inner.named_modules() if is_adapted(m))


def adapter_weights(model: GPT | HFModel) -> dict[str, Adapter]:
    """The adapters of a policy, unmerged and not copied, by the Hugging Face name of the weight that each adds to.

    Merged into bfloat16 weights, an update smaller than half a step of their grid would be lost: an engine that takes
    adapters adds them to the layer's output instead. Empty where the model has none.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> adapter_weights(new_gpt(vocab_size=11, layers=1, hidden=32, heads=1))
        {}
    """
    return {
        f"{name}.weight": Adapter(
            module.lora_A[ADAPTER].weight.detach(),
            module.lora_B[ADAPTER].weight.detach(),
            module.scaling[ADAPTER],
        )
        for name, module in _lora_layers(_inner(model))
    }


def adapter_state(model: Any) -> dict[str, Tensor]:
    """The adapters' weights under the names that peft writes; not copied."""
    inner = _inner(model)
    own = {name: weight for name, weight in inner.named_parameters() if is_adapter(name)}
    state = _peft().get_peft_model_state_dict(inner, own, adapter_name=ADAPTER)
    return {f"base_model.model.{name}": tensor.detach() for name, tensor in state.items()}


def save_adapters(model: Any, folder: str | Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors as peft does; the latter's header says for which base, if
    that is at hand, and how it was quantised, if it was."""
    from safetensors.torch import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in adapter_state(model).items()}
    header = {"format": "pt"}
    with suppress(ConfigError):
        header[BASE] = _identity(model.lora_settings.base_model_name_or_path)
    if (layer := next(quantized_layers(model), None)) is not None:
        header |= {QUANTIZATION: layer.kind, QUANTIZED_FROM: str(layer.dtype).removeprefix("torch.")}
    (folder / ADAPTER_FILE).write_bytes(_in_order(save(state, metadata=header)))
    model.lora_settings.save_pretrained(str(folder))


def _in_order(data: bytes) -> bytes:
    """A safetensors file with its metadata sorted: their order is another one in each process, so that the files of
    equal adapters would differ."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    assert len(text) == size, "the same keys and values in another order"
    return data[:8] + text + data[8 + size :]


@dataclass(frozen=True)
class MergeError:
    """What merging does to the weights of the adapted layers, each relative to their size."""

    quantization: str | None
    """Of the base under which the adapters were trained."""
    of_base: float
    """By how much the weights of the quantised base, which the merged model keeps, differ from the base's own."""
    added: float
    """The adapters' part."""
    rounding: float
    """What is lost in the dtype that is written."""


def merge_adapters(inner: Any, folder: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, MergeError]:
    """A transformers model with the adapters of a folder, which `save_adapters` or peft wrote, added to its weights.

    Where they were trained on a quantised base, they are added to its weights: those are the policy.

    Args:
        inner: the base, in float32.
        folder: of the adapters.
        dtype: what the error of rounding is stated for; the model stays in float32.

    Raises:
        ConfigError: peft is missing, or they are damaged or do not fit the model.
    """
    message, kind, of_base = f"the adapters in {folder} do not fit their base model", None, 0.0
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    if (file := Path(folder) / ADAPTER_FILE).is_file():
        with said_as(ConfigError, message, OSError, SafetensorError):
            header = _header(file)
        if (kind := header.get(QUANTIZATION)) is not None:
            trained_in = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(header.get(QUANTIZED_FROM, ""))
            if kind not in get_args(Quantization) or trained_in is None:
                raise ConfigError(f"{file}: its header has a {QUANTIZATION} or {QUANTIZED_FROM} that is not known here")
            of_base = round_as_quantized(inner, inner.get_output_embeddings().weight, kind, trained_in)
    with said_as(ConfigError, message, ValueError, RuntimeError, OSError, KeyError):
        model = _peft().PeftModel.from_pretrained(inner, folder)
        if head is not None and head.weight is embedding.weight:
            _refuse_tied(inner, embedding.weight, folder)
        error = MergeError(kind, of_base, *_merge_error(model, dtype))
        return model.merge_and_unload(), error


def _refuse_tied(inner: nn.Module, embedding: Tensor, folder: str | Path) -> None:
    """Raise ConfigError where adapters, or modules trained beside them, are of an output matrix or embedding that are
    one: added to it they would change both."""
    for name, module in inner.named_modules():
        base = getattr(module, "base_layer", getattr(module, "original_module", None))
        if getattr(base, "weight", None) is embedding:
            raise ConfigError(
                f"the adapters in {folder} change {name}, and in their base model embedding and output matrix are one "
                "(tie_word_embeddings): merged, they would change both. Take adapters of the layers between, or of "
                "a base whose output matrix is its own"
            )


@cache
def _identity(base: str | Path) -> str:
    # Once in a process: it reads megabytes, and is noted in every checkpoint.
    from atomrl.models import loading

    return model_identity(loading.resolve_folder(loading.base_path(base)))


def _header(file: Path) -> dict[str, Any]:
    """What is noted in a file of adapters."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        return stored.metadata() or {}


@torch.no_grad()
def _merge_error(model: nn.Module, dtype: torch.dtype) -> tuple[float, float]:
    """Norms of what adapters add, and of what rounding their sums changes, by that of the weights."""
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
        adapter_folder: holds adapter_config.json and adapter_model.safetensors.
        folder: where the merged model goes, in float32 or the dtype that the base's files have.
        base: the base model; None takes the one that adapter_config.json names.
        trust_remote_code: whether code beside the base may run.

    Returns:
        How far the written weights are from those that were trained.

    Raises:
        ConfigError: as `merge_adapters`.
    """
    from atomrl.models import loading

    base = base or loading.adapted_path(adapter_folder) or adapter_folder
    stored = loading.model_config_only(base, trust_remote_code).dtype or torch.float32
    inner = loading.load_transformers(base, torch.float32, trust_remote_code)
    merged, error = merge_adapters(inner, adapter_folder, stored)
    file = Path(adapter_folder) / ADAPTER_FILE
    trained_on = _header(file).get(BASE) if file.is_file() else None
    if trained_on not in (None, _identity(base)):
        log.warning(
            "%s: its files are not those that the adapters in %s were trained on; unless it is the same model written "
            "anew, what is exported is another policy",
            base, adapter_folder,
        )  # fmt: skip
    own = Path(adapter_folder) if (Path(adapter_folder) / "tokenizer_config.json").is_file() else base
    loading.save_model(HFModel(merged), loading.load_tokenizer(own, trust_remote_code, base), folder, dtype=stored)
    return error
