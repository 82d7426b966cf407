"""Tools that the model calls: functions, the methods of classes, and MCP servers."""

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

from atomrl.common.errors import describe_error
from atomrl.common.functions import find_function
from atomrl.common.outages import ServiceFault, is_away
from atomrl.common.secrets import expand_variables, mask_secrets, secrets_of
from atomrl.common.workers import kill_marked, new_mark
from atomrl.environments.tool_calls import Call, Form, Schema, find_calls
from atomrl.environments.worker import CallThread, TooLong
from atomrl.sandbox import SandboxError, check
from atomrl.sandbox.running import limits_of, python
from atomrl.types import Problem, Reply

AT_ONCE = 8
"""Calls of one turn that run in parallel."""
URL = re.compile(r"\w://|\bwww\.")
"""Matches a text that contains an address."""
HIDDEN = ("reset", "get_reward", "close")
"""Public methods of a class that are not tools."""


def call_tools(
    problem: Problem, *, tools: Sequence[Mapping[str, Any]], schemas: Sequence[Schema], form: Form
) -> Generator[Any, str, float | None]:
    """Answer each tool call with a message of the role `tool`; a turn without calls ends the episode.

    If a tool is a class, the episode gets an object of it: `reset(**row)` may return text to append to the prompt, its
    other public methods are the tools, and `get_reward()` returns the outcome. Otherwise the outcome is None.

    Args:
        problem: the episode's problem; `reset` of tools that are classes gets its columns.
        tools: the items of the config section `tools`.
        schemas: of all tools, as shown in the prompt.
        form: call format of the model (`tool_calls.find_form`).

    Raises:
        ConnectionError, or an error of a client (`outages.is_away`): a service that a tool needs does not answer.
        McpCrash: a call crashes its server again and again.
        SandboxError: a program could not be run.
    """
    with ExitStack() as stack:
        by_name, objects = _make_tools(tools, stack)
        opening = "".join(one.reset(problem) for one in objects)
        text = yield Reply(text=opening, role="user") if objects else None
        while calls := find_calls(text, form, schemas):
            text = yield answer_calls(calls, by_name)
        rewards = [one.thread.run(one.object.get_reward) for one in objects if hasattr(one.object, "get_reward")]
        return float(sum(rewards)) if rewards else None


def find_schemas(tools: Sequence[Mapping[str, Any]]) -> list[Schema]:
    """Return the JSON schemas of tools: from type hints and docstring, or as an MCP server lists them.

    Raises:
        ValueError: a function does not exist, lacks hints or a docstring, or needs a sandbox that cannot be used; a
            class or server has no tools; or two tools have the same name.
        ConnectionError, TimeoutError: an MCP server does not answer.
    """
    schemas: list[Schema] = []
    for tool in tools:
        if tool["mcp"]:
            with closing(McpServer(tool)) as server:
                own: Sequence[Schema] = server.schemas()
        else:
            own = [_schema(function, tool) for function in _functions(tool)]
        if not own:
            raise ValueError(f"{tool['function'] or tool['mcp']!r} has no tools")
        schemas += own
    names = [schema["function"]["name"] for schema in schemas]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two tools have the name {min(twice)!r}")
    return schemas


def has_objects(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a tool is a class, whose `reset` may append to the prompt."""
    return bool(_classes(tools))


def gives_reward(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a tool is a class with `get_reward`."""
    return any(hasattr(kind, "get_reward") for kind in _classes(tools))


def check_rows(tools: Sequence[Mapping[str, Any]], columns: Collection[str]) -> None:
    """Check that the `reset` methods of tools that are classes accept the rows of the data.

    Args:
        columns: of the data, without prompt and answer.

    Raises:
        ValueError: a `reset` requires a missing column, or does not accept an existing one.
    """
    for kind in _classes(tools):
        try:
            row = {**dict.fromkeys(columns), "prompt": "", "ground_truth": None}
            signature = inspect.signature(kind.reset)  # type: ignore[attr-defined]
            signature.bind(None, **row)
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}.reset receives the columns of each row, here prompt, ground_truth"
                f"{''.join(f', {name}' for name in columns)}: {error}; write reset(self, **row), or add the column to "
                "the data"
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
        raise ValueError(
            f"{tool['function']!r}: reset must accept the row, as in reset(self, **row): {error}"
        ) from error
    members = inspect.getmembers(function, inspect.isfunction)
    return [method for name, method in members if name not in HIDDEN and not name.startswith("_")]


