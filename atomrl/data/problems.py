"""Load problems from files, the Hugging Face hub or a generator. Every error names file and line.

`load_problems` reads a split. `processor.py` encodes the prompts, `curriculum.py` chooses those of a step.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.data.columns import IMAGES, check_used, images_of, with_places, with_system
from atomrl.data.files import DataError, DataNotHere, RawRow, error_list, read_rows
from atomrl.data.hub import find_hub_source, hub_rows
from atomrl.data.messages import TOOLS, PromptContent, check_prompt, check_tools
from atomrl.data.stored import StoredProblems
from atomrl.data.tasks import GENERATORS, Draw, find_completions, generate, is_generator
from atomrl.types import Problem

if TYPE_CHECKING:
    from atomrl.config import DataConfig
    from atomrl.data.images import ImageStore

log = logging.getLogger(__name__)

ENVIRONMENT = "environment"
"""Role of an environment's reply within the assistant's turn: plain text, without the chat template."""
RESERVED = ("prompts", "completions", "ground_truth")


AT_ONCE = 2048
"""Prompts that are tokenized in one call: the tokenizer needs over 100 bytes a token while it works."""
PROGRESS_S = 10.0
"""Seconds between two lines of progress."""
Scored = tuple[tuple[PromptContent, float], ...]
"""(completion, score) pairs. A demonstration: one, with score 0. A pair: the chosen one first. With a label: one, with
score 1 if good, -1 if bad. A demonstration may be messages, of which the first and the last are the assistant's, with
those of an environment between them; other keys of a message (calls, thoughts) stay."""
Convert = Callable[[str, Mapping[str, Any]], Problem]
"""(place, row) -> problem; raises DataError, without the place, if the row is invalid."""
USUAL = {
    "data.prompt_field": ("question", "problem", "query", "instruction", "input", "messages"),
    "data.answer_field": ("answer", "solution", "final_answer", "target", "label", "reward_model.ground_truth"),
}
"""Config key of a field -> names that it often has."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Loaded problems and skipped rows."""

    source: str
    """Name of the file, files or generator."""
    problems: StoredProblems
    errors: list[str] = field(default_factory=list)
    """One line (place and reason) for each skipped row, with `on_bad_row: skip`."""
    draw: Draw | None = None
    """Draws new completions for each prompt, for generators."""


def load_problems(
    config: DataConfig,
    split: Literal["train", "eval"] = "train",
    seed: int = 0,
    convert: Convert | None = None,
    completions: Literal["demonstrate", "pair"] | None = None,
    images: ImageStore | None = None,
) -> LoadReport:
    """Load the problems of a split.

    For files, `train_size` or `eval_size` keeps the first rows (the whole file is checked all the same; a shorter one
    is used whole, with a warning). For a generator it is the number of problems to draw, and required. Every problem
    has all columns of the data set, with None where its row lacks one.

    Args:
        config: sources and fields.
        split: `train` or `eval`.
        seed: seed of a generator; files do not depend on it.
        convert: converts a row of a file to a problem; default `problem_reader`.
        completions: also require completions of this kind from a generator.
        images: reads the pictures of rows; None: the model reads text alone, and rows with pictures are refused.

    Returns:
        The problems, in the order of the file. None of them if `split` is `eval` and `config.eval` is None.

    Raises:
        DataError: a file is missing or empty, a generator has fewer problems or no such completions, or rows are
            invalid (the first 20 are listed, with file and line) and `on_bad_row` is `error`.
    """
    source: str | list[str] | None
    source, size = (config.train, config.train_size) if split == "train" else (config.eval, config.eval_size)
    if source is None:
        return LoadReport(source="none", problems=StoredProblems())
    name, draw, limit = source if isinstance(source, str) else ", ".join(source), None, None
    rows: Iterable[RawRow]
    if is_generator(source):
        if size is None:
            raise DataError(f"data.{split}_size is required: number of problems to generate from {source}")
        draw = find_completions(source, completions) if completions else None
        drawn = generate(source, size, seed=seed, split=split, **config.generator_args)
        rows = [RawRow(f"{source}:{split}:{index}", row) for index, row in enumerate(drawn, start=1)]
        convert = problem_reader(type(config)(train=source))  # generators use the default field names
    else:
        convert = convert or problem_reader(config)
        # A hub data set must name the split to evaluate on: `train` is a safe default only for training.
        rows = read_source(source, "train" if split == "train" else None, streamed=size is not None)
        # Files are checked to the end. From the hub no more rows are downloaded than needed.
        if all(find_hub_source(each) for each in ([source] if isinstance(source, str) else source)):
            limit = size
    try:
        problems, errors = to_problems(rows, convert, limit, images)
    except DataNotHere as error:
        raise DataNotHere(f"data.{split}: {error}") from None
    if errors and config.on_bad_row == "error":
        raise DataError(
            f"{name}: {len(errors)} rows have problems (data.on_bad_row=skip drops them):\n" + error_list(errors)
        )
    if errors and problems:
        log.warning("%s: %d rows with problems were skipped, the first: %s", name, len(errors), errors[0])
    if not problems:
        raise DataError(f"data.{split}: {name} has no usable row" + (":\n" + error_list(errors) if errors else ""))
    if size is not None and len(problems) < size:
        log.warning("data.%s_size=%d, but %s has only %d usable rows: all are used", split, size, name, len(problems))
    return LoadReport(source=name, problems=problems[:size], errors=errors, draw=draw)


