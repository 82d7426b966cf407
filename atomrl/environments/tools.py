"""Tools: functions, objects and MCP servers that the model calls in its own format, and what answers."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from atomrl.environments.calls import CallThread, TooLong
from atomrl.environments.mcp_server import McpCrash, McpServer, connected
from atomrl.environments.playing import described
from atomrl.environments.tool_calls import Call, Form, Schema, find_calls
from atomrl.episodes import Reply
from atomrl.functions import find_function
from atomrl.outages import ServiceFault, is_away
from atomrl.sandbox import SandboxError, check
from atomrl.sandbox.tools import limits_of, python
from atomrl.types import Sample

AT_ONCE = 8
"""Calls of one turn that run at the same time."""
_ADDRESS = re.compile(r"\w://|\bwww\.")
HIDDEN = ("reset", "get_reward", "close")
"""Methods of a class that are no tools."""


def call_tools(
    sample: Sample, *, tools: Sequence[Mapping[str, Any]], schemas: Sequence[Schema], form: Form
) -> Generator[Any, str, float | None]:
    """An episode: each call of a tool is answered by a message of the role `tool`; an answer without one ends it.

    Where a tool is a class, an object of it is made for the episode: `reset(**row)` may return text for the end of the
    prompt, its other public methods are the tools, and `get_reward()` gives the outcome. Otherwise the outcome is None.

    Args:
        sample: the problem.
        tools: the items of the section `tools`.
        schemas: of all tools, as the prompt shows them.
        form: in which the model calls (`tool_calls.find_form`).

    Raises:
        ConnectionError, or an error of a client (`outages.is_away`): a service that a tool needs does not answer.
        McpCrash: a server does not survive a call.
        SandboxError: a program could not be run.
    """
    with ExitStack() as stack:
        known, objects = _tools_of(tools, stack)
        opening = "".join(one.reset(sample) for one in objects)
        text = yield Reply(text=opening, role="user") if objects else None
        while calls := find_calls(text, form, schemas):
            text = yield _answers(calls, known)
        rewards = [one.thread.run(one.object.get_reward) for one in objects if hasattr(one.object, "get_reward")]
        return float(sum(rewards)) if rewards else None


def find_schemas(tools: Sequence[Mapping[str, Any]]) -> list[Schema]:
    """The JSON schemas of tools: of functions and methods from type hints and docstring, of servers as they say.

    Raises:
        ValueError: there is no such function, it lacks hints or docstring, it needs a sandbox and there is none, a
            class or a server has no tools, or two have the same name.
        ConnectionError, TimeoutError: an MCP server does not answer.
    """
    found: list[Schema] = []
    for tool in tools:
        if tool["mcp"]:
            with closing(McpServer(tool)) as server:
                own: Sequence[Schema] = server.schemas()
        else:
            own = [_schema(function, tool) for function in _functions(tool)]
        if not own:
            raise ValueError(f"{tool['function'] or tool['mcp']!r} has no tools")
        found += own
    names = [schema["function"]["name"] for schema in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"there are two tools of the name {min(twice)!r}")
    return found


def has_objects(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the tools is a class, which begins the episode and may end it with a reward."""
    return bool(_classes(tools))


def gives_reward(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the tools is a class that ends the episode with a reward."""
    return any(hasattr(kind, "get_reward") for kind in _classes(tools))


def check_rows(tools: Sequence[Mapping[str, Any]], columns: Collection[str]) -> None:
    """Check that `reset` of the tools that are classes takes a row of the data.

    Args:
        columns: of the data, without prompt and answer.

    Raises:
        ValueError: one needs a column that the data lack, or does not take one that they have.
    """
    for kind in _classes(tools):
        try:
            row = {**dict.fromkeys(columns), "prompt": "", "ground_truth": None}
            inspect.signature(kind.reset).bind(None, **row)  # type: ignore[attr-defined]
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}.reset is given each row by its columns, here prompt, ground_truth"
                f"{''.join(f', {name}' for name in columns)}: {error}; write reset(self, **row), or give the data the "
                "column"
            ) from error


def _classes(tools: Sequence[Mapping[str, Any]]) -> list[type]:
    functions = [find_function(tool["function"]) for tool in tools if tool["function"]]
    return [function for function in functions if inspect.isclass(function)]


def _functions(tool: Mapping[str, Any]) -> list[Callable[..., Any]]:
    function = find_function(tool["function"])
    if not inspect.isclass(function):
        return [function]
    if not callable(reset := getattr(function, "reset", None)):
        raise ValueError(f"{tool['function']!r} is a class without a method reset")
    try:
        inspect.signature(reset).bind_partial(None, prompt="", ground_truth=None)
    except TypeError as error:
        raise ValueError(f"{tool['function']!r}: reset is given the row, as in reset(self, **row): {error}") from error
    members = inspect.getmembers(function, inspect.isfunction)
    return [method for name, method in members if name not in HIDDEN and not name.startswith("_")]


def _schema(function: Callable[..., Any], tool: Mapping[str, Any]) -> Schema:
    from transformers.utils.chat_template_utils import get_json_schema

    given = {} if inspect.isclass(find_function(tool["function"])) else _given(function, tool)
    try:
        inspect.signature(function).bind_partial(**given)
        if function is python:
            limits_of(given["timeout_s"], given["memory_mb"])
            check(given["sandbox"])
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # of type hints, docstrings and sandboxes, each its own
        raise ValueError(f"{tool['function']!r} cannot be a tool: {error}") from error
    parameters = schema["function"]["parameters"]
    parameters["properties"] = {key: value for key, value in parameters["properties"].items() if key not in given}
    if "required" in parameters:
        parameters["required"] = [key for key in parameters["required"] if key not in given]
    return schema


def _given(function: Callable[..., Any], tool: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the model neither sees nor gives: the config's, and of Python in the sandbox all but the
    program, since how safely it runs is not for the model to say."""
    parameters = inspect.signature(function).parameters.values() if function is python else ()
    return {**{one.name: one.default for one in parameters if one.name != "code"}, **tool["args"]}


@dataclass(frozen=True)
class _Tool:
    """What answers to a name, for one episode."""

    call: Callable[..., Any]
    limit_s: float | None
    """None: it has a limit of its own, an MCP server's."""
    thread: CallThread | None = None
    """Of an object, whose methods all run on it, one after the other."""


def _tools_of(tools: Sequence[Mapping[str, Any]], stack: ExitStack) -> tuple[dict[str, _Tool], list[_Object]]:
    """What answers to each name, for one episode, and the objects that were made for it."""
    known: dict[str, _Tool] = {}
    objects = []
    for tool in tools:
        limit = tool["timeout_s"]
        if tool["mcp"]:
            server = connected(tool)
            known |= {name: _Tool(functools.partial(server.call, name), None) for name in server.names}
        elif inspect.isclass(made := find_function(tool["function"])):
            objects.append(one := _Object(functools.partial(made, **tool["args"]), stack))
            for method in _functions(tool):
                bound = _checked(getattr(one.object, method.__name__), {})
                known[method.__name__] = _Tool(bound, limit, one.thread)
        else:
            known[made.__name__] = _Tool(_checked(made, _given(made, tool)), limit)
    return known, objects


class _Refused(ValueError):
    """An argument that is not the model's to give."""


def _checked(function: Callable[..., Any], own: Mapping[str, Any]) -> Callable[..., Any]:
    """With arguments that fit its hints, and the config's own; otherwise a ValidationError or `_Refused`."""
    checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)

    def call(**given: Any) -> Any:
        if taken := own.keys() & given.keys():
            raise _Refused(f"{min(taken)}: Unexpected keyword argument")
        return checked(**given, **own)

    return call


