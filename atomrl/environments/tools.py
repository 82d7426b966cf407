"""Tools: functions, objects and MCP servers that the model calls in its own format, and what answers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import re
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from atomrl.common.errors import ServiceFault, is_away
from atomrl.common.functions import find_function
from atomrl.common.secrets import left_out, resolved, secrets_of
from atomrl.environments.tool_calls import Call, Form, Schema, find_calls
from atomrl.environments.worker import CallThread, TooLong, described
from atomrl.sandbox import SandboxError, check
from atomrl.sandbox.running import limits_of, python
from atomrl.types import Reply, Sample

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
            signature = inspect.signature(kind.reset)  # type: ignore[attr-defined]
            signature.bind(None, **row)
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


# --------------------------------------------------------------------------------------------------------------------
# Servers of the Model Context Protocol as tools: a connection for each in every worker. Needs the `mcp` extra.

MIN_SECRET = 8
"""Characters of a secret that a reply may not repeat."""

CRASHES = 3
"""Connections that may be lost by the same call."""
_servers: dict[str, McpServer] = {}
_lock = threading.Lock()
_CLOSING_S = 10.0
"""At most, for the end of a command: the client kills one that has not ended after two seconds."""
_STATUS = "Server returned an error response"
"""What the client makes of a status of HTTP without an error of the server's own."""


class McpCrash(Exception):
    """A server ends or falls silent whenever it gets a certain call, and is there again before each."""


def connected(tool: Mapping[str, Any]) -> McpServer:
    """The server of an item of the section `tools`: one connection for all episodes of this process."""
    key = json.dumps(tool, sort_keys=True)
    with _lock:
        if key not in _servers:
            _servers[key] = McpServer(tool)
        if not _servers[key].names:
            _servers[key].schemas()
        return _servers[key]


