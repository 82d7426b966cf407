"""Samples become prompts as token ids: chat template, system prompt, length limit."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.data.problems import DataError
from atomrl.hints import said_as
from atomrl.types import Message, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from atomrl.config import DataConfig


_END = "atomrl-end-of-words"


class DataProcessor:
    """Applies one tokenizer and one data config. Nothing is tokenised twice.

    - Messages go through the tokenizer's chat template, and so does text where there is one (as a user's message).
      What the template writes is all there is: the tokenizer adds no special tokens to it.
    - Text without a template (the tokenizer has none, or `chat_template` is `none`) gets the tokens that the
      tokenizer puts in front of a text, unless it begins with them; never those that it puts behind.
    - The system prompt is the first message, or, without a template, the text before the prompt and an empty line. A
      row that brings a system message keeps its own.
    - Last messages of the assistant are continued, not closed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        max_prompt_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: bool = False,
    ) -> None:
        """
        Args:
            max_prompt_tokens: overrides the config's, where the model's context is shorter.
            tools: JSON schemas that the chat template shows to the model.
            opening: an environment goes on with the prompt's last message, so a prompt ends with its words.

        Raises:
            DataError: the system prompt's file is absent, or `chat_template: none` meets a system prompt.
        """
        self.tokenizer = tokenizer
        self.config = config
        self.max_prompt_tokens = config.max_prompt_tokens if max_prompt_tokens is None else max_prompt_tokens
        self.system_prompt = read_system_prompt(config)
        self._has_template = config.chat_template == "auto" and bool(tokenizer.chat_template)
        if config.chat_template == "none" and self.system_prompt is not None:
            raise DataError("data.chat_template=none takes prompts as they are; remove the system prompt")
        self.tools, self.opening = [dict(tool) for tool in tools], opening
        self._prefix = _tokens_in_front(tokenizer)
        # by identity: ids are unique within one data set only; keeping the sample keeps its identity
        self._cache: dict[int, tuple[Sample, array[int]]] = {}
        self._system_checked = False

    def to_prompts(self, items: Sequence[tuple[str, Sample]]) -> list[Prompt]:
        """Prompts of (prompt id, sample), in their order.

        Raises:
            DataError: a prompt that the template refuses, or one over the limit where `overlong_prompt` is `drop`
                (`filter_overlong` takes them out).
        """
        prompts = []
        for (prompt_id, sample), ids in zip(items, self.token_ids([sample for _, sample in items]), strict=True):
            kept = self._cut(ids)
            if kept is None:
                limit = self.max_prompt_tokens
                raise DataError(f"{sample.sample_id}: {len(ids)} prompt tokens, more than {limit}; filter it out")
            prompts.append(Prompt(prompt_id=prompt_id, sample=sample, token_ids=tuple(kept)))
        return prompts

    def filter_overlong(self, samples: Sequence[Sample]) -> tuple[list[Sample], int]:
        """The samples to use, and how many prompts exceed `max_prompt_tokens`.

        With `overlong_prompt: drop` those are left out, so that used + overlong = total; with `truncate` all are
        used, and the overlong ones lose their first tokens in `to_prompts`.

        Raises:
            DataError: nothing is left.
        """
        encoded = self.token_ids(samples)
        kept = [sample for sample, ids in zip(samples, encoded, strict=True) if self._cut(ids) is not None]
        if samples and not kept:
            raise DataError(
                f"all {len(samples)} prompts are longer than {self.max_prompt_tokens} tokens (data.max_prompt_tokens, "
                "or what a completion leaves of the model's context); data.overlong_prompt=truncate cuts them"
            )
        return kept, sum(len(ids) > self.max_prompt_tokens for ids in encoded)

    def token_ids(self, samples: Sequence[Sample]) -> list[array[int]]:
        """The whole prompts as token ids, without the limit."""
        new = list({id(sample): sample for sample in samples if id(sample) not in self._cache}.values())
        for sample, ids in zip(new, self._encode(new), strict=True):
            self._cache[id(sample)] = (sample, array("q", ids))
        return [self._cache[id(sample)][1] for sample in samples]

    def within_limit(self, samples: Sequence[Sample]) -> list[Sequence[int] | None]:
        """The prompts as token ids; None for one over the limit, or its last tokens where `overlong_prompt` is
        `truncate`. They are not kept for another time."""
        return [self._cut(ids) for ids in self._encode(samples)]

    def _cut(self, ids: Sequence[int]) -> Sequence[int] | None:
        if len(ids) > self.max_prompt_tokens and self.config.overlong_prompt == "drop":
            return None
        return ids[-self.max_prompt_tokens :]

    def _encode(self, samples: Sequence[Sample]) -> list[list[int]]:
        if not samples:
            return []
        bare = [isinstance(sample.prompt, str) and not self._has_template for sample in samples]
        front = "" if self.system_prompt is None else f"{self.system_prompt}\n\n"
        texts = [
            f"{front}{sample.prompt}" if is_bare else self.rendered(sample.prompt, sample.sample_id)
            for sample, is_bare in zip(samples, bare, strict=True)
        ]
        encoded: list[list[int]] = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        found = []
        for sample, is_bare, ids in zip(samples, bare, encoded, strict=True):
            if is_bare and ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
            if not ids:
                raise DataError(f"{sample.sample_id}: the tokenizer makes no tokens of {sample.prompt!r}")
            found.append(ids)
        return found

    def rendered(self, prompt: str | Sequence[Message], place: str) -> str:
        """The text of a prompt, or of the beginning of a conversation, as the chat template writes it, up to the
        assistant's next words.

        Args:
            place: how errors name it.
        """
        if not self._has_template:
            why = "data.chat_template=none" if self.tokenizer.chat_template else "the tokenizer has no chat template"
            raise DataError(f"{place}: the prompt is a list of messages, but {why}")
        turns = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        messages: list[dict[str, Any]] = [dict(message) for message in turns]
        own_system = any(message["role"] in ("system", "developer") for message in messages)
        if self.system_prompt is not None and not own_system:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        continued = messages[-1]["role"] == "assistant"
        if self.opening and messages[-1]["role"] != "user":
            raise DataError(f"{place}: with environment.opening the last message of a prompt is the user's")
        messages[-1]["content"] += _END if self.opening else ""
        options: dict[str, Any] = {"add_generation_prompt": not continued, "continue_final_message": continued}
        options |= {"tools": self.tools} if self.tools else {}
        # templates are programs and raise what they like
        with said_as(DataError, f"{place}: the chat template refuses the prompt", Exception):
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        if self.system_prompt is not None and not own_system and not self._system_checked:
            self._system_checked = True
            if self.system_prompt.strip() not in text:
                raise DataError("the tokenizer's chat template leaves out the system prompt")
        return text.partition(_END)[0]


def read_system_prompt(config: DataConfig) -> str | None:
    """The system prompt of a config, from its text or its file (without the white space around it).

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


def _tokens_in_front(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text of its own accord: the beginning-of-sequence token, mostly."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return list(whole[:start])
    return []
