"""Load samples from files, the Hugging Face hub or a generator; every error names file and line."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from atomrl.common.errors import did_you_mean, said_as
from atomrl.data.files import DataError, DataNotHere, RawRow, find_hub_source, hub_rows, problem_list, read_rows
from atomrl.data.tasks import GENERATORS, Draw, find_completions, generate, is_generator
from atomrl.types import Message, Sample

if TYPE_CHECKING:
    from atomrl.config import DataConfig

log = logging.getLogger(__name__)
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
ENVIRONMENT = "environment"
"""Role of an environment's reply within the assistant's turn: plain text, without the chat template."""
RESERVED = ("prompts", "completions", "ground_truth")


PromptContent = str | tuple[Message, ...]
"""Plain text, or chat messages."""
Scored = tuple[tuple[PromptContent, float], ...]
"""(completion, score) pairs. A demonstration: one, with score 0. A pair: the chosen one first. With a label: one, with
score 1 if good, -1 if bad. A demonstration may be messages, of which the first and the last are the assistant's, with
those of an environment between them; other keys of a message (calls, thoughts) stay."""
COMPLETIONS, TOOLS = "completions", "tools"
"""Columns of a sample with completions: these, and the JSON schemas of the row's tools, if any."""
Convert = Callable[[str, Mapping[str, Any]], Sample]
"""(place, row) -> sample; raises DataError, without the place, if the row is invalid."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Loaded samples and skipped rows."""

    source: str
    """Name of the file, files or generator."""
    samples: list[Sample]
    problems: list[str] = field(default_factory=list)
    """One line (place and reason) for each skipped row, with `on_bad_row: skip`."""
    draw: Draw | None = None
    """Draws new completions for each prompt, for generators."""


def load_samples(
    config: DataConfig,
    split: Literal["train", "eval"] = "train",
    seed: int = 0,
    convert: Convert | None = None,
    completions: Literal["demonstrate", "pair"] | None = None,
) -> LoadReport:
    """Load the samples of one split.

    For files, `train_size` or `eval_size` keeps the first rows (the whole file is checked all the same; a shorter one
    is used whole, with a warning). For a generator it is the number of problems to draw, and required. Every sample has
    all columns of the data set, with None where its row lacks one.

    Args:
        config: names sources and fields.
        split: `train` or `eval`.
        seed: of a generator; files do not depend on it.
        convert: converts a row of a file to a sample; default `problem_reader`.
        completions: also require completions of this kind from a generator.

    Returns:
        The samples, in the order of the file. No samples if `split` is `eval` and `config.eval` is None.

    Raises:
        DataError: a file is missing or empty, a generator has fewer problems or no such completions, or rows are
            invalid (the first 20 are listed, with file and line) and `on_bad_row` is `error`.
    """
    source: str | list[str] | None
    source, size = (config.train, config.train_size) if split == "train" else (config.eval, config.eval_size)
    if source is None:
        return LoadReport(source="none", samples=[])
    name = source if isinstance(source, str) else ", ".join(source)
    draw = None
    if is_generator(source):
        if size is None:
            raise DataError(f"data.{split}_size is required: how many problems to draw from {source}")
        draw = find_completions(source, completions) if completions else None
        drawn = generate(source, size, seed=seed, split=split, **config.generator_args)
        rows: Iterable[RawRow] = [RawRow(f"{source}:{split}:{index}", row) for index, row in enumerate(drawn, start=1)]
        convert = problem_reader(type(config)(train=source))  # generators use the default field names
    else:
        rows = _read_split(source, split, streamed=size is not None)
    # Files are checked to the end. From the hub no more rows are downloaded than needed.
    max_samples = size if not is_generator(source) and all(map(find_hub_source, listed(source))) else None
    samples, problems = to_samples(rows, convert or problem_reader(config), max_samples)
    if problems and config.on_bad_row == "error":
        raise DataError(
            f"{name}: {len(problems)} rows have problems (data.on_bad_row=skip leaves them out):\n"
            + problem_list(problems)
        )
    if not samples:
        raise DataError(
            f"data.{split}: {name} holds no usable row" + (":\n" + problem_list(problems) if problems else "")
        )
    if size is not None and len(samples) < size:
        log.warning("data.%s_size=%d, but %s holds %d usable rows: all are taken", split, size, name, len(samples))
    return LoadReport(source=name, samples=samples[:size], problems=problems, draw=draw)


def _read_split(source: str | list[str], split: Literal["train", "eval"], streamed: bool) -> Iterator[RawRow]:
    try:
        yield from read_source(source, "train" if split == "train" else None, streamed)
    except DataNotHere as error:
        raise DataNotHere(f"data.{split}: {error}") from None


def listed(source: str | list[str]) -> list[str]:
    """Return a source as a list of sources."""
    return [source] if isinstance(source, str) else source


