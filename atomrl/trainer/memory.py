"""Estimate the memory of a run from shapes; loads no weights, needs no GPU.

`memory_estimate` is the memory by part, `memory_by_phase` that at its peak.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atomrl.atoms.auxiliary_losses import DIVERGENCE_ELEMENTS
from atomrl.atoms.logprobs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU
from atomrl.common.memory import process_memory
from atomrl.config import ConfigError, Quantization, RunConfig
from atomrl.engines.native.linear import lora_columns
from atomrl.models.loading import compute_dtype, model_config_only
from atomrl.models.lora import trained_places
from atomrl.models.memory import (
    FLOAT32,
    IN_CPU_MEMORY,
    QUANTIZED,
    Sizes,
    activation_bytes_per_token,
    adapter_parameters,
    count_parameters,
    critic_parameters,
    empty_model,
    ends,
    is_tied,
    layer_count,
    tower_bytes,
    trained_parameters,
    widths,
)
from atomrl.models.shapes import text_config
from atomrl.protocols import Algorithm, needs_teacher
from atomrl.trainer.build import ranked_kind
from atomrl.trainer.colocation import engine_sleeps, rounds_into_engine, shares_base

GIB = 2**30
CONTEXT_GIB = 0.6
"""Memory that the driver and PyTorch take for themselves, on every card."""
USABLE_FRACTION = 0.92
"""Share of the rest that a plan may use: on the H200 12.6 GiB were in use where the formulas say 11.6."""
DISTRIBUTIONS = 10
"""Elements per logit of a chunk while a divergence of two distributions is computed; its backward pass holds 7.5."""
SAMPLING = 5
"""Float32 copies of the logits while a token is sampled on a GPU: scores, their exponentials and sums."""
LEAST_CONCURRENT = 32
"""Completions decoded at once, at least, where the number is `auto`: below, decoding takes many times as long."""
MOMENTS_IN_8_BITS = 2 * (1 + FLOAT32 / 256)
"""Bytes per weight of Adam's two moments in 8 bits: one code each, and a float32 scale per 256 codes."""
GATHERED = ("gathered embedding", "gathered layers")
"""Weights that a rank gathers from the shards of the others during a forward or backward pass."""
UPDATE = (
    "gradients", "fresh gradients", "activations", "critic activations", "log-prob chunk", "backward pass",
    "distributions", *GATHERED,
)  # fmt: skip
TEMPORARY = {"key-value cache", *UPDATE}
"""Parts of `memory_estimate` that are freed after their phase; all others are resident. The cache stays if the engine
does not sleep during updates (`engine_sleeps`)."""
PARTS_OF_PHASE: Mapping[str, tuple[str, ...]] = {
    "rollout": ("key-value cache",),
    "log-probs": ("log-prob chunk", *GATHERED),
    "update": UPDATE,
}


