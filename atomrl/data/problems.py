"""Load problems from files, the hub or a generator, encode their prompts, and order them over epochs.

`load_problems` reads a split, `DataProcessor` encodes prompts as token ids, `PromptStream` draws them in the order of
training.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from atomrl.common.chat_template import FOREIGN_MARK, NO_TEMPLATE, check_kwargs, render, thought_opening, turn_marks
from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.data.columns import (
    IMAGES,
    PLACE,
    TEMPLATE_KWARGS,
    check_used,
    count_places,
    images_of,
    message_weight,
    with_places,
    with_system,
)
from atomrl.data.files import DataError, DataNotHere, RawRow, error_list, find_hub_source, hub_rows, read_rows
from atomrl.data.stored import StoredProblems, alike
from atomrl.data.tasks import GENERATORS, Draw, find_completions, generate, is_generator
from atomrl.types import Image, Message, Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from atomrl.config import DataConfig
    from atomrl.data.image_reader import ImageReader
    from atomrl.data.images import ImageStore


# --------------------------------------------------------------------------------------------------------------------
# Load problems from files, the Hugging Face hub or a generator. Every error names file and line.

log = logging.getLogger(__name__)
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
ENVIRONMENT = "environment"
"""Role of an environment's reply within the assistant's turn: plain text, without the chat template."""
RESERVED = ("prompts", "completions", "ground_truth")


AT_ONCE = 2048
"""Prompts that are tokenized in one call: the tokenizer needs over 100 bytes a token while it works."""
PROGRESS_S = 10.0
"""Seconds between two lines of progress."""
PromptContent = str | tuple[Message, ...]
"""Plain text, or chat messages."""
Scored = tuple[tuple[PromptContent, float], ...]
"""(completion, score) pairs. A demonstration: one, with score 0. A pair: the chosen one first. With a label: one, with
score 1 if good, -1 if bad. A demonstration may be messages, of which the first and the last are the assistant's, with
those of an environment between them; other keys of a message (calls, thoughts) stay."""
COMPLETIONS, TOOLS = "completions", "tools"
"""Columns: the completions of a demonstration or a preference; the JSON schemas of a row's tools, if any."""
Convert = Callable[[str, Mapping[str, Any]], Problem]
"""(place, row) -> problem; raises DataError, without the place, if the row is invalid."""


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


USUAL = {
    "data.prompt_field": ("question", "problem", "query", "instruction", "input", "messages"),
    "data.answer_field": ("answer", "solution", "final_answer", "target", "label", "reward_model.ground_truth"),
}
"""Config key of a field -> names that it often has."""


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
        raise DataError(f"{name}: all messages are empty")
    return checked


def _message(place: str, message: Any, roles: Sequence[str]) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{place} must be an object with role and content, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise DataError(f"{place}: 'role' must be text")
    if message["role"] not in roles:
        raise DataError(f"{place}: unknown role {message['role']!r} (known: {', '.join(roles)})")
    message = message_weight(place, message)
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
        with reraise_as(DataError, f"{name} must be a list of objects, or its JSON", ValueError):
            value = json.loads(value)
    items = [*value] if isinstance(value, list | tuple) else [value] if value else []
    items = [_objects(name, item)[0] if isinstance(item, str) and item.strip() else item for item in items]
    if not all(isinstance(item, Mapping) for item in items):
        raise DataError(f"{name} must be a list of objects")
    return [dict(item) for item in items]


_END = "atomrl-end-of-words"  # marks a place in a rendered template


