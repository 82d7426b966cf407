"""The service: an index behind HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atomrl.hints import said_as
from atomrl.retrieval.corpus import RetrievalError
from atomrl.retrieval.index import Hit, Index
from atomrl.retrieval.requests import MAX_BODY_BYTES, BadRequest, answer, parse_request

log = logging.getLogger(__name__)
BACKLOG = 2048
"""Connections that wait to be accepted."""
MAX_CONNECTIONS = 4096
"""More are answered 503, which clients of Search-R1's kind send again."""
GRACE_S = 5.0
"""For requests under way when the service is told to end."""
ENCODED_AT_ONCE = 64
"""Queries, where so many wait: an encoder is faster at many together, and has all cores. BM25 is not: each thread takes
one request at a time."""
BM25_THREADS = 4
"""At most: each holds a number for each document, and Python runs one at a time for most of their work."""
Message = MutableMapping[str, Any]


class Batcher:
    """Hands queries to threads; a thread that is free takes what has come in while all were busy, together.

    Args:
        index: is searched.
    """

    def __init__(self, index: Index) -> None:
        threads, self._at_once = (1, ENCODED_AT_ONCE) if index.kind == "dense" else (min(cores(), BM25_THREADS), 1)
        self._index = index
        self._waiting: asyncio.Queue[tuple[Sequence[str], int, asyncio.Future[list[list[Hit]]]]] = asyncio.Queue()
        self._executor = ThreadPoolExecutor(threads, "search")
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(threads)]

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """As `Index.search`."""
        found: asyncio.Future[list[list[Hit]]] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((queries, topk, found))
        return await found

    async def _lane(self) -> None:
        while True:
            jobs = [await self._waiting.get()]
            while not self._waiting.empty() and sum(len(job[0]) for job in jobs) < self._at_once:
                jobs.append(self._waiting.get_nowait())
            await self._answer([job for job in jobs if not job[2].cancelled()])

    async def _answer(self, jobs: list[Any]) -> None:
        queries = [query for asked, _, _ in jobs for query in asked]
        topk = max((topk for _, topk, _ in jobs), default=0)
        try:
            hits = await asyncio.get_running_loop().run_in_executor(self._executor, self._index.search, queries, topk)
        except Exception as error:  # of any kind: the others that wait must not wait for ever
            for *_, found in jobs:
                if not found.cancelled():
                    found.set_exception(error)
            return
        start = 0
        for asked, own_topk, found in jobs:
            if not found.cancelled():
                found.set_result([each[:own_topk] for each in hits[start : start + len(asked)]])
            start += len(asked)


class Service:
    """The ASGI application: `POST /retrieve`, `GET /health`.

    Args:
        index: is searched.
        topk: documents for a query that does not say how many.
    """

    def __init__(self, index: Index, topk: int) -> None:
        self.index, self.topk = index, topk
        self.queries, self._started = 0, time.monotonic()
        self._batcher: Batcher | None = None

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        try:
            status, content = 200, await self._answer(scope, receive)
        except BadRequest as error:
            status, content = error.status, {"detail": error.reason}
        except Exception as error:  # whatever it is, the service goes on
            log.exception("a request failed")
            status, content = 500, {"detail": f"{type(error).__name__}: {error}"}
        body = json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Message, receive: Callable[[], Awaitable[Message]]) -> dict[str, Any]:
        methods = {"/retrieve": "POST", "/health": "GET"}
        path, method = scope["path"].rstrip("/"), scope["method"]
        if path not in methods:
            raise BadRequest(404, "there are POST /retrieve and GET /health")
        if method != methods[path]:
            raise BadRequest(405, f"{path} takes {methods[path]}, not {method}")
        if path == "/health":
            return self.health()
        request = parse_request(await _body(receive), self.topk)
        if self._batcher is None:
            self._batcher = Batcher(self.index)
        found = await self._batcher.search(request.queries, request.topk)
        self.queries += len(request.queries)
        return answer(request, found)

    def health(self) -> dict[str, Any]:
        """How it is doing."""
        return {
            "status": "ok",
            "kind": self.index.kind,
            "documents": len(self.index),
            "memory_bytes": memory_bytes(),
            "queries": self.queries,
            "uptime_s": round(time.monotonic() - self._started, 3),
        }


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest(400, "the client went away")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Of this process, its share of what is mapped from disk included; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def address_of(host: str, port: int) -> socket.socket:
    """A socket at an address; nothing is answered there before `serve`.

    Raises:
        RetrievalError: the address is not to be had.
    """
    if not 0 <= port <= 65535:  # the system would take the number's last 16 bits
        raise RetrievalError(f"--port {port}: a port is from 0 to 65535")
    with said_as(RetrievalError, f"cannot listen at {host}:{port} (--host, --port)", OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    return listener


def serve(service: Service, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Answer requests until the process is told to end (Ctrl-C, SIGTERM); those under way are answered first.

    Args:
        ready: is called when connections are taken.
    """
    import uvicorn

    settings = uvicorn.Config(
        service,
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(GRACE_S),
    )
    server = uvicorn.Server(settings)

    def end(*_: Any) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn has its own while it runs, and calls these once more then
        signal.signal(number, end)
    listener.listen(BACKLOG)
    ready()
    server.run(sockets=[listener])
