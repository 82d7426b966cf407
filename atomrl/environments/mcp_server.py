"""Servers of the Model Context Protocol as tools: a connection for each in every worker. Needs the `mcp` extra."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from atomrl.episodes import Reply
from atomrl.secrets import left_out, resolved, secrets_of

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
