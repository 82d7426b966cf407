"""Load and save models and tokenizers in Hugging Face layout; read configs without weights; import nanoGPT."""

import copy
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from atomrl.common.chat_template import stop_tokens
from atomrl.common.errors import nearest, reraise_as
from atomrl.config import ConfigError, LoraConfig, Quantization
from atomrl.models import lora as adapters
from atomrl.models.adapted import is_added
from atomrl.models.decoder_spec import fitting_weights, unsupported
from atomrl.models.gpt import GPT
from atomrl.models.older_readers import make_readable
from atomrl.models.published import published_weights
from atomrl.models.quantized import quantize
from atomrl.models.shapes import auto_class, check_fields, check_sizes, text_config, tower_weights
from atomrl.models.transformers_model import HFModel, check_causal, rounded_to, switch_dropout_off

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
CLASSIFIER = "ForSequenceClassification"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Settings of what turns pictures into the input of a vision tower."""


Policy = GPT | HFModel
AnyGPT = TypeVar("AnyGPT", bound=GPT)


def compute_dtype(name: str | torch.dtype, device: str | torch.device = "cpu") -> torch.dtype:
    """Resolve `model.dtype`: `auto` and `bfloat16` are bfloat16 on devices with bfloat16 instructions, else float32.

    A CPU without them is several times slower in bfloat16 than in float32 (docs/development/benchmarks/training.md), so
    `bfloat16` then gives a warning. A `torch.dtype` is returned as it is.

    Example:
        >>> compute_dtype("float32")
        torch.float32
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"model.dtype={name!r} is not one of auto, float32, bfloat16")
    if name == "float32" or has_bfloat16(torch.device(device).type):
        return torch.float32 if name == "float32" else torch.bfloat16
    if name == "bfloat16":
        _warn_bfloat16(str(device))
    return torch.float32


