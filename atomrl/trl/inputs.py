"""Convert Python objects (data sets, reward functions, peft configs) into sections of a config."""

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError, DataConfig
from atomrl.config.adapters import HEADS
from atomrl.data.columns import IMAGES
from atomrl.data.files import DataError, RawRow, error_list
from atomrl.data.given import NOT_TRAINED, TOKENS
from atomrl.data.images import ImageStore
from atomrl.data.pictures import STARTS
from atomrl.data.problems import problem_reader, read_source, to_problems
from atomrl.data.tasks import generate, is_generator
from atomrl.rewards.compute import name_functions
from atomrl.rewards.table import REWARDS, AnyReward, find_reward
from atomrl.types import Problem

BUILT_IN_PROBLEMS = 512
INSTRUCTION = "Think between <think> and </think>, then write the number alone between <answer> and </answer>."
ANSWERS = ("ground_truth", "answer", "solution")
"""Names of the ground truth column; the first that the rows have is used."""

PICTURE_COLUMNS = ("image", "images")
"""Columns of a row that have its pictures, as in TRL."""

DatasetRows = list[dict[str, Any]]


def built_in_rows() -> DatasetRows:
    """Return the rows of the built-in task, which is used without a `train_dataset`: two-step arithmetic.

    Example:
        >>> built_in_rows()[0]["prompt"]  # doctest: +ELLIPSIS
        'Start with ...'
    """
    rows = generate("arithmetic", BUILT_IN_PROBLEMS, steps=2)
    return [{**row, "prompt": f"{row['prompt']}\n{INSTRUCTION}"} for row in rows]


def has_pictures(rows: DatasetRows) -> bool:
    """Return whether rows have pictures, in a column or in messages."""
    return any(
        column in PICTURE_COLUMNS or (isinstance(value, list) and any("image" in _types(message) for message in value))
        for row in rows
        for column, value in row.items()
        if value
    )


