"""Will a run fit, phase by phase, and how long will it take: from shapes alone, or measured on a few small steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError, RunConfig
from atomrl.models.loading import model_config_only
from atomrl.models.memory import BESIDE, process_memory
from atomrl.protocols import Algorithm
from atomrl.runs.base import PreparedRun, readable
from atomrl.runs.memory import at_once, memory_estimate, sampling_bytes
from atomrl.runs.probe import Measured, device_memory, measure
from atomrl.runs.rl import RLRun

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