def _schema(function: Callable[..., Any], tool: Mapping[str, Any]) -> Schema:
    from transformers.utils.chat_template_utils import get_json_schema

    fixed = {} if inspect.isclass(find_function(tool["function"])) else _fixed_arguments(function, tool)
    try:
        inspect.signature(function).bind_partial(**fixed)
        if function is python:
            limits_of(fixed["timeout_s"], fixed["memory_mb"])
            check(fixed["sandbox"])
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # type hints, docstrings and sandboxes each raise their own
        raise ValueError(f"{tool['function']!r} cannot be a tool: {error}") from error
    parameters = schema["function"]["parameters"]
    parameters["properties"] = {key: value for key, value in parameters["properties"].items() if key not in fixed}
    if "required" in parameters:
        parameters["required"] = [key for key in parameters["required"] if key not in fixed]
    return schema


def _fixed_arguments(function: Callable[..., Any], tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the model cannot set: those of the config, and for the Python sandbox all but the
    program, as the model must not choose how safely it runs."""
    parameters = inspect.signature(function).parameters.values() if function is python else ()
    return {**{one.name: one.default for one in parameters if one.name != "code"}, **tool["args"]}


@dataclass(frozen=True)
class Tool:
    """A callable tool of one episode."""

    call: Callable[..., Any]
    limit_s: float | None
    """Time limit of a call; None for MCP servers, which have their own."""
    thread: CallThread | None = None
    """Thread of the object, whose methods are called one after the other."""


def _make_tools(tools: Sequence[Mapping[str, Any]], stack: ExitStack) -> tuple[dict[str, Tool], list[_Object]]:
    """Return the tools of an episode by name, and the objects that were made for it."""
    by_name: dict[str, Tool] = {}
    objects = []
    for tool in tools:
        limit = tool["timeout_s"]
        if tool["mcp"]:
            server = connected(tool)
            by_name |= {name: Tool(functools.partial(server.call, name), None) for name in server.names}
        elif inspect.isclass(function := find_function(tool["function"])):
            objects.append(one := _Object(functools.partial(function, **tool["args"]), stack))
            for method in _functions(tool):
                bound = _validated(getattr(one.object, method.__name__), {})
                by_name[method.__name__] = Tool(bound, limit, one.thread)
        else:
            by_name[function.__name__] = Tool(_validated(function, _fixed_arguments(function, tool)), limit)
    return by_name, objects


class _FixedArgument(ValueError):
    """The model gave an argument that it cannot set."""


def _validated(function: Callable[..., Any], fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """Wrap a function: validate its arguments by the type hints (ValidationError), and add the fixed arguments, which a
    call must not contain (`_FixedArgument`)."""
    checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)

    def call(**arguments: Any) -> Any:
        if overlap := fixed.keys() & arguments.keys():
            raise _FixedArgument(f"{min(overlap)}: Unexpected keyword argument")
        return checked(**arguments, **fixed)

    return call


class _Object:
    """An object of one episode. All its methods run on one thread, since some objects (of sqlite3, say) require it."""

    def __init__(self, make: Callable[[], Any], stack: ExitStack) -> None:
        self.thread = CallThread()
        self.object: Any = None
        stack.callback(lambda: self.thread.end(getattr(self.object, "close", None)))
        self.object = self.thread.run(make)

    def reset(self, problem: Problem) -> str:
        row = {**problem.columns, "prompt": problem.prompt, "ground_truth": problem.ground_truth}
        return str(self.thread.run(lambda: self.object.reset(**row)) or "")


def answer_calls(calls: Sequence[Call], by_name: Mapping[str, Tool]) -> list[Reply]:
    """Make all calls of a turn, and return a message for each, in order. Calls run in parallel, except those of one
    object."""
    groups: dict[Any, list[int]] = {}
    for index, call in enumerate(calls):
        thread = by_name[call.name].thread if call.name in by_name else None
        groups.setdefault(thread or index, []).append(index)
    replies: dict[int, Reply] = {}

    def answer(indices: Sequence[int]) -> None:
        replies.update({index: _answer_call(calls[index], by_name) for index in indices})

    if len(groups) == 1:
        answer(range(len(calls)))
    else:
        with ThreadPoolExecutor(min(AT_ONCE, len(groups))) as threads:
            list(threads.map(answer, groups.values()))
    return [replies[index] for index in range(len(calls))]


def _answer_call(call: Call, by_name: Mapping[str, Tool]) -> Reply:
    """Make a call. Errors that the model can correct become a reply; those of services are raised."""

    def error_reply(label: str, message: str) -> Reply:
        return Reply(text=f"Error: {message}", role="tool", label=label)

    if call.problem:
        return error_reply("invalid", f"the call {call.name or 'of a tool'} cannot be read: {call.problem}")
    if call.name not in by_name:
        return error_reply("invalid", f"there is no tool {call.name!r}; tools: {', '.join(by_name)}")
    tool = by_name[call.name]
    try:
        result = tool.call(**call.arguments) if tool.limit_s is None else _call_with_limit(tool, call.arguments)
        return result if isinstance(result, Reply) else Reply(text=_as_text(result), role="tool", label=call.name)
    except TooLong as error:
        return error_reply("timeout", f"{call.name}: {error}")
    except (SandboxError, ServiceFault, McpCrash):
        raise
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        return error_reply("invalid", f"{call.name}: {'; '.join(reasons)}")
    except _FixedArgument as error:
        return error_reply("invalid", f"{call.name}: {error}")
    except Exception as error:
        if _uses_own_service(tool, call):
            if isinstance(error, TimeoutError):  # the tool's client gave up
                raise ConnectionError(f"{call.name}: {describe_error(error)}") from error
            if is_away(error):
                raise
        return error_reply("error", f"{call.name}: {describe_error(error)}")


def _uses_own_service(tool: Tool, call: Call) -> bool:
    """Return True if a failing service is the tool's own, and not behind a URL that the model wrote, which may never
    exist. MCP servers report such URLs themselves."""
    return tool.limit_s is None or URL.search(json.dumps(call.arguments, default=str)) is None


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _call_with_limit(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    thread = tool.thread or CallThread()
    try:
        return thread.run(lambda: tool.call(**arguments), tool.limit_s)
    finally:
        if tool.thread is None:
            thread.end()


# --------------------------------------------------------------------------------------------------------------------
# MCP servers: one connection per server in every worker. Needs the `mcp` extra.

MIN_SECRET = 8
"""Shortest secret, in characters, that is removed from replies."""
CRASHES = 3
"""Connections that one call may lose in a row."""
_servers: dict[str, McpServer] = {}
_servers_lock = threading.Lock()
_CLOSING_S = 10.0
"""Time limit to end a server process: the client kills one that has not ended after two seconds."""
_HTTP_ERROR = "Server returned an error response"
"""Message of the client's own error for an HTTP error status."""


class McpCrash(Exception):
    """A server crashes or hangs whenever it gets a certain call, and can be connected to again before each."""


def connected(tool: Mapping[str, Any]) -> McpServer:
    """Return the server of an item of the section `tools`, connected once for all episodes of this process."""
    key = json.dumps(tool, sort_keys=True)
    with _servers_lock:
        if key not in _servers:
            _servers[key] = McpServer(tool)
        if not _servers[key].names:
            _servers[key].schemas()
        return _servers[key]


class McpServer:
    """An MCP server, by command or URL. Connects at the first use, and again after a lost connection.

    Args:
        tool: item of the section `tools`: `mcp`, `env`, `headers_env`, `timeout_s`.
    """

    def __init__(self, tool: Mapping[str, Any]) -> None:
        import mcp.client.streamable_http  # noqa: F401 - takes seconds, which must not count as the server's

        self.tool, self.names = tool, list[str]()
        self._secrets: list[str] = []
        self._lost_by = defaultdict[str, set[asyncio.Event]](set)
        """Call without an answer so far -> the connections that it was made on."""
        self._loop = asyncio.new_event_loop()
        self._connecting = asyncio.Lock()
        self._client: Any = None
        self._lost = asyncio.Event()
        self._connection: asyncio.Task[None] | None = None
        self._connections = dict[asyncio.Task[None], asyncio.Event]()
        """Current connection and lost ones that have not ended -> the event that ends them."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def schemas(self) -> list[dict[str, Any]]:
        """List the JSON schemas of its tools.

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
        """Call a tool. Errors that the server reports are replies, with the label `error`, or `invalid` if it rejects
        the arguments.

        Raises:
            ConnectionError, TimeoutError: it does not answer.
            McpCrash: this call has lost `CRASHES` connections in a row.
        """
        call = json.dumps([name, arguments], sort_keys=True, default=str)
        try:
            label, text = self._run(self._call(name, arguments, self._lost_by[call]))
        except (ConnectionError, TimeoutError) as error:
            if (times := len(self._lost_by[call])) > CRASHES:
                raise McpCrash(f"{error} ({times} connections in a row, by the call {call[:200]})") from None
            raise
        self._lost_by.pop(call, None)
        text = self._without_secrets(text)
        return Reply(text=text if label == name else f"Error: {text}", role="tool", label=label)

    def close(self) -> None:
        """Close the connection and end the server's process."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- On the event loop's thread ----

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _list(self) -> list[Any]:
        client, tools, cursor = await self._connect(), [], None
        async with self._connection_errors():
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if (cursor := page.next_cursor) is None:
                    return tools

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

        client = await self._connect()
        lost_by.add(self._lost)
        async with self._connection_errors():
            try:
                result = await client.call_tool(name, arguments)
            except MCPError as error:
                if error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
                    return "invalid", error.message
                # The client's own errors: the connection or session has ended, or the answer is malformed.
                lost = (CONNECTION_CLOSED, REQUEST_TIMEOUT, INVALID_REQUEST, PARSE_ERROR)
                if error.code in lost or error.message == _HTTP_ERROR:
                    raise
                return "error", error.message
        texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return "error" if result.is_error else name, "\n".join(texts)

    @asynccontextmanager
    async def _connection_errors(self) -> AsyncIterator[None]:
        """Drop the connection after an error, raised again as TimeoutError or ConnectionError that names the server."""
        lost = self._lost
        try:
            async with asyncio.timeout(self.tool["timeout_s"]):
                yield
        except TimeoutError as error:
            self._drop(lost, self.tool["timeout_s"])
            raise TimeoutError(f"{self._name}: no answer within {self.tool['timeout_s']:g} s") from error
        except Exception as error:
            self._drop(lost)
            raise ConnectionError(f"{self._name}: {self._without_secrets(str(error))}") from error

    async def _connect(self) -> Any:
        """Return the client of the current connection, or of a new one."""
        async with self._connecting:
            if self._client is None or self._connection is None or self._connection.done():
                ready: asyncio.Future[Any] = self._loop.create_future()
                self._client, self._lost = None, asyncio.Event()
                self._connection = self._loop.create_task(self._hold(ready, self._lost))
                self._connections[self._connection] = self._lost
                self._connection.add_done_callback(self._connections.pop)
                async with self._connection_errors():
                    self._client = await asyncio.shield(ready)
            return self._client

    async def _hold(self, ready: asyncio.Future[Any], lost: asyncio.Event) -> None:
        """Open a connection and close it once it is lost: the client requires one task for both."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._open(stack))
                ready.set_result(client)
                await lost.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(ConnectionError(f"it cannot be reached: {_first(error)}"))
                ready.exception()  # mark it as retrieved: the caller may have timed out

    async def _open(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        mcp, limit = self.tool["mcp"], self.tool["timeout_s"]
        if not isinstance(mcp, str):
            command, *args = map(expand_variables, mcp)
            env = {name: expand_variables(value) for name, value in self.tool["env"].items()}
            self._set_secrets({"mcp": [command, *args], "env": env})
            mark = new_mark()
            stack.callback(kill_marked, mark.encode())  # the client ends the server, but not children outside its group
            server: Any = StdioServerParameters(command=command, args=args, env=env | dict([mark.split("=")]))
        else:
            import httpx2

            variables = self.tool["headers_env"]
            if unset := [variable for variable in variables.values() if variable not in os.environ]:
                raise ValueError(f"the environment variable {unset[0]} is not set (tools.headers_env)")
            headers = {name: os.environ[variable] for name, variable in variables.items()}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=limit))
            url = expand_variables(mcp)
            self._set_secrets({"mcp": url}, headers.values())
            server = streamable_http_client(url, http_client=http)
        return Client(server, read_timeout_seconds=limit)

    def _drop(self, lost: asyncio.Event, grace_s: float = 0.0) -> None:
        """Drop the connection: the next call opens a new one, without waiting for the end of the old one.

        Args:
            lost: event of the connection that failed; nothing is done if another call has dropped it already.
            grace_s: time in which other calls on it may still finish.
        """
        if lost is not self._lost:
            return
        if self._client is None and self._connection is not None:  # still connecting, so not waiting for the event
            self._connection.cancel()
            self._connection = None  # a second cancel would interrupt the end of the server's process
        self._client, self._lost = None, asyncio.Event()
        self._loop.call_later(grace_s, lost.set)

    async def _close(self) -> None:
        self._drop(self._lost)
        for lost in self._connections.values():
            lost.set()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_CLOSING_S)

    @property
    def _name(self) -> str:
        mcp = mask_secrets({"mcp": self.tool["mcp"]})["mcp"]
        return f"the MCP server {mcp if isinstance(mcp, str) else ' '.join(mcp)}"

    def _without_secrets(self, text: str) -> str:
        """Replace secrets in a text of the server."""
        for value in self._secrets:
            text = text.replace(value, "***")
        return text

    def _set_secrets(self, settings: Mapping[str, Any], headers: Iterable[str] = ()) -> None:
        """Set the secrets to hide: those in a command, URL or environment, and headers."""
        secrets = {*secrets_of(settings, mask_secrets(settings)), *headers}
        self._secrets = sorted((value for value in secrets if len(value) >= MIN_SECRET), key=len, reverse=True)


def _first(error: BaseException) -> BaseException:
    """Return the first error of an exception group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
