"""How much memory a run will take, from its config and the models' configs alone."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from atomrl.atoms.distillation import DIVERGENCE_ELEMENTS
from atomrl.atoms.logprobs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU
from atomrl.config import Quantization, RunConfig
from atomrl.models.loading import compute_dtype, model_config_only
from atomrl.models.memory import (
    BESIDE,
    FLOAT32,
    QUANTIZED,
    Sizes,
    activation_bytes_per_token,
    adapter_parameters,
    count_parameters,
    critic_parameters,
    ends,
    widths,
)
from atomrl.protocols import Algorithm, needs_teacher
from atomrl.runs.build import ranked_kind

DISTRIBUTIONS = 10
"""Numbers per logit of a chunk that a divergence of two distributions holds: its backward pass keeps seven and a
half."""
SAMPLING = 5
"""Arrays of logits in float32 that drawing a token holds on a GPU: scores, their exponentials and sums."""
MOMENTS_IN_8_BITS = 2 * (1 + FLOAT32 / 256)
"""Bytes of a weight's two moments: codes, and a scale for each 256."""


def memory_estimate(
    config: RunConfig,
    algorithm: Algorithm,
    ranks: int = 1,
    device: str | None = None,
    compute: int | None = None,
    shape_of: Callable[[str, bool], Any] = model_config_only,
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
        compute: bytes of a number in the forward pass; None: as `model.dtype` says, on this machine's device of that
            kind, or on a GPU that knows bfloat16 where this machine has none.
        shape_of: a model's transformers config by its path, and whether its own code is trusted.

    Raises:
        ConfigError: the model's config is not there.
    """
    model, train, rollout = config.model, config.train, config.rollout
    trusted, path = model.trust_remote_code, model.path
    assert path is not None, "of a fresh model there is no estimate"
    shape = shape_of(path, trusted)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    there = device == "cpu" or torch.cuda.is_available()  # else it is one that knows bfloat16
    if compute is None:
        compute = compute_dtype(model.dtype, device).itemsize if there else 4 if model.dtype == "float32" else 2
    total = count_parameters(shape, trusted)
    trained = adapter_parameters(shape, model.lora.rank) if model.lora else total
    row_tokens = config.data.max_prompt_tokens + rollout.max_completion_tokens
    row_tokens = min(row_tokens, train.max_row_tokens or row_tokens)
    tokens = max(train.micro_batch_tokens(device), row_tokens)
    if train.rows_per_micro_batch:
        tokens = min(tokens, train.rows_per_micro_batch * row_tokens)

    def activations(shape: Any) -> int:
        sharing = config.backend.activation_ranks if config.backend else 1
        layer, checkpoint = activation_bytes_per_token(shape, row_tokens, compute, device == "cpu", sharing)
        layers: int = shape.num_hidden_layers
        return tokens * (layer + layers * checkpoint if model.checkpoints_layers else layers * layer)

    hidden, _, keys, inner = widths(shape)
    kept = rollout.concurrent_completions * (1 if config.environment is None else 2)  # as many between two turns
    decoded = min(kept, rollout.prompts_per_step * rollout.completions_per_prompt)
    prompts = min(decoded, rollout.prompts_per_step)  # those of waiting completions are not in the cache
    cached = decoded * rollout.max_completion_tokens + prompts * config.data.max_prompt_tokens
    chunk = min(CHUNK_ELEMENTS if device == "cpu" else CHUNK_ELEMENTS_ON_GPU, tokens * shape.vocab_size)
    # Logits and their gradient, which a compiled kernel rounds; without one the entropy has a third.
    eager = device == "cpu" or (config.backend is not None and config.backend.type == "megatron")
    logit = FLOAT32 * (3 if "entropy" in algorithm.outputs else 2) if eager else FLOAT32 + compute
    held, beside = _weight_bytes(model.quantization, compute)
    base = ends(shape) * compute + int((total - ends(shape)) * held)
    moments = 2 * FLOAT32 if train.optimizer == "adamw" else MOMENTS_IN_8_BITS
    parts: dict[str, int] = {
        "trainer weights": base + trained * FLOAT32 if model.lora else total * FLOAT32,
        "rounded weights": 0 if model.lora or compute == FLOAT32 else total * compute,  # `kernels.round_once`
        "gradients": trained * FLOAT32,
        "optimizer": int(moments * trained),
        "reference": total * compute if "ref_logprobs" in algorithm.needs and not model.lora else 0,
        "activations": activations(shape),
        "log-prob chunk": chunk * logit,
        # Of gate and up: the gradients of both and of what they give, and weights that are made for it.
        "backward pass": tokens * compute * (3 * inner + 2 * hidden) + beside * inner * hidden,
        # Before they are added to those that are there: of gate and up, and, until its other use, of a tied embedding.
        "fresh gradients": 0 if model.lora else (2 * inner + shape.vocab_size) * hidden * FLOAT32,
    }
    if config.kind == "rl" or (config.pretrain and config.pretrain.sample_every_steps):
        parts["engine weights"] = total * compute // rollout.tensor_parallel
    if config.kind == "rl":
        parts["key-value cache"] = cached * 2 * shape.num_hidden_layers * keys * compute // rollout.tensor_parallel
    if "distributions" in algorithm.outputs:
        parts["distributions"] = DISTRIBUTIONS * min(DIVERGENCE_ELEMENTS, tokens * shape.vocab_size) * FLOAT32
    if needs_teacher(algorithm):
        assert config.teacher is not None
        parts["teacher"] = count_parameters(shape_of(config.teacher.path, trusted), trusted) * compute
    if "values" in algorithm.needs:
        critic = shape_of(config.critic.path or path, trusted)
        parts["critic"] = 4 * critic_parameters(critic, trusted) * FLOAT32  # weights, gradients and Adam's two moments
        parts["critic activations"] = activations(critic)
    if config.backend is not None:
        sizes = Sizes(shape, total, trained, compute, held)
        parts = ranked_kind(config.backend).memory(config.backend, parts, sizes, ranks)
    return parts | {"total": at_once(parts)}


def sampling_bytes(config: RunConfig, vocab_size: int) -> int:
    """Bytes that drawing a token of all rows takes on a GPU beside the cache."""
    rollout = config.rollout
    rows = min(rollout.concurrent_completions, rollout.prompts_per_step * rollout.completions_per_prompt)
    return SAMPLING * rows * vocab_size * FLOAT32


def _weight_bytes(quantization: Quantization | None, compute: int) -> tuple[float, int]:
    """Of a weight of a layer: bytes as it lies there, and what is made to compute with it: two matrices side by side,
    or of codes one at a time, by way of float32 from int8's."""
    if quantization is None:
        return compute, 2 * compute
    return QUANTIZED[quantization], compute + (FLOAT32 if quantization == "int8" and compute != FLOAT32 else 0)


def at_once(parts: Mapping[str, int]) -> int:
    """The sum of parts, of which the logits and what a layer's backward pass takes are never there at the same time."""
    layer = parts.get("backward pass", 0) + parts.get("gathered layers", 0)
    return sum(size for name, size in parts.items() if name != BESIDE) - min(layer, parts.get("log-prob chunk", 0))


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
    found = {}
    tried: list[tuple[int, dict[str, Any]]] = [(ranks, {}), (2 * ranks, {})]
    for count, change in [*tried, *((ranks, {name: to}) for name, to in backend.choices.items())]:
        name, to = next(iter(change.items()), ("ranks", count))
        try:
            settings = type(backend)(**(backend.model_dump() | change))
            settings.check_count(count)
            check(changed := config.model_copy(update={"backend": settings}))
        except ValueError:  # it cannot be
            continue
        found[f"backend.{name}={str(to).lower()}"] = _on_rank(changed, algorithm, count, device)
    checkpointing = not config.model.checkpoints_layers
    model = config.model.model_copy(update={"gradient_checkpointing": checkpointing})
    changed = config.model_copy(update={"model": model})
    found[f"model.gradient_checkpointing={str(checkpointing).lower()}"] = _on_rank(changed, algorithm, ranks, device)
    return found


def _on_rank(config: RunConfig, algorithm: Algorithm, ranks: int, device: str | None) -> tuple[int, int]:
    parts = memory_estimate(config, algorithm, ranks, device)
    return parts["total"], parts.get(BESIDE, 0)
