"""Plan the memory and time of a run on a GPU that need not be in this machine, and find settings with which it fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch

from atomrl.config import ConfigError, RunConfig, build_config, merge_trees
from atomrl.models.known_shapes import planning_shape
from atomrl.protocols import Algorithm
from atomrl.runs.auto import choose, described
from atomrl.runs.base import readable
from atomrl.runs.build import algorithm_of, chosen_class
from atomrl.runs.hardware import ERROR, Gpu, step_seconds
from atomrl.runs.plan import Memory, memory_by_phase

LEAST_AT_ONCE, LEAST_COMPLETION = 8, 256
"""Lower limits of a fit: completions decoded at once, and tokens of a completion."""
SLOWER = 1.1
"""How many times as long a step may take as with the fastest fit, for fewer changes of training."""


@dataclass(frozen=True)
class Plan:
    """Memory and time of a config on a device."""

    config: RunConfig
    """With its settings of `auto`."""
    chosen: RunConfig
    """With what is chosen for them."""
    memory: Memory
    budget: int
    """Bytes that can be allocated."""
    seconds: Mapping[str, float]
    """Seconds of a step by phase, with every completion at the limit; empty where time is not estimated."""
    gpus: int
    """Number of GPUs; 0 on a CPU."""
    again: Callable[[RunConfig], "Plan"]
    """Plans another config on the same device."""

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.budget

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def plan_here(config: RunConfig, algorithm: Algorithm, ranks: int, budget: int) -> Plan:
    """Plan the memory of a run on this machine's device; no time is estimated.

    Raises:
        ConfigError: as `memory_by_phase`.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = choose(config, budget, lambda other: memory_by_phase(other, algorithm, ranks), ranks) if gpus else config
    memory = memory_by_phase(chosen, algorithm, ranks)
    return Plan(config, chosen, memory, budget, {}, gpus, lambda other: plan_here(other, algorithm, ranks, budget))


def plan_on(config: RunConfig, gpu: Gpu) -> Plan:
    """Plan a run on a GPU from shapes alone, without weights, data, tokenizer or the GPU.

    Raises:
        ConfigError: the model is a fresh one, or its shape is neither in a local folder, nor known, nor on the hub.
    """
    if config.gpt is not None:
        raise ConfigError("a fresh model (gpt) is not planned for a GPU from shapes; `atomrl plan --probe` measures it")
    algorithm = algorithm_of(config)
    ranks = gpu.count if config.backend else 1
    if config.backend is not None:
        config.backend.check_count(ranks)
    if (cut := config.rollout.tensor_parallel) > gpu.count:
        raise ConfigError(f"rollout.tensor_parallel={cut}: {gpu} is planned for; give as many, as in --gpu {cut}x80GiB")
    compute = 4 if config.model.dtype == "float32" else gpu.compute_bytes
    path = config.model.path
    assert path is not None, "without gpt a config has a path"

    def memory_of(other: RunConfig) -> Memory:
        return memory_by_phase(other, algorithm, ranks, device="cuda", compute=compute, shape_of=planning_shape)

    budget = gpu.usable_bytes
    chosen = choose(config, budget, memory_of, ranks)
    seconds = step_seconds(chosen, planning_shape(path, config.model.trust_remote_code), gpu, compute)
    return Plan(config, chosen, memory_of(chosen), budget, seconds, gpu.count, lambda other: plan_on(other, gpu))


