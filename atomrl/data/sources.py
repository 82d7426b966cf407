"""Rows of files or a generator become samples; every problem is named with its file and line."""

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
"""The role of what an environment says within the assistant's turn: its text as it is, without the chat template."""
RESERVED = ("prompts", "completions", "ground_truth")


PromptContent = str | tuple[Message, ...]
"""Text, or messages."""
Scored = tuple[tuple[PromptContent, float], ...]
"""Completions with their scores: of a demonstration one, 0; of a pair the better one first; one with a label by itself
is 1 if good and -1 if bad. A demonstration may be messages, of which the first and the last are the assistant's, and
those of an environment stand between two of the assistant's; messages have all that the row's have."""
COMPLETIONS, TOOLS = "completions", "tools"
"""The columns of such a sample: these, and the JSON schemas of the row's tools, if it has any."""
Convert = Callable[[str, Mapping[str, Any]], Sample]
"""(place, row) -> a sample; DataError, without the place, says what is wrong with the row."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was loaded, and what was not."""

    source: str
    """The file or files, or the generator."""
    samples: list[Sample]
    problems: list[str] = field(default_factory=list)
    """One line for each row that was skipped (`on_bad_row` is `skip`): place and reason."""
    draw: Draw | None = None
    """Of a generator, where completions were asked for: writes others each time."""


def load_samples(
    config: DataConfig,
    split: Literal["train", "eval"] = "train",
    seed: int = 0,
    convert: Convert | None = None,
    completions: Literal["demonstrate", "pair"] | None = None,
) -> LoadReport:
    """The problems of one split.

    Of a file, `train_size` or `eval_size` keeps the first rows (the whole file is checked all the same; one that has
    fewer is taken whole, with a warning); of a generator it is the number of problems to draw, and required. Every
    sample has every column of the data set, None where its row had not.

    Args:
        config: names sources and fields.
        split: which of the two.
        seed: decides what a generator draws; files do not depend on it.
        convert: how a row of a file becomes a sample; None is `problem_reader`.
        completions: what a generator must write beside problems.

    Returns:
        The samples, in the order of the file. No samples where `split` is `eval` and `config.eval` is None.

    Raises:
        DataError: a file is absent or empty, a generator has fewer problems or writes no such completions, or rows have
            problems (all of them are listed, up to 20, with file and line) and `on_bad_row` is `error`.
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
        made = generate(source, size, seed=seed, split=split, **config.generator_args)
        rows: Iterable[RawRow] = [RawRow(f"{source}:{split}:{index}", row) for index, row in enumerate(made, start=1)]
        convert = problem_reader(type(config)(train=source))  # with the names that generators give
    else:
        rows = _read_split(source, split, streamed=size is not None)
    # Files are checked to their end; of the hub no more is downloaded than is wanted.
    most = size if not is_generator(source) and all(map(find_hub_source, listed(source))) else None
    samples, problems = to_samples(rows, convert or problem_reader(config), most)
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
    """A source as a list of sources."""
    return [source] if isinstance(source, str) else source


def read_source(
    source: str | list[str], default_split: str | None = "train", streamed: bool = False
) -> Iterable[RawRow]:
    """The rows of a file or a data set of the hub, or of several one after the other.

    Args:
        default_split: of data sets of the hub that are named without one; None: they have to be.
        streamed: of the hub, rows are downloaded as they are read.

    Raises:
        DataError: one cannot be read; one that is absent and looks like a generator's name is answered with the
            nearest.
    """
    paths = listed(source)
    if not paths or len(set(paths)) < len(paths):
        raise DataError(f"a list of data files must name one at least, and each once; got {paths}")
    names = [Path(path).name for path in paths]
    rows: list[Iterable[RawRow]] = []
    for path, name in zip(paths, names, strict=True):
        on_hub = find_hub_source(path)
        rows.append(hub_rows(on_hub, default_split, streamed) if on_hub else _file_rows(path, names.count(name) > 1))
    return chain.from_iterable(rows)


def _file_rows(path: str, whole_path: bool) -> Iterable[RawRow]:
    """`whole_path`: rows are named by it, where another file has the same name."""
    if is_generator(path):
        raise DataError(f"{path!r} is a generator; a list of sources takes files (atomrl data make writes one)")
    if "." not in path and "/" not in path and not Path(path).exists():
        known = "a data file (.jsonl, .json, .csv, .parquet), a data set of the hub (OWNER/NAME) nor a generator"
        raise DataError(f"{path!r} is neither {known}; {did_you_mean(path, GENERATORS)}")
    if not Path(path).exists() and find_hub_source(f"{path}::train"):
        owner = Path(path).parent
        hint = (
            f"{owner} is a folder here; a data set of the Hugging Face hub is named with its split, as in {path}::train"
        )
        raise DataNotHere(f"data file {path} does not exist ({hint})")
    folder = path.removesuffix(Path(path).name) if whole_path else ""
    return (replace(raw, place=folder + raw.place) for raw in read_rows(path))


def to_samples(rows: Iterable[RawRow], convert: Convert, most: int | None = None) -> tuple[list[Sample], list[str]]:
    """Samples, and a line for every row that is none; no more rows are read once there are `most` samples."""
    samples: list[Sample] = []
    problems: list[str] = []
    for raw in rows:
        try:
            if raw.row is None:
                raise DataError(raw.problem)
            samples.append(convert(raw.place, raw.row))
        except DataError as error:
            problems.append(f"{raw.place}: {error}")
        if most is not None and len(samples) >= most:
            break
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    if any(len(sample.columns) < len(names) for sample in samples):
        samples = [replace(sample, columns={name: sample.columns.get(name) for name in names}) for sample in samples]
    return samples, problems


def problem_reader(config: DataConfig) -> Convert:
    """Reads a row as a problem with the fields that a config names.

    Raises:
        DataError: the pattern is no regular expression with a group, or has no field to look in.
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
    """`a.b` is the key of that very name, or key `b` of the object under `a`."""
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
    """That a row lacks a field.

    Args:
        key: of the config, which names its column; "" are those of a prompt and its answer.
    """
    has = ", ".join(map(repr, row)) or "no keys"
    named = f"{key} names the column" if key else "data.prompt_field, data.answer_field name columns"
    if not key and "chosen" in row:
        named += "; preferences are trained on with algorithm.name=dpo, reward_model, ..."
    elif not key and ("completion" in row or "messages" in row):
        named += "; demonstrations are trained on with `sft: {}`"
    return DataError(f"field {name!r} is missing (has {has}; {named})")


