"""Time of a step on a GPU: a roofline model. docs/start/hardware.md says which constants were measured, and how."""

from collections.abc import Mapping
from typing import Any

import torch

from atomrl.config import RunConfig
from atomrl.engines.native.linear import FUSED_ROWS
from atomrl.models.memory import FLOAT32, QUANTIZED, active_parameters, count_parameters, ends, layer_count, widths
from atomrl.models.shapes import text_config
from atomrl.models.stream import packs_rows
from atomrl.planner.gpus import Gpu
from atomrl.trainer.build import chosen_class
from atomrl.trainer.colocation import shares_base

PRODUCT_SHARE = 0.75
"""Share of the TFLOPS that large matrix products reach. Measured on one H200: 737 of 989 in updates, 2026-11-26."""

BANDWIDTH_SHARE = 0.6
"""Share of the bandwidth that memory-bound kernels reach. Estimated; a plain copy reached 0.89 on the H200."""

FUSED_SHARE = 0.5
"""Share of these two rates that products with the codes of nf4 reach. Estimated: no GPU has run them."""

PASS_BYTES, PASS_BYTES_COMPILED = 500, 200
"""Memory traffic of one pass, in bytes per token, layer and hidden unit, without matrix products. Counted
(`benchmarks/layer_launches.py`: half of what forward and backward move); estimated for compiled layers."""

LOGIT_BYTES = 12
"""Memory traffic of one pass in bytes per logit. Estimated."""

LAYER_LAUNCHES, LAYER_LAUNCHES_COMPILED = 216, 110
"""Kernel launches of a layer's forward and backward pass with adapters. Counted, as above; estimated if compiled."""

LAUNCH_S = 9e-6
"""Seconds per kernel launch on the host. Estimated: 15 us were measured from Python, and a backward pass is launched
from C++."""

PLAIN_LAYER_S = 2.4e-3
"""Seconds of a decode step per layer on a card without bfloat16, where no engine has kernels: as transformers."""

OTHER_S = 0.5
"""Seconds of a step for weight sync, rewards and advantages. Estimated."""

ERROR_FACTOR = 2.0
"""Factor by which a step may be faster or slower than estimated."""


