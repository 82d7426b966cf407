"""How much memory a run will take, from its config and the models' configs alone."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from atomrl.atoms.auxiliary_losses import DIVERGENCE_ELEMENTS
from atomrl.atoms.logprobs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU
from atomrl.common.errors import did_you_mean
from atomrl.config import ConfigError, Quantization, RunConfig
from atomrl.models.attention import packs_rows
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
from atomrl.trainer.build import chosen_class, ranked_kind

# --------------------------------------------------------------------------------------------------------------------
# A table of GPUs, and an estimate of the time of a GRPO step from their data sheets.

CONTEXT_GIB = 0.6
"""Memory that the driver and PyTorch take for themselves, on every card."""
USABLE = 0.92
"""Share of the rest that is planned with: on the H200 12.6 GiB were in use where the formulas say 11.6."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet, and how many of it."""

    name: str
    gib: float
    gb_s: float
    """Memory bandwidth in 10^9 bytes a second."""
    tflops: float
    """Dense bfloat16 matrix products with float32 sums; float32 products for a card without bfloat16."""
    bfloat16: bool = True
    count: int = 1

    @property
    def usable_bytes(self) -> int:
        """Bytes of one card that a plan may use."""
        return int((self.gib - CONTEXT_GIB) * USABLE * 2**30)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the forward pass where `model.dtype` is `auto`."""
        return 2 if self.bfloat16 else 4

    def __str__(self) -> str:
        cards = f"{self.count} x " if self.count > 1 else ""
        return f"{cards}{self.name} ({self.gib:g} GiB)"


GPUS = {
    gpu.name.lower().replace(" ", ""): gpu
    for gpu in (
        Gpu("T4", 16, 320, 8.1, bfloat16=False),
        Gpu("V100", 32, 900, 15.7, bfloat16=False),
        Gpu("2080 Ti", 11, 616, 13.4, bfloat16=False),
        Gpu("3060", 12, 360, 25),
        Gpu("3070", 8, 448, 40),
        Gpu("3080", 10, 760, 59),
        Gpu("3090", 24, 936, 71),
        Gpu("4060", 8, 272, 30),
        Gpu("4060 Ti", 16, 288, 44),
        Gpu("4070", 12, 504, 58),
        Gpu("4070 Ti Super", 16, 672, 88),
        Gpu("4080", 16, 717, 97),
        Gpu("4090", 24, 1008, 165),
        Gpu("5060 Ti", 16, 448, 47),
        Gpu("5070", 12, 672, 62),
        Gpu("5080", 16, 960, 112),
        Gpu("5090", 32, 1792, 209),
        Gpu("A10", 24, 600, 125),
        Gpu("A10G", 24, 600, 70),
        Gpu("L4", 24, 300, 121),
        Gpu("A40", 48, 696, 150),
        Gpu("A6000", 48, 768, 155),
        Gpu("L40S", 48, 864, 362),
        Gpu("6000 Ada", 48, 960, 364),
        Gpu("A100-40", 40, 1555, 312),
        Gpu("A100", 80, 2039, 312),
        Gpu("PRO 6000", 96, 1792, 503),
        Gpu("H100", 80, 3350, 989),
        Gpu("H200", 141, 4800, 989),
        Gpu("B200", 180, 8000, 2250),
    )
}
_PLAIN_CARDS = ((9, "4060"), (13, "3060"), (17, "4060ti"), (33, "3090"), (50, "a6000"), (90, "a100"), (1e9, "h200"))
"""(up to GiB, name): the card whose speed is taken where only a size is given."""


def gpu_of(text: str) -> Gpu:
    """Parse a card by name or size, and how many: `4090`, `RTX 4090`, `2xA100`, `24GiB`, `8x80GiB`.

    Raises:
        ConfigError: no such card.

    Example:
        >>> gpu_of("2 x RTX 4090").count, gpu_of("4090").gib, gpu_of("80GB").gib
        (2, 24, 80.0)
    """
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(.+)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError("--gpu: name a card, or give its memory, as in 24GiB")
    count, name = int(match[1] or 1), match[2].lower()
    if count < 1:
        raise ConfigError(f"--gpu {text}: give one card at least")
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*g(?:i?b)?", name):
        gib = float(size[1])
        like = next(GPUS[card] for most, card in _PLAIN_CARDS if gib <= most)
        return replace(like, name=f"a card as fast as {like.name}", gib=gib, count=count)
    plain = re.sub(r"nvidia|geforce|rtx|gtx|tesla|quadro|[\s_]", "", name)
    plain = re.sub(r"(sxm\d?|pcie|nvl|-|80gi?b?$|40gi?b?$)", lambda m: "-40" if m[0].startswith("40") else "", plain)
    if plain not in GPUS:
        raise ConfigError(
            f"no card {text!r} in the table: {did_you_mean(plain, GPUS, 'known are')}; or give its memory in GiB, "
            "as in 24GiB"
        )
    return replace(GPUS[plain], count=count)


# Shares of the data sheet's rates, and what else takes time: docs/start/hardware.md says which were measured, and how.
PRODUCT_SHARE = 0.75
"""Of the TFLOPS, what large matrix products reach. Measured on one H200: 737 of 989 in the updates of 2026-11-26."""
BANDWIDTH_SHARE = 0.6
"""Of the bandwidth, what kernels of few operations reach. Estimated; a plain copy reached 0.89 on the H200."""
PASS_BYTES, PASS_BYTES_COMPILED = 500, 200
"""Memory traffic of a pass over a token, in bytes for each layer and unit of width, for all that is no product. Counted
(`benchmarks/layer_launches.py`: half of what forward and backward move); estimated where layers are compiled."""
LOGIT_BYTES = 12
"""Likewise of a pass over a logit. Estimated."""
LAYER_LAUNCHES, LAYER_LAUNCHES_COMPILED = 216, 110
"""Kernels of a layer's forward and backward pass with adapters. Counted, as above; estimated where compiled."""
LAUNCH_S = 9e-6
"""Seconds in which the host launches a kernel. Estimated: 15 us were measured from Python, and a backward pass is
launched by C++."""
OTHER_S = 0.5
"""Seconds of a step for weight sync, rewards and advantages. Estimated."""
ERROR = 2.0
"""By how many times a step may be faster or slower than is estimated."""