def _types(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return [part.get("type") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def with_pictures(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row whose pictures a JSON file can hold: as data URLs, and paths that do not depend on a folder.

    Args:
        folder: from which relative paths in the row are read.
    """

    def inline(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [inline(one) for one in value]
        if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
            value = value["path"] if value.get("bytes") is None else value["bytes"]
        if hasattr(value, "save") and hasattr(value, "mode"):  # an image of Pillow
            buffer = io.BytesIO()
            value.save(buffer, "PNG")
            value = buffer.getvalue()
        if isinstance(value, bytes | bytearray):
            return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
        if isinstance(value, str) and value and not value.startswith(("data:", "http:", "https:", "file:", *STARTS)):
            return str((folder / value).absolute())
        return value

    def of_parts(message: Any) -> Any:
        if "image" not in _types(message):
            return message
        parts = [
            {**part, "image": inline(part["image"])} if isinstance(part, Mapping) and part.get("image") else part
            for part in message["content"]
        ]
        return {**message, "content": parts}

    return {
        column: inline(value)
        if column in PICTURE_COLUMNS
        else [of_parts(message) for message in value]
        if isinstance(value, list)
        else value.tolist()  # a tensor or an array
        if hasattr(value, "tolist")
        else value
        for column, value in row.items()
    }


SFT_LAYOUTS = ("messages",), ("conversations",), ("prompt", "completion")
WITH_TEXT = frozenset({"tools", "chat_template_kwargs", *PICTURE_COLUMNS})


def sft_rows(rows: DatasetRows, text_field: str, formatting_func: Callable[..., Any] | None) -> DatasetRows:
    """Reduce the rows of an SFT data set to the columns that TRL trains on: those of the layout that it recognises
    first, of `formatting_func`, a conversation, prompt and completion, and text.

    Raises:
        ConfigError: the rows do not have the column that `text_field` names.
    """
    if formatting_func is not None:
        return [{"text": text} for row in rows for text in _formatted(formatting_func, row)]
    names = set().union(*rows)
    if TOKENS in names:
        return [_without_padding(row) for row in rows]
    if "messages" in names and not isinstance(next(row["messages"] for row in rows if "messages" in row), list):
        names.discard("messages")
    for layout in SFT_LAYOUTS:
        if names >= set(layout):
            return [{key: row[key] for key in row if key in layout or key in WITH_TEXT} for row in rows]
    if text_field in names:
        return [{"text": row.get(text_field)} for row in rows]
    if text_field != "text":
        raise ConfigError(f"dataset_text_field: the rows have no column {text_field!r}, but {', '.join(sorted(names))}")
    return rows  # Alpaca's layout, or an error that names all layouts


def _without_padding(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of a row, with its labels, without those that its attention mask leaves out."""
    mask, ids = row.get("attention_mask"), row.get(TOKENS)
    names = [TOKENS, *(["labels"] if row.get("labels") is not None else [])]
    if not isinstance(mask, list) or not isinstance(ids, list) or len(mask) != len(ids):
        return {name: row.get(name) for name in names}
    return {name: [one for one, shown in zip(row[name], mask, strict=False) if shown] for name in names}


def token_rows(
    rows: DatasetRows, tokenizer: Any, max_length: int | None, learned: Callable[[list[int]], list[bool]], what: str
) -> DatasetRows:
    """Return rows of an SFT data set as tokens, as the trainer would make them, of which some are trained.

    Args:
        max_length: cuts longer rows, before tokens are selected.
        learned: the tokens of a row -> for each whether it is trained.
        what: the argument that selects, for messages.

    Raises:
        ConfigError: nothing of any row is trained, or a row has another layout.
    """
    end, made, trained = tokenizer.eos_token or "", list[dict[str, Any]](), False
    for place, row in enumerate(rows):
        if empty := [name for name in row.keys() - WITH_TEXT if row[name] is None]:
            raise ConfigError(f"{what}: row {place} has no {empty[0]} (None); remove it")
        if TOKENS in row:
            ids = row[TOKENS]
        elif "messages" in row:
            text = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)[TOKENS]
        else:
            parts = [row[key] for key in ("prompt", "completion", "text") if key in row]
            if not parts or not all(isinstance(part, str) for part in parts):
                raise ConfigError(f"{what}: needs rows of text or messages, not {', '.join(row)}")
            text = "".join(parts)
            ids = tokenizer(text if text.endswith(end) else text + end)[TOKENS]
        ids = ids[:max_length]
        labels = [token if one else NOT_TRAINED for token, one in zip(ids, learned(ids), strict=True)]
        trained = trained or any(label != NOT_TRAINED for label in labels[1:])
        made.append({TOKENS: ids, "labels": labels})
    if not trained:
        raise ConfigError(f"{what}: its tokens are in no row, so that nothing would be trained")
    return made


def _formatted(formatting_func: Callable[..., Any], row: Mapping[str, Any]) -> list[str]:
    """Apply a `formatting_func`, which takes a row and returns its text, or in older scripts a batch of rows."""
    batch = {key: [value] for key, value in row.items()}
    try:
        texts = formatting_func(batch)
    except Exception:
        texts = None  # it takes a row
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        texts = formatting_func(dict(row))
    if not isinstance(texts, str | list):
        raise ConfigError(f"formatting_func must return the text of a row, not {type(texts).__name__}")
    return [texts] if isinstance(texts, str) else texts


def dataset_rows(dataset: Any, name: str, copy_answer: bool = True) -> DatasetRows:
    """Read and check the rows of a list of dicts, a JSONL or Parquet file, or a Hugging Face dataset.

    If no row has a `ground_truth`, the column `answer` or `solution` is copied to it.

    Args:
        name: name of the argument, for messages.
        copy_answer: False: only a column `ground_truth` is the ground truth.

    Raises:
        DataError: the data set is of another type or empty, or rows are invalid (all are listed).
    """
    raw = _raw_rows(dataset, name)
    rows = [item.row for item in raw if item.row is not None]
    store = ImageStore("images") if has_pictures(rows) else None
    answers = ANSWERS if copy_answer else ANSWERS[:1]
    answer = next((key for key in answers if any(key in row for row in rows)), None)
    read = problem_reader(DataConfig(train="-", answer_field=answer))

    def checked(place: str, row: Mapping[str, Any]) -> Problem:
        try:
            json.dumps({key: value for key, value in row.items() if key != IMAGES or store is None}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"a value is not JSON serializable: {error}") from None
        return read(place, row)

    _, problems = to_problems(raw, checked, images=store)
    if problems:
        raise DataError(f"{name}: {len(problems)} rows have problems:\n{error_list(problems)}")
    if not rows:
        raise DataError(f"{name} has no rows")
    return [{**row, "ground_truth": row.get(answer)} for row in rows] if answer else rows


def plain_rows(dataset: Any, name: str) -> DatasetRows:
    """Read the rows of a list of dicts, a file or a Hugging Face dataset, unchanged.

    Raises:
        DataError: the data set is of another type or empty, or a row is not a dict of JSON values.
    """
    rows, read = [], _raw_rows(dataset, name)
    for raw in read:
        try:
            json.dumps(raw.row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{raw.place}: {_odd_column(raw.row)} is not JSON serializable: {error}") from None
        if raw.row is None:
            raise DataError(f"{raw.place}: {raw.error}")
        rows.append(raw.row)
    if not rows:
        raise DataError(f"{name} has no rows")
    return rows


def _odd_column(row: Mapping[str, Any] | None) -> str:
    """Return the name of the first column whose value JSON cannot hold."""
    for name, value in (row or {}).items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return f"column {name!r} (dataset.remove_columns, if nothing needs it)"
    return "a value"


def prompts_of_tokens(rows: DatasetRows, tokenizer: Any, name: str) -> DatasetRows:
    """Return rows with the text of their `input_ids` as `prompt`; rows without `input_ids` unchanged.

    Raises:
        DataError: tokens do not come from their text, or only some rows have them.
    """
    if "input_ids" not in rows[0]:
        return rows
    made = []
    for place, row in enumerate(rows):
        if "input_ids" not in row:
            raise DataError(f"{name}[{place}]: input_ids are missing")
        ids = list(row["input_ids"])
        # a text begins with the tokens that the tokenizer adds, which are special
        both = [tokenizer.decode(ids, skip_special_tokens=without) for without in (True, False)]
        text = next((one for one in both if tokenizer(one)["input_ids"] == ids), None)
        if text is None:
            raise DataError(f"{name}[{place}]: input_ids are not the tokens of a text: {both[1]!r}")
        made.append({**{key: row[key] for key in row if key not in ("input_ids", "attention_mask")}, "prompt": text})
    return made


def prompts_of_messages(rows: DatasetRows, name: str) -> DatasetRows:
    """Return rows with the beginning of their `messages`, without the last, as `prompt`.

    Raises:
        ConfigError: one has neither.
    """
    if "prompt" in rows[0]:
        return [{key: row[key] for key in row if key != "messages"} for row in rows]
    for place, row in enumerate(rows):
        if "messages" not in row:
            raise ConfigError(f"{name}[{place}]: a row needs messages or a prompt, not {', '.join(row)}")
    return [{"prompt": row["messages"][:-1]} for row in rows]


def _raw_rows(dataset: Any, name: str) -> list[RawRow]:
    if isinstance(dataset, str | Path):
        if is_generator(str(dataset)):
            raise DataError(
                f"{name}: {dataset} is a task; pass its problems: atomrl.data.tasks.generate({str(dataset)!r}, 500)"
            )
        return [
            replace(raw, row=None if raw.row is None else with_pictures(raw.row, Path(raw.folder)))
            for raw in read_source(str(dataset))
        ]
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} is a mapping with the keys {', '.join(map(str, dataset))}; pass one of its splits")
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name} must be a list of dicts, a JSONL file or a Hugging Face dataset, not {type(dataset).__name__}"
        )
    rows = []
    for index, row in enumerate(dataset):
        problem = None if isinstance(row, Mapping) else f"a row must be a dict with a prompt, not {type(row).__name__}"
        rows.append(RawRow(f"{name}[{index}]", None if problem else with_pictures(row, Path()), problem))
        if problem:
            break  # the others are not dicts either
    return rows


