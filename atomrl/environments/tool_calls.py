"""Tool calls in a model's text: parse them (`find_calls`), and detect the format of a tokenizer (`find_form`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atomrl.common.chat_template import NO_TEMPLATE, render
from atomrl.common.errors import describe_error
from atomrl.data.conversations import common_prefix

Schema = Mapping[str, Any]
"""JSON schema of a tool, as made by `transformers.utils.get_json_schema`."""
UNREADABLE = (ValueError, RecursionError)
"""Errors of `json`: RecursionError for deeply nested brackets."""
Form = str | Mapping[str, Any]
"""A key of `FORMS`, or the `response_template` of a tokenizer (transformers)."""
_OPENED = "<tool_call>"
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")
_KEYS = {"name", "parameters", "arguments", "type", "id"}
_MAX_FAILURES = 20
"""Attempts to parse JSON at an opening tag; each takes time linear in the text."""
_CLOSED = re.compile(r"\s*(?:</tool_call>|$)")  # the last call may be unclosed: a stop string may have ended the turn
_TOOL_TAG = re.compile(r"</?tool_call>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>|</function>|</?tool_call>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|$))")
"""A value may contain a closing tag, but not one that is followed by a further tag."""
_THOUGHT = re.compile(
    r"(</?think>)|(<parameter=[^<>\n]*>)|"
    r"(?:<tool_call>|\[ARGS\]|\[TOOL_CALLS\]|<\|python_tag\|>|\}\s*;|^|(?<=</think>))\s*(?=\{|\[\s*\{)"
)


@dataclass(frozen=True)
class Call:
    """A tool call of the model.

    Example:
        >>> hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [Call(name='add', arguments={'a': 1}, problem='')]
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Reason why the call cannot be parsed; "" if it can."""


def hermes(text: str, schemas: Sequence[Schema] = ()) -> list[Call]:
    """Parse any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3."""
    calls, at, failures = list[Call](), 0, 0
    while (at := text.find(_OPENED, at)) >= 0:
        at += len(_OPENED)
        end = _json_end(text, at) if failures < _MAX_FAILURES else -1
        failures += end < 0
        closed = _CLOSED.match(text, end) if end >= 0 else None
        if closed is None:  # invalid JSON: the block ends at its closing tag
            close = text.find("</tool_call>", at)
            end = len(text) if close < 0 else close
        calls.append(_from_json(text[at:end]))
        at = closed.end() if closed else end
    return calls


def xml(text: str, schemas: Sequence[Schema] = ()) -> list[Call]:
    """Parse `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5.

    Values are text or JSON, depending on the tool's schema.
    """
    calls, at, closes = list[Call](), 0, True
    while (at := text.find(_OPENED, at)) >= 0:
        at += len(_OPENED)
        end = _TOOL_TAG.search(text, at)
        function = _opening_tag("function", text, at, end.start() if end else len(text))
        if not function:
            calls.append(Call(problem="it has no <function=NAME>"))
            continue
        name, arguments, at = function[1].strip(), dict[str, str](), function.end()
        while closes and (key := _PARAMETER.search(text, at)) and key[1]:  # of this function
            if not (value := _PARAMETER_END.search(text, key.end())):
                closes = False  # no later parameter is closed either
                break
            arguments[key[1]] = text[key.end() : value.start()].removeprefix("\n").removesuffix("\n")
            at = value.end()
        types = _types(name, schemas)
        calls.append(Call(name, {key: _value(value, types.get(key)) for key, value in arguments.items()}))
    return calls


def _opening_tag(kind: str, text: str, start: int, end: int) -> re.Match[str] | None:
    """Find the first `<KIND=NAME>`. The pattern also matches unclosed tags, so that no text is scanned twice."""
    tags = re.compile(rf"<{kind}=([^>\n]*)(>?)").finditer(text, start, end)
    return next((tag for tag in tags if tag[1] and tag[2]), None)


def llama(text: str, schemas: Sequence[Schema] = ()) -> list[Call]:
    """Parse an answer that is `{"name": ..., "parameters": {...}}` and nothing else, with or without
    `<|python_tag|>`: Llama 3.1 to 3.3. Several calls may follow each other, with or without a semicolon.
    """
    tagged = "<|python_tag|>" in text
    rest = text[text.find("<|python_tag|>") :].strip() if tagged else text.strip()
    if not tagged and not rest.startswith("{"):
        return []
    calls, decoder, at = list[Call](), json.JSONDecoder(), 0
    while at < len(rest):
        at = _BETWEEN.match(rest, at).end()  # type: ignore[union-attr]
        try:
            value, at = decoder.raw_decode(rest, at)
        except UNREADABLE as error:
            return [*calls, Call(problem=f"it is not JSON: {error}")]
        if not tagged and not (isinstance(value, dict) and "name" in value and {*value} <= _KEYS):
            return calls  # an answer that is JSON
        calls.append(_from_value(value))
        at = _BETWEEN.match(rest, at).end()  # type: ignore[union-attr]
    return calls


def mistral(text: str, schemas: Sequence[Schema] = ()) -> list[Call]:
    """Parse `[TOOL_CALLS]` with a list of `{"name": ..., "arguments": {...}}`, or with `NAME[ARGS]{...}`: Mistral."""
    _, tag, rest = text.partition("[TOOL_CALLS]")
    if not tag:
        return []
    if not rest.lstrip().startswith("[") and (named := list(_named(rest))):
        return [_from_json(arguments, name) for name, arguments in named]
    try:
        values, _ = json.JSONDecoder().raw_decode(rest.strip())
    except UNREADABLE as error:
        return [Call(problem=f"it is not JSON: {error}")]
    return [_from_value(value) for value in (values if isinstance(values, list) else [values])]


def _named(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and arguments of every `NAME[ARGS]...`. The pattern matches any word, so that no text is scanned
    twice."""
    at, failures, text = 0, 0, text.removesuffix("\n")
    while 0 <= at < len(text):
        words = re.compile(r"([\w.-]+)(?=(?:\[CALL_ID\]\w+)?(\[ARGS\])?)").finditer(text, at)
        name = next((word for word in words if word[2]), None)
        if name is None:
            return
        end = _json_end(text, name.end(2)) if failures < _MAX_FAILURES else -1
        failures += end < 0
        tag = text.find("[TOOL_CALLS]", max(name.end(2), end))
        yield name[1], text[name.end(2) : len(text) if tag < 0 else tag]
        at = tag


FORMS: dict[str, Callable[[str, Sequence[Schema]], list[Call]]] = {
    "hermes": hermes, "xml": xml, "llama": llama, "mistral": mistral,
}  # fmt: skip


def find_calls(text: str, form: Form, schemas: Sequence[Schema] = ()) -> list[Call]:
    """Parse the tool calls in one turn of a model, outside of its thoughts (`<think>`).

    Example:
        >>> find_calls('<think>maybe g</think><tool_call>{"name": "g"}</tool_call>', "hermes")
        [Call(name='g', arguments={}, problem='')]
        >>> find_calls('<tool_call>{"name": "say", "arguments": {"text": "<think>"}}</tool_call>', "hermes")
        [Call(name='say', arguments={'text': '<think>'}, problem='')]
    """
    text = _without_thoughts(text)
    return FORMS[form](text, schemas) if isinstance(form, str) else _by_template(text, form, schemas)


def _by_template(text: str, template: Mapping[str, Any], schemas: Sequence[Schema]) -> list[Call]:
    from transformers.utils.chat_parsing import parse_response

    try:
        message = parse_response(text, dict(template), prefix="", tools=[dict(schema) for schema in schemas])
    except Exception as error:  # templates are programs, and the model's text can be anything
        return [Call(problem=describe_error(error))]
    return [_from_value(call.get("function", call)) for call in message.get("tool_calls") or ()]


def find_form(tokenizer: Any, schemas: Sequence[Schema], kwargs: Mapping[str, Any] | None = None) -> Form:
    """Detect the format in which a model calls tools: the tokenizer's `response_template`, else the format in which its
    chat template renders a call.

    Args:
        kwargs: further variables of the template (`data.chat_template_kwargs`).

    Raises:
        ValueError: the chat template leaves out tools or calls, or its format is unknown.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"tools: {NO_TEMPLATE}")
    user, name = {"role": "user", "content": "words"}, str(schemas[0]["function"]["name"])
    arguments = {"text": 'two "words"\n<b>', "number": 7}
    call = {"id": "atomrl001", "type": "function", "function": {"name": name, "arguments": arguments}}
    assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = render(tokenizer, [user], tools=schemas, kwargs=kwargs, add_generation_prompt=True)
        whole = render(tokenizer, [user, assistant], tools=schemas, kwargs=kwargs)
    except Exception as error:  # templates are programs and raise what they like
        raise ValueError(f"the chat template rejects tools: {error}") from error
    if any(str(schema["function"]["name"]) not in prompt for schema in schemas):
        raise ValueError("the chat template ignores tools: this model was not trained to call them")
    written = whole[common_prefix(prompt, whole) :]
    if template := getattr(tokenizer, "response_template", None):
        return dict(template)
    properties = {"text": {"type": "string"}, "number": {"type": "integer"}}
    probe = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    for end in sorted({token for token in (tokenizer.eos_token, *_added(tokenizer)) if token}, key=len, reverse=True):
        if (shortened := written.rstrip().removesuffix(end)) != written.rstrip():
            written = shortened
            break
    for form in FORMS:
        if find_calls(written, form, [probe]) == [Call(name, arguments)]:
            return form
    raise ValueError(f"the chat template writes tool calls as {written[:200]!r}; supported: {', '.join(FORMS)}")


def _added(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def _without_thoughts(text: str) -> str:
    """Return the text behind the model's thoughts. Think tags within the arguments of a call are text."""
    if "think>" not in text:
        return text
    start, at, closes, failures = 0, 0, True, 0
    while match := _THOUGHT.search(text, at):
        if match[1] == "<think>":
            end = text.find("</think>", match.end())
            if end < 0:
                return text[start : match.start()]
            at = end
            continue
        at = match.end()
        if match[1]:
            start = at
        elif match[2]:
            value = _PARAMETER_END.search(text, at) if closes else None
            at, closes = (value.start() if value else at), value is not None
        elif failures < _MAX_FAILURES:
            end = _json_end(text, at)
            at, failures = max(at, end), failures + (end < 0)
        at += at == match.start()
    return text[start:]


def _json_end(text: str, start: int) -> int:
    """Return the end of the JSON value that begins at `start`, after white space; -1 if there is none."""
    while text[start : start + 1] in (" ", "\n", "\t", "\r"):
        start += 1
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except UNREADABLE:
        return -1


def _from_json(text: str, name: str = "") -> Call:
    try:
        value = json.loads(text)
    except UNREADABLE as error:
        return Call(problem=f"it is not JSON: {error}")
    return _from_value({"name": name, "arguments": value} if name else value)


def _from_value(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(problem='it is not an object with a "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's format: JSON in a string
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except UNREADABLE:
            return Call(value["name"], problem="its arguments are not a JSON object")
    if arguments is None:  # a tool without parameters
        arguments = {}
    if not isinstance(arguments, dict):
        return Call(value["name"], problem="its arguments are not a JSON object")
    return Call(value["name"], arguments)


def _types(name: str, schemas: Sequence[Schema]) -> dict[str, Any]:
    for schema in schemas:
        if schema["function"]["name"] == name:
            properties = schema["function"].get("parameters", {}).get("properties", {})
            return {key: value.get("type") for key, value in properties.items()}
    return {}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except UNREADABLE:
        return text
