"""Plan the memory and time of a run, choose its `auto` settings, and find settings with which it fits a GPU.

The GPU need not be in this machine. `plan_on` and `plan_here` make a `Plan` from shapes, `forecast` measures a few
small steps, `chosen_here` resolves `auto` for a run, `fit` finds what to change if the run does not fit.
"""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch

from atomrl.config import ConfigError, RunConfig, load_config, merge_trees, read_yaml
from atomrl.models.gpt import FAMILIES
from atomrl.models.memory import MOST_TOKENS, count_parameters, known_shapes, planning_shape
from atomrl.protocols import Algorithm
from atomrl.tracking.run_directory import is_begun
from atomrl.trainer.base import PreparedRun, readable
from atomrl.trainer.build import algorithm_of, chosen_class, device_name, with_settings
from atomrl.trainer.memory import ERROR, LEAST_AT_ONCE, USABLE, Gpu, Memory, memory_by_phase, step_seconds
from atomrl.trainer.probe import ProbeResult, device_memory, measure
from atomrl.trainer.rl import RLRun

log = logging.getLogger(__name__)

# --------------------------------------------------------------------------------------------------------------------
# Time of a run, measured on a few small steps.

PROBE_STEPS, PROBE_SECONDS = 20, 2.0
"""A probe ends after so many steps or seconds, whichever comes first."""
BY_ROWS = ("reward", "update_actor", "old_log_prob", "ref", "values", "teacher", "adv", "forward")
"""Phases (`timing_s/...`) whose time is proportional to the number of rows."""


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a run, scaled up from a probe."""

    measured: ProbeResult
    seconds: Mapping[str, float]
    """Seconds of a step by phase, at the present length of completions."""
    at_limit: float
    """Seconds of a step in which every completion has `rollout.max_completion_tokens`."""
    run_seconds: float
    evaluations: int
    tokens: float
    """Mean length of a completion; 0 without rollouts."""

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def forecast(config: RunConfig, run: PreparedRun) -> Forecast:
    """Measure a few small steps and scale them to the steps of the run.

    A small step has as many rows as the engine decodes at once, or as one micro-batch holds.

    Args:
        config: config of any kind of run.
        run: the same run after its checks, with its number of steps.
    """
    small, ratio = _small_step(config)
    changes = {**small, "train": {"steps": PROBE_STEPS, **small.get("train", {})}}
    probe = measure(config, changes, PROBE_SECONDS)
    timings = {
        name.removeprefix("timing_s/"): probe.mean(name) for name in probe.steps[-1] if name.startswith("timing_s/")
    }
    step = timings.pop("step", 0.0)
    seconds = {name: value * (ratio if name in BY_ROWS else 1.0) for name, value in timings.items()}
    if "gen" in seconds:
        seconds["gen"] *= _waves(config, 1.0) / _waves(config, ratio)
    seconds["rest"] = max(0.0, step - sum(timings.values())) * ratio
    tokens, longest = probe.mean("response_length/mean"), probe.mean("response_length/max")
    growth = _growth(config, probe, tokens, longest)
    at_limit = sum(value * growth.get(name, 1.0) for name, value in seconds.items())
    steps = run.config.train.steps
    every, evaluation = config.eval.every_steps, config.eval
    count = bool(evaluation.before) + bool(evaluation.after) + ((steps - 1) // every if every else 0)
    evaluation_seconds = 0.0
    if isinstance(run, RLRun):
        rows = config.rollout.prompts_per_step * config.rollout.completions_per_prompt
        eval_rows = len(run.held_out or ()) * evaluation.samples_per_prompt
        evaluation_seconds = count * seconds.get("gen", 0.0) * eval_rows / rows
    total = steps * sum(seconds.values()) + evaluation_seconds
    return Forecast(probe, seconds, at_limit, total, count if evaluation_seconds else 0, tokens)


def _small_step(config: RunConfig) -> tuple[dict[str, dict[str, int]], float]:
    """Return changes that make a step small, and the ratio of the rows of a real step to those of the small one."""
    limit = config.train.micro_batch_tokens("cuda")
    if config.kind != "rl":
        rows = config.items_per_step
        small = min(rows, max(8, limit // 32))
        return {"train": {"rows_per_update": small}}, rows / small
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_completion_tokens
    completions = max(rollout.concurrent_completions, limit // min(64, longest))
    prompts = min(rollout.prompts_per_step, math.ceil(completions / rollout.completions_per_prompt))
    ratio = rollout.prompts_per_step / prompts
    if ratio == 1:
        return {}, 1.0
    # As many optimizer steps as in a real step, because each has a fixed cost.
    updates = config.updates_per_epoch
    rows = prompts * rollout.completions_per_prompt
    update_rows = next(size for size in range(max(1, rows // updates), rows + 1) if rows % size == 0)
    return {"rollout": {"prompts_per_step": prompts}, "train": {"rows_per_update": update_rows}}, ratio


def _waves(config: RunConfig, ratio: float) -> int:
    """Return how many times the engine fills all its slots in a step that is `ratio` times smaller."""
    rows = config.rollout.prompts_per_step * config.rollout.completions_per_prompt / ratio
    return max(1, math.ceil(rows / config.rollout.concurrent_completions))


def _growth(config: RunConfig, probe: ProbeResult, tokens: float, longest: float) -> dict[str, float]:
    """Return the factor by which each phase grows if every completion has the maximum length."""
    if not tokens:
        return {}
    limit, prompt = config.rollout.max_completion_tokens, probe.mean("prompt_length/mean")
    row = (prompt + limit) / (prompt + tokens)
    return {"gen": limit / max(1.0, longest), **dict.fromkeys(BY_ROWS[1:], row)}


def signal(config: RunConfig, prompts: int) -> Iterator[str]:
    """Sample and score completions of some prompts with the untrained model, and report how many groups have a signal.

    A group has a signal if the rewards of its completions differ.

    Raises:
        ConfigError: this kind of run has no rollouts, or the model's weights are not on this machine.
    """
    if config.kind != "rl":
        raise ConfigError("--signal: this kind of run has no rollouts")
    changes = {
        "rollout": {"prompts_per_step": prompts},
        "train": {"steps": 1, "rows_per_update": None},
        "algorithm": {"group_filter": "all"},
    }
    probe = measure(config, changes)
    if probe.random_weights:
        raise ConfigError("--signal: the model's weights are not on this machine")
    [row] = probe.steps
    mixed, good, bad = (row.get(f"by_group/frac_{name}", 0.0) for name in ("mixed", "all_good", "all_bad"))
    yield f"{prompts} prompts x {config.rollout.completions_per_prompt} completions, before training:"
    yield f"  {mixed:.0%} of groups have a signal; {good:.0%} are all correct, {bad:.0%} all wrong"
    yield f"  reward {row.get('critic/score/mean', 0.0):.3f}, {row.get('response_length/mean', 0.0):.1f} tokens"
    if mixed < 0.2:
        yield "  few groups have a signal: use easier or harder problems, more completions, or algorithm.name=dapo"


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


# --------------------------------------------------------------------------------------------------------------------
# `auto` settings: on a GPU chosen from its free memory, by the formulas of `memory_estimate`.

LEAST_TOKENS = 2048
"""Below so many tokens in a micro-batch, recomputing layers (`gradient_checkpointing`) costs less than still smaller
micro-batches: their matrix products are slower, and fewer rows share the prompt of their group."""
MOST_AT_ONCE = 512
"""Most completions decoded at once. The fewest are `LEAST_AT_ONCE`."""


def autos(config: RunConfig) -> dict[str, str]:
    """Return the settings that are `auto` and chosen by memory: section -> key."""
    settings = {
        "rollout": ("max_concurrent_completions", config.rollout.max_concurrent_completions),
        "train": ("tokens_per_micro_batch", config.train.tokens_per_micro_batch),
        "model": ("gradient_checkpointing", config.model.gradient_checkpointing),
    }
    used = settings if config.kind == "rl" else {name: settings[name] for name in ("train", "model")}
    return {section: key for section, (key, value) in used.items() if value == "auto"}


def choose(config: RunConfig, budget: int, memory_of: Callable[[RunConfig], Memory], ranks: int = 1) -> RunConfig:
    """Replace `auto` settings by the fastest ones with which a run fits into memory.

    They are chosen in this order: as many concurrent completions as fit, at most those of a step; no gradient
    checkpointing, if a micro-batch of `LEAST_TOKENS` fits without; as many tokens per micro-batch as fit. If nothing
    fits, the smallest values are taken.

    Args:
        config: config of any kind of run.
        budget: bytes of one device.
        memory_of: estimates the memory of a changed config, on the rank with the highest peak.
        ranks: number of ranks of `config.backend`; all get the same settings.

    Returns:
        The config with numbers. `model.gradient_checkpointing` stays `auto` if it is not needed; a run turns it on if
        it runs out of memory.
    """

    def first_fit(phases: Iterable[str], changes: Iterable[Mapping[str, Any]]) -> RunConfig:
        """Apply the first change with which these phases fit, or the last one."""
        for change in changes:
            changed = with_settings(config, change)
            memory = memory_of(changed)
            if memory.process + memory.resident + max(memory.phases.get(phase, 0) for phase in phases) <= budget:
                break
        return changed

    unset, replicas = autos(config), ranks // config.backend.ranks_per_row if config.backend else 1
    rows = -(-config.rows_per_update // replicas)
    if "rollout" in unset:
        completions = min(MOST_AT_ONCE, config.rollout.prompts_per_step * config.rollout.completions_per_prompt)
        sizes = halves(completions, LEAST_AT_ONCE)
        config = first_fit(["rollout"], ({"rollout": {"max_concurrent_completions": size}} for size in sizes))
    if "train" in unset or "model" in unset:
        row = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
        row = min(row, config.train.max_row_tokens or row)
        most = max(row, min(MOST_TOKENS, rows * row))
        tokens = config.train.tokens_per_micro_batch
        sizes, least = ([tokens], 1) if tokens != "auto" else (halves(most, row), min(most, LEAST_TOKENS))
        # (gradient checkpointing, tokens): first large micro-batches without checkpointing, then all sizes with it.
        pairs: list[tuple[Any, int]] = [(config.model.gradient_checkpointing, size) for size in sizes]
        if "model" in unset:
            pairs = [pair for pair in pairs if pair[1] >= least] + [(True, size) for size in sizes]
        config = first_fit(
            ["log-probs", "update"],
            (
                {"train": {"tokens_per_micro_batch": size}, "model": {"gradient_checkpointing": checkpointing}}
                for checkpointing, size in pairs
            ),
        )
    return config


def halves(most: int, least: int) -> list[int]:
    """Halve a number repeatedly, down to a lower bound.

    Example:
        >>> halves(100, 20), halves(8, 8)
        ([100, 50, 25, 20], [8])
    """
    sizes = [most]
    while sizes[-1] > least:
        sizes.append(max(least, sizes[-1] // 2))
    return sizes


def chosen_here(config: RunConfig, algorithm: Algorithm, ranks: int) -> RunConfig:
    """Replace `auto` settings by those for this machine's GPU, and log them with the reason.

    A resumed run keeps the settings that it started with. `auto` stays, and means the defaults in the config reference,
    on a CPU, for a fresh model, and in Ray actors, whose GPUs are not known here.
    """
    unset = autos(config)
    if not unset:
        return config
    if is_begun(config.run_dir) and (file := config.run_dir / "config.yaml").is_file():
        stored = read_yaml(file)
        same = {name: {key: stored[name][key]} for name, key in unset.items() if key in stored.get(name, {})}
        return with_settings(config, same)
    device = device_name(config.model.device)
    if device == "cpu" or config.gpt is not None or config.cluster is not None:
        return config
    budget = int(free_bytes(device, ranks) * USABLE)

    def memory_of(changed: RunConfig) -> Memory:
        return memory_by_phase(changed, algorithm, ranks)

    chosen = choose(config, budget, memory_of, ranks)
    peak = memory_of(chosen).peak
    log.info(
        "auto: %s; estimated %s of %s free memory%s",
        ", ".join(auto_values(config, chosen)), readable(peak).strip(), readable(budget).strip(),
        " on the fullest of the ranks' GPUs" if ranks > 1 else "",
    )  # fmt: skip
    if peak > budget:
        log.warning("estimated memory does not fit: `atomrl plan CONFIG` lists settings that reduce it")
    return chosen


def free_bytes(device: str, ranks: int) -> int:
    """Return the free memory of a GPU; for several ranks the minimum over their GPUs on this machine."""
    if ranks == 1:
        return torch.cuda.mem_get_info(torch.device(device))[0]
    count = min(ranks, torch.cuda.device_count())
    # In another process: the query creates a CUDA context on each GPU, which holds memory until its process ends.
    query = f"import torch; print(min(torch.cuda.mem_get_info(n)[0] for n in range({count})))"
    return int(subprocess.run([sys.executable, "-c", query], check=True, stdout=subprocess.PIPE).stdout)


def auto_values(config: RunConfig, chosen: RunConfig) -> list[str]:
    """Return the values chosen for `auto` settings as `KEY=VALUE`, such as `train.tokens_per_micro_batch=8192`."""
    lines = []
    for section, key in autos(config).items():
        value = getattr(getattr(chosen, section), key)
        shown = str(value).lower() if isinstance(value, bool) else "false" if section == "model" else value
        lines.append(f"{section}.{key}={shown}")
    return lines


# --------------------------------------------------------------------------------------------------------------------
# Plans: memory and time of a config on a device, from shapes.


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
    span = f"{seconds / ERROR:.1f} to {seconds * ERROR:.1f} {unit}"
    yield f"  estimated from the data sheet, not measured; up to {ERROR:g} times off: {span}"
    if plan.config.kind == "rl":
        rollout = plan.chosen.rollout
        name = "native" if rollout.engine == "auto" else rollout.engine
        yield f"  rollouts with rollout.engine={name}: a decode step is {chosen_class(rollout).decode_time.source}"


# --------------------------------------------------------------------------------------------------------------------
# Changes of a config that save memory, and the search for those with which a run fits.

FEWEST_AT_ONCE, LEAST_COMPLETION = 8, 256
"""Lower limits of a fit: concurrent completions, and tokens of a completion."""
SLOWER = 1.1
"""A fit with fewer changes of training is preferred if its step is at most this many times slower than the fastest."""


@dataclass(frozen=True)
class Trade:
    """A change of the config that saves memory, and its price."""

    changes: Mapping[str, Any]
    """Keys of the config with their values, as a tree."""
    price: str
    """The drawback, in words."""
    kind: Literal["speed", "bits", "adapters", "task"] = "speed"
    """Changes the speed only; the precision of training; trains adapters instead of all weights; or shortens
    completions."""

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

    First changes of the speed only; then 8-bit moments, adapters and a quantised base, which change training; last
    shorter completions, which change the task.

    Args:
        gpus: number of GPUs; 0 on a CPU.
    """
    model, rollout, train = config.model, config.rollout, config.train
    if config.backend is None and gpus > 1:
        yield Trade({"backend": {"type": "fsdp", "ranks": gpus}}, "shards over all GPUs; not slower")
    # Speed only: smaller batches, down to sizes that cost little, then recomputation, then smaller ones still.
    # A micro-batch holds at least one whole row.
    has_rollouts = config.kind == "rl"
    at_once = min(rollout.concurrent_completions, rollout.prompts_per_step * rollout.completions_per_prompt)
    row = config.data.max_prompt_tokens + rollout.max_completion_tokens if has_rollouts else 1
    tokens = train.micro_batch_tokens("cuda" if gpus else "cpu")
    while has_rollouts and at_once > max(32, FEWEST_AT_ONCE):
        at_once = max(32, at_once // 2)
        yield Trade({"rollout": {"max_concurrent_completions": at_once}}, "smaller decoding batches: slower rollouts")
    while tokens > max(row, 2048):
        tokens = max(row, 2048, tokens // 2)
        yield Trade(
            {"train": {"tokens_per_micro_batch": tokens}}, "smaller micro-batches: the same gradients, a little slower"
        )
    if not model.checkpoints_layers:
        yield Trade({"model": {"gradient_checkpointing": True}}, "recomputes layers: updates a third slower")
    while tokens > max(row, 512):
        tokens = max(row, 512, tokens // 2)
        yield Trade({"train": {"tokens_per_micro_batch": tokens}}, "smaller micro-batches: the same gradients, slower")
    # Changes of what is trained: moments, adapters, the base.
    if train.optimizer == "adamw" and config.backend is None:
        price = "Adam's moments in 8 bits (pip install 'atomrl[quant]')"
        yield Trade({"train": {"optimizer": "adamw8bit"}}, price, "bits")
    if model.lora is None:
        lora = {"lora": {"rank": 32, "alpha": 64.0}}
        rate = {"train": {"learning_rate": 2e-5}} if train.learning_rate < 1e-5 else {}
        price = "trains adapters of rank 32 instead of all weights"
        yield Trade({"model": lora, **rate}, price, "adapters")
    if model.quantization is None:
        price = "the frozen base in 4 bits: a little noise (pip install 'atomrl[quant]')"
        yield Trade({"model": {"quantization": "nf4"}}, price, "bits")
    # Last: very slow rollouts, and shorter completions, which change the task.
    while has_rollouts and at_once > FEWEST_AT_ONCE:
        at_once = max(FEWEST_AT_ONCE, at_once - 8)
        yield Trade(
            {"rollout": {"max_concurrent_completions": at_once}}, "smaller decoding batches: much slower rollouts"
        )
    limit = rollout.max_completion_tokens
    while has_rollouts and limit > LEAST_COMPLETION:
        limit = max(LEAST_COMPLETION, limit // 2)
        price = "truncates longer completions: changes the task"
        yield Trade({"rollout": {"max_completion_tokens": limit}}, price, "task")


def helpful(plan: Plan) -> list[tuple[Trade, Plan]]:
    """Return single changes that save 64 MiB or more, each with its plan.

    Of several values for the same keys it is the first with which the run fits, or else the last.
    """
    by_keys: dict[str, tuple[Trade, Plan]] = {}
    for trade in trades(plan.chosen, plan.gpus):
        smaller = changed(plan, [trade])
        if smaller is not None and smaller.memory.peak < plan.memory.peak - 2**26:
            keys = " ".join(key for key, _ in _flat(trade.changes))
            if keys not in by_keys or not by_keys[keys][1].fits:
                by_keys[keys] = (trade, smaller)
    return list(by_keys.values())


def fit(plan: Plan) -> tuple[list[Trade], Plan] | None:
    """Find changes with which a run fits, without superfluous ones; None if no changes are enough.

    Three stages, each only if the one before does not fit: changes of the speed and precision; adapters as well;
    shorter completions as well. Within a stage every subset of the precision changes (8-bit moments, a quantised base)
    is completed by changes of the speed until it fits. The result is the smallest subset whose step takes at most
    `SLOWER` times as long as the fastest.
    """
    if plan.fits:
        return [], plan
    available = list(trades(plan.chosen, plan.gpus))
    speed, bits, adapters, task = (
        [trade for trade in available if trade.kind == kind] for kind in ("speed", "bits", "adapters", "task")
    )
    subsets = [list(subset) for count in range(len(bits) + 1) for subset in combinations(bits, count)]
    for required, optional in (([], speed), (adapters, speed), (adapters, [*speed, *task])):
        fits = [one for subset in subsets if (one := _fit_with(plan, [*required, *subset], optional)) is not None]
        if fits:
            fastest = min(smaller.step_seconds for _, smaller in fits)
            return next(one for one in fits if one[1].step_seconds <= SLOWER * fastest)
    return None


def _fit_with(plan: Plan, required: Sequence[Trade], optional: Sequence[Trade]) -> tuple[list[Trade], Plan] | None:
    """Apply required changes and as many optional ones, in their order, as it takes to fit; None if that is too few."""
    chosen, current = list(required), changed(plan, required)
    if current is None:
        return None
    for trade in optional:
        if current.fits:
            break
        smaller = changed(plan, [*chosen, trade])
        if smaller is not None and smaller.memory.peak < current.memory.peak:
            chosen, current = [*chosen, trade], smaller
    if not current.fits:
        return None
    for trade in list(chosen):  # a later change may have made an earlier one superfluous
        fewer = [other for other in chosen if other is not trade]
        smaller = changed(plan, fewer)
        if smaller is not None and smaller.fits and smaller.step_seconds <= current.step_seconds:
            chosen, current = fewer, smaller
    return chosen, current


def least(plan: Plan) -> tuple[list[Trade], Plan]:
    """Return the changes that bring a run's memory to its minimum, and its plan."""
    chosen: list[Trade] = []
    current = plan
    for trade in trades(plan.chosen, plan.gpus):
        smaller = changed(plan, [*chosen, trade])
        if smaller is not None and smaller.memory.peak < current.memory.peak:
            chosen, current = [*chosen, trade], smaller
    return chosen, current


def largest_that_fits(plan: Plan, changes: Sequence[Trade]) -> tuple[str, Plan] | None:
    """Return the largest well-known model that fits with some changes, with its plan: of the same family, else of any
    other; None if none fits."""
    path = plan.config.model.path
    assert path is not None
    shape = planning_shape(path, plan.config.model.trust_remote_code)
    size = count_parameters(shape)
    sizes = {name: count_parameters(other) for name, other in known_shapes().items() if other.model_type in FAMILIES}
    ordered = sorted((name for name, count in sizes.items() if count < size), key=lambda name: -sizes[name])
    for of_family in (True, False):
        for name in ordered:
            if (known_shapes()[name].model_type == shape.model_type) is of_family:
                renamed = changed(plan, [*changes, Trade({"model": {"path": name}}, "a smaller model", "task")])
                if renamed is not None and renamed.fits:
                    return name, renamed
    return None


def merged(chosen: Sequence[Trade]) -> dict[str, Any]:
    """Merge the changes of several trades into one tree."""
    tree: dict[str, Any] = {}
    for trade in chosen:
        tree = merge_trees(tree, trade.changes)
    return tree


def changed(plan: Plan, chosen: Sequence[Trade]) -> Plan | None:
    """Plan a config after some changes; None if they make it invalid."""
    try:
        return plan.replan(load_config(merge_trees(plan.config.to_tree(secrets=True), merged(chosen))))
    except ConfigError:
        return None