def reward_items(
    functions: Any, weights: Sequence[float] | None, messages: bool = False
) -> tuple[list[dict[str, Any]], dict[str, AnyReward]]:
    """Convert reward functions into the items of `reward.functions`.

    Args:
        functions: one or several of: a function, a built-in name, a dotted path.
        weights: one for each function, or None for 1 each.
        messages: pass completions as messages if the prompt is messages, as TRL does (built-in rewards excepted).

    Returns:
        The items, and the functions that only this process has, by name.

    Raises:
        ConfigError: no function is given, the number of weights differs, or an item is not a function.
    """
    rewards = list(functions) if isinstance(functions, Sequence) and not isinstance(functions, str) else [functions]
    models = {place: one for place, one in enumerate(rewards) if messages and is_reward_model(one)}
    rewards = ["reward_model" if place in models else one for place, one in enumerate(rewards)]
    if not rewards or rewards == [None]:
        raise ConfigError("reward_funcs: give at least one reward function")
    if weights is not None and len(weights) != len(rewards):
        raise ConfigError(f"GRPOArgs.reward_weights has {len(weights)} values for {len(rewards)} reward functions")
    for function in rewards:
        if isinstance(function, str):
            find_reward(function)
        elif not callable(function):
            raise ConfigError(f"reward_funcs: {function!r} is neither a function nor its name")
    names, local = name_functions(rewards)
    items = [{"function": n, "weight": w} for n, w in zip(names, weights or [1.0] * len(names), strict=True)]
    for place, item in enumerate(items):
        if place in models:
            item["args"] = {"path": models[place], "chat_template": "messages_only"}
        elif messages and (item["function"] in local or item["function"] not in REWARDS):
            item["completions"] = "messages"
    return items, local