class DataProcessor:
    """Encodes prompts with one tokenizer and one data config.

    - Messages are rendered by the tokenizer's chat template, and so is text if there is a template (as a user message).
      The tokenizer adds no special tokens to it. Text that already contains the template, up to the generation prompt,
      is not rendered again.
    - Text without a template (the tokenizer has none, or `chat_template` is `none` or `messages_only`) gets the
      tokenizer's leading special tokens (BOS) unless it starts with them, but no trailing ones.
    - The system prompt is the first message; without a template it is the text before the prompt, with an empty line.
      A row with its own system message keeps it.
    - A last message of the assistant is continued, not closed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        max_prompt_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: bool = False,
        today: datetime | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """
        Args:
            max_prompt_tokens: replaces the config's, where the model's context is shorter.
            tools: JSON schemas that the chat template shows to the model.
            opening: an environment continues the prompt's last message, so the prompt ends with its content.
            today: fixed date for chat templates that print it; None uses the clock.
            images: knows the tokens of pictures; None: the model reads text alone.

        Raises:
            DataError: the system prompt's file does not exist, `chat_template: none` has a system prompt, or the
                template does not use one of `chat_template_kwargs`.
        """
        self.tokenizer = tokenizer
        self.config = config
        self.max_prompt_tokens = config.max_prompt_tokens if max_prompt_tokens is None else max_prompt_tokens
        self.system_prompt = read_system_prompt(config)
        self.has_template = config.chat_template != "none" and bool(tokenizer.chat_template)
        if config.chat_template == "none" and self.system_prompt is not None:
            raise DataError("data.chat_template=none uses prompts unchanged; remove the system prompt")
        if config.chat_template_kwargs:
            if config.chat_template == "none":
                raise DataError("data.chat_template=none renders nothing; remove data.chat_template_kwargs")
            with reraise_as(DataError, "data.chat_template_kwargs", ValueError):
                check_kwargs(tokenizer, config.chat_template_kwargs)
        self.template_kwargs: dict[str, Any] = {**config.chat_template_kwargs}
        """Variables of the chat template, for other renderings in the same run."""
        self.today = today
        if today is not None:
            self.template_kwargs["strftime_now"] = today.strftime
        self.tools, self.opening = [dict(tool) for tool in tools], opening
        self.images = images
        self._prefix = _leading_tokens(tokenizer)
        self._warned = False
        self._marks = turn_marks(tokenizer, self.template_kwargs)
        self._own_marks = set(self._marks.special if self.has_template else tokenizer.get_vocab())

    def to_prompts(self, items: Sequence[tuple[str, Problem]], drop: bool = False) -> list[Prompt]:
        """Encode (prompt id, problem) pairs, in order.

        Args:
            drop: leave out prompts over the limit, where `overlong_prompt` is `drop`.

        Raises:
            DataError: the template refuses a prompt, or one is over the limit and `overlong_prompt` is `drop`
                (`filter_overlong` removes those), or with `drop` all are.
        """
        prompts = []
        encoded = self._encode([problem for _, problem in items])
        for (prompt_id, problem), (ids, opening) in zip(items, encoded, strict=True):
            limited = self.cut(ids, problem)
            if limited is not None:
                prompts.append(Prompt(prompt_id=prompt_id, problem=problem, token_ids=tuple(limited), opening=opening))
            elif not drop:
                limit = self.max_prompt_tokens
                raise DataError(f"{problem.problem_id}: {len(ids)} prompt tokens, more than {limit}; remove it")
        if items and not prompts:
            raise self._all_overlong(len(items))
        return prompts

    def filter_overlong(
        self, problems: Sequence[Problem], source: str = "", lengths: Sequence[int] | None = None
    ) -> tuple[Sequence[Problem], Sequence[int]]:
        """Return the problems to use, and their numbers of prompt tokens before the limit.

        With `overlong_prompt: drop` these are the ones whose prompt has at most `max_prompt_tokens`. With `truncate`
        all problems are used, and overlong prompts lose their first tokens in `to_prompts`.

        Args:
            source: name of the data, for a warning with the number of overlong prompts; "" for none.
            lengths: what `lengths` returned for these problems; None computes it.

        Raises:
            DataError: no problem is left.
        """
        lengths = self.lengths(problems) if lengths is None else lengths
        limit, drops = self.max_prompt_tokens, self.config.overlong_prompt == "drop"
        overlong = sum(length > limit for length in lengths)
        if overlong and not drops:  # a prompt with pictures is not cut
            for place, length in enumerate(lengths):
                if length > limit and problems[place].images:
                    self.cut(range(length), problems[place])
        if problems and drops and overlong == len(problems):
            raise self._all_overlong(len(problems))
        if overlong and source:
            action = "dropped" if drops else "truncated to their last tokens"
            log.warning("%s: %d prompts over %d tokens were %s", source, overlong, limit, action)
        if not (overlong and drops):
            return problems, lengths
        kept = [place for place, length in enumerate(lengths) if length <= limit]
        chosen = problems.select(kept) if isinstance(problems, StoredProblems) else [problems[place] for place in kept]
        return chosen, array("i", (lengths[place] for place in kept))

    def _all_overlong(self, count: int) -> DataError:
        return DataError(
            f"all {count} prompts are longer than {self.max_prompt_tokens} tokens (data.max_prompt_tokens, "
            "or what a completion leaves of the model's context); set data.overlong_prompt=truncate"
        )

    def lengths(self, problems: Sequence[Problem]) -> array[int]:
        """Return the number of tokens of each prompt, before the limit. Every prompt is rendered and checked."""
        lengths, told = array("i"), time.monotonic()
        for start in range(0, len(problems), AT_ONCE):
            lengths.extend(len(ids) for ids, _ in self._encode(problems[start : start + AT_ONCE]))
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                log.info("tokenized %d of %d prompts", len(lengths), len(problems))
        return lengths

    def within_limit(self, problems: Sequence[Problem]) -> list[Sequence[int] | None]:
        """Encode prompts with the length limit. Overlong ones are None, or their last tokens if
        `overlong_prompt` is `truncate`."""
        encoded = self._encode(problems)
        return [self.cut(ids, problem) for problem, (ids, _) in zip(problems, encoded, strict=True)]

    def cut(self, ids: Sequence[int], problem: Problem) -> Sequence[int] | None:
        """Apply the length limit to a prompt's tokens; see `within_limit`.

        Raises:
            DataError: a prompt with pictures would be cut.
        """
        if len(ids) > self.max_prompt_tokens and self.config.overlong_prompt == "drop":
            return None
        if len(ids) > self.max_prompt_tokens and problem.images:
            raise DataError(
                f"{problem.problem_id}: {len(ids)} prompt tokens, more than {self.max_prompt_tokens}, and a prompt "
                "with pictures is not cut: raise data.max_prompt_tokens, lower data.max_pixels, or set "
                "data.overlong_prompt=drop"
            )
        return ids[-self.max_prompt_tokens :]

    @property
    def settings(self) -> str:
        """What prompts depend on besides the problems and the tokenizer, as JSON."""
        shown = {**self.template_kwargs, "strftime_now": self.today and self.today.date()}
        own = [self.system_prompt, self.has_template, shown, self.tools, self.opening]
        own += [] if self.images is None else [self.images.settings]
        return json.dumps(own, sort_keys=True, default=str)

    def _encode(self, problems: Sequence[Problem]) -> list[tuple[Sequence[int], str]]:
        """Return the token ids of each prompt, and the text with which it begins the assistant's turn."""
        problems = [*problems]
        # The text of each prompt: as it is, after the system prompt, or rendered by the chat template.
        bare = [self.is_bare(problem) for problem in problems]
        front = "" if self.system_prompt is None else f"{self.system_prompt}\n\n"
        texts = [
            f"{front}{problem.prompt}"
            if is_bare
            else self.rendered(problem.prompt, problem.problem_id, self.tools_of(problem), self.kwargs_of(problem))
            for problem, is_bare in zip(problems, bare, strict=True)
        ]

        # One call for all texts: fast tokenizers encode a batch in parallel.
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        marked = [self.marked(text, problem) for problem, text in zip(problems, texts, strict=True)]
        encoded = self.tokenizer(marked, add_special_tokens=False, **options)["input_ids"] if texts else []
        encoded = [
            self.expanded(ids, problem.images[: count_places(problem.prompt)], problem.problem_id)
            for problem, ids in zip(problems, encoded, strict=True)
        ]
        prompts: list[tuple[Sequence[int], str]] = []
        for problem, text, is_bare, ids in zip(problems, texts, bare, encoded, strict=True):
            if is_bare and ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
            if not ids and problem.prompt:
                raise DataError(f"{problem.problem_id}: the tokenizer returns no tokens for {problem.prompt!r}")
            if not isinstance(problem.prompt, str) and problem.prompt[-1]["role"] == "assistant":
                self._warn(
                    f"{problem.problem_id}: the prompt ends with an assistant message, which completions "
                    "continue: if it is the answer, remove it from the prompt"
                )
            prompts.append((ids, self._turn_opening(problem.prompt, text)))
        return prompts

    def marked(self, text: str, problem: Problem) -> str:
        """Write the model's tokens of a picture in place of each `<image>` of a problem with pictures."""
        if not problem.images:
            return text
        assert self.images is not None, "pictures are read only for models that read them"
        return text.replace(PLACE, self.images.place(self.tokenizer))

    def expanded(self, ids: list[int], images: Sequence[Image], place: str) -> list[int]:
        """Repeat the token of each picture in a text as often as the picture has features.

        Args:
            images: pictures of the text.
            place: name of the row in errors.

        Raises:
            DataError: there are more or fewer such tokens than pictures.
        """
        if self.images is None or (not images and self.images.image_token not in ids):
            return ids
        with reraise_as(DataError, place, DataError):
            return self.images.expanded(ids, images)

    def is_bare(self, problem: Problem) -> bool:
        """Return True if a prompt is used without rendering it. Warns once if one contains tokens of the template.

        Raises:
            DataError: the prompt contains the chat template, and the config has settings that only a template applies.
        """
        prompt, name = problem.prompt, f"data.prompt_field={self.config.prompt_field}"
        if isinstance(prompt, str):
            marks = (found[0] for found in FOREIGN_MARK.finditer(prompt))
            if mark := next((mark for mark in marks if mark not in self._own_marks), None):
                self._warn(
                    f"{problem.problem_id}: the prompt contains {mark}, from the chat template of another model, which "
                    f"this one reads as words: give only the question in {name}"
                )
        if prompt == "" or (isinstance(prompt, str) and self.config.chat_template == "messages_only"):
            return True
        if not self.has_template:
            if self.tools_of(problem) and not self.tools:
                raise DataError(f"{problem.problem_id}: field {TOOLS!r}: {self.why_none()}; remove the column")
            return isinstance(prompt, str)
        if not isinstance(prompt, str) or self._marks.turn(prompt) is None:
            texts = [prompt] if isinstance(prompt, str) else [str(message.get("content") or "") for message in prompt]
            if mark := next((mark for mark in self._marks.special if any(mark in text for text in texts)), None):
                self._warn(
                    f"{problem.problem_id}: the prompt contains {mark}, which the chat template also adds, so the "
                    f"model reads it as the start or end of a turn: remove it from {name}, or set "
                    "data.chat_template=none if prompts contain their template"
                )
            return False
        self._warn(
            f"{problem.problem_id}: the prompt already contains the chat template and is used unchanged; "
            f"set data.chat_template=none, or give only the question in {name}"
        )
        unused = {
            "data.system_prompt": self.system_prompt is not None,
            "data.chat_template_kwargs": self.config.chat_template_kwargs,
            "tools": self.tools_of(problem),
            "environment.opening": self.opening,
        }
        if key := next((key for key, value in unused.items() if value), None):
            raise DataError(
                f"{problem.problem_id}: the prompt already contains the chat template, so {key} cannot be applied: "
                f"give only the question in {name}, or remove {key}"
            )
        return True

    def _warn(self, message: str) -> None:
        """Log a warning for the first prompt only."""
        if not self._warned:
            self._warned = True
            log.warning("%s (only the first such prompt is reported)", message)

    def _turn_opening(self, prompt: str | Sequence[Message], text: str) -> str:
        """Return the end of a prompt's text that belongs to the assistant's turn, such as an opened thought."""
        if self.opening:  # the environment's reply comes next, and then the template's header of the assistant's turn
            return thought_opening(self._marks.header)
        if isinstance(prompt, str):
            turn = self._marks.turn(text)
            return thought_opening(text) if turn is None else turn
        content = str(prompt[-1].get("content") or "") if prompt[-1]["role"] == "assistant" else ""
        content = content if text.endswith(content) else content.strip()
        return thought_opening(text.removesuffix(content)) + content

    def conversation(self, prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages of a prompt or conversation, after the system prompt unless they have their own."""
        turns = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        messages: list[dict[str, Any]] = [dict(message) for message in turns]
        own_system = any(message["role"] in ("system", "developer") for message in messages)
        if self.system_prompt is not None and not own_system:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def tools_of(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        """Return the tools in a problem's prompt: the run's, or those of its row.

        Raises:
            DataError: both have tools.
        """
        own = check_tools(problem.columns.get(TOOLS))
        if own and self.tools:
            raise DataError(
                f"{problem.problem_id}: column {TOOLS!r}: the run has tools of its own (section tools), and only these "
                "can be called: remove or rename the column"
            )
        return self.tools or own

    def kwargs_of(self, problem: Problem) -> Mapping[str, Any]:
        """Return the variables of the chat template for a problem: those of the config, and of its row."""
        own = problem.columns.get(TEMPLATE_KWARGS) if COMPLETIONS in problem.columns else None
        return {**self.template_kwargs, **own} if own else self.template_kwargs

    def rendered(
        self,
        prompt: str | Sequence[Message],
        place: str,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a prompt, or the beginning of a conversation, with the chat template and its generation prompt.

        Args:
            place: name of the row in errors.
            tools: of the row; ignored if the run has its own.
            kwargs: variables of the template; None: those of the config.
        """
        if not self.has_template:
            raise DataError(f"{place}: the prompt is a list of messages, but {self.why_none()}")
        messages = self.conversation(prompt)
        continued = messages[-1]["role"] == "assistant"
        if self.opening and messages[-1]["role"] != "user":
            raise DataError(f"{place}: with environment.opening the last message of a prompt must be the user's")
        messages[-1]["content"] += _END if self.opening else ""
        shown = self.tools or tools
        variables = self.template_kwargs if kwargs is None else kwargs
        options: dict[str, Any] = {"kwargs": variables, "add_generation_prompt": not continued}
        options["continue_final_message"] = continued
        # templates are programs and raise what they like
        with reraise_as(DataError, f"{place}: the chat template raised an error for the prompt", Exception):
            text = render(self.tokenizer, messages, tools=shown, **options)
            ignored = shown is tools and len(tools) and text == render(self.tokenizer, messages, **options)
        if ignored:
            raise DataError(
                f"{place}: field {TOOLS!r}: the chat template does not show tools: use a tokenizer whose "
                "template does, or remove the column"
            )
        for message in messages:
            if message["role"] in ("system", "developer") and str(message["content"]).strip() not in text:
                raise DataError(f"{place}: the tokenizer's chat template drops the system prompt")
        return text.partition(_END)[0]

    def why_none(self) -> str:
        """Return why messages cannot be rendered, and what to do."""
        if self.tokenizer.chat_template:
            return "data.chat_template=none needs text prompts: remove it, or give text"
        return f"{NO_TEMPLATE}, or give text"


def read_system_prompt(config: DataConfig) -> str | None:
    """Return the system prompt of a config, from its text or its file (stripped of white space).

    Raises:
        DataError: the file cannot be read, or is empty.
    """
    if config.system_prompt_file is None:
        return config.system_prompt
    path = Path(config.system_prompt_file)
    with reraise_as(DataError, f"data.system_prompt_file {path} cannot be read", OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8-sig").strip()
    if not text:
        raise DataError(f"data.system_prompt_file {path} is empty")
    return text


def _leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text, usually BOS."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    return []


# --------------------------------------------------------------------------------------------------------------------
# The order of problems over epochs.


class PromptStream:
    """An endless stream of problems: every epoch has each problem once, in its own order.

    The order is a function of the seed and the epoch. So `position`, the number of problems drawn since the start of
    the run, is the whole state to resume from.

    Example:
        >>> problems = [Problem(problem_id=name, prompt=name, ground_truth="") for name in "abc"]
        >>> stream = PromptStream(problems, seed=0, shuffle=False)
        >>> [prompt_id for prompt_id, _ in stream.take(4)]
        ['0:a', '0:b', '0:c', '1:a']
        >>> stream.position = 2
        >>> [prompt_id for prompt_id, _ in stream.take(1)]
        ['0:c']
    """

    def __init__(self, problems: Sequence[Problem], seed: int = 0, shuffle: bool = True) -> None:
        """
        Raises:
            DataError: no problems are given, or two have the same id.
        """
        if not problems:
            raise DataError("a stream needs at least one problem")
        same = [problem.problem_id for problem in alike(problems, lambda problem: problem.problem_id)]
        if len(set(same)) < len(same):
            count = len(problems) - len(same) + len(set(same))
            raise DataError(f"problem ids must be unique: {len(problems)} problems have {count} ids")
        self.problems = problems
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._order: tuple[int, MutableSequence[int]] = (-1, [])

    def take(self, count: int) -> list[tuple[str, Problem]]:
        """Return the next `count` problems, each with its prompt id `epoch:problem_id`; a batch may cross epochs."""
        start, self.position = self.position, self.position + count
        return [self.at(position) for position in range(start, self.position)]

    def at(self, position: int) -> tuple[str, Problem]:
        """Return the problem at a position since the start of the run, with its prompt id."""
        epoch, index = divmod(position, len(self.problems))
        if self._order[0] != epoch:
            order = array("q", range(len(self.problems)))  # 8 bytes each, where a list has 40
            if self.shuffle:
                digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
                random.Random(int.from_bytes(digest, "little")).shuffle(order)
            self._order = (epoch, order)
        problem = self.problems[self._order[1][index]]
        return f"{epoch}:{problem.problem_id}", problem

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the problems in order; checkpoints store it to detect changed data."""
        digest, encoder = hashlib.blake2b(digest_size=16), json.JSONEncoder(sort_keys=True, default=str)
        for each in self.problems:
            columns, names = dict(each.columns), [image.name for image in each.images]
            if names:  # they are in the folder of a run
                columns[IMAGES] = names
            content = [each.problem_id, each.prompt, each.ground_truth, each.data_source, columns]
            digest.update(encoder.encode(content).encode() + b"\n")
        return digest.hexdigest()
