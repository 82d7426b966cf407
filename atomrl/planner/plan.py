"""Plan the memory and time of a config on a device, from shapes alone.

The GPU need not be in this machine. `plan_on` plans for any GPU, `plan_here` for this machine's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from atomrl.common.memory import available_memory, readable
from atomrl.config import ConfigError, RunConfig
from atomrl.models.known_shapes import planning_shape
from atomrl.planner.gpus import Gpu
from atomrl.planner.step_time import ERROR_FACTOR, step_seconds
from atomrl.protocols import Algorithm
from atomrl.trainer.auto import auto_values, choose
from atomrl.trainer.build import algorithm_of, chosen_class
from atomrl.trainer.memory import Memory, memory_by_phase


def memory_lines(memory: Memory, budget: int, place: str) -> tuple[list[str], bool]:
    """Return the table of a run's memory by phase, and whether it fits into `budget` bytes."""
    fits = memory.peak <= budget
    verdict = "fits" if fits else "does not fit"
    return [*_phase_lines(memory), f"{readable(memory.peak)} of {readable(budget)} ({place}): {verdict}"], fits


def _phase_lines(memory: Memory) -> Iterator[str]:
    always = memory.resident + memory.process
    yield f"{'stays':<12}{readable(always)}"
    for name, size in memory.phases.items():
        mark = "  <- peak" if name == memory.largest else ""
        yield f"{name:<12}{readable(size)} more = {readable(always + size)}{mark}"


def budget_of(text: str | None) -> tuple[int, str]:
    """Parse a memory size; None: the memory of this machine's device. Also returns where the size is from.

    Example:
        >>> budget_of("24GiB"), budget_of("500 MB")
        ((25769803776, '--memory'), (500000000, '--memory'))

    Raises:
        ConfigError: the text is not a size.
    """
    if text is None:
        return device_memory()
    units = {
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    }
    for unit, size in units.items():
        number = text.removesuffix(unit).strip()
        if number != text and number.replace(".", "", 1).isdigit():
            return int(float(number) * size), "--memory"
    raise ConfigError(f"--memory {text}: must be a size as in 24GiB ({', '.join(units)})")


@dataclass(frozen=True)
class Plan:
    """Memory and time of a config on a device."""

    config: RunConfig
    """The config of the user, possibly with `auto` settings."""
    chosen: RunConfig
    """With numbers for `auto` settings."""
    memory: Memory
    budget: int
    """Bytes that can be allocated."""
    seconds: Mapping[str, float]
    """Seconds of a step by phase, with every completion at its maximum length; empty if time is not estimated."""
    gpus: int
    """Number of GPUs; 0 on a CPU."""
    replan: Callable[[RunConfig], Plan]
    """Plans another config on the same device."""

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.budget

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def plan_here(config: RunConfig, algorithm: Algorithm, ranks: int, budget: int) -> Plan:
    """Plan the memory of a run on this machine's device, without an estimate of time.

    Raises:
        ConfigError: as `memory_by_phase`.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = choose(config, budget, lambda other: memory_by_phase(other, algorithm, ranks), ranks) if gpus else config
    memory = memory_by_phase(chosen, algorithm, ranks)
    return Plan(config, chosen, memory, budget, {}, gpus, lambda other: plan_here(other, algorithm, ranks, budget))


def plan_on(config: RunConfig, gpu: Gpu) -> Plan:
    """Plan a run on a GPU from shapes alone; needs no weights, data, tokenizer or GPU.

    Raises:
        ConfigError: the model is a fresh one; its `config.json` cannot be found; or the config needs more GPUs.
    """
    if config.gpt is not None:
        raise ConfigError("no estimate from shapes for a fresh model (gpt); `atomrl plan --probe` measures it")
    algorithm = algorithm_of(config)
    ranks = gpu.count if config.backend else 1
    if config.backend is not None:
        config.backend.check_count(ranks)
    if (cut := config.rollout.tensor_parallel) > gpu.count:
        raise ConfigError(
            f"rollout.tensor_parallel={cut}: the plan is for {gpu}; give more GPUs, as in --gpu {cut}x80GiB"
        )
    compute = 4 if config.model.dtype == "float32" else gpu.compute_bytes
    path = config.model.path
    assert path is not None, "a config without gpt has a model.path"

    def memory_of(other: RunConfig) -> Memory:
        return memory_by_phase(other, algorithm, ranks, device="cuda", compute=compute, shape_of=planning_shape)

    budget = gpu.usable_bytes
    chosen = choose(config, budget, memory_of, ranks)
    seconds = step_seconds(chosen, planning_shape(path, config.model.trust_remote_code), gpu, compute)
    return Plan(config, chosen, memory_of(chosen), budget, seconds, gpu.count, lambda other: plan_on(other, gpu))


def describe(plan: Plan, gpu: Gpu) -> Iterator[str]:
    """Yield the lines of a report: memory by phase, `auto` settings, and time."""
    memory, budget, steps = plan.memory, plan.budget, plan.config.train.steps
    yield f"memory on {gpu}, of which {readable(budget).strip()} can be used, at the longest rows:"
    yield from (f"  {line}" for line in _phase_lines(memory))
    yield f"  {readable(memory.peak).strip()} of {readable(budget).strip()}: {'fits' if plan.fits else 'does not fit'}"
    if settings := auto_values(plan.config, plan.chosen):
        yield f"  auto: {', '.join(settings)}"
    if (cut := plan.config.rollout.tensor_parallel) > 1:
        yield f"  the engine shards the model over {cut} of the {gpu.count} GPUs"
    elif gpu.count > 1 and plan.config.backend is None:
        yield (f"  only one of the {gpu.count} GPUs is used; backend.type=fsdp backend.ranks={gpu.count} uses all")
    if not gpu.bfloat16 and plan.config.model.dtype != "float32":
        yield f"  {gpu.name} has no bfloat16: it computes in float32"
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.seconds.items())
    yield f"time of a step, all completions at the limit: {plan.step_seconds:.1f} s ({parts})"
    seconds, unit = plan.step_seconds, "s"
    if steps is not None:
        seconds, unit = seconds * steps / 3600, "h"
        yield f"  {steps} steps: {seconds:.1f} h, without evaluations; less if completions are shorter"
        if epochs := plan.config.train.total_epochs:
            yield f"  the run: {epochs:g} passes over the data; atomrl train CONFIG --dry-run counts the steps"
    span = f"{seconds / ERROR_FACTOR:.1f} to {seconds * ERROR_FACTOR:.1f} {unit}"
    yield f"  estimated from the data sheet, not measured; up to {ERROR_FACTOR:g} times off: {span}"
    if plan.config.kind == "rl":
        rollout = plan.chosen.rollout
        name = "native" if rollout.engine == "auto" else rollout.engine
        yield f"  rollouts with rollout.engine={name}: a decode step is {chosen_class(rollout).decode_time.source}"


def device_memory() -> tuple[int, str]:
    """Return the memory of the GPU, or what is available on this machine or in its container, and the device's name."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory), torch.cuda.get_device_name(0)
    return available_memory(), "this machine"