def is_reward_model(reward: Any) -> bool:
    """Return True for the name of a model on the hub, its folder, or a sequence classifier."""
    return "/" in reward or Path(reward).is_dir() if isinstance(reward, str) else hasattr(reward, "save_pretrained")


LORA = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules",
    "modules_to_save": "modules_to_save",
}  # fmt: skip
"""peft's names -> keys of `model.lora`."""
WITHOUT_EFFECT = {
    "task_type", "peft_type", "peft_version", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
    "fan_in_fan_out", "runtime_config", "use_rslora", "loftq_config", "monteclora_config", "ensure_weight_tying",
}  # fmt: skip
"""Fields of `peft.LoraConfig` that do not affect training."""


def lora_section(peft_config: Any) -> dict[str, Any] | None:
    """Convert a `peft.LoraConfig`, or a dict with its names, into the section `model.lora`.

    Raises:
        ConfigError: it sets an option that adapters do not have here.

    Example:
        >>> lora_section({"r": 8, "lora_alpha": 16})
        {'rank': 8, 'alpha': 16}
    """
    if peft_config is None:
        return None
    if isinstance(peft_config, Mapping):
        options = dict(peft_config)
        unknown = [name for name in options if name not in LORA]
    else:
        if type(peft_config).__name__ != "LoraConfig":
            raise ConfigError(f"peft_config must be a peft.LoraConfig or a dict, not {type(peft_config).__name__}")
        options, defaults = {name: getattr(peft_config, name) for name in LORA}, type(peft_config)()
        others = [field.name for field in fields(peft_config) if field.name not in LORA.keys() | WITHOUT_EFFECT]
        unknown = [name for name in others if getattr(peft_config, name) != getattr(defaults, name)]
    if unknown:
        raise ConfigError(f"peft_config: {unknown[0]!r} is not supported; supported: {', '.join(LORA)}")
    section = {LORA[name]: value for name, value in options.items() if value is not None}
    if getattr(peft_config, "use_rslora", False):  # a scale of alpha / sqrt(rank) there, of alpha / rank here
        section["alpha"] = section["alpha"] * math.sqrt(section["rank"])
    if whole := section.pop("modules_to_save", None):
        section["modules_to_save"] = sorted({*whole} - {*HEADS})  # a reward model's head always is
    modules = section.get("target_modules")
    if modules is not None and not isinstance(modules, str):
        # a name with the comma of a shell command matches nothing, which peft ignores
        section["target_modules"] = sorted(name for name in map(str, modules) if not name.endswith(","))
    return section
