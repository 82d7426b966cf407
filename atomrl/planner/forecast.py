"""Time and memory of a run, measured on a few small steps, and the signal of its untrained model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atomrl.config import ConfigError, RunConfig
from atomrl.planner.probe import ProbeResult, measure
from atomrl.trainer.base import PreparedRun
from atomrl.trainer.rl import RLRun

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