def read_source(
    source: str | list[str], default_split: str | None = "train", streamed: bool = False
) -> Iterator[RawRow]:
    """Read the rows of a file or a hub data set, or of several in order.

    Args:
        default_split: for hub data sets named without a split; None requires one.
        streamed: download hub rows as they are read.

    Raises:
        DataError: a source cannot be read; for a misspelt generator the message names the closest match.
    """
    paths = [source] if isinstance(source, str) else source
    if not paths or len(set(paths)) < len(paths):
        raise DataError(f"a list of data files needs at least one file, and each once; got {paths}")
    # Check all sources before any row is read, so that a misspelt one is an error at once.
    names = [Path(path).name for path in paths]
    opened: list[tuple[str, str, Iterator[RawRow]]] = []
    for path, name in zip(paths, names, strict=True):
        if hub_source := find_hub_source(path):
            opened.append(("", "", hub_rows(hub_source, default_split, streamed)))
            continue
        if is_generator(path):
            raise DataError(
                f"{path!r} is a generator; a list of sources may only have files (atomrl data make writes one)"
            )
        if "." not in path and "/" not in path and not Path(path).exists():
            kinds = "a data file (.jsonl, .json, .csv, .parquet), a data set of the hub (OWNER/NAME) nor a generator"
            raise DataError(f"{path!r} is neither {kinds}; {did_you_mean(path, GENERATORS)}")
        if not Path(path).exists():
            hint = ""
            if find_hub_source(f"{path}::train"):
                hint = (
                    f" ({Path(path).parent} is a folder here; a data set of the Hugging Face hub needs its split, "
                    f"as in {path}::train)"
                )
            raise DataNotHere(f"data file {path} does not exist{hint}")
        # Places name the file alone, unless another file has the same name.
        front = "" if names.count(name) == 1 else path.removesuffix(name)
        opened.append((front, str(Path(path).absolute().parent), read_rows(path)))
    for front, folder, rows in opened:
        for raw in rows:
            yield replace(raw, place=front + raw.place, folder=folder)


def to_problems(
    rows: Iterable[RawRow], convert: Convert, limit: int | None = None, images: ImageStore | None = None
) -> tuple[StoredProblems, list[str]]:
    """Convert rows to problems, up to `limit`. Also return a line for each invalid row: place and reason."""
    errors: list[str] = []

    def converted() -> Iterator[Problem]:
        count, told = 0, time.monotonic()
        for number, raw in enumerate(rows, start=1):
            try:
                if raw.row is None:
                    raise DataError(raw.error)
                problem = convert(raw.place, raw.row if images is None else images.row(raw))
            except DataError as error:
                errors.append(f"{raw.place}: {error}")
            else:
                count += 1
                yield problem
            if limit is not None and count >= limit:
                break
            if number % AT_ONCE == 0 and time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                log.info("read %d rows, up to %s", number, raw.place)

    # Every problem gets all columns: a reward may ask for any of them.
    return StoredProblems(converted()), errors


