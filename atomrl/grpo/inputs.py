"""What `GRPOTrainer` is given as objects, turned into what a config can name: files and reward names."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError, DataConfig
from atomrl.data.files import RawRow
from atomrl.data.generators import generate, is_generator
from atomrl.data.problems import DataError, problem_list
from atomrl.data.sources import problem_reader, read_source, to_samples
from atomrl.rewards.compute import name_functions
from atomrl.rewards.table import REWARDS, AnyReward, find_reward
from atomrl.types import Sample

BUILT_IN_PROBLEMS = 512
INSTRUCTION = "Think between <think> and </think>, then write the number alone between <answer> and </answer>."
ANSWERS = ("ground_truth", "answer", "solution")
"""Columns that are the ground truth, the first that the rows have."""

DatasetRows = list[dict[str, Any]]


def built_in_rows() -> DatasetRows:
    """The task without a `train_dataset`: arithmetic of two steps, with how to write the answer.

    Example:
        >>> built_in_rows()[0]["prompt"]  # doctest: +ELLIPSIS
        'Start with ...'
    """
    rows = generate("arithmetic", BUILT_IN_PROBLEMS, steps=2)
    return [{**row, "prompt": f"{row['prompt']}\n{INSTRUCTION}"} for row in rows]


def dataset_rows(dataset: Any, name: str) -> DatasetRows:
    """The rows of a list of dicts, a JSONL or Parquet file, or a Hugging Face dataset, checked.

    Where no row has a `ground_truth`, the column `answer` or `solution` is that too.

    Args:
        name: of the argument, for messages.

    Raises:
        DataError: it is none of these or empty, or rows have problems: all are listed.
    """
    raw = _raw_rows(dataset, name)
    rows = [item.row for item in raw if item.row is not None]
    answer = next((key for key in ANSWERS if any(key in row for row in rows)), None)
    read = problem_reader(DataConfig(train="-", answer_field=answer))

    def checked(place: str, row: Mapping[str, Any]) -> Sample:
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"a value that JSON has no form for: {error}") from None
        return read(place, row)

    _, problems = to_samples(raw, checked)
    if problems:
        raise DataError(f"{name}: {len(problems)} rows have problems:\n{problem_list(problems)}")
    if not rows:
        raise DataError(f"{name} holds no row")
    return [{**row, "ground_truth": row.get(answer)} for row in rows] if answer else rows


def plain_rows(dataset: Any, name: str) -> DatasetRows:
    """The rows of a list of dicts, a file or a Hugging Face dataset, as they are.

    Raises:
        DataError: it is none of these or empty, or a row is no dict of values that JSON has.
    """
    rows = []
    for raw in _raw_rows(dataset, name):
        try:
            json.dumps(raw.row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{raw.place}: a value that JSON has no form for: {error}") from None
        if raw.row is None:
            raise DataError(f"{raw.place}: {raw.problem}")
        rows.append(raw.row)
    if not rows:
        raise DataError(f"{name} holds no row")
    return rows


def _raw_rows(dataset: Any, name: str) -> list[RawRow]:
    if isinstance(dataset, str | Path):
        if is_generator(str(dataset)):
            raise DataError(
                f"{name}: {dataset} is a task; pass its problems: "
                f"atomrl.data.generators.generate({str(dataset)!r}, 500)"
            )
        return list(read_source(str(dataset)))
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} is a mapping with the keys {', '.join(map(str, dataset))}; pass one of its splits")
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name} must be a list of dicts, a JSONL file or a Hugging Face dataset, not {type(dataset).__name__}"
        )
    rows = []
    for index, row in enumerate(dataset):
        problem = None if isinstance(row, Mapping) else f"a row is a dict with a prompt, not {type(row).__name__}"
        rows.append(RawRow(f"{name}[{index}]", None if problem else dict(row), problem))
        if problem:
            break  # nor are the others
    return rows


def reward_items(
    functions: Any, weights: Sequence[float] | None, messages: bool = False
) -> tuple[list[dict[str, Any]], dict[str, AnyReward]]:
    """The rewards as a config has them, and by name those that exist in this process alone.

    Args:
        functions: one or several of: a function, a built-in name, a dotted path.
        weights: one for each, or None for 1 each.
        messages: functions, but for built-in ones, get completions as messages where the prompt is messages, as TRL
            gives them.

    Raises:
        ConfigError: there is none, the weights are not as many, or one is no function.
    """
    given = list(functions) if isinstance(functions, Sequence) and not isinstance(functions, str) else [functions]
    if not given or given == [None]:
        raise ConfigError("reward_funcs: name at least one reward function")
    if weights is not None and len(weights) != len(given):
        raise ConfigError(f"GRPOArgs.reward_weights has {len(weights)} values for {len(given)} reward functions")
    for function in given:
        if isinstance(function, str):
            find_reward(function)
        elif not callable(function):
            raise ConfigError(f"reward_funcs: {function!r} is neither a function nor the name of one")
    names, local = name_functions(given)
    items = [{"function": n, "weight": w} for n, w in zip(names, weights or [1.0] * len(given), strict=True)]
    for item in items if messages else ():
        if item["function"] not in REWARDS:
            item["completions"] = "messages"
    return items, local


LORA = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
"""peft's names of what `model.lora` has."""
WITHOUT_EFFECT = {
    "task_type", "peft_type", "peft_version", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
    "fan_in_fan_out", "runtime_config",
}  # fmt: skip
"""What a `peft.LoraConfig` has beside them that changes no training."""


def lora_section(peft_config: Any) -> dict[str, Any] | None:
    """The section `model.lora` of a `peft.LoraConfig` or a dict with its names.

    Raises:
        ConfigError: it sets something that adapters do not have here.

    Example:
        >>> lora_section({"r": 8, "lora_alpha": 16})
        {'rank': 8, 'alpha': 16}
    """
    if peft_config is None:
        return None
    if isinstance(peft_config, Mapping):
        given = dict(peft_config)
        unknown = [name for name in given if name not in LORA]
    else:
        if type(peft_config).__name__ != "LoraConfig":
            raise ConfigError(f"peft_config must be a peft.LoraConfig or a dict, not {type(peft_config).__name__}")
        given, usual = {name: getattr(peft_config, name) for name in LORA}, type(peft_config)()
        others = [field.name for field in fields(peft_config) if field.name not in LORA.keys() | WITHOUT_EFFECT]
        unknown = [name for name in others if getattr(peft_config, name) != getattr(usual, name)]
    if unknown:
        raise ConfigError(f"peft_config: {unknown[0]!r} is not known here; there are {', '.join(LORA)}")
    found = {LORA[name]: value for name, value in given.items() if value is not None}
    modules = found.get("target_modules")
    return found | ({} if modules is None or isinstance(modules, str) else {"target_modules": sorted(modules)})
