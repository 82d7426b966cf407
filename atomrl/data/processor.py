"""`DataProcessor` encodes prompts as token ids."""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.common.chat_template import FOREIGN_MARK, NO_TEMPLATE, check_kwargs, render, thought_opening, turn_marks
from atomrl.common.errors import reraise_as
from atomrl.data.columns import PLACE, SYSTEM, TEMPLATE_KWARGS, count_places
from atomrl.data.files import DataError
from atomrl.data.messages import COMPLETIONS, TOOLS, check_tools
from atomrl.data.problems import AT_ONCE, PROGRESS_S
from atomrl.data.stored import StoredProblems
from atomrl.types import Image, Message, Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from atomrl.config import DataConfig
    from atomrl.data.image_reader import ImageReader

log = logging.getLogger(__name__)


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
        """Settings that the tokens of prompts depend on, besides problems and tokenizer, as JSON."""
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
        for problem, is_bare in zip(problems, bare, strict=True):
            if not (is_bare or self.has_template) and (own := [name for name in SYSTEM if problem.columns.get(name)]):
                raise DataError(
                    f"{problem.problem_id}: the column {own[0]!r} is a system prompt, so the prompt is a list of "
                    f"messages, but {self.why_none()}, or rename the column"
                )
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
