"""Rows of a file or a generator become samples; every problem is named with its file and line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from atomrl.data.files import RawRow, read_rows
from atomrl.data.generators import generate, is_generator, nearest_generator
from atomrl.data.problems import DataError, problem_list
from atomrl.stages import Message, Sample

if TYPE_CHECKING:
    from atomrl.config import DataConfig

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = ("prompts", "completions")


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was loaded, and what was not."""

    source: str
    """The file or the generator."""
    samples: list[Sample]
    skipped: int = 0
    """Rows with a problem, where `on_bad_row` is `skip`."""
    problems: list[str] = field(default_factory=list)
    """One line for each skipped row: place and reason."""


Convert = Callable[[Iterable[RawRow]], tuple[list[Sample], list[str]]]
"""Rows -> samples, and a line for every row that is none."""


def load_samples(
    config: DataConfig, split: Literal["train", "eval"] = "train", seed: int = 0, convert: Convert | None = None
) -> LoadReport:
    """The problems of one split.

    Of a file, `train_size` or `eval_size` keeps the first rows (the whole file is checked all the same); of a
    generator it is the number of problems to draw, and required. Every sample has every column of the data set,
    None where its row had not.

    Args:
        seed: decides what a generator draws; files do not depend on it.
        convert: how rows become samples; None is `to_samples`.

    Returns:
        The samples, in the order of the file. No samples where `split` is `eval` and `config.eval` is None.

    Raises:
        DataError: the file is absent or empty, a size cannot be met, or rows have problems (all of them are listed,
            up to 20, with file and line) and `on_bad_row` is `error`.
    """
    source, size = (config.train, config.train_size) if split == "train" else (config.eval, config.eval_size)
    if source is None:
        return LoadReport(source="none", samples=[])
    rows = _generated(config, source, size, split, seed) if is_generator(source) else read_source(source)
    samples, problems = convert(rows) if convert else to_samples(rows, config, generated=is_generator(source))
    if problems and config.on_bad_row == "error":
        raise DataError(
            f"{source}: {len(problems)} rows have problems (data.on_bad_row=skip leaves them out):\n"
            + problem_list(problems)
        )
    if not samples:
        raise DataError(f"{source} holds no usable row" + (":\n" + problem_list(problems) if problems else ""))
    if size is not None and len(samples) < size:
        raise DataError(f"data.{split}_size={size}, but {source} holds {len(samples)} usable rows")
    return LoadReport(source=source, samples=samples[:size], skipped=len(problems), problems=problems)


def collate(samples: list[Sample]) -> list[Sample]:
    """The collate function of a data loader: it changes nothing."""
    return samples


def read_source(source: str) -> Iterable[RawRow]:
    """The rows of a file; an absent one that looks like a generator's name is answered with the nearest."""
    if "." not in source and "/" not in source:
        near = nearest_generator(source)
        hint = f"; did you mean {near!r}?" if near else ""
        raise DataError(f"{source!r} is neither a data file (.jsonl, .parquet) nor a generator{hint}")
    return read_rows(source)


def _generated(config: DataConfig, source: str, size: int | None, split: str, seed: int) -> Iterable[RawRow]:
    if size is None:
        raise DataError(f"data.{split}_size is required: how many problems to draw from {source}")
    rows = generate(source, size, seed=seed, split=split, **config.generator_args)
    return [RawRow(f"{source}:{split}:{index}", row) for index, row in enumerate(rows, start=1)]


def to_samples(rows: Iterable[RawRow], config: DataConfig, generated: bool = False) -> tuple[list[Sample], list[str]]:
    """Samples, and a line for every row that is none."""
    fields = _Fields("prompt", "ground_truth", "data_source", None) if generated else _Fields.of(config)
    samples: list[Sample] = []
    problems: list[str] = []
    for raw in rows:
        if raw.row is None:
            problems.append(f"{raw.place}: {raw.problem}")
            continue
        try:
            samples.append(_sample(raw.place, raw.row, fields))
        except DataError as error:
            problems.append(f"{raw.place}: {error}")
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    if any(len(sample.columns) < len(names) for sample in samples):
        samples = [replace(sample, columns={name: sample.columns.get(name) for name in names}) for sample in samples]
    return samples, problems