def read_source(
    source: str | list[str], default_split: str | None = "train", streamed: bool = False
) -> Iterable[RawRow]:
    """Read the rows of a file or a hub data set, or of several in order.

    Args:
        default_split: for hub data sets named without a split; None requires one.
        streamed: download hub rows as they are read.

    Raises:
        DataError: a source cannot be read; for a misspelt generator the message names the closest match.
    """
    paths = listed(source)
    if not paths or len(set(paths)) < len(paths):
        raise DataError(f"a list of data files must name one at least, and each once; got {paths}")
    names = [Path(path).name for path in paths]
    rows: list[Iterable[RawRow]] = []
    for path, name in zip(paths, names, strict=True):
        hub_source = find_hub_source(path)
        rows.append(
            hub_rows(hub_source, default_split, streamed) if hub_source else _file_rows(path, names.count(name) > 1)
        )
    return chain.from_iterable(rows)


def _file_rows(path: str, whole_path: bool) -> Iterable[RawRow]:
    """Read the rows of one file. `whole_path` puts the folder into their places: another file has the same name."""
    if is_generator(path):
        raise DataError(f"{path!r} is a generator; a list of sources takes files (atomrl data make writes one)")
    if "." not in path and "/" not in path and not Path(path).exists():
        kinds = "a data file (.jsonl, .json, .csv, .parquet), a data set of the hub (OWNER/NAME) nor a generator"
        raise DataError(f"{path!r} is neither {kinds}; {did_you_mean(path, GENERATORS)}")
    if not Path(path).exists() and find_hub_source(f"{path}::train"):
        owner = Path(path).parent
        hint = (
            f"{owner} is a folder here; a data set of the Hugging Face hub is named with its split, as in {path}::train"
        )
        raise DataNotHere(f"data file {path} does not exist ({hint})")
    folder = path.removesuffix(Path(path).name) if whole_path else ""
    return (replace(raw, place=folder + raw.place) for raw in read_rows(path))


def to_samples(
    rows: Iterable[RawRow], convert: Convert, max_samples: int | None = None
) -> tuple[list[Sample], list[str]]:
    """Convert rows to samples, up to `max_samples`. Also return a line for each invalid row."""
    samples: list[Sample] = []
    problems: list[str] = []
    for raw in rows:
        try:
            if raw.row is None:
                raise DataError(raw.problem)
            samples.append(convert(raw.place, raw.row))
        except DataError as error:
            problems.append(f"{raw.place}: {error}")
        if max_samples is not None and len(samples) >= max_samples:
            break
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    if any(len(sample.columns) < len(names) for sample in samples):
        samples = [replace(sample, columns={name: sample.columns.get(name) for name in names}) for sample in samples]
    return samples, problems


def problem_reader(config: DataConfig) -> Convert:
    """Return a converter of rows to problems, with the fields that a config names.

    Raises:
        DataError: `answer_pattern` is not a regular expression with a group, or there is no `answer_field`.
    """
    pattern = None
    if config.answer_pattern is not None:
        message = f"data.answer_pattern {config.answer_pattern!r} is not a regular expression"
        with said_as(DataError, message, re.error):
            pattern = re.compile(config.answer_pattern)
        if pattern.groups < 1:
            raise DataError(f"data.answer_pattern {pattern.pattern!r} has no group; put parentheses around the answer")
        if config.answer_field is None:
            raise DataError("data.answer_pattern needs data.answer_field, the field in which it looks")
    return partial(_problem, config=config, pattern=pattern)


def _problem(place: str, row: Mapping[str, Any], config: DataConfig, pattern: re.Pattern[str] | None) -> Sample:
    prompt = check_prompt(_lookup(row, config.prompt_field))
    used, name = {config.prompt_field, config.data_source_field}, config.answer_field
    answer = None
    if name is not None:
        answer = _lookup(row, name)
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            raise DataError(f"field {name!r} is empty")
        if isinstance(answer, float) and not math.isfinite(answer):
            raise DataError(f"field {name!r} is {answer}")
        if name in RESERVED:  # any other stays a column too, for rewards that ask for it
            used.add(name)
        if pattern is not None:
            answer = _extract(answer, name, pattern)
    source = _lookup(row, config.data_source_field, required=False)
    source = "default" if source is None else source
    if not isinstance(source, str):
        raise DataError(f"field {config.data_source_field!r} must be text, not {type(source).__name__}")
    columns = {key: value for key, value in row.items() if key not in used}
    for key in (*RESERVED, "data_source"):
        if key in columns:
            raise DataError(f"column {key!r} has a name that rewards use for something else; rename or map it")
    return Sample(sample_id=place, prompt=prompt, ground_truth=answer, data_source=source, columns=columns)


def _lookup(row: Mapping[str, Any], name: str, required: bool = True) -> Any:
    """Look up a field: the key `a.b` itself, else the key `b` of the object under `a`."""
    if name in row:
        return row[name]
    node: Any = row
    for part in name.split("."):
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif required:
            raise missing(name, row)
        else:
            return None
    return node


