"""Rows with demonstrations become samples: a prompt, and what the assistant says.

Layouts, recognised by their fields:

- `prompt` and `completion`: text, or lists of messages (TRL's prompt-completion rows);
- `messages`: a conversation (TRL's conversational rows), or `conversations` with `from` and `value` (ShareGPT);
- `instruction`, `input` (may be empty) and `output` (Alpaca).

What the assistant says is trained on, from its first message after the prompt to the last; what others say is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from atomrl.data.problems import DataError
from atomrl.data.sources import (
    Convert,
    LoadReport,
    PromptContent,
    Scored,
    as_content,
    check_messages,
    check_prompt,
    completions_reader,
    load_samples,
)
from atomrl.types import Message

if TYPE_CHECKING:
    from atomrl.config import DataConfig

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def load_demonstrations(
    config: DataConfig, completion_field: str, split: Literal["train", "eval"] = "train", seed: int = 0
) -> LoadReport:
    """The demonstrations of one split, as `load_samples` loads problems.

    Raises:
        DataError: as `load_samples`; or the generator writes no demonstrations.
    """
    return load_samples(config, split, seed, demonstration_reader(config.prompt_field, completion_field), "demonstrate")


def demonstration_reader(prompt_field: str, completion_field: str) -> Convert:
    """Reads a row as a demonstration (`demonstrated`)."""

    def read(row: Mapping[str, Any]) -> tuple[PromptContent, Scored]:
        prompt, turns = demonstrated(row, prompt_field, completion_field)
        return prompt, ((turns, 0.0),)

    return completions_reader(read)


def demonstrated(
    row: Mapping[str, Any], prompt_field: str = "prompt", completion_field: str = "completion"
) -> tuple[PromptContent, PromptContent]:
    """The prompt of a row, and what follows it.

    Raises:
        DataError: what is wrong with it, without the place.

    Example:
        >>> demonstrated({"instruction": "Add.", "input": "2+2", "output": "4"})
        ('Add.\\n\\n2+2', '4')
        >>> demonstrated({"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]})
        ('2+2=', '4')
    """
    given = {name for name, value in row.items() if value is not None}
    if completion_field in given:
        if prompt_field not in given:
            raise DataError(f"field {prompt_field!r} is missing (has {', '.join(map(repr, row))})")
        completion = row[completion_field]
        if isinstance(completion, list):
            prompt = check_prompt(row[prompt_field])
            return prompt, _turns(completion_field, check_messages(completion))
        if not isinstance(completion, str) or not completion:
            raise DataError(f"field {completion_field!r} holds no text and no messages")
        return check_prompt(row[prompt_field]), completion
    if "conversations" in given:
        return _conversation("conversations", [_sharegpt(message) for message in _list(row["conversations"])])
    if "messages" in given:
        return _conversation("messages", _list(row["messages"]))
    if {"instruction", "output"} <= given:
        texts = [row[name] for name in ("instruction", "input") if row.get(name)]
        if not all(isinstance(text, str) for text in texts) or not isinstance(row["output"], str) or not row["output"]:
            raise DataError("fields 'instruction', 'input' and 'output' must be text")
        return check_prompt("\n\n".join(texts)), row["output"]
    raise DataError(
        f"no demonstration: it has {', '.join(map(repr, row)) or 'no keys'}, but neither {prompt_field!r} and "
        f"{completion_field!r} (sft.completion_field), nor 'messages', 'conversations', or 'instruction' and 'output'"
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"a conversation must be a list of messages, not {type(value).__name__}")
    return value


def _sharegpt(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("from") not in SHAREGPT:
        raise DataError(f"a message of 'conversations' must have 'from' ({', '.join(SHAREGPT)}) and 'value'")
    return {"role": SHAREGPT[message["from"]], "content": message.get("value")}


def _conversation(name: str, messages: list[Any]) -> tuple[PromptContent, PromptContent]:
    checked = check_messages(messages)
    first = next((place for place, message in enumerate(checked) if message["role"] == "assistant"), None)
    if not first:
        raise DataError(f"field {name!r} has no message of the assistant" + ("" if first is None else " after another"))
    return as_content(checked[:first]), _turns(name, checked[first:])


def _turns(name: str, turns: tuple[Message, ...]) -> PromptContent:
    if turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
        raise DataError(f"field {name!r} must begin and end with the assistant after the prompt")
    if not all(turn["content"].strip() for turn in turns if turn["role"] == "assistant"):
        raise DataError(f"field {name!r} has an empty message of the assistant")
    return turns[0]["content"] if len(turns) == 1 else turns
