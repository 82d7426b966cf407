"""How much memory a run will take, from its config and the model's config alone; and how much this process has."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from atomrl.atoms.distillation import DIVERGENCE_ELEMENTS
from atomrl.atoms.logprobs import CHUNK_ELEMENTS
from atomrl.config import FSDPConfig, MegatronConfig, RunConfig
from atomrl.metrics import Max, Metrics
from atomrl.models.gpt import BMM_MAX_TOKENS
from atomrl.models.loading import compute_dtype, model_config_only
from atomrl.protocols import Algorithm, needs_teacher

FLOAT32 = 4
_counted: dict[str, int] = {}
"""Parameters by config: a dry run asks for those of one model again and again."""
DISTRIBUTIONS = 10
"""Numbers per logit of a chunk that a divergence of two distributions holds: its backward pass keeps seven and a
half."""
QUANTIZED = {"nf4": 0.5 + 1 / 64 + FLOAT32 / (64 * 256), "int8": 1.0}
"""Bytes of a weight of a quantised base: codes, a scale for each 64 and a scale for each 256 of those."""
MOMENTS_IN_8_BITS = 2 * (1 + FLOAT32 / 256)
"""Bytes of a weight's two moments: codes, and a scale for each 256."""


def count_parameters(config: Any, trust_remote_code: bool = False) -> int:
    """Parameters of a model of this transformers config.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> count_parameters(new_gpt(vocab_size=64, layers=2, hidden=64, heads=2, kv_heads=1).config)
        102720
    """
    from transformers import AutoModelForCausalLM

    known = _counted.get(text := config.to_json_string(use_diff=False))
    if known is None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        known = _counted[text] = sum(parameter.numel() for parameter in model.parameters())
    return known


