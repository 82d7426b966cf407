"""Models and tokenizers in Hugging Face layout: load, save, and look at without loading."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomrl.config import ConfigError, LoraConfig
from atomrl.models import lora as adapters
from atomrl.models.gpt import GPT, unsupported

log = logging.getLogger(__name__)


class HFModel(nn.Module):
    """Any causal language model of transformers behind the two methods that training uses of `GPT`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config
        self.generation_config = inner.generation_config
        self.compute_dtype: torch.dtype | None = None
        """None computes in the dtype of the weights; another one by autocast."""

    @property
    def head_weight(self) -> Tensor:
        """[V, H]: logits are `hidden @ head_weight.T`."""
        return self.inner.get_output_embeddings().weight

    def forward_hidden(self, tokens: Tensor) -> Tensor:
        """[B, T] right-padded token ids -> hidden states after the final norm, [B, T, H]."""
        compute = self.compute_dtype
        with torch.autocast(tokens.device.type, compute, enabled=compute is not None):
            hidden = self.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden if compute is None else hidden.to(compute)  # autocast leaves a norm's output in float32

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]."""
        hidden = self.forward_hidden(tokens)
        return F.linear(hidden, self.head_weight.to(hidden.dtype))

    def check_head(self) -> None:
        """Raise where the model does more to its logits than the output matrix does."""
        tokens = torch.arange(4, device=self.head_weight.device)[None] % self.config.vocab_size
        with torch.no_grad():
            theirs, ours = self.inner(input_ids=tokens).logits, self(tokens)
        if not torch.allclose(theirs.float(), ours.float(), rtol=1e-2, atol=1e-2):
            raise ConfigError(
                f"model_type {self.config.model_type!r} changes its logits after the output matrix (a bias, a scale "
                "or a soft cap), which the chunked log-probs do not know; choose another model"
            )


Policy = GPT | HFModel


def compute_dtype(name: str | torch.dtype, device: str | torch.device = "cpu") -> torch.dtype:
    """What to compute in: `auto` and `bfloat16` are bfloat16 where the device has instructions for it, else float32.

    A CPU without them multiplies bfloat16 several times slower than float32 (docs/benchmarks/training.md), so there
    `bfloat16` is answered with a warning. A `torch.dtype` is taken as it is.

    Example:
        >>> compute_dtype("float32")
        torch.float32
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"model.dtype={name!r} is none of auto, float32, bfloat16")
    if name == "float32" or has_bfloat16(torch.device(device).type):
        return torch.float32 if name == "float32" else torch.bfloat16
    if name == "bfloat16":
        _warn_bfloat16(str(device))
    return torch.float32


def has_bfloat16(device_type: str) -> bool:
    """Whether a device multiplies bfloat16 by instructions of its own."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@cache
def _warn_bfloat16(device: str) -> None:
    log.warning("%s has no bfloat16 instructions and is faster in float32: model.dtype=bfloat16 computes that", device)


def is_local(path: str | Path) -> bool:
    """Whether the model's config is on this machine: a folder, or in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(path).is_dir():
        return (Path(path) / "config.json").is_file()
    try:
        return isinstance(try_to_load_from_cache(str(path), "config.json"), str)
    except HFValidationError:
        return False


def resolve_folder(path: str | Path, weights: bool = True) -> Path:
    """The folder of a model: `path` itself, or a hub name's snapshot, downloaded where it is not here yet.

    Raises:
        ConfigError: the folder has no config.json, or `path` is no folder and the hub does not give it.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            hint = "; it holds adapters: export them first" if (folder / "adapter_config.json").is_file() else ""
            raise ConfigError(f"model folder {folder} has no config.json{hint}")
        return folder
    if folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") > 1:
        raise ConfigError(f"model folder {path} does not exist")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "*.model"] + (["*.safetensors"] if weights else [])
    try:
        try:
            cached = Path(snapshot_download(str(path), allow_patterns=patterns, local_files_only=True))
            if _is_whole(cached, weights):
                return cached
        except Exception:  # not in the cache
            pass
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except Exception as error:  # the hub client has many, and every one means the same here
        raise ConfigError(
            f"model {str(path)!r} is no folder on this machine, and the Hugging Face hub did not give it: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from None


def _is_whole(snapshot: Path, weights: bool) -> bool:
    """Whether a folder of the hub's cache has what is wanted of it: the cache also keeps what was fetched in part."""
    if not (snapshot / "config.json").is_file() or not any(snapshot.glob("tokenizer*")):
        return False
    index = snapshot / "model.safetensors.index.json"
    if weights and index.is_file():
        parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return all((snapshot / part).is_file() for part in parts)
    return not weights or any(file.suffix in (".safetensors", ".bin") for file in snapshot.iterdir())


