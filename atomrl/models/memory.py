"""What a model's parts take of memory, from its config alone; and how much this process has."""

import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from atomrl.common.metrics import Max, Metrics
from atomrl.models.gpt import BMM_MAX_TOKENS
from atomrl.models.loading import model_config_only

# --------------------------------------------------------------------------------------------------------------------
# Shapes of well-known models, for planning a run without a network, weights or a GPU.

_SUFFIXES = ("-Instruct", "-it", "-pt", "-Base", "-SFT", "-DPO")


@cache
def _table() -> dict[str, dict[str, Any]]:
    """By the repository's name in lower case: `model_type` and fields of the transformers config."""
    read = yaml.safe_load((files("atomrl.models") / "known_shapes.yaml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for entry in read["models"]:
        kind, names = entry.pop("type"), entry.pop("names")
        sizes = dict(zip(read["columns"], entry.pop("shape"), strict=True))
        fields = {"model_type": kind, **read["families"].get(kind, {}), **sizes, **entry}
        found |= {name.lower(): fields for name in names}
    return found


def known_shape(path: str | Path) -> Any | None:
    """The transformers config of a well-known model by its hub name; None where it is not in the table.

    Instruction-tuned variants share the shape of their base model. Token ids and RoPE settings are not those of the
    hub: it is for counting parameters and memory, never for computing.

    Example:
        >>> known_shape("Qwen/Qwen2.5-7B-Instruct").hidden_size
        3584
    """
    from transformers import AutoConfig

    name = str(path).lower()
    names = [name, *(name.removesuffix(suffix.lower()) for suffix in _SUFFIXES)]
    fields = next((_table()[candidate] for candidate in names if candidate in _table()), None)
    if fields is None:
        # Mistral's instruction-tuned versions carry the word in the middle of the name
        fields = _table().get(name.replace("-instruct-", "-"))
    if fields is None:
        return None
    return AutoConfig.for_model(**fields)


def planning_shape(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The config of a model to plan with: of a folder its own, of a well-known hub name the table's, else the hub's.

    Raises:
        ConfigError: the model is in no folder, not in the table, and the hub does not give it.
    """
    if not Path(path).is_dir() and (shape := known_shape(path)) is not None:
        return shape
    return model_config_only(path, trust_remote_code)


FLOAT32 = 4
MOST_TOKENS = 16384
"""Tokens of a micro-batch beyond which more are not faster on a GPU."""
_counted: dict[str, int] = {}
"""Parameters by config: a dry run asks for those of one model again and again."""
QUANTIZED = {"nf4": 0.5 + 1 / 64 + FLOAT32 / (64 * 256), "int8": 1.0}
"""Bytes of a weight of a quantised base: codes, a scale for each 64 and a scale for each 256 of those."""
BESIDE = "in the CPU's memory"
"""Of a rank whose shards lie there; no part of its device's total."""
SHARDED = ("trainer weights", "optimizer", "gradients", "reference", "teacher", "critic")
"""Parts of a run's memory of which ranks have a share each."""


@dataclass(frozen=True)
class Sizes:
    """What of the policy a back end of several ranks shares out."""

    shape: Any
    """Its transformers config."""
    total: int
    """Its parameters."""
    trained: int
    """As many: all of them, or those of adapters."""
    compute: int
    """Bytes of a number in the forward pass."""
    kept: float
    """Bytes of a weight of a layer as it lies in the trainer, and travels between ranks."""


def count_parameters(config: Any, trust_remote_code: bool = False) -> int:
    """Parameters of a model of this transformers config.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> count_parameters(new_gpt(vocab_size=64, layers=2, hidden=64, heads=2, kv_heads=1).config)
        102720
    """
    known = _counted.get(text := config.to_json_string(use_diff=False))
    if known is None:
        known = _counted[text] = sum(weight.numel() for weight in empty_model(config, trust_remote_code).parameters())
    return known


def empty_model(config: Any, trust_remote_code: bool = False) -> Any:
    """The model of a transformers config, without memory for weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def adapter_parameters(config: Any, rank: int) -> int:
    """Parameters of adapters on every linear layer of a Llama or Qwen model."""
    hidden, query, keys, inner = widths(config)
    ends = 2 * (hidden + query) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return int(config.num_hidden_layers) * rank * ends


def activation_bytes_per_token(
    config: Any, row_tokens: int, size: int, on_cpu: bool, tensor: int = 1
) -> tuple[int, int]:
    """What one layer keeps of a token for its backward pass, and what checkpointing keeps of it instead.

    Counted off `gpt.Layer`: the residual stream and its norm, twice; queries and mixed values; keys and values; gate,
    up and their product; with explicit products also the attention of each head to each token. All but the residual
    stream and its norms is shared by ranks that share the layer's matrices.
    """
    hidden, query, keys, inner = widths(config)
    attention = config.num_attention_heads * row_tokens if on_cpu and row_tokens <= BMM_MAX_TOKENS else 0
    return size * (4 * hidden + (2 * query + 2 * keys + 3 * inner + attention) // tensor), size * hidden


def tokens_without_gradient(config: Any, tokens: int, size: int, checkpointed: bool) -> int:
    """Tokens of a micro-batch without gradient, which holds one layer at a time: as many as take no more memory than
    `tokens` do in an update, up to `MOST_TOKENS`, and never fewer.

    Args:
        config: the model's transformers config.
        tokens: of a micro-batch of an update.
        size: bytes of a number in the forward pass.
        checkpointed: an update keeps the layers' inputs alone.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> config = new_gpt(vocab_size=64, layers=8, hidden=64, heads=2).config
        >>> tokens_without_gradient(config, 1024, 2, False), tokens_without_gradient(config, 1024, 2, True)
        (8192, 1505)
        >>> tokens_without_gradient(config, 32768, 2, True)
        32768
    """
    layer, checkpoint = activation_bytes_per_token(config, 1, size, on_cpu=False)
    layers = int(config.num_hidden_layers)
    kept = layer + layers * checkpoint if checkpointed else layers * layer
    return max(tokens, min(MOST_TOKENS, tokens * kept // layer))


def critic_parameters(config: Any, trust_remote_code: bool = False) -> int:
    """Parameters of a critic: a decoder with one number in the place of the output matrix."""
    output = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return count_parameters(config, trust_remote_code) - output + int(config.hidden_size)


def ends(config: Any) -> int:
    """Numbers of embedding and output matrix."""
    return int(config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2))


def uncut(config: Any) -> int:
    """Numbers of what ranks that share each layer's matrices all have: embedding, output matrix and norms."""
    return ends(config) + int((2 * config.num_hidden_layers + 1) * config.hidden_size)


def widths(config: Any) -> tuple[int, int, int, int]:
    """Widths of the residual stream, of all query heads, of all key heads, and of the MLP."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if experts := getattr(config, "moe_intermediate_size", None):
        inner = config.num_experts_per_tok * experts
    return config.hidden_size, heads * size, kv_heads * size, inner


def adapters_of_rank(config: Any, trained: int, tensor: int) -> int:
    """Of so many numbers of adapters, those of a rank: a part of one of an adapter's matrices, and all of the other,
    which is as wide as the residual stream."""
    hidden, query, keys, inner = widths(config)
    cut = 2 * query + 2 * keys + 3 * inner
    return trained * (7 * hidden + cut // tensor) // (7 * hidden + cut)


def expert_parameters(config: Any) -> int:
    """Of all experts of a layer."""
    width = getattr(config, "moe_intermediate_size", None)
    return 0 if width is None else 3 * int(config.num_experts * config.hidden_size * width)


def process_memory(which: Literal["VmRSS", "VmHWM"]) -> int:
    """Bytes of this process in memory, by Linux's names: now, or at most so far. Elsewhere the latter, by getrusage."""
    try:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_metrics() -> Metrics:
    """What this process has, under verl's names, in GiB: in the machine's memory now; and where it uses a GPU, the most
    that was in use there, and kept by the allocator, since this was last asked. Nothing waits for the GPU.

    Example:
        >>> memory_metrics()["perf/cpu_memory_used_gb"].value > 0
        True
    """
    found = {"perf/cpu_memory_used_gb": process_memory("VmRSS")}
    if torch.cuda.is_initialized():
        found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated()
        found["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    return {name: Max(size / 2**30) for name, size in found.items()}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of a GPU or of the machine.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
        True
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # cuBLAS has a message of its own for its workspace.
    signs = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
