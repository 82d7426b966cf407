"""Plan the memory and time of a run on a GPU that need not be in this machine, and find settings with which it fits."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import torch

from atomrl.config import ConfigError, RunConfig, build_config, merge_trees, read_yaml
from atomrl.models.loading import model_config_only
from atomrl.models.memory import BESIDE, MOST_TOKENS, planning_shape, process_memory
from atomrl.protocols import Algorithm
from atomrl.tracking.run_directory import is_begun
from atomrl.trainer.base import PreparedRun, readable
from atomrl.trainer.build import algorithm_of, chosen_class, device_name, with_settings
from atomrl.trainer.memory import ERROR, USABLE, Gpu, at_once, memory_estimate, sampling_bytes, step_seconds
from atomrl.trainer.probe import Measured, device_memory, measure
from atomrl.trainer.rl import RLRun

# --------------------------------------------------------------------------------------------------------------------
# Will a run fit, phase by phase, and how long will it take: from shapes alone, or measured on a few small steps.

GATHERED = ("gathered embedding", "gathered layers")
"""Of ranks with shards, while a model computes."""
UPDATE = (
    "gradients", "fresh gradients", "activations", "critic activations", "log-prob chunk", "backward pass",
    "distributions", *GATHERED,
)  # fmt: skip
PASSING = {"key-value cache", *UPDATE}
"""Parts of the memory that are there in a phase alone; all others stay."""
PHASES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("key-value cache",),
    "log-probs": ("log-prob chunk", *GATHERED),
    "update": UPDATE,
}
PROBE_STEPS, PROBE_SECONDS = 20, 2.0
"""A probe ends with the first of the two."""
BY_ROWS = ("reward", "update_actor", "old_log_prob", "ref", "values", "teacher", "adv", "forward")
"""Of the seconds of a step, those that grow with its rows."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a run takes."""

    resident: int
    """Weights, optimizer and what else stays."""
    phases: Mapping[str, int]
    """What each phase takes beside them, at its largest."""
    process: int
    """What Python and torch take themselves, on a CPU."""

    @property
    def largest(self) -> str:
        """The phase that decides."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak(self) -> int:
        """The most at once: a phase gives back what it took before the next begins."""
        return self.process + self.resident + self.phases[self.largest]


def memory_by_phase(
    config: RunConfig,
    algorithm: Algorithm,
    ranks: int = 1,
    device: str | None = None,
    compute: int | None = None,
    shape_of: Callable[[str, bool], Any] = model_config_only,
) -> Memory:
    """The memory of a run at its limits, from shapes alone, of the first of several ranks; no weights are loaded.

    Args:
        algorithm, ranks, device, compute, shape_of: as of `memory_estimate`.

    Raises:
        ConfigError: there is no estimate of a fresh model; its `config.json` is not at hand.
    """
    import torch

    if config.gpt is not None:
        raise ConfigError("of a fresh model (gpt) there is no estimate from shapes; --probe measures it")
    parts = memory_estimate(config, algorithm, ranks, device, compute, shape_of)
    path = config.model.path
    assert path is not None
    layers = shape_of(path, config.model.trust_remote_code).num_hidden_layers
    phases = {name: at_once({part: parts.get(part, 0) for part in needs}) for name, needs in PHASES.items()}
    on_gpu = device == "cuda" or (device is None and torch.cuda.is_available())
    if on_gpu and config.kind == "rl":
        phases["rollout"] += sampling_bytes(config, shape_of(path, config.model.trust_remote_code).vocab_size)
    phases["log-probs"] += parts["activations"] // layers  # without gradient one layer is held at a time
    if config.kind != "rl":
        phases = {"update": phases["update"]}
    resident = sum(size for part, size in parts.items() if part not in {*PASSING, BESIDE, "total"})
    return Memory(resident, phases, 0 if on_gpu else process_memory("VmHWM"))


@dataclass(frozen=True)
class Forecast:
    """What a probe says of the whole run."""

    measured: Measured
    seconds: Mapping[str, float]
    """Of a step, by phase, at the length that completions have now."""
    at_limit: float
    """Seconds of a step whose completions all go to `rollout.max_completion_tokens`."""
    run_seconds: float
    evaluations: int
    tokens: float
    """Mean length of a completion; 0 where none are drawn."""

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def forecast(config: RunConfig, run: PreparedRun, folder: Path | None) -> Forecast:
    """Measure a few steps on as many rows as the engine decodes at once, or a forward pass takes, and scale.

    Args:
        config: of any kind of run.
        run: the same, checked, with its number of steps.
        folder: of the config's file.
    """
    part, share = _small_step(config)
    changes = {**part, "train": {"steps": PROBE_STEPS, **part.get("train", {})}}
    found = measure(config, folder, changes, PROBE_SECONDS)
    timed = {
        name.removeprefix("timing_s/"): found.mean(name) for name in found.steps[-1] if name.startswith("timing_s/")
    }
    whole = timed.pop("step", 0.0)
    seconds = {name: value * (share if name in BY_ROWS else 1.0) for name, value in timed.items()}
    if "gen" in seconds:
        seconds["gen"] *= _waves(config, 1.0) / _waves(config, share)
    seconds["rest"] = max(0.0, whole - sum(timed.values())) * share
    tokens, longest = found.mean("response_length/mean"), found.mean("response_length/max")
    growth = _growth(config, found, tokens, longest)
    at_limit = sum(value * growth.get(name, 1.0) for name, value in seconds.items())
    steps = run.config.train.steps
    every, evaluation = config.eval.every_steps, config.eval
    count = bool(evaluation.before) + bool(evaluation.after) + ((steps - 1) // every if every else 0)
    evaluated = 0.0
    if isinstance(run, RLRun):
        rows = config.rollout.prompts_per_step * config.rollout.completions_per_prompt
        evaluated = count * seconds.get("gen", 0.0) * len(run.held_out or ()) * evaluation.samples_per_prompt / rows
    total = steps * sum(seconds.values()) + evaluated
    return Forecast(found, seconds, at_limit, total, count if evaluated else 0, tokens)


def _small_step(config: RunConfig) -> tuple[dict[str, dict[str, int]], float]:
    """Changes that make a step small, and by how many times the real one has more rows."""
    limit = config.train.micro_batch_tokens("cuda")
    if config.kind != "rl":
        rows = config.items_per_step
        small = min(rows, max(8, limit // 32))
        return {"train": {"rows_per_update": small}}, rows / small
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_completion_tokens
    wanted = max(rollout.concurrent_completions, limit // min(64, longest))
    prompts = min(rollout.prompts_per_step, math.ceil(wanted / rollout.completions_per_prompt))
    share = rollout.prompts_per_step / prompts
    if share == 1:
        return {}, 1.0
    # As many optimizer steps as in the real one, so that their own cost is in it.
    updates = config.updates_per_epoch
    rows = prompts * rollout.completions_per_prompt
    update_rows = next(size for size in range(max(1, rows // updates), rows + 1) if rows % size == 0)
    return {"rollout": {"prompts_per_step": prompts}, "train": {"rows_per_update": update_rows}}, share


def _waves(config: RunConfig, share: float) -> int:
    """How many times the engine fills its slots in a step that is `share` times smaller."""
    rows = config.rollout.prompts_per_step * config.rollout.completions_per_prompt / share
    return max(1, math.ceil(rows / config.rollout.concurrent_completions))


def _growth(config: RunConfig, found: Measured, tokens: float, longest: float) -> dict[str, float]:
    """By how much each phase grows when every completion goes to the limit."""
    if not tokens:
        return {}
    limit, prompt = config.rollout.max_completion_tokens, found.mean("prompt_length/mean")
    rows = (prompt + limit) / (prompt + tokens)
    return {"gen": limit / max(1.0, longest), **dict.fromkeys(BY_ROWS[1:], rows)}


def signal(config: RunConfig, folder: Path | None, prompts: int) -> Iterator[str]:
    """Draw and score completions of some prompts with the untrained model: what there is to learn from.

    Raises:
        ConfigError: it draws no rollouts; its weights are not here.
    """
    if config.kind != "rl":
        raise ConfigError("--signal: this kind of run draws no rollouts")
    changes = {
        "rollout": {"prompts_per_step": prompts},
        "train": {"steps": 1, "rows_per_update": None},
        "algorithm": {"group_filter": "all"},
    }
    found = measure(config, folder, changes)
    if found.random_weights:
        raise ConfigError("--signal: the model's weights are not on this machine")
    [row] = found.steps
    mixed, good, bad = (row.get(f"by_group/frac_{name}", 0.0) for name in ("mixed", "all_good", "all_bad"))
    yield f"{prompts} prompts x {config.rollout.completions_per_prompt} completions before anything is trained:"
    yield f"  {mixed:.0%} of groups have a signal; {good:.0%} are all right, {bad:.0%} all wrong"
    yield f"  reward {row.get('critic/score/mean', 0.0):.3f}, {row.get('response_length/mean', 0.0):.1f} tokens"
    if mixed < 0.2:
        yield "  few groups teach anything: take easier or harder problems, more completions, or algorithm.name=dapo"


def memory_lines(memory: Memory, budget: int, place: str) -> tuple[list[str], bool]:
    """The table of a run's memory, and whether it fits."""
    lines = [f"{'stays':<12}{readable(memory.resident + memory.process)}"]
    for name, size in memory.phases.items():
        mark = "  <- the most" if name == memory.largest else ""
        lines.append(f"{name:<12}{readable(size)} more = {readable(memory.resident + memory.process + size)}{mark}")
    fits = memory.peak <= budget
    verdict = "fits" if fits else "does not fit"
    return [*lines, f"{readable(memory.peak)} of {readable(budget)} ({place}): {verdict}"], fits