def describe(plan: Plan, gpu: Gpu) -> Iterator[str]:
    """Yield the lines of a report: memory by phase, and time."""
    memory, budget, steps = plan.memory, plan.budget, plan.config.train.steps
    yield f"memory on {gpu}, of which {readable(budget).strip()} are planned with, at the longest rows:"
    yield f"  {'stays':<12}{readable(memory.resident)}"
    for name, size in memory.phases.items():
        mark = "  <- the most" if name == memory.largest else ""
        yield f"  {name:<12}{readable(size)} more = {readable(memory.resident + size)}{mark}"
    yield f"  {readable(memory.peak).strip()} of {readable(budget).strip()}: {'fits' if plan.fits else 'does not fit'}"
    if settings := described(plan.config, plan.chosen):
        yield f"  auto: {', '.join(settings)}"
    if (cut := plan.config.rollout.tensor_parallel) > 1:
        yield f"  the engine uses {cut} of the {gpu.count} GPUs, with a part of the model on each"
    elif gpu.count > 1 and plan.config.backend is None:
        yield (
            f"  one of the {gpu.count} GPUs is used; backend.type=fsdp backend.ranks={gpu.count} trains on all of them"
        )
    if not gpu.bfloat16 and plan.config.model.dtype != "float32":
        yield f"  {gpu.name} has no bfloat16: it computes in float32"
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.seconds.items())
    yield f"time of a step, with every completion at its limit: {plan.step_seconds:.1f} s ({parts})"
    seconds, unit = plan.step_seconds, "s"
    if steps is not None:
        seconds, unit = seconds * steps / 3600, "h"
        yield f"  {steps} steps: {seconds:.1f} h, without evaluations; completions that end earlier take less"
        if epochs := plan.config.train.total_epochs:
            yield f"  the run: {epochs:g} passes over the data; atomrl train CONFIG --dry-run counts the steps"
    span = f"{seconds / ERROR:.1f} to {seconds * ERROR:.1f} {unit}"
    yield f"  estimated from the card's data sheet, not measured on a GPU, and up to {ERROR:g} times off: {span}"
    if plan.config.kind == "rl":
        rollout = plan.chosen.rollout
        name = "native" if rollout.engine == "auto" else rollout.engine
        yield f"  rollouts with rollout.engine={name}: a decode step is {chosen_class(rollout).decode_time.source}"


# ---- Changes that save memory ----


