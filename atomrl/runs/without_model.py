"""A dry run without the model, where it is neither on this machine nor can be downloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from atomrl.config import PreferenceConfig, RunConfig, SftConfig
from atomrl.data.checks import repetitions
from atomrl.data.completions import demonstration_reader, preference_reader
from atomrl.data.sources import LoadReport, load_samples
from atomrl.environments.playing import find_environment
from atomrl.environments.tools import find_schemas
from atomrl.models.loading import ModelNotHere
from atomrl.rewards.compute import build_rewards
from atomrl.runs.build import with_steps
from atomrl.runs.rl import batch_lines


def describe_without_model(config: RunConfig, absent: ModelNotHere) -> Sequence[tuple[str, Sequence[str]]]:
    """Return the sections of a dry run, titles with lines, without those that need the tokenizer or the shapes.

    Raises:
        ConfigError, DataError, ValueError: data, rewards, environment or tools have a mistake.
    """
    if config.kind == "pretrain":  # its data need the model's tokenizer
        raise absent
    reports = {split: _load(config, split) for split in ("train", "eval")}
    train, held_out = reports["train"].samples, reports["eval"].samples
    config = with_steps(config, len(train))
    if config.kind == "train":
        rewards = build_rewards(config.reward)
        rewards.check_sources([*train, *held_out])
        rewards.close()
        if config.tools:
            find_schemas([tool.model_dump(mode="json") for tool in config.tools])
        elif config.environment is not None:
            find_environment(config.environment.function, config.environment.args)
    data = [line for split, report in reports.items() for line in _counted(split, report)]
    if config.kind == "train":
        batch = batch_lines(config, len(train))
    else:
        rows, steps = config.items_per_step, config.train.steps
        passes = steps * rows / len(train)
        batch = [f"a step: {rows} rows in one optimizer step; the run: {steps} steps = {passes:.2f} passes"]
    missing = "not checked without it: lengths in tokens, memory, and whether engine, template and algorithm suit it"
    return [("model", [str(absent), missing]), ("data", data), ("batch", batch)]


def _load(config: RunConfig, split: Literal["train", "eval"]) -> LoadReport:
    """Read the rows of a split as the run would."""
    data, field = config.data, config.data.prompt_field
    if config.kind == "sft":
        read = demonstration_reader(field, (config.sft or SftConfig()).completion_field)
        return load_samples(data, split, config.seed, read, "demonstrate")
    if config.kind in ("dpo", "reward-model"):
        read = preference_reader(field, config.preference or PreferenceConfig())
        return load_samples(data, split, config.seed, read, "pair")
    return load_samples(data, split, config.seed)


def _counted(split: str, report: LoadReport) -> list[str]:
    if not report.samples:
        return [f"{split}: none"]
    sources = Counter(sample.data_source for sample in report.samples)
    named = ", ".join(f"{source} x{count}" for source, count in sources.items())
    repeated = [f"       {line}" for line in repetitions(report.samples)]
    return [f"{split}: {len(report.samples)} samples ({named})", *repeated]