def model_config_only(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The transformers config of a model, without its weights.

    Raises:
        ConfigError: as `resolve_folder`, or transformers does not know the model.
    """
    from transformers import AutoConfig

    folder = resolve_folder(path, weights=False)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"config of model {path}: {error}") from None


def load_policy(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    lora: LoraConfig | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    trainable: bool = True,
) -> Policy:
    """A causal language model to train: `GPT` where it knows the family, else the transformers model, saying why.

    Args:
        dtype: what the forward pass computes in (`compute_dtype`). Weights that are trained are float32 in any case;
            frozen ones (with `lora`, or not `trainable`) are kept in it.
        lora: put low-rank adapters on it; only they are then trained. Their dropout is the only one: the model's own
            is switched off.
        trainable: False keeps all weights in `dtype` and without gradient.

    Raises:
        ConfigError: the model is not there, or its files do not fit its config.
    """
    config = model_config_only(path, trust_remote_code)
    folder = resolve_folder(path)
    compute = compute_dtype(dtype, device)
    weight_dtype = torch.float32 if trainable and lora is None else compute
    reason = unsupported(config) or (None if any(folder.glob("*.safetensors")) else "it has no *.safetensors file")
    if reason is None:
        policy: Policy = _load_gpt(folder, config, weight_dtype)
    else:
        log.warning("%s is trained through transformers, not the faster built-in decoder: %s", path, reason)
        policy = _load_hf(folder, weight_dtype, trust_remote_code)
    policy.compute_dtype = compute if compute != weight_dtype else None
    policy.to(device)
    if lora is not None or not trainable:
        policy.requires_grad_(False)
    if lora is not None:
        adapters.add_adapters(policy, lora, base=str(path))
    return policy


def _load_gpt(folder: Path, config: Any, dtype: torch.dtype) -> GPT:
    from transformers import GenerationConfig

    with torch.device("meta"):
        model = GPT(config)
    state = {name: tensor.to(dtype) for name, tensor in read_safetensors(folder) if "rotary_emb" not in name}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ConfigError(f"the weights in {folder} do not fit its config.json: {error}") from None
    model.requires_grad_(True)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _load_hf(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> HFModel:
    from transformers import AutoModelForCausalLM

    try:
        inner = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise ConfigError(f"transformers cannot load {folder}: {error}") from None
    inner.config.use_cache = False
    switch_dropout_off(inner)
    model = HFModel(inner)
    model.check_head()
    return model


def switch_dropout_off(inner: nn.Module) -> None:
    """The policy that is trained must be the one that sampled, and that had none; the config keeps its values."""
    for module in inner.modules():
        names = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        for name in [*names, *(["p"] if isinstance(module, nn.Dropout) else [])]:
            setattr(module, name, 0.0)


def read_safetensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight: of model.safetensors, its numbered parts, or whatever *.safetensors there is."""
    from safetensors import safe_open

    folder = Path(folder)
    files = list(folder.glob("model.safetensors")) or list(folder.glob("model-*-of-*.safetensors"))
    for file in sorted(files or folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                yield name, tensors.get_tensor(name)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer, with a pad token: the end-of-sequence token where it has none of its own.

    Raises:
        ConfigError: the model or its tokenizer is not there.
    """
    from transformers import AutoTokenizer

    own = any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    folder = Path(path) if own else resolve_folder(path, weights=False)  # a tokenizer needs no model beside it
    if not any(file for pattern in ("tokenizer*", "*.model", "vocab*") for file in folder.glob(pattern)):
        raise ConfigError(f"model {path} has no tokenizer")  # transformers would make up an empty one
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model {path} has no tokenizer that transformers can load: {error}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def policy_weights(model: Policy) -> Iterator[tuple[str, Tensor]]:
    """Every weight, adapters merged, named as in the Hugging Face state dict; without gradient, not copied."""
    return adapters.merged_weights(model.inner if isinstance(model, HFModel) else model)


def save_model(model: Policy, tokenizer: Any, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a folder that transformers and serving engines load: config, safetensors, tokenizer; adapters merged.

    Args:
        tokenizer: None leaves it out.
        dtype: of the written weights; None keeps theirs.
    """
    from huggingface_hub import save_torch_state_dict

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in policy_weights(model)}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_torch_state_dict(state, folder, metadata={"format": "pt"})
    config = model.config.__class__.from_dict(model.config.to_dict())
    config.dtype = next(iter(state.values())).dtype
    config.use_cache = True
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
