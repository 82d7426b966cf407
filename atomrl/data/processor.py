"""Samples to prompts as token ids (`DataProcessor`), and the order of samples over epochs (`PromptStream`)."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.common.chat_template import NO_TEMPLATE, check_kwargs, render, thought_opening, turn_marks
from atomrl.common.errors import said_as
from atomrl.data.files import DataError
from atomrl.data.sources import COMPLETIONS, TOOLS
from atomrl.types import Message, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from atomrl.config import DataConfig


log = logging.getLogger(__name__)
_END = "atomrl-end-of-words"  # marks a place in a rendered template


class DataProcessor:
    """Encodes prompts with one tokenizer and one data config. Each sample is tokenized once.

    - Messages are rendered by the tokenizer's chat template, and so is text if there is a template (as a user message).
      The tokenizer adds no special tokens to it. Text that already contains the template, up to the generation prompt,
      is not rendered again.
    - Text without a template (the tokenizer has none, or `chat_template` is `none`) gets the tokenizer's leading
      special tokens (BOS) unless it starts with them, but no trailing ones.
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
    ) -> None:
        """
        Args:
            max_prompt_tokens: replaces the config's, where the model's context is shorter.
            tools: JSON schemas that the chat template shows to the model.
            opening: an environment continues the prompt's last message, so the prompt ends with its content.
            today: fixed date for chat templates that print it; None uses the clock.

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
            raise DataError("data.chat_template=none takes prompts as they are; remove the system prompt")
        if config.chat_template_kwargs:
            if config.chat_template == "none":
                raise DataError("data.chat_template=none renders nothing; remove data.chat_template_kwargs")
            with said_as(DataError, "data.chat_template_kwargs", ValueError):
                check_kwargs(tokenizer, config.chat_template_kwargs)
        self.template_kwargs: dict[str, Any] = {**config.chat_template_kwargs}
        """Variables of the chat template, for other renderings in the same run."""
        if today is not None:
            self.template_kwargs["strftime_now"] = today.strftime
        self.tools, self.opening = [dict(tool) for tool in tools], opening
        self._prefix = _leading_tokens(tokenizer)
        # By identity, since ids are unique within one data set only; the entry keeps the sample alive.
        self._cache: dict[int, tuple[Sample, array[int], str]] = {}
        self._warned = False
        self._marks = turn_marks(tokenizer, self.template_kwargs)

    def to_prompts(self, items: Sequence[tuple[str, Sample]]) -> list[Prompt]:
        """Encode (prompt id, sample) pairs, in order.

        Raises:
            DataError: the template refuses a prompt, or one is over the limit and `overlong_prompt` is `drop`
                (`filter_overlong` removes those).
        """
        prompts = []
        for (prompt_id, sample), ids in zip(items, self.token_ids([sample for _, sample in items]), strict=True):
            limited = self.cut(ids)
            if limited is None:
                limit = self.max_prompt_tokens
                raise DataError(f"{sample.sample_id}: {len(ids)} prompt tokens, more than {limit}; filter it out")
            opening = self._cache[id(sample)][2]
            prompts.append(Prompt(prompt_id=prompt_id, sample=sample, token_ids=tuple(limited), opening=opening))
        return prompts

    def filter_overlong(self, samples: Sequence[Sample]) -> tuple[list[Sample], int]:
        """Return the samples to use, and the number of prompts over `max_prompt_tokens`.

        With `overlong_prompt: drop` these are left out, so that used + overlong = total; with `truncate` all samples
        are used, and overlong prompts lose their first tokens in `to_prompts`.

        Raises:
            DataError: no sample is left.
        """
        encoded = self.token_ids(samples)
        usable = [sample for sample, ids in zip(samples, encoded, strict=True) if self.cut(ids) is not None]
        if samples and not usable:
            raise DataError(
                f"all {len(samples)} prompts are longer than {self.max_prompt_tokens} tokens (data.max_prompt_tokens, "
                "or what a completion leaves of the model's context); data.overlong_prompt=truncate cuts them"
            )
        return usable, sum(len(ids) > self.max_prompt_tokens for ids in encoded)

    def token_ids(self, samples: Sequence[Sample]) -> list[array[int]]:
        """Encode prompts without the length limit. Cached per sample."""
        new = list({id(sample): sample for sample in samples if id(sample) not in self._cache}.values())
        for sample, (ids, opening) in zip(new, self._encode(new), strict=True):
            self._cache[id(sample)] = (sample, array("q", ids), opening)
        return [self._cache[id(sample)][1] for sample in samples]

    def within_limit(self, samples: Sequence[Sample]) -> list[Sequence[int] | None]:
        """Encode prompts with the length limit, without caching. Overlong ones are None, or their last tokens if
        `overlong_prompt` is `truncate`."""
        return [self.cut(ids) for ids, _ in self._encode(samples)]

    def cut(self, ids: Sequence[int]) -> Sequence[int] | None:
        """Apply the length limit to a prompt's tokens; see `within_limit`."""
        if len(ids) > self.max_prompt_tokens and self.config.overlong_prompt == "drop":
            return None
        return ids[-self.max_prompt_tokens :]

    def _encode(self, samples: Sequence[Sample]) -> list[tuple[list[int], str]]:
        """Return the token ids of each prompt, and the text with which it begins the assistant's turn."""
        if not samples:
            return []
        bare = [self.is_bare(sample) for sample in samples]
        front = "" if self.system_prompt is None else f"{self.system_prompt}\n\n"
        texts = [
            f"{front}{sample.prompt}"
            if is_bare
            else self.rendered(sample.prompt, sample.sample_id, self.tools_of(sample))
            for sample, is_bare in zip(samples, bare, strict=True)
        ]
        encoded: list[list[int]] = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        prompts = []
        for sample, text, is_bare, ids in zip(samples, texts, bare, encoded, strict=True):
            if is_bare and ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
            if not ids:
                raise DataError(f"{sample.sample_id}: the tokenizer makes no tokens of {sample.prompt!r}")
            if not isinstance(sample.prompt, str) and sample.prompt[-1]["role"] == "assistant":
                self._warn(
                    f"{sample.sample_id}: the prompt ends in a message of the assistant, and completions continue it: "
                    "where it is the answer, take it out of the prompt"
                )
            prompts.append((ids, self._turn_opening(sample.prompt, text)))
        return prompts

    def is_bare(self, sample: Sample) -> bool:
        """Return True if a prompt is used without rendering it. Warns once if one contains tokens of the template.

        Raises:
            DataError: the prompt contains the chat template, and the config has settings that only a template applies.
        """
        prompt, name = sample.prompt, f"data.prompt_field={self.config.prompt_field}"
        if not self.has_template:
            if self.tools_of(sample) and not self.tools:
                raise DataError(f"{sample.sample_id}: field {TOOLS!r}: {self.why_none()}; remove the column")
            return isinstance(prompt, str)
        if not isinstance(prompt, str) or self._marks.turn(prompt) is None:
            texts = [prompt] if isinstance(prompt, str) else [str(message.get("content") or "") for message in prompt]
            if mark := next((mark for mark in self._marks.special if any(mark in text for text in texts)), None):
                self._warn(
                    f"{sample.sample_id}: the prompt holds {mark}, which the chat template writes itself, so the model "
                    f"reads it as a turn's begin or end: remove it from {name}, or set data.chat_template=none where "
                    "prompts carry their template"
                )
            return False
        self._warn(
            f"{sample.sample_id}: the prompt carries its chat template already and is taken as it is; "
            f"data.chat_template=none says so, or give the question alone in {name}"
        )
        unused = {
            "data.system_prompt": self.system_prompt is not None,
            "data.chat_template_kwargs": self.config.chat_template_kwargs,
            "tools": self.tools_of(sample),
            "environment.opening": self.opening,
        }
        if key := next((key for key, value in unused.items() if value), None):
            raise DataError(
                f"{sample.sample_id}: the prompt carries its chat template already, so {key} has no place in it: give "
                f"the question alone in {name}, or remove {key}"
            )
        return True

    def _warn(self, message: str) -> None:
        """Log a warning for the first prompt only."""
        if not self._warned:
            self._warned = True
            log.warning("%s (of such prompts the first is named)", message)

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

    def tools_of(self, sample: Sample) -> Sequence[Mapping[str, Any]]:
        """Return the tools in a sample's prompt: the run's, else those of its row (demonstrations and preferences)."""
        return self.tools or (sample.columns.get(TOOLS, ()) if COMPLETIONS in sample.columns else ())

    def rendered(self, prompt: str | Sequence[Message], place: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render a prompt, or the beginning of a conversation, with the chat template and its generation prompt.

        Args:
            place: name of the row in errors.
            tools: of the row; ignored if the run has its own.
        """
        if not self.has_template:
            raise DataError(f"{place}: the prompt is a list of messages, but {self.why_none()}")
        messages = self.conversation(prompt)
        continued = messages[-1]["role"] == "assistant"
        if self.opening and messages[-1]["role"] != "user":
            raise DataError(f"{place}: with environment.opening the last message of a prompt is the user's")
        messages[-1]["content"] += _END if self.opening else ""
        shown = self.tools or tools
        options: dict[str, Any] = {"kwargs": self.template_kwargs, "add_generation_prompt": not continued}
        options["continue_final_message"] = continued
        # templates are programs and raise what they like
        with said_as(DataError, f"{place}: the chat template refuses the prompt", Exception):
            text = render(self.tokenizer, messages, tools=shown, **options)
            ignored = shown is tools and len(tools) and text == render(self.tokenizer, messages, **options)
        if ignored:
            raise DataError(
                f"{place}: field {TOOLS!r}: the chat template does not show tools: take a tokenizer whose "
                "template does, or remove the column"
            )
        for message in messages:
            if message["role"] in ("system", "developer") and str(message["content"]).strip() not in text:
                raise DataError(f"{place}: the tokenizer's chat template leaves out the system prompt")
        return text.partition(_END)[0]

    def why_none(self) -> str:
        """Return why messages cannot be rendered, and what to do."""
        if self.tokenizer.chat_template:
            return "data.chat_template=none takes text alone: leave it out, or give text"
        return f"{NO_TEMPLATE}, or give text"


def read_system_prompt(config: DataConfig) -> str | None:
    """Return the system prompt of a config, from its text or its file (stripped of white space).

    Raises:
        DataError: the file cannot be read, or is empty.
    """
    if config.system_prompt_file is None:
        return config.system_prompt
    path = Path(config.system_prompt_file)
    with said_as(DataError, f"data.system_prompt_file {path} cannot be read", OSError, UnicodeDecodeError):
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
# The order of samples over epochs.


class PromptStream:
    """An endless stream of samples: every epoch has each sample once, in its own order.

    The order is a function of the seed and the epoch, so `position`, the number of samples drawn since the start of the
    run, is the whole state to resume from.

    Example:
        >>> samples = [Sample(sample_id=name, prompt=name, ground_truth="") for name in "abc"]
        >>> stream = PromptStream(samples, seed=0, shuffle=False)
        >>> [prompt_id for prompt_id, _ in stream.take(4)]
        ['0:a', '0:b', '0:c', '1:a']
        >>> stream.position = 2
        >>> [prompt_id for prompt_id, _ in stream.take(1)]
        ['0:c']
    """

    def __init__(self, samples: Sequence[Sample], seed: int = 0, shuffle: bool = True) -> None:
        """
        Raises:
            DataError: there are no samples, or two have the same id.
        """
        if not samples:
            raise DataError("a stream needs at least one sample")
        ids = {sample.sample_id for sample in samples}
        if len(ids) < len(samples):
            raise DataError(f"sample ids must be unique: {len(samples)} samples have {len(ids)} ids")
        self.samples = tuple(samples)
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[tuple[str, Sample]]:
        """Return the next `count` samples, each with its prompt id `epoch:sample_id`; a batch may cross epochs."""
        start, self.position = self.position, self.position + count
        return [self.at(position) for position in range(start, self.position)]

    def at(self, position: int) -> tuple[str, Sample]:
        """Return the sample at a position since the start of the run, with its prompt id."""
        epoch, index = divmod(position, len(self.samples))
        sample = self.samples[self._epoch_order(epoch)[index]]
        return f"{epoch}:{sample.sample_id}", sample

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self.samples)))
            if self.shuffle:
                digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
                random.Random(int.from_bytes(digest, "little")).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the samples in order; checkpoints store it to detect changed data."""
        digest = hashlib.blake2b(digest_size=16)
        for sample in self.samples:
            content = [sample.sample_id, sample.prompt, sample.ground_truth, sample.data_source, dict(sample.columns)]
            digest.update(json.dumps(content, sort_keys=True, default=str).encode() + b"\n")
        return digest.hexdigest()