def has_bfloat16(device_type: str) -> bool:
    """Return True if a type of device has bfloat16 instructions."""
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    has = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    # oneDNN may be limited to older instructions (ONEDNN_MAX_CPU_ISA=AVX2), and then rejects bfloat16 weights.
    return bool(has and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _warn_bfloat16(device: str) -> None:
    log.warning("model.dtype=bfloat16: %s has no bfloat16 instructions and is faster in float32", device)


def adapted_path(path: str | Path) -> str | None:
    """Return the base model that the adapters in a folder name; None if the folder has a full model.

    The base may be a folder with adapters itself.

    Raises:
        ConfigError: the adapters name no base model.
    """
    if not (settings := _adapter_settings(path)):
        return None
    if not (base := settings.get("base_model_name_or_path")):
        file = Path(path) / "adapter_config.json"
        raise ConfigError(f"{file} has no base_model_name_or_path: write the path of the base model there")
    revision = settings.get("revision")
    return f"{base}@{revision}" if revision and not Path(str(base)).is_dir() else str(base)


def _adapter_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings of the adapters in a folder; empty if it has a full model."""
    settings = Path(path) / "adapter_config.json"
    if not settings.is_file() or (Path(path) / "config.json").is_file():
        return {}
    with reraise_as(ConfigError, f"{settings} is not readable as a JSON object", OSError, ValueError):
        read = json.loads(settings.read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            raise ValueError(f"a {type(read).__name__}")
    return read or {"base_model_name_or_path": None}


def base_path(path: str | Path) -> str:
    """Return the full model beneath the adapters in a folder; `path` itself if it is one.

    Raises:
        ConfigError: the adapters name themselves as their base, directly or through others.
    """
    passed: list[Path] = []
    while (beneath := adapted_path(path)) is not None:
        if (folder := Path(path).resolve()) in passed:
            raise ConfigError(
                f"the adapters in {folder} are their own base: write the path of a full model into "
                f"base_model_name_or_path of {folder / 'adapter_config.json'}"
            )
        passed.append(folder)
        path = beneath
    return str(path)


class ModelNotHere(ConfigError):
    """A model with a hub name is not on this machine, and could not be downloaded."""


def resolve_folder(path: str | Path, weights: bool = True) -> Path:
    """Return the folder of a model: `path` itself, or the snapshot of a hub name, downloaded if it is not cached.

    Args:
        path: a folder, a hub name, or `OWNER/NAME@REVISION`, of a branch, tag or commit of the hub.
        weights: download the weights, too.

    Raises:
        ConfigError: the folder has neither config.json nor adapter_config.json, or `path` is not a folder and cannot be
            downloaded.
    """
    folder = Path(path)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            run = f"; it is a run, and its model is {folder / 'model'}" if (folder / "model").is_dir() else ""
            raise ConfigError(f"model folder {folder} has no config.json{run}")
        return folder
    if folder.is_absolute() or str(path).startswith((".", "~")) or str(path).partition("@")[0].count("/") > 1:
        raise ConfigError(f"model folder {path} does not exist ({_looked_in(folder)})")
    try:
        return _downloaded(str(path), weights)
    except Exception as error:  # the hub client raises many kinds
        raise ModelNotHere(
            f"model {str(path)!r} is not a folder on this machine ({_looked_in(folder)}), and downloading it from the "
            f"Hugging Face hub failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. "
            "Correct the name, or give a folder that has the model (for a plan, its config.json is enough)"
        ) from None


def _looked_in(folder: Path) -> str:
    """Return the absolute path of an absent folder, and the existing folder whose path is most similar."""
    place, near = f"looked in {folder.absolute()}", Path(folder.anchor)
    with suppress(OSError):  # a folder on the way is not readable
        for part in folder.relative_to(folder.anchor).parts:
            if (near / part).is_dir():
                near /= part
            elif similar := nearest(part, (each.name for each in near.iterdir() if each.is_dir())):
                near /= similar
            else:
                break
    return place if near in (Path(folder.anchor), *folder.parents) else f"{place}; did you mean {str(near)!r}?"


@cache
def _downloaded(name: str, weights: bool) -> Path:
    """Download the snapshot of a hub name, once per process; without a network, return the cached one."""
    from huggingface_hub import snapshot_download

    # Includes the model's own code, which runs only with model.trust_remote_code=true.
    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"] + (["*.safetensors"] if weights else [])
    repository, _, revision = name.partition("@")
    return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))


def model_config_only(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the transformers config of a model without its weights; for adapters, that of their base model, and if they
    have a score head, as a sequence classifier.

    Raises:
        ConfigError: as `resolve_folder`, or transformers does not know the model.
    """
    from transformers import AutoConfig

    folder = resolve_folder(base_path(path), weights=False)
    if (folder / "config.json").is_file():
        check_fields(folder)
    # transformers' validators raise errors of their own kind, and a package that is missing an ImportError.
    with reraise_as(ConfigError, f"config of model {path}", Exception):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    check_sizes(config, path)
    if _adapter_settings(path).get("task_type") == "SEQ_CLS":
        _make_classifier(config, Path(path))
    return config


def _make_classifier(config: Any, adapters: Path) -> None:
    """Change the config of a base model into that of a reward model, whose score head is among its adapters."""
    if not any(name.endswith(CLASSIFIER) for name in config.architectures or ()):
        family = (config.architectures or ["LlamaForCausalLM"])[0].partition("For")[0]
        config.architectures, config.num_labels = [family + CLASSIFIER], 1
    if (adapters / "tokenizer_config.json").is_file():  # the last token is found by the padding token of the training
        text_config(config).pad_token_id = load_tokenizer(adapters).pad_token_id


def load_policy(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    lora: LoraConfig | None = None,
    quantization: Quantization | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    trainable: bool = True,
    freeze_vision: bool = True,
) -> Policy:
    """Load a causal language model for training: a `GPT` if it supports the family, else an `HFModel` with a warning.

    Args:
        dtype: dtype of the forward pass (`compute_dtype`) and of frozen weights. Trained weights are float32.
        lora: add low-rank adapters; only they and `modules_to_save` are trained. The model's own dropout is off.
        quantization: quantize the base beneath the adapters, from weights in `dtype`.
        trainable: False: all weights are in `dtype`, without gradient.
        freeze_vision: leave a vision tower as it is.

    Raises:
        ConfigError: the model does not exist, or its files do not fit its config.
    """
    from transformers import GenerationConfig

    # Trained weights are float32 and rounded in each forward pass; frozen ones are stored in that dtype.
    config = model_config_only(path, trust_remote_code)
    check_causal(config, path)
    compute = compute_dtype(dtype, device)
    weight_dtype = torch.float32 if trainable and lora is None else compute
    whole = lora is not None and bool(lora.modules_to_save)  # their masters are float32 in a model that is not
    rounded = compute if compute != weight_dtype or (whole and compute != torch.float32) else None
    reason = unsupported(config)
    if reason is None:
        policy: Policy = load_decoder(
            GPT, path, config, read_weights(path, trust_remote_code=trust_remote_code), weight_dtype
        )
        policy.compute_dtype = rounded
        if (folder := resolve_folder(base_path(path), weights=False) / "generation_config.json").is_file():
            policy.generation_config = GenerationConfig.from_pretrained(folder.parent)
    else:
        log.warning("%s is trained with transformers, not the faster built-in decoder: %s", path, reason)
        if whole and rounded is not None:
            raise ConfigError(
                f"model.lora.modules_to_save: {path} is trained with transformers ({reason}), which needs "
                "model.dtype=float32 for it"
            )
        inner = load_transformers(path, weight_dtype, trust_remote_code)
        inner.config.use_cache = False
        policy = HFModel(inner, rounded)
        policy.check()
        if freeze_vision and (tower := freeze_tower(inner)):
            log.info("%s: %d weights of its vision tower are not trained, and saved as they are", path, tower)
    # Quantize layer by layer before the move, so that the GPU never holds all full weights.
    if quantization is not None:
        quantize(getattr(policy, "inner", policy), policy.head_weight, quantization, torch.device(device))
    for parameter in policy.parameters():
        if parameter.device.type == "cpu":  # a view of the mapped file, and a single one would keep all of it mapped
            parameter.data = parameter.data.to(device, copy=True)
    policy.to(device)
    if lora is not None or not trainable:
        policy.requires_grad_(False)
    if lora is not None:
        adapters.add_adapters(policy, lora, base=str(path))
    return policy


def freeze_tower(inner: Any) -> int:
    """Freeze the weights that text does not use; return their number."""
    tower = tower_weights(inner)
    for name in tower:
        inner.get_parameter(name).requires_grad_(False)
    return len(tower)


def load_decoder(
    kind: type[AnyGPT], path: str | Path, config: Any, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> AnyGPT:
    """Create a decoder on the meta device and assign it these weights, so that memory is used once.

    Raises:
        ConfigError: the weights do not fit the config.
    """
    with torch.device("meta"):
        model = kind(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    what = f"the weights in {path} do not fit its config.json"
    state = fitting_weights(weights, shapes, {"lm_head.weight"} if model.spec.tied_head else (), what)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, assign=True)
    return model.requires_grad_(True)


def load_transformers(
    path: str | Path, dtype: torch.dtype, trust_remote_code: bool = False, scalar: bool = False
) -> Any:
    """Load a transformers model, with adapters merged and dropout switched off.

    Args:
        scalar: load a sequence classifier with one label; False: a causal language model.

    Raises:
        ConfigError: the model does not exist or is of another kind, or its files are damaged or do not fit its config.
    """
    from transformers import AutoModelForSequenceClassification

    base_path(path)  # raises if adapters are their own base
    if (beneath := adapted_path(path)) is not None:
        # Merged in float32 and rounded once, as a policy with float32 weights is: policy and reference are then equal.
        wide = load_transformers(beneath, torch.float32, trust_remote_code, scalar)
        return rounded_to(adapters.merge_adapters(wide, path)[0], dtype)
    shape: Any = model_config_only(path, trust_remote_code)
    auto: Any = AutoModelForSequenceClassification if scalar else auto_class(shape)
    if scalar:
        shape.num_labels = 1
    else:
        check_causal(shape, path)
    folder = resolve_folder(path)
    stored_files(folder)
    if (folder / INDEX).is_file():
        shape.transformers_weights = INDEX  # by default, a model.safetensors beside the index would be loaded
    with reraise_as(ConfigError, f"transformers cannot load {folder}", ValueError, OSError, RuntimeError):
        inner = auto.from_pretrained(folder, config=shape, dtype=dtype, trust_remote_code=trust_remote_code)
    switch_dropout_off(inner)
    return inner


def stored_files(folder: str | Path) -> list[Path]:
    """Return the safetensors files of a model, after checking their headers.

    They are those in the index; without an index, model.safetensors, or else all *.safetensors.

    Raises:
        ConfigError: a file is missing, damaged or cut short.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / name for name in sorted(set(names))]
    else:
        files = list(folder.glob("model.safetensors")) or sorted(folder.glob("*.safetensors"))
    for file in files:
        message = f"{file} is missing, damaged or cut short; copy or download it again"
        with reraise_as(ConfigError, message, SafetensorError, OSError), safe_open(file, framework="pt"):
            pass
    return files


def read_safetensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every weight in a folder's `stored_files`, one at a time."""
    from safetensors import safe_open

    for file in stored_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                yield name, tensors.get_tensor(name)


def read_weights(
    path: str | Path, scalar: bool = False, trust_remote_code: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Read the weights of a model by their published names, with adapters merged. Engines and back ends use this.

    Args:
        scalar, trust_remote_code: as in `load_transformers`.

    Raises:
        ConfigError: a file is damaged, or the adapters cannot be merged.
    """
    if adapted_path(path) is None and stored_files(folder := resolve_folder(path)):
        return read_safetensors(folder)
    model = load_transformers(path, torch.float32, trust_remote_code, scalar)  # adapters, or *.bin files
    return iter(published_weights(model).items())


@torch.no_grad()
def fill_weights(own: Mapping[str, Tensor], folder: str | Path) -> None:
    """Load weights or adapters from a folder into tensors of a model, in place.

    Raises:
        ConfigError: the folder has the weights of another model.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    what = f"checkpoint {folder} is of another model"
    for name, tensor in fitting_weights(read_safetensors(folder), shapes, what=what).items():
        own[name].copy_(tensor)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False, model: str | Path | None = None) -> Any:
    """Load a tokenizer; its pad token defaults to the end-of-sequence token, and that one to the model config's.

    Args:
        path: folder or hub name of a model or tokenizer.
        model: model that it is used with; None: the one in the same folder, if any.

    Raises:
        ConfigError: the model or tokenizer does not exist, or the model has no embeddings for some tokens.
    """
    from transformers import AutoTokenizer

    own = any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    folder = Path(path) if own else resolve_folder(base_path(path), weights=False)
    if not any(file for pattern in ("tokenizer*", "*.model", "vocab*") for file in folder.glob(pattern)):
        raise ConfigError(
            f"model {path} has no tokenizer: copy its files into the folder, or set another one in model.tokenizer"
        )  # transformers would create an empty one
    message = f"model {path} has no tokenizer that transformers can load"
    with reraise_as(ConfigError, message, ValueError, OSError, KeyError):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if model is not None or (folder / "config.json").is_file():
        _fit_tokenizer(tokenizer, model_config_only(model or path, trust_remote_code), f"{path}", f"{model or path}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _fit_tokenizer(tokenizer: Any, config: Any, path: str, model: str) -> None:
    """Take a missing end-of-sequence token from the model's config; check that every token has an embedding."""
    text = text_config(config)
    size, end = getattr(text, "vocab_size", None), getattr(text, "eos_token_id", None)
    if tokenizer.eos_token_id is None and isinstance(end, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    named = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    spare = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special} - named  # Gemma 3 has one
    beyond = [token for token, id in tokenizer.get_vocab().items() if size and id >= size and id not in spare]
    if beyond:
        raise ConfigError(
            f"the tokenizer of {path} has {len(beyond)} tokens (such as {beyond[0]!r}) beyond the {size} embeddings of "
            f"{model}: use the model's own tokenizer, or resize its embeddings (transformers' resize_token_embeddings)"
        )


def model_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its published name (`published_weights`), adapters left out; without gradient, not copied.

    Args:
        model: a policy, critic or reward model.
    """
    inner = getattr(model, "inner", None)
    state = (model if inner is None else inner).state_dict().items()
    weights = ((name.replace(".base_layer.", "."), tensor) for name, tensor in state if not is_added(name))
    return weights if inner is None else iter(published_weights(inner, weights).items())


def save_model(
    model: Any, tokenizer: Any, folder: str | Path, dtype: torch.dtype | None = None, **settings: Any
) -> None:
    """Save config, weights (safetensors) and tokenizer for transformers and serving engines; without adapters.

    Args:
        model: a policy, critic or reward model.
        tokenizer: None: not saved.
        dtype: dtype of the saved weights; None: unchanged.
        settings: fields of the saved config that differ from the model's.
    """
    from huggingface_hub import save_torch_state_dict

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = own_memory({name: tensor.to(dtype or tensor.dtype) for name, tensor in model_weights(model)})
    save_torch_state_dict(state, folder, metadata={"format": "pt"})
    save_settings(model, tokenizer, folder, next(iter(state.values())).dtype, **settings)


def own_memory(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors that use only a part of their storage, as safetensors requires."""
    state = {name: tensor.contiguous() for name, tensor in weights.items()}
    return {name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for name, t in state.items()}


def save_settings(model: Any, tokenizer: Any, folder: str | Path, dtype: torch.dtype, **settings: Any) -> None:
    """Save config, generation config, tokenizer, processor and the model's own code; arguments as for `save_model`."""
    from transformers import PreTrainedModel
    from transformers.dynamic_module_utils import custom_object_save

    config = model.config.__class__.from_dict(model.config.to_dict())
    inner = getattr(model, "inner", model)
    if not config.architectures and isinstance(inner, PreTrainedModel):
        config.architectures = [type(inner).__name__]  # by which serving engines choose the class
    for name, value in {"use_cache": True, **settings, "dtype": dtype}.items():
        setattr(config, name, value)
    for part in (config, tokenizer, _generation_config(model, config, tokenizer)):
        if part is not None:
            part.save_pretrained(folder)
    if model.config._name_or_path:
        copy_processor(model.config._name_or_path, folder)
    make_readable(folder)
    for kind in type(getattr(model, "inner", model)).__mro__:
        if vars(kind).get("_auto_class"):  # the model's own code; config and tokenizer have saved theirs
            custom_object_save(kind, folder)


def copy_processor(source: str | Path, folder: str | Path) -> None:
    """Copy the settings of a model's processor of pictures, if its folder has them."""
    for name in PROCESSOR_FILES:
        if (file := Path(source) / name).is_file() and Path(source).resolve() != Path(folder).resolve():
            shutil.copyfile(file, Path(folder) / name)


def _generation_config(model: Any, config: Any, tokenizer: Any) -> Any:
    """Return the model's generation config with all tokens that end a completion; None if there is nothing to save.

    So serving engines stop where the model learned to end.
    """
    from transformers import GenerationConfig

    own, architecture = model.generation_config, str((config.architectures or [""])[0])
    if tokenizer is None or architecture.endswith("Classification"):
        return own
    ends = stop_tokens(tokenizer, config, own)
    written = GenerationConfig.from_model_config(config) if own is None else copy.deepcopy(own)
    before, written.eos_token_id = written.eos_token_id, ends[0] if len(ends) == 1 else list(ends) or None
    return None if own is None and before == written.eos_token_id else written