def missing(name: str, row: Mapping[str, Any], key: str = "") -> DataError:
    """Return the error for a missing field.

    Args:
        key: config key that names the column; "" for the prompt and answer fields.
    """
    has = ", ".join(map(repr, row)) or "no keys"
    columns = f"{key} names the column" if key else "data.prompt_field, data.answer_field name columns"
    if not key and "chosen" in row:
        columns += "; preferences are trained on with algorithm.name=dpo, reward_model, ..."
    elif not key and ("completion" in row or "messages" in row):
        columns += "; demonstrations are trained on with `sft: {}`"
    return DataError(f"field {name!r} is missing (has {has}; {columns})")


def _extract(answer: Any, name: str, pattern: re.Pattern[str]) -> str:
    if not isinstance(answer, str):
        raise DataError(f"field {name!r} must be text for data.answer_pattern, not {type(answer).__name__}")
    match = pattern.search(answer)
    if match is None or not (match.group(1) or "").strip():
        raise DataError(f"field {name!r} has no match for data.answer_pattern {pattern.pattern!r}")
    return match.group(1).strip()


def check_prompt(prompt: Any) -> PromptContent:
    """Validate a prompt: text, or a list of messages, which is returned as a tuple.

    Raises:
        DataError: it is neither, or empty.

    Example:
        >>> check_prompt([{"role": "user", "content": "2+2="}])
        ({'role': 'user', 'content': '2+2='},)
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError("the prompt is empty")
        return prompt
    return check_messages(prompt)


def check_messages(messages: Any, name: str = "the prompt", roles: Sequence[str] = ROLES) -> tuple[Message, ...]:
    """Validate chat messages. Other keys of a message are kept unless null; content in parts is joined.

    Args:
        name: of the messages in errors.
        roles: allowed roles.

    Raises:
        DataError: they are not messages, or all empty.

    Example:
        >>> check_messages([{"role": "user", "content": [{"type": "text", "text": "2+2="}], "name": None}])
        ({'role': 'user', 'content': '2+2='},)
    """
    if not isinstance(messages, list):
        raise DataError(f"{name} must be text or a list of messages, not {type(messages).__name__}")
    if not messages:
        raise DataError(f"{name} is an empty list of messages")
    checked = tuple(_message(f"{name}: message {n}", message, roles) for n, message in enumerate(messages, start=1))
    if not any(message["content"].strip() or len(message) > 2 for message in checked):
        raise DataError(f"{name}: its messages are all empty")
    return checked


def _message(place: str, message: Any, roles: Sequence[str]) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{place} must be an object with role and content, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise DataError(f"{place}: 'role' must be text")
    if message["role"] not in roles:
        raise DataError(f"{place}: unknown role {message['role']!r} (known: {', '.join(roles)})")
    others = {key: value for key, value in message.items() if value is not None and key not in ("role", "content")}
    calls = _objects(f"{place}: 'tool_calls'", others.pop("tool_calls", None))
    if calls:
        others["tool_calls"] = [_call(f"{place}: 'tool_calls'", call) for call in calls]
    content = message.get("content")
    if content is None and message["role"] == "assistant" and others:  # a call, or a thought
        content = ""
    if isinstance(content, list):
        content = "".join(_part(place, part) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{place}: 'content' must be text")
    return cast(Message, {"role": message["role"], "content": content, **others})


def _part(place: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise DataError(f"{place}: 'content' must be text, or parts of text; one is {kind!r}")
    return text


def _call(place: str, call: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = {key: value for key, value in call.items() if value is not None}
    if isinstance(function := cleaned.get("function"), Mapping):
        return {**cleaned, "function": _call(place, function)}
    if not isinstance(cleaned.get("name"), str):
        raise DataError(f"{place} must be a list of objects with a 'function', which has 'name' and 'arguments'")
    return cleaned


def check_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Validate the JSON schemas of a row's tools: a list, or its JSON text.

    Raises:
        DataError: they are not tool schemas.

    Example:
        >>> check_tools('[{"type": "function", "function": {"name": "search"}}]')
        ({'type': 'function', 'function': {'name': 'search'}},)
    """
    checked = tuple(_objects(f"field {TOOLS!r}", tools))
    for tool in checked:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"field {TOOLS!r}: a tool must be an object with a 'function' that has a 'name'")
    return checked


def _objects(name: str, value: Any) -> list[dict[str, Any]]:
    """Parse a list of objects, or its JSON text; null and "" give an empty list."""
    if isinstance(value, str) and value.strip():
        with said_as(DataError, f"{name} must be a list of objects, or its JSON", ValueError):
            value = json.loads(value)
    items = value if isinstance(value, list) else [value] if value else []
    items = [_objects(name, item)[0] if isinstance(item, str) and item.strip() else item for item in items]
    if not all(isinstance(item, Mapping) for item in items):
        raise DataError(f"{name} must be a list of objects")
    return [dict(item) for item in items]
