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
from dataclasses import dataclass
from typing import Any

from atomrl.common.errors import said_as
from atomrl.environments.retrieval.index import Hit, Index, RetrievalError

# --------------------------------------------------------------------------------------------------------------------
# What is asked of the service and what it answers: the protocol of Search-R1's retriever.
#
#     POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
#                     {"result": [[{"document": {"contents": "..."}, "score": 7.1}]]}
#
# Without `return_scores` the documents stand by themselves. `query`, one text or a list, is taken for `queries`.

MAX_TOPK, MAX_QUERIES, MAX_BODY_BYTES = 1000, 4096, 16 << 20


class BadRequest(Exception):
    """A request that cannot be answered.

    Args:
        status: of HTTP.
        reason: what is wrong with it.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, kw_only=True)
class RetrievalRequest:
    """What is asked."""

    queries: list[str]
    topk: int
    return_scores: bool


def parse_request(body: bytes, default_topk: int) -> RetrievalRequest:
    """A request from its body; keys that it does not know are passed over, as other services do.

    Args:
        default_topk: where the request has none, or 0.

    Raises:
        BadRequest: what is wrong with it.

    Example:
        >>> parse_request(b'{"query": "who?"}', 3)
        RetrievalRequest(queries=['who?'], topk=3, return_scores=False)
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest(422, 'the body must be an object: {"queries": ["..."], "topk": 3, "return_scores": true}')
    if ("queries" in given) == ("query" in given):
        raise BadRequest(422, "give `queries`, a list of texts, or `query`")
    queries = given.get("queries", given.get("query"))
    queries = [queries] if isinstance(queries, str) and "query" in given else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequest(422, "`queries` must be a list of texts")
    if len(queries) > MAX_QUERIES:
        raise BadRequest(422, f"{len(queries)} queries; at most {MAX_QUERIES} in a request")
    topk = given.get("topk") or default_topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise BadRequest(422, f"`topk` must be a whole number from 1 to {MAX_TOPK}")
    scores = given.get("return_scores", False)
    if not isinstance(scores, bool):
        raise BadRequest(422, "`return_scores` must be true or false")
    return RetrievalRequest(queries=queries, topk=topk, return_scores=scores)


def answer(request: RetrievalRequest, found: Sequence[Sequence[Hit]]) -> dict[str, Any]:
    """What a request is answered, of the hits of each query.

    Example:
        >>> asked = RetrievalRequest(queries=["who?"], topk=1, return_scores=True)
        >>> answer(asked, [[({"contents": "Nobody"}, 7.1)]])
        {'result': [[{'document': {'contents': 'Nobody'}, 'score': 7.1}]]}
    """
    if request.return_scores:
        return {"result": [[{"document": document, "score": score} for document, score in hits] for hits in found]}
    return {"result": [[document for document, _ in hits] for hits in found]}


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