def memory_estimate(
    config: RunConfig,
    algorithm: Algorithm,
    ranks: int = 1,
    device: str | None = None,
    compute: int | None = None,
    shape_of: Callable[[str, bool], Any] = model_config_only,
) -> dict[str, int]:
    """Estimate the bytes of each part of a run on one device (rank 0 of several ranks), and the total.

    Activations, log-prob chunk and key-value cache are those of rows of maximum length. The memory of the CUDA context
    and of torch itself is not included. The total adds trainer (`peak_of`) and engine, which do not peak at the same
    time, so it is an upper bound. An engine that uses the trainer's frozen weights (`shares_base`) holds adapters, and
    one dequantized layer if they are quantized.

    Args:
        config: config of the run. The `config.json` of its model, teacher and critic must be available.
        algorithm: decides whether the trainer holds a reference, a teacher and a critic.
        ranks: number of ranks of `config.backend`.
        device: `cpu` or `cuda`; None: the device of this machine.
        compute: bytes per element in the forward pass; None: from `model.dtype` on this machine. For `cuda` without a
            GPU here, one with bfloat16 is assumed.
        shape_of: (path, trust_remote_code) -> a model's transformers config.

    Returns:
        Name of the part -> bytes, and `total`.

    Raises:
        ConfigError: the model's config is not available.
    """
    model, train, rollout = config.model, config.train, config.rollout
    trusted, path = model.trust_remote_code, model.path
    assert path is not None, "no estimate for a fresh model"
    shape = shape_of(path, trusted)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    compute = _compute_bytes(config, device) if compute is None else compute
    total = count_parameters(shape, trusted)
    trained = adapter_parameters(shape, model.lora.rank) if model.lora else trained_parameters(shape, trusted)
    if model.lora and model.lora.modules_to_save:
        inner = empty_model(shape, trusted, scalar=(scores := config.kind == "reward-model"))
        whole = trained_places(inner, None if scores else inner.get_output_embeddings().weight, model.lora)[-1]
        trained += sum({w: w.numel() for name in whole for w in inner.get_submodule(name).parameters()}.values())
    if not model.freeze_vision:
        trained = total
    tokens, row_tokens = _micro_batch(config, device)
    hidden, _, keys, inner = widths(shape)
    vocab, layers = text_config(shape).vocab_size, layer_count(shape)
    cached = _cached_tokens(config)

    def activations(shape: Any) -> int:
        sharing = config.backend.activation_ranks if config.backend else 1
        layer, checkpoint = activation_bytes_per_token(shape, row_tokens, compute, device == "cpu", sharing)
        layers = layer_count(shape)
        return tokens * (layer + layers * checkpoint if model.checkpoints_layers else layers * layer)

    stored, temporary = _weight_bytes(model.quantization, compute)
    base = ends(shape) * compute + int((total - ends(shape)) * stored)
    moments = 2 * FLOAT32 if train.optimizer == "adamw" else MOMENTS_IN_8_BITS
    parts: dict[str, int] = {
        "trainer weights": base + trained * FLOAT32 if model.lora else total * FLOAT32,
        "rounded weights": 0 if model.lora or compute == FLOAT32 else total * compute,  # `kernel_switches.round_once`
        "gradients": trained * FLOAT32,
        "optimizer": int(moments * trained),
        "reference": total * compute if "ref_logprobs" in algorithm.needs and not model.lora else 0,
        "activations": activations(shape),
        "log-prob chunk": _chunk_bytes(config, algorithm, tokens * vocab, device, compute),
        # The MLP's backward pass is the largest: gradients of gate, up and their product, and temporary weights.
        "backward pass": tokens * compute * (3 * inner + 2 * hidden) + temporary * inner * hidden,
        # New gradients before they are accumulated: of gate and up, and of a tied embedding between its two uses.
        "fresh gradients": 0 if model.lora else (2 * inner + vocab) * hidden * FLOAT32,
    }
    if device != "cpu" and compute < FLOAT32 and rounds_into_engine(config, shape):
        parts["rounded weights"] = vocab * hidden * compute  # the output matrix, which the engine does not offer
    if config.kind == "rl" or (config.pretrain and config.pretrain.sample_every_steps):
        parts["engine weights"] = total * compute // rollout.tensor_parallel
        if shares_base(config, shape, device, compute):
            parts["engine weights"] = _own_bytes(config, shape, device, compute)
    if config.kind == "rl":
        parts["key-value cache"] = cached * 2 * layers * keys * compute // rollout.tensor_parallel
    environment = config.environment
    replies = environment.max_reply_tokens if environment is not None and environment.images else 0
    largest = max(config.data.max_prompt_tokens, replies)
    pictures = min(tokens, largest) if model.freeze_vision else tokens
    if tower := tower_bytes(shape, pictures, compute, trained=not model.freeze_vision):
        parts["vision tower"] = tower  # activations, for pictures that fill the prompts or a reply
    if "distributions" in algorithm.outputs:
        parts["distributions"] = DISTRIBUTIONS * min(DIVERGENCE_ELEMENTS, tokens * vocab) * FLOAT32
    if needs_teacher(algorithm):
        assert config.teacher is not None
        parts["teacher"] = count_parameters(shape_of(config.teacher.path, trusted), trusted) * compute
    if "values" in algorithm.needs:
        critic = shape_of(config.critic.path or path, trusted)
        parts["critic"] = 4 * critic_parameters(critic, trusted) * FLOAT32  # weights, gradients and Adam's two moments
        parts["critic activations"] = activations(critic)
    if config.backend is not None:
        sizes = Sizes(shape, total, trained, compute, stored)
        parts = ranked_kind(config.backend).memory(config.backend, parts, sizes, ranks)
    return parts | {"total": peak_of(parts)}