class _Object:
    """An object for an episode, on a thread of its own from beginning to end: some things are not for another one."""

    def __init__(self, make: Callable[[], Any], stack: ExitStack) -> None:
        self.thread = CallThread()
        self.object: Any = None
        stack.callback(lambda: self.thread.end(getattr(self.object, "close", None)))
        self.object = self.thread.run(make)

    def reset(self, sample: Sample) -> str:
        row = {**sample.columns, "prompt": sample.prompt, "ground_truth": sample.ground_truth}
        return str(self.thread.run(lambda: self.object.reset(**row)) or "")


def _answers(calls: Sequence[Call], known: Mapping[str, _Tool]) -> list[Reply]:
    """A message for each call, in their order; the calls run at the same time, but for those of one object."""
    together: dict[Any, list[int]] = {}
    for place, call in enumerate(calls):
        thread = known[call.name].thread if call.name in known else None
        together.setdefault(thread or place, []).append(place)
    found: dict[int, Reply] = {}

    def answer(places: Sequence[int]) -> None:
        found.update({place: _answer(calls[place], known) for place in places})

    if len(together) == 1:
        answer(range(len(calls)))
    else:
        with ThreadPoolExecutor(min(AT_ONCE, len(together))) as threads:
            list(threads.map(answer, together.values()))
    return [found[place] for place in range(len(calls))]


def _answer(call: Call, known: Mapping[str, _Tool]) -> Reply:
    def wrong(label: str, message: str) -> Reply:
        return Reply(text=f"Error: {message}", role="tool", label=label)

    if call.problem:
        return wrong("invalid", f"the call {call.name or 'of a tool'} cannot be read: {call.problem}")
    if call.name not in known:
        return wrong("invalid", f"there is no tool {call.name!r}; there are: {', '.join(known)}")
    tool = known[call.name]
    try:
        result = tool.call(**call.arguments) if tool.limit_s is None else _limited(tool, call.arguments)
        return result if isinstance(result, Reply) else Reply(text=_as_text(result), role="tool", label=call.name)
    except TooLong as error:
        return wrong("timeout", f"{call.name}: {error}")
    except (SandboxError, ServiceFault, McpCrash):
        raise
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        return wrong("invalid", f"{call.name}: {'; '.join(reasons)}")
    except _Refused as error:
        return wrong("invalid", f"{call.name}: {error}")
    except Exception as error:
        if _of_service(tool, call):
            if isinstance(error, TimeoutError):  # a tool that asks a service gives up by itself
                raise ConnectionError(f"{call.name}: {described(error)}") from error
            if is_away(error):  # which is no doing of the model's
                raise
        return wrong("error", f"{call.name}: {described(error)}")


def _of_service(tool: _Tool, call: Call) -> bool:
    """Whether what a call asks is the tool's own service. An address that the model wrote may be of nobody, for ever;
    a server of tools answers that by itself."""
    return tool.limit_s is None or _ADDRESS.search(json.dumps(call.arguments, default=str)) is None


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _limited(tool: _Tool, arguments: Mapping[str, Any]) -> Any:
    thread = tool.thread or CallThread()
    try:
        return thread.run(lambda: tool.call(**arguments), tool.limit_s)
    finally:
        if tool.thread is None:
            thread.end()
