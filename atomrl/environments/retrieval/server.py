"""HTTP server of an index, with the API of Search-R1's retriever."""

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

from atomrl.common.errors import reraise_as
from atomrl.common.memory import process_memory
from atomrl.environments.retrieval.index import Hit, Index, RetrievalError

# --------------------------------------------------------------------------------------------------------------------
# Requests and answers.
#
#     POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
#                     {"result": [[{"document": {"contents": "..."}, "score": 7.1}]]}
#
# Without `return_scores` the result has bare documents. `query`, a text or a list, is an alias of `queries`.

MAX_TOPK, MAX_QUERIES, MAX_BODY_BYTES = 1000, 4096, 16 << 20


class BadRequest(Exception):
    """An invalid request.

    Args:
        status: HTTP status.
        reason: error message.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, kw_only=True)
class RetrievalRequest:
    """A parsed request."""

    queries: list[str]
    topk: int
    return_scores: bool


def parse_request(body: bytes, default_topk: int) -> RetrievalRequest:
    """Parse the body of a request. Unknown keys are ignored, as other servers do.

    Args:
        default_topk: for requests without `topk`, or with 0.

    Raises:
        BadRequest: the body is invalid.

    Example:
        >>> parse_request(b'{"query": "who?"}', 3)
        RetrievalRequest(queries=['who?'], topk=3, return_scores=False)
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest(422, 'the body must be an object: {"queries": ["..."], "topk": 3, "return_scores": true}')
    if ("queries" in fields) == ("query" in fields):
        raise BadRequest(422, "give `queries`, a list of texts, or `query`")
    queries = fields.get("queries", fields.get("query"))
    queries = [queries] if isinstance(queries, str) and "query" in fields else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequest(422, "`queries` must be a list of texts")
    if len(queries) > MAX_QUERIES:
        raise BadRequest(422, f"{len(queries)} queries; at most {MAX_QUERIES} in a request")
    topk = fields.get("topk") or default_topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise BadRequest(422, f"`topk` must be a whole number from 1 to {MAX_TOPK}")
    scores = fields.get("return_scores", False)
    if not isinstance(scores, bool):
        raise BadRequest(422, "`return_scores` must be true or false")
    return RetrievalRequest(queries=queries, topk=topk, return_scores=scores)


def answer(request: RetrievalRequest, hits_by_query: Sequence[Sequence[Hit]]) -> dict[str, Any]:
    """Format the hits of each query as the answer to a request.

    Example:
        >>> request = RetrievalRequest(queries=["who?"], topk=1, return_scores=True)
        >>> answer(request, [[({"contents": "Nobody"}, 7.1)]])
        {'result': [[{'document': {'contents': 'Nobody'}, 'score': 7.1}]]}
    """
    if request.return_scores:
        scored = [[{"document": document, "score": score} for document, score in hits] for hits in hits_by_query]
        return {"result": scored}
    return {"result": [[document for document, _ in hits] for hits in hits_by_query]}


# --------------------------------------------------------------------------------------------------------------------
# The server.

log = logging.getLogger(__name__)
BACKLOG = 2048
"""Length of the queue of connections to accept."""
MAX_CONNECTIONS = 4096
"""Further connections get status 503, after which clients like Search-R1's retry."""
GRACE_S = 5.0
"""Time limit for running requests at shutdown."""
ENCODED_AT_ONCE = 64
"""Most queries in a batch of dense retrieval: an encoder is faster with many, and uses all cores. BM25 is not, so each
thread serves one request at a time."""
BM25_THREADS = 4
"""Most threads of BM25: each needs a score buffer for all documents, and most of the work holds the GIL."""
Message = MutableMapping[str, Any]


class Batcher:
    """Distributes queries over threads. A free thread serves the waiting requests as a batch.

    Args:
        index: the index to search.
    """

    def __init__(self, index: Index) -> None:
        threads, self._at_once = (1, ENCODED_AT_ONCE) if index.kind == "dense" else (min(cores(), BM25_THREADS), 1)
        self._index = index
        self._waiting: asyncio.Queue[tuple[Sequence[str], int, asyncio.Future[list[list[Hit]]]]] = asyncio.Queue()
        self._executor = ThreadPoolExecutor(threads, "search")
        self._tasks = [asyncio.create_task(self._serve()) for _ in range(threads)]

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Search like `Index.search`."""
        future: asyncio.Future[list[list[Hit]]] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((queries, topk, future))
        return await future

    async def _serve(self) -> None:
        while True:
            jobs = [await self._waiting.get()]
            while not self._waiting.empty() and sum(len(job[0]) for job in jobs) < self._at_once:
                jobs.append(self._waiting.get_nowait())
            await self._answer([job for job in jobs if not job[2].cancelled()])

    async def _answer(self, jobs: list[Any]) -> None:
        queries = [query for own_queries, _, _ in jobs for query in own_queries]
        topk = max((topk for _, topk, _ in jobs), default=0)
        try:
            hits = await asyncio.get_running_loop().run_in_executor(self._executor, self._index.search, queries, topk)
        except Exception as error:  # any error: no request may wait for ever
            for *_, future in jobs:
                if not future.cancelled():
                    future.set_exception(error)
            return
        start = 0
        for own_queries, own_topk, future in jobs:
            if not future.cancelled():
                future.set_result([each[:own_topk] for each in hits[start : start + len(own_queries)]])
            start += len(own_queries)


class Service:
    """The ASGI application: `POST /retrieve`, `GET /health`.

    Args:
        index: the index to search.
        topk: documents per query, for requests without `topk`.
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
        except Exception as error:  # the server must not end
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
            raise BadRequest(404, "valid: POST /retrieve, GET /health")
        if method != methods[path]:
            raise BadRequest(405, f"{path} accepts {methods[path]}, not {method}")
        if path == "/health":
            return self.health()
        request = parse_request(await _body(receive), self.topk)
        if self._batcher is None:
            self._batcher = Batcher(self.index)
        hits = await self._batcher.search(request.queries, request.topk)
        self.queries += len(request.queries)
        return answer(request, hits)

    def health(self) -> dict[str, Any]:
        """Return the answer of `GET /health`."""
        return {
            "status": "ok",
            "kind": self.index.kind,
            "documents": len(self.index),
            "memory_bytes": process_memory("VmRSS"),
            "queries": self.queries,
            "uptime_s": round(time.monotonic() - self._started, 3),
        }


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest(400, "the client disconnected")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def address_of(host: str, port: int) -> socket.socket:
    """Bind a socket to an address. It answers nothing before `serve`.

    Raises:
        RetrievalError: the address is in use or invalid.
    """
    if not 0 <= port <= 65535:  # the system would use the lowest 16 bits
        raise RetrievalError(f"--port {port}: a port must be 0 to 65535")
    with reraise_as(RetrievalError, f"cannot listen on {host}:{port} (--host, --port)", OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    return listener


def serve_documents(service: Service, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Answer requests until SIGINT (Ctrl-C) or SIGTERM; running ones are answered first.

    Args:
        ready: called when connections are accepted.
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

    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn replaces these while it runs, and calls them at its end
        signal.signal(number, end)
    listener.listen(BACKLOG)
    ready()
    server.run(sockets=[listener])