def problem_reader(config: DataConfig) -> Convert:
    """Return a converter of rows to problems, with the fields that a config names.

    Raises:
        DataError: `answer_pattern` is not a regular expression with a group, or there is no `answer_field`.
    """
    pattern = None
    if config.answer_pattern is not None:
        message = f"data.answer_pattern {config.answer_pattern!r} is not a regular expression"
        with reraise_as(DataError, message, re.error):
            pattern = re.compile(config.answer_pattern)
        if pattern.groups < 1:
            raise DataError(
                f"data.answer_pattern {pattern.pattern!r} has no capture group; put parentheses around the answer"
            )
        if config.answer_field is None:
            raise DataError("data.answer_pattern needs data.answer_field, the field that it searches")

    def convert(place: str, row: Mapping[str, Any]) -> Problem:
        images = images_of(row)
        prompt = with_places(check_prompt(_lookup(row, config.prompt_field, "data.prompt_field")), images)
        prompt = with_system(row, prompt)
        used, name = {config.prompt_field, config.data_source_field}, config.answer_field
        check_used(row, [config.prompt_field, config.answer_field or ""], prompt, None)
        check_tools(row.get(TOOLS))

        # The ground truth: a field, or the part of it that the pattern matches.
        answer = None
        if name is not None:
            answer = _lookup(row, name, "data.answer_field")
            if answer is None or (isinstance(answer, str) and not answer.strip()):
                raise DataError(f"field {name!r} is empty")
            if isinstance(answer, float) and not math.isfinite(answer):
                raise DataError(f"field {name!r} is {answer}")
            if name in RESERVED:  # any other stays a column too, for rewards that ask for it
                used.add(name)
        if pattern is not None:
            if not isinstance(answer, str):
                raise DataError(f"field {name!r} must be text for data.answer_pattern, not {type(answer).__name__}")
            match = pattern.search(answer)
            answer = (match.group(1) or "").strip() if match else ""
            if not answer:
                raise DataError(f"field {name!r} has no match for data.answer_pattern {pattern.pattern!r}")

        # Everything else is a column, which rewards may ask for by its name.
        source = _lookup(row, config.data_source_field)
        source = "default" if source is None else source
        if not isinstance(source, str):
            raise DataError(f"field {config.data_source_field!r} must be text, not {type(source).__name__}")
        columns = {key: value for key, value in row.items() if key not in used}
        if images:
            columns[IMAGES] = [image.path for image in images]
        for key in (*RESERVED, "data_source"):
            if key in columns:
                raise DataError(f"column {key!r} has a name that is reserved for rewards; rename or map it")
        return Problem(
            problem_id=place, prompt=prompt, ground_truth=answer, data_source=source, columns=columns, images=images
        )

    return convert


def _lookup(row: Mapping[str, Any], name: str, key: str = "") -> Any:
    """Look up a field: the key `a.b` itself, else the key `b` of the object under `a`.

    Args:
        key: config key that names a required field; without it, a missing field is None.
    """
    if name in row:
        return row[name]
    node: Any = row
    for part in name.split("."):
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif key:
            raise missing(name, row, key)
        else:
            return None
    return node


def missing(name: str, row: Mapping[str, Any], key: str) -> DataError:
    """Return the error for a missing field.

    Args:
        key: config key that names the column.
    """
    has = ", ".join(map(repr, row)) or "no keys"
    usual = next((each for each in USUAL.get(key, ()) if each.partition(".")[0] in row), None)
    columns = f"{key} names the column" + (f", such as {key}={usual}" if usual else "")
    if key == "data.answer_field" and not usual:
        columns += "; null if rewards need none"
    if key in USUAL and "chosen" in row:
        columns += "; preferences are trained on with algorithm.name=dpo, reward_model, ..."
    elif key in USUAL and ("completion" in row or "messages" in row):
        columns += "; demonstrations are trained on with `sft: {}`"
    return DataError(f"field {name!r} is missing (has {has}; {columns})")