def _compute_bytes(config: RunConfig, device: str) -> int:
    """Return the bytes per element in the forward pass; a GPU elsewhere is assumed to have bfloat16."""
    if device == "cpu" or torch.cuda.is_available():
        return compute_dtype(config.model.dtype, device).itemsize
    return 4 if config.model.dtype == "float32" else 2


def _micro_batch(config: RunConfig, device: str) -> tuple[int, int]:
    """Return the tokens of the largest micro-batch, and of the longest row."""
    train = config.train
    row_tokens = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    row_tokens = min(row_tokens, train.max_row_tokens or row_tokens)
    tokens = max(train.micro_batch_tokens(device), row_tokens)
    if train.rows_per_micro_batch:
        tokens = min(tokens, train.rows_per_micro_batch * row_tokens)
    return tokens, row_tokens


def _cached_tokens(config: RunConfig) -> int:
    """Return the tokens in the key-value cache.

    Episodes keep their cache between turns: as many again as are decoded. Prompts of waiting rows are not cached.
    """
    rollout = config.rollout
    slots = rollout.concurrent_completions * (1 if config.environment is None else 2)
    cached_rows = min(slots, rollout.prompts_per_step * rollout.completions_per_prompt)
    cached_prompts = min(cached_rows, rollout.prompts_per_step)
    return cached_rows * rollout.max_completion_tokens + cached_prompts * config.data.max_prompt_tokens


def _chunk_bytes(config: RunConfig, algorithm: Algorithm, logits: int, device: str, compute: int) -> int:
    """Return the bytes of a chunk of logits in float32, and of their gradient.

    A compiled kernel stores the gradient in the compute dtype; without one the entropy needs a third array.
    """
    eager = device == "cpu" or (config.backend is not None and config.backend.type == "megatron")
    logit = FLOAT32 * (3 if "entropy" in algorithm.outputs else 2) if eager else FLOAT32 + compute
    return min(CHUNK_ELEMENTS if device == "cpu" else CHUNK_ELEMENTS_ON_GPU, logits) * logit


def _own_bytes(config: RunConfig, shape: Any, device: str, compute: int) -> int:
    """Return the bytes of the weights that an engine has beside the trainer's frozen ones, as `engines.decoder`."""
    model = config.model
    assert model.lora is not None
    hidden, query, keys, inner = widths(shape)
    stacks = [(query + 2 * keys, hidden, 3), (hidden, query, 1), (2 * inner, hidden, 2), (hidden, inner, 1)]
    layers, rank = layer_count(shape), model.lora.rank
    if device == "cpu" and model.quantization is None:
        adapters, scratch = adapter_parameters(shape, rank) * FLOAT32, 0
    else:  # A and B of a stack's projections in common columns
        columns = [lora_columns([rank] * parts) for _, _, parts in stacks]
        sizes = list(zip(stacks, columns, strict=True))
        adapters = layers * compute * sum((outputs + inputs) * own for (outputs, inputs, _), own in sizes)
        scratch = compute * max(outputs * (inputs + own) for (outputs, inputs, _), own in sizes)
        if device == "cpu" and model.quantization == "nf4":  # bitsandbytes writes a matrix of its own
            scratch += compute * hidden * inner
    tied_head = ends(shape) * compute if device == "cpu" and is_tied(shape) else 0
    return adapters + tied_head + (scratch if model.quantization else 0)


def sampling_bytes(config: RunConfig, vocab_size: int) -> int:
    """Return the bytes that one sampling step over all rows takes on a GPU, beside the key-value cache."""
    rollout = config.rollout
    rows = min(rollout.concurrent_completions, rollout.prompts_per_step * rollout.completions_per_prompt)
    return SAMPLING * rows * vocab_size * FLOAT32


def _weight_bytes(quantization: Quantization | None, compute: int) -> tuple[float, int]:
    """Return (stored, temporary) bytes per weight of a layer.

    Temporary are two matrices side by side. Quantized weights are dequantized one matrix at a time.
    """
    return (compute, 2 * compute) if quantization is None else (QUANTIZED[quantization], compute)