def adapter_parameters(config: Any, rank: int) -> int:
    """Parameters of adapters on every linear layer of a Llama or Qwen model."""
    hidden, query, keys, inner = _widths(config)
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
    hidden, query, keys, inner = _widths(config)
    attention = config.num_attention_heads * row_tokens if on_cpu and row_tokens <= BMM_MAX_TOKENS else 0
    return size * (4 * hidden + (2 * query + 2 * keys + 3 * inner + attention) // tensor), size * hidden


def memory_estimate(
    config: RunConfig, algorithm: Algorithm, ranks: int = 1, device: str | None = None
) -> dict[str, int]:
    """Bytes of each part of a run on one device, or on the first of several ranks, and their total; loads no weights.

    Activations, the log-prob chunk and the key-value cache are at their largest, for rows of full length. What torch
    itself takes is not in it. The total is of what the trainer has `at_once` and of what an engine takes besides; these
    do not peak at the same time, so it is an upper estimate.

    Args:
        config: of the run; the config.json of its model, and of teacher and critic, must be at hand.
        algorithm: what it needs is held: a frozen copy of the start, a teacher, a critic.
        ranks: of the config's `backend`.
        device: `cpu` or `cuda`; None: what this machine has.

    Raises:
        ConfigError: the model's config is not there.
    """
    model, train, rollout = config.model, config.train, config.rollout
    trusted, path = model.trust_remote_code, model.path
    assert path is not None, "of a fresh model there is no estimate"
    shape = model_config_only(path, trusted)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    there = device == "cpu" or torch.cuda.is_available()  # else it is one that knows bfloat16
    compute = compute_dtype(model.dtype, device).itemsize if there else 4 if model.dtype == "float32" else 2
    total = count_parameters(shape, trusted)
    trained = adapter_parameters(shape, model.lora.rank) if model.lora else total
    row_tokens = config.data.max_prompt_tokens + rollout.max_completion_tokens
    row_tokens = min(row_tokens, train.max_row_tokens or row_tokens)
    tokens = max(train.micro_batch_tokens(device), row_tokens)
    if train.rows_per_micro_batch:
        tokens = min(tokens, train.rows_per_micro_batch * row_tokens)

    def activations(shape: Any) -> int:
        tensor = config.backend.tensor if isinstance(config.backend, FSDPConfig) else 1
        layer, checkpoint = activation_bytes_per_token(shape, row_tokens, compute, device == "cpu", tensor)
        layers: int = shape.num_hidden_layers
        return tokens * (layer + layers * checkpoint if model.gradient_checkpointing else layers * layer)

    hidden, _, keys, inner = _widths(shape)
    kept = rollout.max_concurrent_completions * (1 if config.environment is None else 2)  # as many between two turns
    decoded = min(kept, rollout.prompts_per_step * rollout.completions_per_prompt)
    cached = decoded * rollout.max_completion_tokens + rollout.prompts_per_step * config.data.max_prompt_tokens
    chunk = min(CHUNK_ELEMENTS, tokens * shape.vocab_size)
    base, moments = total * compute, 2 * FLOAT32 if train.optimizer == "adamw" else MOMENTS_IN_8_BITS
    if model.quantization:
        base = _ends(shape) * compute + int((total - _ends(shape)) * QUANTIZED[model.quantization])
    parts = {
        "trainer weights": base + trained * FLOAT32 if model.lora else total * FLOAT32,
        "rounded weights": 0 if model.lora or compute == FLOAT32 else total * compute,  # `kernels.round_once`
        "gradients": trained * FLOAT32,
        "optimizer": int(moments * trained),
        "reference": total * compute if "ref_logprobs" in algorithm.needs and not model.lora else 0,
        "activations": activations(shape),
        # Logits that are kept, and their gradient; of the entropy a third.
        "log-prob chunk": (3 if "entropy" in algorithm.outputs else 2) * chunk * FLOAT32,
        # Of gate and up: the gradients of both and of what they give, and the weights side by side.
        "backward pass": tokens * compute * (3 * inner + 2 * hidden) + 2 * inner * hidden * compute,
        # Before they are added to those that are there: of gate and up, and, until its other use, of a tied embedding.
        "fresh gradients": 0 if model.lora else (2 * inner + shape.vocab_size) * hidden * FLOAT32,
        "engine weights": total * compute,
        "key-value cache": cached * 2 * shape.num_hidden_layers * keys * compute,
    }
    if "distributions" in algorithm.outputs:
        parts["distributions"] = DISTRIBUTIONS * min(DIVERGENCE_ELEMENTS, tokens * shape.vocab_size) * FLOAT32
    if needs_teacher(algorithm):
        assert config.teacher is not None
        parts["teacher"] = count_parameters(model_config_only(config.teacher.path, trusted), trusted) * compute
    if "values" in algorithm.needs:
        critic = model_config_only(config.critic.path or path, trusted)
        parts["critic"] = 4 * critic_parameters(critic, trusted) * FLOAT32  # weights, gradients and Adam's two moments
        parts["critic activations"] = activations(critic)
    if config.backend is not None:
        cut: Any = in_parts if isinstance(config.backend, MegatronConfig) else in_shards
        parts = cut(parts, shape, total, compute, trained, config.backend, ranks)
    return parts | {"total": at_once(parts)}


def at_once(parts: Mapping[str, int]) -> int:
    """The sum of parts, of which the logits and what a layer's backward pass takes are never there at the same time."""
    layer = parts.get("backward pass", 0) + parts.get("gathered layers", 0)
    return sum(size for name, size in parts.items() if name != BESIDE) - min(layer, parts.get("log-prob chunk", 0))


BESIDE = "in the CPU's memory"
"""Of a rank whose shards lie there; no part of its device's total."""
BY_TOKENS = {"activations", "critic activations", "log-prob chunk", "backward pass", "distributions"}
SHARED = {"activations", "critic activations", "log-prob chunk", "backward pass", "fresh gradients"}
"""Of what there is for a moment, what ranks cut that share each layer on Megatron."""
SHARDED = ("trainer weights", "optimizer", "gradients", "reference", "teacher", "critic")


def in_shards(
    parts: dict[str, int], shape: Any, total: int, compute: int, trained: int, backend: FSDPConfig, ranks: int
) -> dict[str, int]:
    """What of a run's memory is rank 0's: a share of what lies in shards, and what is gathered for a moment.

    Gathered are the embedding and the output matrix, with their gradients before they are summed, and of the layers two
    (one computes, the next arrives) and the gradients of one, in the dtype of computation, beside those of the layer
    after it, which are being summed in float32. Weights on their way to the engine are in the CPU's memory of rank 0.

    Args:
        parts: of one device, as `memory_estimate` has them.
        shape: the policy's transformers config.
        total, trained: its parameters.
        compute: bytes of a number in the forward pass.
    """
    shards = ranks // backend.replicas
    uncut = _uncut(shape) / total * (backend.tensor - 1)  # in the shards of ranks / tensor ranks alone
    found = {name: math.ceil(size * (1 + uncut) / shards) if name in SHARDED else size for name, size in parts.items()}
    once = trained * (1 + uncut) / backend.tensor  # of what is trained, in one copy of what ranks share
    if trained < total:
        once = _adapters_of_rank(shape, trained, backend.tensor)
        share = once * backend.tensor / trained / shards
        found |= {name: math.ceil(parts[name] * share) for name in ("optimizer", "gradients")}
    for name in BY_TOKENS & found.keys():
        found[name] //= backend.sequence
    if backend.reduce == "update":
        found["gradients"] += math.ceil(once * FLOAT32)
    ends = _ends(shape)
    layer = (total - ends) // shape.num_hidden_layers // backend.tensor
    found["rounded weights"] = found["fresh gradients"] = 0
    whole = trained == total
    found["gathered embedding"] = ends * compute * (2 if whole else 1)
    found["gathered layers"] = layer * (3 * compute + FLOAT32 if whole else 2 * compute)
    found["backward pass"] //= backend.tensor
    if backend.cpu_offload:
        found[BESIDE] = sum(found[name] for name in SHARDED if name in found)
        found |= {name: 0 for name in SHARDED if name in found}
    return found


def rank_choices(
    config: RunConfig,
    algorithm: Algorithm,
    ranks: int,
    device: str | None = None,
    check: Callable[[RunConfig], None] = lambda changed: None,
) -> dict[str, tuple[int, int]]:
    """What rank 0 would hold with one setting of the back end changed; arguments as of `memory_estimate`.

    Args:
        check: raises a ConfigError where a changed config cannot be run, and which is then left out.

    Returns:
        By the setting: bytes on the device, and those of shards that are kept in the CPU's memory.
    """
    backend = config.backend
    assert backend is not None
    changes: dict[str, Any] = {"tensor": 2 * backend.tensor}
    if isinstance(backend, MegatronConfig):
        changes["pipeline"] = 2 * backend.pipeline
        assert config.model.path is not None
        if _expert_parameters(model_config_only(config.model.path, config.model.trust_remote_code)):
            changes["expert"] = 2 * backend.expert
    else:
        changes["replicas"] = 2 if backend.replicas == 1 else 1
        changes["reduce"] = "update" if backend.reduce == "micro_batch" else "micro_batch"
        changes["sequence"] = 2 * backend.sequence
        if (device or ("cuda" if torch.cuda.is_available() else "cpu")) != "cpu":
            changes["cpu_offload"] = not backend.cpu_offload
    found = {}
    for count, change in [(ranks, {}), (2 * ranks, {}), *((ranks, {name: to}) for name, to in changes.items())]:
        name, to = next(iter(change.items()), ("ranks", count))
        try:
            settings = type(backend)(**(backend.model_dump() | change))
            settings.check_count(count)
            check(changed := config.model_copy(update={"backend": settings}))
        except ValueError:  # it cannot be
            continue
        found[f"backend.{name}={str(to).lower()}"] = _on_rank(changed, algorithm, count, device)
    checkpointing = not config.model.gradient_checkpointing
    model = config.model.model_copy(update={"gradient_checkpointing": checkpointing})
    changed = config.model_copy(update={"model": model})
    found[f"model.gradient_checkpointing={str(checkpointing).lower()}"] = _on_rank(changed, algorithm, ranks, device)
    return found


def _on_rank(config: RunConfig, algorithm: Algorithm, ranks: int, device: str | None) -> tuple[int, int]:
    parts = memory_estimate(config, algorithm, ranks, device)
    return parts["total"], parts.get(BESIDE, 0)


def critic_parameters(config: Any, trust_remote_code: bool = False) -> int:
    """Parameters of a critic: a decoder with one number in the place of the output matrix."""
    output = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return count_parameters(config, trust_remote_code) - output + int(config.hidden_size)


def _ends(config: Any) -> int:
    """Numbers of embedding and output matrix."""
    return int(config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2))


