"""Check the prompt, the messages and the tools of a row. Every error names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from atomrl.common.errors import reraise_as
from atomrl.data.columns import message_weight
from atomrl.data.files import DataError
from atomrl.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
PromptContent = str | tuple[Message, ...]
"""Plain text, or chat messages."""
COMPLETIONS, TOOLS = "completions", "tools"
"""Columns: the completions of a demonstration or a preference; the JSON schemas of a row's tools, if any."""


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
    return cast(Message, {"role": message["role"], "content": content_text(place, content), **others})


def content_text(place: str, content: Any) -> str:
    """Return the content of a message as text: its own, or that of its parts.

    Raises:
        DataError: it is something else.
    """
    if isinstance(content, list):
        content = "".join(_part(place, part) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{place}: 'content' must be text")
    return content


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
