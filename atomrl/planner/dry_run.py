"""Dry run of a config whose model or data is not on this machine: checks all that does not need them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from atomrl.config import PreferenceConfig, RunConfig, SftConfig
from atomrl.data.checks import repetitions
from atomrl.data.curriculum_setup import check_classes
from atomrl.data.files import DataNotHere
from atomrl.data.given import demonstration_reader, preference_reader
from atomrl.data.images import ImageStore
from atomrl.data.problems import LoadReport, load_problems
from atomrl.environments.tools import find_schemas
from atomrl.environments.worker import find_environment
from atomrl.models.loading import ModelNotHere, resolve_folder
from atomrl.rewards.compute import build_rewards
from atomrl.trainer.base import memory_sections
from atomrl.trainer.build import algorithm_of, image_reader, image_store, images_folder, model_path, with_steps
from atomrl.trainer.checks.config import check_best, check_ranks, check_savers
from atomrl.trainer.pretrain import describe_windows
from atomrl.trainer.rl import batch_lines

log = logging.getLogger(__name__)


def describe_without(config: RunConfig, absent: ModelNotHere | DataNotHere) -> Sequence[tuple[str, Sequence[str]]]:
    """Return the sections of a dry run, as (title, lines), without those that need the tokenizer, shapes or rows.

    Logs a warning with the config key for data that is missing.

    Args:
        absent: the error for the first model, data set or file that is missing.

    Raises:
        ConfigError, DataError, ValueError: available data, rewards, environment or tools have a mistake.
    """
    # The model is loaded before the data, so it is available if the data is what is missing.
    memory = _memory(config) if isinstance(absent, DataNotHere) else []
    if config.kind == "pretrain":
        if isinstance(absent, ModelNotHere):  # nothing can be checked without its tokenizer
            raise absent
        log.warning("%s", absent)
        model = [("model", _model_lines(config))] if config.gpt is None else []
        return [*model, ("data", ["train: not on this machine"]), ("batch", [describe_windows(config)]), *memory]
    reports, missing = {}, []
    for split in ("train", "eval"):
        try:
            reports[split] = _load(config, split)
        except DataNotHere as error:
            log.warning("%s", error)
            missing.append(f"{split}: not on this machine")
    problems = [problem for report in reports.values() for problem in report.problems]
    reward: list[tuple[str, Sequence[str]]] = []
    if config.kind == "rl":
        check_classes(config.curriculum)
        try:
            rewards = build_rewards(config.reward)
            rewards.check_sources(problems)
            rewards.close()
        except ModelNotHere as error:
            reward.append(("reward", [str(error), "the rewards are not checked"]))
        if config.tools:
            find_schemas([tool.model_dump(mode="json") for tool in config.tools])
        elif config.environment is not None:
            find_environment(config.environment.function, config.environment.args)
    data = [line for split, report in reports.items() for line in _data_lines(split, report)]
    if missing:
        data += [*missing, "not checked without them: fields of the rows, and whether the rewards can read them"]
    batch = _batch_lines(config, len(reports["train"].problems) if "train" in reports else None)
    return [("model", _model_lines(config)), ("data", data), *reward, ("batch", batch), *memory]


def _memory(config: RunConfig) -> Sequence[tuple[str, Sequence[str]]]:
    """Return the sections on memory, after the checks that a run does between its data and its models."""
    algorithm = algorithm_of(config)
    check_best(config)
    check_ranks(config, algorithm)
    check_savers(config)
    return memory_sections(config, algorithm)


def _model_lines(config: RunConfig) -> list[str]:
    try:
        if config.model.path is not None:
            resolve_folder(config.model.path, weights=False)
    except ModelNotHere as absent:
        skipped = "lengths in tokens, memory, support by engine, template and algorithm"
        return [str(absent), f"not checked without it: {skipped}"]
    return [f"{config.model.path or 'fresh'}: available"]


def _batch_lines(config: RunConfig, problems: int | None) -> list[str]:
    """Describe the size of a step, and the length of the run if the number of problems is known."""
    if problems is not None:
        config = with_steps(config, problems)
    epochs = config.train.total_epochs
    has_steps = problems is not None or epochs is None
    length = f"the run: {config.train.steps} steps" if has_steps else f"the run: {epochs:g} passes over the data"
    if config.kind == "rl":
        lines = batch_lines(config, problems or 1)
        return lines if problems is not None else [*lines[:-1], length]
    rows = config.items_per_step
    passes = f" = {config.train.steps * rows / problems:.2f} passes" if problems is not None else ""
    return [f"a step: {rows} rows in one optimizer step; {length}{passes}"]


def _load(config: RunConfig, split: Literal["train", "eval"]) -> LoadReport:
    """Load the rows of a split in the format of this kind of run."""
    data, field, images = config.data, config.data.prompt_field, _images(config)
    if config.kind == "sft":
        read = demonstration_reader(field, (config.sft or SftConfig()).completion_field)
        return load_problems(data, split, config.seed, read, "demonstrate", images)
    if config.kind in ("preference", "reward-model"):
        read = preference_reader(field, config.preference or PreferenceConfig())
        return load_problems(data, split, config.seed, read, "pair", images)
    return load_problems(data, split, config.seed, images=images)


def _images(config: RunConfig) -> ImageStore | None:
    """Return the store of the run's pictures; if its model is not here, one that does not check them for it."""
    if config.model.path is None:
        return None
    try:
        return image_store(config, image_reader(config, model_path(config)))
    except ModelNotHere:
        return ImageStore(images_folder(config), config.data.images_field)


def _data_lines(split: str, report: LoadReport) -> list[str]:
    if not report.problems:
        return [f"{split}: none"]
    sources = Counter(problem.data_source for problem in report.problems)
    counts = ", ".join(f"{source} x{count}" for source, count in sources.items())
    repeated = [f"       {line}" for line in repetitions(report.problems)]
    return [f"{split}: {len(report.problems)} problems ({counts})", *repeated]