def step_seconds(config: RunConfig, shape: Any, gpu: Gpu, compute: int) -> Mapping[str, float]:
    """Estimate the seconds of each phase of a step, with every completion at its maximum length.

    Args:
        config: config of the run. Kinds other than RL have the phases `update` and `other` only.
        shape: the model's transformers config.
        gpu: the GPU; with a `backend` updates are spread over `gpu.count` of them.
        compute: bytes per element in the forward pass.
    """
    rollout, train, has_rollouts = config.rollout, config.train, config.kind == "rl"
    limit, prompt = rollout.max_completion_tokens, config.data.max_prompt_tokens
    rows = rollout.prompts_per_step * rollout.completions_per_prompt if has_rollouts else config.items_per_step
    row = min(prompt + limit, train.max_row_tokens or prompt + limit)
    dtype = torch.bfloat16 if compute == 2 else torch.float32
    tokens = rows * row
    # Rows of a group that are packed into one micro-batch compute their prompt once.
    if has_rollouts and packs_rows(config.model.pack_rows, "cuda", dtype):
        sharing = min(rollout.completions_per_prompt, max(1, train.micro_batch_tokens("cuda") // row))
        tokens -= rows * max(0, row - limit) * (sharing - 1) // sharing
    logits = rows * (limit if has_rollouts else row)
    forward, update = (_pass_seconds(config, shape, gpu, tokens, logits, compute, b) for b in (False, True))
    seconds: dict[str, float] = {}
    if has_rollouts:
        seconds["rollout"] = _rollout_seconds(config, shape, gpu, compute)
        if config.updates_per_step > 1:
            seconds["log-probs"] = forward
        if "ref_logprobs" in getattr(config.algorithm, "needs", ()):
            seconds["reference"] = forward
    seconds["update"] = update * (train.epochs_per_step if has_rollouts else 1)
    return seconds | {"other": OTHER_S if has_rollouts else 0.1}


def _rollout_seconds(config: RunConfig, shape: Any, gpu: Gpu, compute: int) -> float:
    """Estimate the seconds of a step's rollouts: a prefill, then waves of decode steps.

    The kernels of a decode step run one after the other: matrix products read all weights, attention reads the
    key-value cache, and sampling reads the logits.
    """
    rollout, engine = config.rollout, chosen_class(config.rollout).decode_time
    active, layers, vocab = active_parameters(shape), layer_count(shape), text_config(shape).vocab_size
    _, _, keys, _ = widths(shape)
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    batch = min(rows, rollout.concurrent_completions)
    mean_context = config.data.max_prompt_tokens + rollout.max_completion_tokens / 2
    rate, bandwidth = gpu.tflops * 1e12 * PRODUCT_SHARE, gpu.gb_s * 1e9 * BANDWIDTH_SHARE
    total = count_parameters(shape)
    read = min(total, active * batch)  # tokens run through different experts
    products = max(read * compute / bandwidth, 2 * active * batch / rate)
    if config.model.quantization and shares_base(config, shape, "cuda", compute):
        if config.model.quantization == "nf4" and batch <= FUSED_ROWS and compute < FLOAT32:
            codes = (total - ends(shape)) * QUANTIZED["nf4"] + ends(shape) * compute
            products = max(codes / bandwidth, 2 * active * batch / rate) / FUSED_SHARE
        else:
            products += _dequantized_bytes(config, shape, compute) / bandwidth
    traffic = batch * (mean_context * 2 * layers * keys * compute + LOGIT_BYTES * vocab)
    layer = engine.layer_s + (engine.adapted_layer_s if config.model.lora else 0)
    layer = layer if gpu.bfloat16 else max(layer, PLAIN_LAYER_S)
    row = engine.row_s + (engine.logprob_s if rollout.logprobs_over != "none" else 0)
    step = (products + traffic / bandwidth) / rollout.tensor_parallel + layers * layer + batch * row
    prefill = 2 * active * rollout.prompts_per_step * config.data.max_prompt_tokens / rate
    return float(prefill + -(-rows // batch) * rollout.max_completion_tokens * step)


def _dequantized_bytes(config: RunConfig, shape: Any, compute: int) -> float:
    """Return the bytes that are read and written when all layers are dequantized once; 0 if they are not quantized."""
    quantization = config.model.quantization
    return 0 if quantization is None else (count_parameters(shape) - ends(shape)) * (QUANTIZED[quantization] + compute)


def _pass_seconds(
    config: RunConfig, shape: Any, gpu: Gpu, tokens: int, logits: int, compute: int, backward: bool
) -> float:
    """Estimate the seconds of a forward pass over all tokens, and of the backward pass if `backward`.

    Kernel launches on the host overlap with the device, so it is the larger of the two times.
    """
    model, cards = config.model, gpu.count if config.backend else 1
    text = text_config(shape)
    active, layers, hidden = active_parameters(shape), layer_count(shape), int(text.hidden_size)
    forwards = 2 if backward and model.checkpoints_layers else 1
    products = 2 * forwards + backward * (2 if model.lora else 4)  # FLOPs per parameter and token
    passes = forwards + backward
    traffic = passes * layers * hidden * (PASS_BYTES_COMPILED if model.compile else PASS_BYTES) * tokens
    traffic += (1 + backward) * LOGIT_BYTES * text.vocab_size * logits
    device = products * active * tokens / (gpu.tflops * 1e12 * PRODUCT_SHARE)
    micro_batches = -(-tokens // (cards * config.train.micro_batch_tokens("cuda")))
    traffic += cards * micro_batches * passes * _dequantized_bytes(config, shape, compute)
    device += traffic / (gpu.gb_s * 1e9 * BANDWIDTH_SHARE)
    launches = layers * (LAYER_LAUNCHES_COMPILED if model.compile else LAYER_LAUNCHES) * (passes / 2)
    return float(max(device / cards, micro_batches * launches * LAUNCH_S))