def _uncut(config: Any) -> int:
    """Numbers of what ranks that share each layer's matrices all have: embedding, output matrix and norms."""
    return _ends(config) + int((2 * config.num_hidden_layers + 1) * config.hidden_size)


def _widths(config: Any) -> tuple[int, int, int, int]:
    """Widths of the residual stream, of all query heads, of all key heads, and of the MLP."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if experts := getattr(config, "moe_intermediate_size", None):
        inner = config.num_experts_per_tok * experts
    return config.hidden_size, heads * size, kv_heads * size, inner


def in_parts(
    parts: dict[str, int], shape: Any, total: int, compute: int, trained: int, backend: MegatronConfig, ranks: int
) -> dict[str, int]:
    """What of a run's memory is rank 0's on Megatron: its part of the layers, and of the first stage's embedding.

    Gradients are float32; of float32 weights beside rounded ones, and of the moments, each copy of the model has a
    share. Adapters are float32 themselves. Activations are cut over the ranks that share layers; the first of P stages
    holds those of P micro-batches.

    Args:
        parts, shape, total, compute, trained: as of `in_shards`.
    """
    tensor, pipeline, expert = backend.tensor, backend.pipeline, backend.expert
    one, ends = shape.vocab_size * shape.hidden_size, _ends(shape)
    experts = shape.num_hidden_layers * _expert_parameters(shape)
    dense = ((total - ends - experts) // pipeline + (one if pipeline > 1 else ends)) // tensor
    mixed = experts // (pipeline * expert)
    found = {name: size * (dense + mixed) // total if name in SHARDED else size for name, size in parts.items()}
    once = dense * tensor * pipeline // ranks + mixed * expert * pipeline // ranks
    found["trainer weights"] = (dense + mixed) * compute
    found["rounded weights"] = once * FLOAT32 if compute != FLOAT32 and trained == total else 0
    if trained != total:
        adapters = _adapters_of_rank(shape, trained, tensor) // pipeline
        once = adapters * tensor * pipeline // ranks
        found["trainer weights"] += adapters * FLOAT32
        found["gradients"] = adapters * FLOAT32
    found["optimizer"] = parts["optimizer"] * once // trained
    for name in SHARED & found.keys():
        found[name] //= tensor
    return found


def _adapters_of_rank(config: Any, trained: int, tensor: int) -> int:
    """Of so many numbers of adapters, those of a rank: a part of one of an adapter's matrices, and all of the other,
    which is as wide as the residual stream."""
    hidden, query, keys, inner = _widths(config)
    cut = 2 * query + 2 * keys + 3 * inner
    return trained * (7 * hidden + cut // tensor) // (7 * hidden + cut)


def _expert_parameters(config: Any) -> int:
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