@dataclass(frozen=True)
class _Fields:
    prompt: str
    answer: str | None
    data_source: str
    pattern: re.Pattern[str] | None

    @classmethod
    def of(cls, config: DataConfig) -> _Fields:
        pattern = _pattern(config.answer_pattern)
        if pattern is not None and config.answer_field is None:
            raise DataError("data.answer_pattern needs data.answer_field, the field in which it looks")
        return cls(config.prompt_field, config.answer_field, config.data_source_field, pattern)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise DataError(f"data.answer_pattern {text!r} is not a regular expression: {error}") from None
    if pattern.groups < 1:
        raise DataError(f"data.answer_pattern {text!r} has no group; put parentheses around the answer")
    return pattern


def _sample(place: str, row: Mapping[str, Any], fields: _Fields) -> Sample:
    prompt = check_prompt(_lookup(row, fields.prompt))
    answer = None if fields.answer is None else _lookup(row, fields.answer)
    blank = answer is None or (isinstance(answer, str) and not answer.strip())
    if fields.answer is not None and (blank or (isinstance(answer, float) and not math.isfinite(answer))):
        raise DataError(f"field {fields.answer!r} is empty" if blank else f"field {fields.answer!r} is {answer}")
    used = {fields.prompt, fields.data_source}
    if fields.pattern is None or fields.answer == "ground_truth":
        used.add(fields.answer)  # with a pattern the whole answer stays as a column, if its name is free
    if fields.pattern is not None:
        answer = _extract(answer, fields)
    source = _lookup(row, fields.data_source, "default")
    if source is None:
        source = "default"
    if not isinstance(source, str):
        raise DataError(f"field {fields.data_source!r} must be text, not {type(source).__name__}")
    columns = {name: value for name, value in row.items() if name not in used}
    for name in (*RESERVED, "ground_truth", "data_source"):
        if name in columns:
            raise DataError(f"column {name!r} has a name that rewards use for something else; rename or map it")
    return Sample(sample_id=place, prompt=prompt, ground_truth=answer, data_source=source, columns=columns)


_REQUIRED = object()


def _lookup(row: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    """`a.b` is the key of that very name, or key `b` of the object under `a`."""
    if name in row:
        return row[name]
    node: Any = row
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            if default is not _REQUIRED:
                return default
            raise DataError(f"field {name!r} is missing (has {', '.join(map(repr, row)) or 'no keys'})")
        node = node[part]
    return node


def _extract(answer: Any, fields: _Fields) -> str:
    assert fields.pattern is not None
    if not isinstance(answer, str):
        raise DataError(f"field {fields.answer!r} must be text for data.answer_pattern, not {type(answer).__name__}")
    match = fields.pattern.search(answer)
    if match is None or not (match.group(1) or "").strip():
        raise DataError(f"field {fields.answer!r} has no match for data.answer_pattern {fields.pattern.pattern!r}")
    return match.group(1).strip()


def check_prompt(prompt: Any) -> str | tuple[Message, ...]:
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
    if not isinstance(prompt, list):
        raise DataError(f"the prompt must be text or a list of messages, not {type(prompt).__name__}")
    if not prompt:
        raise DataError("the prompt is an empty list of messages")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, Mapping):
            raise DataError(f"message {number} must be an object with role and content, not {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(f"message {number}: {key!r} must be text")
        if message["role"] not in ROLES:
            raise DataError(f"message {number}: unknown role {message['role']!r} (known: {', '.join(ROLES)})")
    if not any(message["content"].strip() for message in prompt):
        raise DataError("the prompt's messages are all empty")
    return tuple(prompt)
