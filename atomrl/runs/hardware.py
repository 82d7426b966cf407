"""A table of GPUs, and an estimate of the time of a GRPO step from their data sheets and one measured card."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atomrl.config import ConfigError, RunConfig
from atomrl.hints import did_you_mean
from atomrl.models.memory import count_parameters, widths

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


# Measured on one H200 (docs/start/hardware.md), Qwen2.5-1.5B with bfloat16; shares of the data sheet's rates.
LAUNCH_S = 0.93e-3
"""Least seconds of a layer in a decode step of the native engine, in which the host launches some 59 kernels."""
LAUNCH_ADAPTED_S = 1.68e-3
"""The same with adapters."""
DECODE_SHARE = 0.25
"""Share of the bandwidth that a decode step of the native engine reaches where launches are not the limit."""
VLLM_STEP_S, VLLM_SHARE = 10.6e-3, 0.6
"""vLLM's seconds of a decode step on the host with log-probs, and its share of the bandwidth."""
PRODUCT_SHARE = 0.75
"""Share of the data sheet's TFLOPS that the matrix products of updates and log-probs reach."""
PASS_BYTES, PASS_BYTES_ADAPTED = 1000, 1700
"""Further memory traffic of a pass over a token, in bytes for each layer and unit of width: norms, rotary embeddings,
casts, adapters."""
OTHER_S = 1.5
"""Seconds of a step for weight sync, rewards and advantages."""
MEASURED = "H200"


def step_seconds(config: RunConfig, shape: Any, gpu: Gpu, compute: int) -> Mapping[str, float]:
    """Estimate the seconds of each phase of a step, with every completion at the limit.

    Args:
        config: of the run; kinds other than `train` have the phase `update` alone.
        shape: the model's transformers config.
        gpu: what it runs on; updates are spread over `gpu.count` cards where the config has a `backend`.
        compute: bytes of a number in the forward pass.
    """
    rollout, model = config.rollout, config.model
    total, layers = count_parameters(shape), int(shape.num_hidden_layers)
    _, _, keys, _ = widths(shape)
    cards = gpu.count if config.backend else 1
    beside = layers * int(shape.hidden_size) * (PASS_BYTES_ADAPTED if model.lora else PASS_BYTES) / (gpu.gb_s * 1e9)
    product = total / (gpu.tflops * 1e12 * PRODUCT_SHARE)
    forward = (2 * product + beside) / cards  # seconds of a token
    backward = ((2 if model.lora else 4) * product + beside) / cards
    update = backward + forward * (2 if model.checkpoints_layers else 1)
    found: dict[str, float] = {}
    row = config.data.max_prompt_tokens + rollout.max_completion_tokens
    row = min(row, config.train.max_row_tokens or row)
    if config.kind == "rl":
        rows = rollout.prompts_per_step * rollout.completions_per_prompt
        at_once = min(rows, rollout.concurrent_completions)
        waves = -(-rows // at_once)
        middle = config.data.max_prompt_tokens + rollout.max_completion_tokens / 2
        moved = total * compute + at_once * (middle * 2 * layers * keys * compute + 3 * 4 * shape.vocab_size)
        if rollout.engine == "vllm":
            one = VLLM_STEP_S + moved / (gpu.gb_s * 1e9 * VLLM_SHARE * rollout.tensor_parallel)
        else:
            launches = layers * (LAUNCH_ADAPTED_S if model.lora else LAUNCH_S)
            one = max(launches, moved / (gpu.gb_s * 1e9 * DECODE_SHARE))
        found["rollout"] = waves * rollout.max_completion_tokens * one
        if config.updates_per_step > 1:
            found["log-probs"] = rows * row * forward
        if "ref_logprobs" in getattr(config.algorithm, "needs", ()):
            found["reference"] = rows * row * forward
        found["update"] = config.train.epochs_per_step * rows * row * update
    else:
        found["update"] = config.items_per_step * row * update
    return found | {"other": OTHER_S if config.kind == "rl" else 0.1}