def budget_of(text: str | None) -> tuple[int, str]:
    """`24GiB` in bytes, or what this machine has.

    Example:
        >>> budget_of("24GiB"), budget_of("500 MB")
        ((25769803776, '--memory'), (500000000, '--memory'))

    Raises:
        ConfigError: it is no size.
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
    raise ConfigError(f"--memory {text}: write a size as in 24GiB ({', '.join(units)})")


# --------------------------------------------------------------------------------------------------------------------
# Settings that are `auto`: on a GPU chosen from its free memory, by the formulas of `memory_estimate`.

log = logging.getLogger(__name__)
LEAST_TOKENS = 2048
"""Tokens of a micro-batch below which computing layers twice (`gradient_checkpointing`) costs less than smaller
products, and the prompts of a group that fewer rows share."""
MOST_AT_ONCE, LEAST_AT_ONCE = 512, 32
"""Completions that are decoded at once. With fewer, decoding takes many times as long: `atomrl plan CONFIG --fit` names
better ways to take less memory."""


def autos(config: RunConfig) -> dict[str, str]:
    """The settings of this file that are `auto`, by section."""
    settings = {
        "rollout": ("max_concurrent_completions", config.rollout.max_concurrent_completions),
        "train": ("tokens_per_micro_batch", config.train.tokens_per_micro_batch),
        "model": ("gradient_checkpointing", config.model.gradient_checkpointing),
    }
    used = settings if config.kind == "rl" else {name: settings[name] for name in ("train", "model")}
    return {section: key for section, (key, value) in used.items() if value == "auto"}


def choose(config: RunConfig, budget: int, memory_of: Callable[[RunConfig], Memory], ranks: int = 1) -> RunConfig:
    """Replace the settings that are `auto` by the fastest with which a run fits into some memory.

    These are, in this order: as many completions at once as fit, up to all of a step; layers computed once, if a
    micro-batch of `LEAST_TOKENS` fits so; as many tokens in a micro-batch as fit. Where nothing fits, it is the
    smallest of each.

    Args:
        config: of any kind of run.
        budget: bytes of one device.
        memory_of: the memory of a changed config, on the rank that holds most.
        ranks: of the config's `backend`; each is given the same numbers.

    Returns:
        The config with numbers. `model.gradient_checkpointing` stays `auto` where it is not needed, and is turned on
        if memory runs out all the same.
    """

    def first(phases: Iterable[str], changes: Iterable[Mapping[str, Any]]) -> RunConfig:
        """The first of some changes with which these phases fit, or the last."""
        for change in changes:
            changed = with_settings(config, change)
            memory = memory_of(changed)
            if memory.process + memory.resident + max(memory.phases.get(phase, 0) for phase in phases) <= budget:
                break
        return changed

    left, copies = autos(config), ranks // config.backend.ranks_per_row if config.backend else 1
    rows = -(-config.rows_per_update // copies)
    if "rollout" in left:
        drawn = min(MOST_AT_ONCE, config.rollout.prompts_per_step * config.rollout.completions_per_prompt)
        sizes = halves(drawn, LEAST_AT_ONCE)
        config = first(["rollout"], ({"rollout": {"max_concurrent_completions": size}} for size in sizes))
    if "train" in left or "model" in left:
        row = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
        row = min(row, config.train.max_row_tokens or row)
        most = max(row, min(MOST_TOKENS, rows * row))
        given = config.train.tokens_per_micro_batch
        sizes, least = ([given], 1) if given != "auto" else (halves(most, row), min(most, LEAST_TOKENS))
        pairs: list[tuple[Any, int]] = [(config.model.gradient_checkpointing, size) for size in sizes]
        if "model" in left:
            pairs = [pair for pair in pairs if pair[1] >= least] + [(True, size) for size in sizes]
        config = first(
            ["log-probs", "update"],
            (
                {"train": {"tokens_per_micro_batch": size}, "model": {"gradient_checkpointing": way}}
                for way, size in pairs
            ),
        )
    return config


def halves(most: int, least: int) -> list[int]:
    """A number and its halves, down to another.

    Example:
        >>> halves(100, 20), halves(8, 8)
        ([100, 50, 25, 20], [8])
    """
    sizes = [most]
    while sizes[-1] > least:
        sizes.append(max(least, sizes[-1] // 2))
    return sizes


def chosen_here(config: RunConfig, algorithm: Algorithm, ranks: int) -> RunConfig:
    """Replace the settings that are `auto` by those for this machine's GPU, and log them with the reason.

    A run that goes on keeps those that it began with. On a CPU, for a fresh model, and where trainer or engine are in
    Ray actors, whose GPUs are not known here, `auto` stays, and stands for the values that the config's docs give.
    """
    left = autos(config)
    if not left:
        return config
    if is_begun(config.run_dir) and (file := config.run_dir / "config.yaml").is_file():
        stored = read_yaml(file)
        kept = {section: {key: stored[section][key]} for section, key in left.items() if key in stored.get(section, {})}
        return with_settings(config, kept)
    device = device_name(config.model.device)
    if device == "cpu" or config.gpt is not None or config.cluster is not None:
        return config
    budget = int(free_bytes(device, ranks) * USABLE)

    def memory_of(changed: RunConfig) -> Memory:
        return memory_by_phase(changed, algorithm, ranks)

    found = choose(config, budget, memory_of, ranks)
    log.info(
        "auto: %s; by the formulas %s of %s that are free%s",
        ", ".join(described(config, found)), readable(memory_of(found).peak).strip(), readable(budget).strip(),
        " on the fullest of the ranks' GPUs" if ranks > 1 else "",
    )  # fmt: skip
    if memory_of(found).peak > budget:
        log.warning("by the formulas the run does not fit: `atomrl plan CONFIG` says what takes less memory")
    return found


def free_bytes(device: str, ranks: int) -> int:
    """Free memory of a GPU, or with several ranks the least that one of their GPUs on this machine has."""
    if ranks == 1:
        return torch.cuda.mem_get_info(torch.device(device))[0]
    count = min(ranks, torch.cuda.device_count())
    # In a process that ends: to ask a GPU takes some of its memory for as long as the process lives.
    ask = f"import torch; print(min(torch.cuda.mem_get_info(n)[0] for n in range({count})))"
    return int(subprocess.run([sys.executable, "-c", ask], check=True, stdout=subprocess.PIPE).stdout)


def described(config: RunConfig, found: RunConfig) -> list[str]:
    """The settings that were `auto`, with what was chosen: `train.tokens_per_micro_batch=8192`."""
    lines = []
    for section, key in autos(config).items():
        value = getattr(getattr(found, section), key)
        shown = str(value).lower() if isinstance(value, bool) else "false" if section == "model" else value
        lines.append(f"{section}.{key}={shown}")
    return lines


FEWEST_AT_ONCE, LEAST_COMPLETION = 8, 256
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
    again: Callable[[RunConfig], Plan]
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
    while draws and at_once > max(32, FEWEST_AT_ONCE):
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
    while draws and at_once > FEWEST_AT_ONCE:
        at_once = max(FEWEST_AT_ONCE, at_once - 8)
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