def step_seconds(config: RunConfig, shape: Any, gpu: Gpu, compute: int) -> Mapping[str, float]:
    """Estimate the seconds of each phase of a step, with every completion at the limit.

    Args:
        config: of the run; kinds other than `train` have the phase `update` alone.
        shape: the model's transformers config.
        gpu: what it runs on; updates are spread over `gpu.count` cards where the config has a `backend`.
        compute: bytes of a number in the forward pass.
    """
    rollout, train, draws = config.rollout, config.train, config.kind == "rl"
    limit, prompt = rollout.max_completion_tokens, config.data.max_prompt_tokens
    rows = rollout.prompts_per_step * rollout.completions_per_prompt if draws else config.items_per_step
    row = min(prompt + limit, train.max_row_tokens or prompt + limit)
    dtype = torch.bfloat16 if compute == 2 else torch.float32
    tokens = rows * row
    if draws and packs_rows(
        config.model.pack_rows, "cuda", dtype
    ):  # a group's rows in a micro-batch share their prompt
        sharing = min(rollout.completions_per_prompt, max(1, train.micro_batch_tokens("cuda") // row))
        tokens -= rows * max(0, row - limit) * (sharing - 1) // sharing
    logits = rows * (limit if draws else row)
    forward, update = (_pass_seconds(config, shape, gpu, tokens, logits, backward) for backward in (False, True))
    found: dict[str, float] = {}
    if draws:
        found["rollout"] = _rollout_seconds(config, shape, gpu, compute)
        if config.updates_per_step > 1:
            found["log-probs"] = forward
        if "ref_logprobs" in getattr(config.algorithm, "needs", ()):
            found["reference"] = forward
    found["update"] = update * (train.epochs_per_step if draws else 1)
    return found | {"other": OTHER_S if draws else 0.1}


def _rollout_seconds(config: RunConfig, shape: Any, gpu: Gpu, compute: int) -> float:
    """All completions in waves of decode steps, in which kernels run one after the other: products that read all
    weights; attention, which reads the cache; the draw, which reads logits."""
    rollout, engine = config.rollout, chosen_class(config.rollout).decode_time
    total, layers = count_parameters(shape), int(shape.num_hidden_layers)
    _, _, keys, _ = widths(shape)
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    at_once = min(rows, rollout.concurrent_completions)
    middle = config.data.max_prompt_tokens + rollout.max_completion_tokens / 2
    rate, bandwidth = gpu.tflops * 1e12 * PRODUCT_SHARE, gpu.gb_s * 1e9 * BANDWIDTH_SHARE
    products = max(total * compute / bandwidth, 2 * total * at_once / rate)
    moved = at_once * (middle * 2 * layers * keys * compute + LOGIT_BYTES * shape.vocab_size)
    layer = engine.layer_s + (engine.adapted_layer_s if config.model.lora else 0)
    row = engine.row_s + (engine.logprob_s if rollout.logprobs_over != "none" else 0)
    step = (products + moved / bandwidth) / rollout.tensor_parallel + layers * layer + at_once * row
    prefill = 2 * total * rollout.prompts_per_step * config.data.max_prompt_tokens / rate
    return float(prefill + -(-rows // at_once) * rollout.max_completion_tokens * step)


def _pass_seconds(config: RunConfig, shape: Any, gpu: Gpu, tokens: int, logits: int, backward: bool) -> float:
    """A forward pass over all tokens, and a backward pass; or what the host takes to launch their kernels, if that is
    more: it is ahead of the device."""
    model, cards = config.model, gpu.count if config.backend else 1
    total, layers, hidden = count_parameters(shape), int(shape.num_hidden_layers), int(shape.hidden_size)
    forwards = 2 if backward and model.checkpoints_layers else 1
    products = 2 * forwards + backward * (2 if model.lora else 4)
    passes = forwards + backward
    compiled = model.compile
    moved = passes * layers * hidden * (PASS_BYTES_COMPILED if compiled else PASS_BYTES) * tokens
    moved += (1 + backward) * LOGIT_BYTES * shape.vocab_size * logits
    device = products * total * tokens / (gpu.tflops * 1e12 * PRODUCT_SHARE)
    device += moved / (gpu.gb_s * 1e9 * BANDWIDTH_SHARE)
    micro_batches = -(-tokens // (cards * config.train.micro_batch_tokens("cuda")))
    launches = layers * (LAYER_LAUNCHES_COMPILED if compiled else LAYER_LAUNCHES) * (passes / 2)
    return float(max(device / cards, micro_batches * launches * LAUNCH_S))


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