@dataclass(frozen=True)
class Trade:
    """A change of the config that saves memory, and its cost."""

    changes: Mapping[str, Any]
    """Keys of the config with their values, as a tree."""
    price: str
    kind: Literal["speed", "bits", "adapters", "task"] = "speed"
    """Changes only the speed; the precision of training; trains adapters in place of all weights; or cuts completions
    off."""

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in _flat(self.changes))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def trades(config: RunConfig, gpus: int) -> Iterator[Trade]:
    """Yield changes of a config that may save memory, the cheapest first.

    First those that change only the speed; then 8-bit moments, adapters and a quantised base, which change training;
    last the length of completions, which changes the task.
    """
    model, rollout, train = config.model, config.rollout, config.train
    if config.backend is None and gpus > 1:
        yield Trade({"backend": {"type": "fsdp", "ranks": gpus}}, "shards over all GPUs; not slower")
    draws = config.kind == "rl"
    at_once = min(rollout.concurrent_completions, rollout.prompts_per_step * rollout.completions_per_prompt)
    row = config.data.max_prompt_tokens + rollout.max_completion_tokens if draws else 1
    tokens = train.micro_batch_tokens("cuda" if gpus else "cpu")
    while draws and at_once > max(32, LEAST_AT_ONCE):
        at_once = max(32, at_once // 2)
        yield Trade({"rollout": {"max_concurrent_completions": at_once}}, "more waves of decoding: slower rollouts")
    while tokens > max(row, 2048):
        tokens = max(row, 2048, tokens // 2)
        yield Trade(
            {"train": {"tokens_per_micro_batch": tokens}}, "smaller products: the same gradients, a little slower"
        )
    if not model.checkpoints_layers:
        yield Trade({"model": {"gradient_checkpointing": True}}, "layers are computed twice: updates a third slower")
    while tokens > max(row, 512):
        tokens = max(row, 512, tokens // 2)
        yield Trade({"train": {"tokens_per_micro_batch": tokens}}, "smaller products: the same gradients, slower")
    if train.optimizer == "adamw" and config.backend is None:
        price = "Adam's moments in 8 bits (pip install 'atomrl[quant]')"
        yield Trade({"train": {"optimizer": "adamw8bit"}}, price, "bits")
    if model.lora is None:
        lora = {"lora": {"rank": 32, "alpha": 64.0}}
        rate = {"train": {"learning_rate": 2e-5}} if train.learning_rate < 1e-5 else {}
        price = "adapters of rank 32 are trained in place of all weights"
        yield Trade({"model": lora, **rate}, price, "adapters")
    if model.quantization is None:
        price = "the frozen base in 4 bits: a little noise (pip install 'atomrl[quant]')"
        yield Trade({"model": {"quantization": "nf4"}}, price, "bits")
    while draws and at_once > LEAST_AT_ONCE:
        at_once = max(LEAST_AT_ONCE, at_once - 8)
        yield Trade(
            {"rollout": {"max_concurrent_completions": at_once}}, "more waves of decoding: much slower rollouts"
        )
    limit = rollout.max_completion_tokens
    while draws and limit > LEAST_COMPLETION:
        limit = max(LEAST_COMPLETION, limit // 2)
        price = "longer completions are cut off: another task"
        yield Trade({"rollout": {"max_completion_tokens": limit}}, price, "task")


def helpful(plan: Plan) -> list[tuple[Trade, Plan]]:
    """Single changes that save memory, each with its plan; of several for one key the first that fits, or the last."""
    found: dict[str, tuple[Trade, Plan]] = {}
    for trade in trades(plan.chosen, plan.gpus):
        smaller = changed(plan, [trade])
        if smaller is not None and smaller.memory.peak < plan.memory.peak - 2**26:
            keys = " ".join(key for key, _ in _flat(trade.changes))
            if keys not in found or not found[keys][1].fits:
                found[keys] = (trade, smaller)
    return list(found.values())


def fit(plan: Plan) -> tuple[list[Trade], Plan] | None:
    """The changes with which a run fits, without unneeded ones; None where no changes are enough.

    Adapters are taken only where nothing else fits, and shorter completions only where adapters do not help. Each
    choice of 8-bit moments and a quantised base is made to fit by changes of the speed. Of those that fit it is the one
    with the fewest changes of training that takes at most `SLOWER` times as long as the fastest.
    """
    if plan.fits:
        return [], plan
    found = list(trades(plan.chosen, plan.gpus))
    speed, bits, adapters, task = (
        [trade for trade in found if trade.kind == kind] for kind in ("speed", "bits", "adapters", "task")
    )
    subsets = [list(some) for count in range(len(bits) + 1) for some in combinations(bits, count)]
    for given, tried in (([], speed), (adapters, speed), (adapters, [*speed, *task])):
        fits = [one for some in subsets if (one := _fit_with(plan, [*given, *some], tried)) is not None]
        if fits:
            fastest = min(smaller.step_seconds for _, smaller in fits)
            return next(one for one in fits if one[1].step_seconds <= SLOWER * fastest)
    return None


def _fit_with(plan: Plan, given: Sequence[Trade], tried: Sequence[Trade]) -> tuple[list[Trade], Plan] | None:
    """Some changes, and those of `tried` that they need beside them, in this order; None where the run does not fit."""
    chosen, now = list(given), changed(plan, given)
    if now is None:
        return None
    for trade in tried:
        if now.fits:
            break
        smaller = changed(plan, [*chosen, trade])
        if smaller is not None and smaller.memory.peak < now.memory.peak:
            chosen, now = [*chosen, trade], smaller
    if not now.fits:
        return None
    for trade in list(chosen):  # one that was chosen early may be unneeded now
        fewer = [other for other in chosen if other is not trade]
        smaller = changed(plan, fewer)
        if smaller is not None and smaller.fits and smaller.step_seconds <= now.step_seconds:
            chosen, now = fewer, smaller
    return chosen, now


def merged(chosen: Sequence[Trade]) -> dict[str, Any]:
    """Merge the changes of several trades into one tree."""
    tree: dict[str, Any] = {}
    for trade in chosen:
        tree = merge_trees(tree, trade.changes)
    return tree


def changed(plan: Plan, chosen: Sequence[Trade]) -> Plan | None:
    """The plan after some changes; None where they do not make a valid config."""
    try:
        return plan.again(build_config(merge_trees(plan.config.to_tree(secrets=True), merged(chosen))))
    except ConfigError:
        return None