def _extract(answer: Any, name: str, pattern: re.Pattern[str]) -> str:
    if not isinstance(answer, str):
        raise DataError(f"field {name!r} must be text for data.answer_pattern, not {type(answer).__name__}")
    match = pattern.search(answer)
    if match is None or not (match.group(1) or "").strip():
        raise DataError(f"field {name!r} has no match for data.answer_pattern {pattern.pattern!r}")
    return match.group(1).strip()


def check_prompt(prompt: Any) -> PromptContent:
    """Text, or messages as a tuple.

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


def check_messages(messages: Any, what: str = "the prompt", roles: Sequence[str] = ROLES) -> tuple[Message, ...]:
    """Messages as a tuple, with all that they have but what is null; content in parts is joined.

    Args:
        what: how errors name them.
        roles: that they may have.

    Raises:
        DataError: they are no messages, or all empty.

    Example:
        >>> check_messages([{"role": "user", "content": [{"type": "text", "text": "2+2="}], "name": None}])
        ({'role': 'user', 'content': '2+2='},)
    """
    if not isinstance(messages, list):
        raise DataError(f"{what} must be text or a list of messages, not {type(messages).__name__}")
    if not messages:
        raise DataError(f"{what} is an empty list of messages")
    found = tuple(_message(f"{what}: message {n}", message, roles) for n, message in enumerate(messages, start=1))
    if not any(message["content"].strip() or len(message) > 2 for message in found):
        raise DataError(f"{what}: its messages are all empty")
    return found


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
    found = {key: value for key, value in call.items() if value is not None}
    if isinstance(function := found.get("function"), Mapping):
        return {**found, "function": _call(place, function)}
    if not isinstance(found.get("name"), str):
        raise DataError(f"{place} must be a list of objects with a 'function', which has 'name' and 'arguments'")
    return found


def check_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """The JSON schemas of a row's tools: a list, or the JSON of one.

    Raises:
        DataError: they are none.

    Example:
        >>> check_tools('[{"type": "function", "function": {"name": "search"}}]')
        ({'type': 'function', 'function': {'name': 'search'}},)
    """
    found = tuple(_objects(f"field {TOOLS!r}", tools))
    for tool in found:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"field {TOOLS!r}: a tool must be an object with a 'function' that has a 'name'")
    return found


def _objects(what: str, value: Any) -> list[dict[str, Any]]:
    """A list of objects, or the JSON of one; null and "" are none."""
    if isinstance(value, str) and value.strip():
        with said_as(DataError, f"{what} must be a list of objects, or its JSON", ValueError):
            value = json.loads(value)
    items = value if isinstance(value, list) else [value] if value else []
    items = [_objects(what, item)[0] if isinstance(item, str) and item.strip() else item for item in items]
    if not all(isinstance(item, Mapping) for item in items):
        raise DataError(f"{what} must be a list of objects")
    return [dict(item) for item in items]