class McpServer:
    """An MCP server, by its command or its address; connected when it is first used, and again after it was lost.

    Args:
        tool: of the section `tools`: `mcp`, `env`, `headers_env`, `timeout_s`.
    """

    def __init__(self, tool: Mapping[str, Any]) -> None:
        import mcp.client.streamable_http  # noqa: F401 - takes seconds, which are not the server's

        self.tool, self.names = tool, list[str]()
        self._secrets: list[str] = []
        self._lost_by = defaultdict[str, set[asyncio.Event]](set)
        """Call -> the connections that it was made on, while it has no answer."""
        self._loop = asyncio.new_event_loop()
        self._connecting = asyncio.Lock()
        self._client: Any = None
        self._lost = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        self._tasks = dict[asyncio.Task[None], asyncio.Event]()
        """Of the connection, and of lost ones that have not ended, with what ends them."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def schemas(self) -> list[dict[str, Any]]:
        """Of its tools, as a chat template shows them.

        Raises:
            ConnectionError, TimeoutError: it does not answer.
        """
        listed = self._run(self._list())
        self.names = [tool.name for tool in listed]
        parts = [
            {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in listed
        ]
        return [{"type": "function", "function": part} for part in parts]

    def call(self, name: str, **arguments: Any) -> Reply:
        """Call a tool. What the server says is wrong with the call is a reply: `error`, or `invalid` where it refuses
        the arguments.

        Raises:
            ConnectionError, TimeoutError: it does not answer.
            McpCrash: this call has lost one connection after the other.
        """
        call = json.dumps([name, arguments], sort_keys=True, default=str)
        try:
            label, text = self._run(self._call(name, arguments, self._lost_by[call]))
        except (ConnectionError, TimeoutError) as error:
            if (times := len(self._lost_by[call])) > CRASHES:
                raise McpCrash(f"{error} ({times} connections in a row, by the call {call[:200]})") from None
            raise
        self._lost_by.pop(call, None)
        text = self._hidden(text)
        return Reply(text=text if label == name else f"Error: {text}", role="tool", label=label)

    def close(self) -> None:
        """End the connection, and the process of a command."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- On the loop's thread ----

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _list(self) -> list[Any]:
        client, found, cursor = await self._connected(), [], None
        async with self._answering():
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                if (cursor := page.next_cursor) is None:
                    return found

    async def _call(self, name: str, arguments: dict[str, Any], lost_by: set[asyncio.Event]) -> tuple[str, str]:
        from mcp import MCPError
        from mcp_types import (
            CONNECTION_CLOSED,
            INVALID_PARAMS,
            INVALID_REQUEST,
            METHOD_NOT_FOUND,
            PARSE_ERROR,
            REQUEST_TIMEOUT,
        )

        client = await self._connected()
        lost_by.add(self._lost)
        async with self._answering():
            try:
                result = await client.call_tool(name, arguments)
            except MCPError as error:
                if error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
                    return "invalid", error.message
                # These are the client's own: the connection or the session is over, or what came is no answer.
                lost = (CONNECTION_CLOSED, REQUEST_TIMEOUT, INVALID_REQUEST, PARSE_ERROR)
                if error.code in lost or error.message == _STATUS:
                    raise
                return "error", error.message
        texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return "error" if result.is_error else name, "\n".join(texts)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """What goes wrong within is the server's fault, and loses the connection."""
        lost = self._lost
        try:
            async with asyncio.timeout(self.tool["timeout_s"]):
                yield
        except TimeoutError as error:
            self._lose(lost, self.tool["timeout_s"])
            raise TimeoutError(f"{self._name}: no answer within {self.tool['timeout_s']:g} s") from error
        except Exception as error:
            self._lose(lost)
            raise ConnectionError(f"{self._name}: {self._hidden(str(error))}") from error

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None or self._holding is None or self._holding.done():
                ready: asyncio.Future[Any] = self._loop.create_future()
                self._client, self._lost = None, asyncio.Event()
                self._holding = self._loop.create_task(self._hold(ready, self._lost))
                self._tasks[self._holding] = self._lost
                self._holding.add_done_callback(self._tasks.pop)
                async with self._answering():
                    self._client = await asyncio.shield(ready)
            return self._client

    async def _hold(self, ready: asyncio.Future[Any], lost: asyncio.Event) -> None:
        """A connection, which has to begin and end in one task."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._open(stack))
                ready.set_result(client)
                await lost.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(ConnectionError(f"it cannot be reached: {_first(error)}"))
                ready.exception()  # which nobody may wait for any more

    async def _open(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        given, limit = self.tool["mcp"], self.tool["timeout_s"]
        if not isinstance(given, str):
            command, *words = map(resolved, given)
            env = {name: resolved(value) for name, value in self.tool["env"].items()}
            self._keep_secret({"mcp": [command, *words], "env": env})
            server: Any = StdioServerParameters(command=command, args=words, env=env or None)
        else:
            import httpx2

            named = self.tool["headers_env"]
            if unset := [variable for variable in named.values() if variable not in os.environ]:
                raise ValueError(f"the environment variable {unset[0]} is not set (tools.headers_env)")
            headers = {name: os.environ[variable] for name, variable in named.items()}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=limit))
            address = resolved(given)
            self._keep_secret({"mcp": address}, headers.values())
            server = streamable_http_client(address, http_client=http)
        return Client(server, read_timeout_seconds=limit)

    def _lose(self, lost: asyncio.Event, others_s: float = 0.0) -> None:
        """Let the next call connect anew; nobody waits for the end of the old connection.

        Args:
            lost: of the connection that was used, which another call may have lost before.
            others_s: seconds that it goes on for the calls of others.
        """
        if lost is not self._lost:
            return
        if self._client is None and self._holding is not None:  # it has not come so far as to wait for its end
            self._holding.cancel()
        self._client, self._lost = None, asyncio.Event()
        self._loop.call_later(others_s, lost.set)

    async def _close(self) -> None:
        self._lose(self._lost)
        for lost in self._tasks.values():
            lost.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSING_S)

    @property
    def _name(self) -> str:
        given = left_out({"mcp": self.tool["mcp"]})["mcp"]
        return f"the MCP server {given if isinstance(given, str) else ' '.join(given)}"

    def _hidden(self, text: str) -> str:
        """A text of the server's without the secrets that it was given."""
        for value in self._secrets:
            text = text.replace(value, "***")
        return text

    def _keep_secret(self, given: Mapping[str, Any], headers: Iterable[str] = ()) -> None:
        """Hide what of a command, an address or an environment is secret, and headers."""
        found = {*secrets_of(given, left_out(given)), *headers}
        self._secrets = sorted((value for value in found if len(value) >= MIN_SECRET), key=len, reverse=True)


def _first(error: BaseException) -> BaseException:
    """Of errors of several tasks, the first."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