def peak_of(parts: Mapping[str, int]) -> int:
    """Sum the parts that exist at the same time: the log-prob chunk and a layer's backward pass never do."""
    layer = parts.get("backward pass", 0) + parts.get("gathered layers", 0)
    return sum(size for name, size in parts.items() if name != IN_CPU_MEMORY) - min(
        layer, parts.get("log-prob chunk", 0)
    )


@dataclass(frozen=True)
class Memory:
    """Memory of a run, in bytes."""

    resident: int
    """Weights, optimizer state, and all else that is held in every phase."""
    phases: Mapping[str, int]
    """Peak of each phase, beside the resident memory."""
    process: int
    """Memory of Python and torch themselves; 0 on a GPU."""

    @property
    def largest(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak(self) -> int:
        """Peak over all phases."""
        return self.process + self.resident + self.phases[self.largest]


def memory_by_phase(
    config: RunConfig,
    algorithm: Algorithm,
    ranks: int = 1,
    device: str | None = None,
    compute: int | None = None,
    shape_of: Callable[[str, bool], Any] = model_config_only,
) -> Memory:
    """Estimate the memory of a run by phase, for rows of maximum length, on rank 0; loads no weights.

    Args:
        config, algorithm, ranks, device, compute, shape_of: as for `memory_estimate`.

    Raises:
        ConfigError: the model is a fresh one, or its `config.json` is not available.
    """
    if config.gpt is not None:
        raise ConfigError("no estimate from shapes for a fresh model (gpt); --probe measures it")
    parts = memory_estimate(config, algorithm, ranks, device, compute, shape_of)
    path = config.model.path
    assert path is not None
    text = text_config(shape_of(path, config.model.trust_remote_code))
    phases = {name: peak_of({part: parts.get(part, 0) for part in needs}) for name, needs in PARTS_OF_PHASE.items()}
    on_gpu = device == "cuda" or (device is None and torch.cuda.is_available())
    if on_gpu and config.kind == "rl":
        phases["rollout"] += sampling_bytes(config, text.vocab_size)
    # Without gradient one layer is held at a time.
    phases["log-probs"] += parts["activations"] // text.num_hidden_layers
    if config.kind == "rl" and not engine_sleeps(config, "cuda" if on_gpu else "cpu"):
        engine = phases["rollout"]
        phases = {name: size + engine * (name != "rollout") for name, size in phases.items()}
    if config.kind != "rl":
        phases = {"update": phases["update"]}
    resident = sum(size for part, size in parts.items() if part not in {*TEMPORARY, IN_CPU_MEMORY, "total"})
    return Memory(resident, phases, 0 if on_gpu else process_memory("VmHWM"))


def rank_choices(
    config: RunConfig,
    algorithm: Algorithm,
    ranks: int,
    device: str | None = None,
    check: Callable[[RunConfig], None] = lambda changed: None,
) -> dict[str, tuple[int, int]]:
    """Estimate the memory of rank 0 for each single change of the back end's settings.

    Args:
        config, algorithm, ranks, device: as for `memory_estimate`.
        check: raises a ConfigError for a changed config that cannot run; that change is skipped.

    Returns:
        `KEY=VALUE` -> (bytes on the device, bytes of shards that are offloaded to the CPU).
    """
    backend = config.backend
    assert backend is not None

    def estimate(changed: RunConfig, count: int) -> tuple[int, int]:
        parts = memory_estimate(changed, algorithm, count, device)
        return parts["total"], parts.get(IN_CPU_MEMORY, 0)

    choices = {}
    changes: list[tuple[int, dict[str, Any]]] = [(ranks, {}), (2 * ranks, {})]
    for count, change in [*changes, *((ranks, {name: value}) for name, value in backend.choices.items())]:
        name, value = next(iter(change.items()), ("ranks", count))
        try:
            settings = type(backend)(**(backend.model_dump() | change))
            settings.check_count(count)
            check(changed := config.model_copy(update={"backend": settings}))
        except ValueError:  # not a valid combination
            continue
        choices[f"backend.{name}={str(value).lower()}"] = estimate(changed, count)
    checkpointing = not config.model.checkpoints_layers
    model = config.model.model_copy(update={"gradient_checkpointing": checkpointing})
    changed = config.model_copy(update={"model": model})
    choices[f"model.gradient_checkpointing={str(checkpointing).lower()}"] = estimate(changed, ranks)
    return choices
