"""Rollout servers over HTTP: `Client` talks to them, `Server` is the state of one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from atomrl.common.outages import Outage, is_temporary
from atomrl.engines.distributor import Replica, ReplicaFailure
from atomrl.engines.requests import DIVERGED, RequestState
from atomrl.engines.server_process import ServerProcess
from atomrl.types import FinishReason
from atomrl.weight_sync.broadcast import ServerGroup

_RETRY_S = 0.25
_POOLS = 32


class ServerFailure(ReplicaFailure):
    """A call to a server failed in a way that a repair may fix.

    Args:
        unreachable: the server does not answer; else its response was not as requested.
    """

    def __init__(self, message: str, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


@dataclass(frozen=True)
class ServerOutput:
    """A completion as a server returns it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[Mapping[str, Any]]
    """`version`, `start`, `end`: ranges of tokens and the label of the weights that sampled them."""
    reason: str
    """`stop`, `length` or `abort`."""
    candidates: Sequence[Sequence[int]] = ()
    """Per token, the candidates that top-k and top-p kept, most likely first."""


@dataclass(eq=False)
class Server(Replica):
    """State of one server.

    Args:
        kind: name of the engine, for messages.
        slots: limits the requests sent at once.
        wait_s: how long to wait for a server that is not ours and is unreachable.
        process: of a server that this engine started.
    """

    kind: str
    url: str
    slots: asyncio.Semaphore
    wait_s: float = 600.0
    process: ServerProcess | None = None
    adapters: str | None = None
    """Name of the adapters that it has loaded."""
    remote_ids: dict[str, str] = field(default_factory=dict)
    """Request id -> id at the server, of requests that it was sent; each attempt has a new one."""
    outage: Outage = field(init=False)
    """Failures in a row of a server that is not ours."""
    seeded: bool = True
    """False if its completions do not depend on their seeds alone."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Its answer to a request for its configuration."""
    group: ServerGroup | None = None
    """Process group by which weights are broadcast to it."""
    in_flight: int = 0
    """Requests sent and not answered."""

    def __post_init__(self) -> None:
        self.outage = Outage(self.name, self.wait_s, "rollout.server_timeout_s")

    @property
    def log_tail(self) -> str:
        """Last lines of our own server's output, for messages; empty for others."""
        return f"; last lines of its output:\n{self.process.tail()}" if self.process else ""

    @property
    def name(self) -> str:
        """Name for messages."""
        started = f"started at {self.url} (pid {self.process.pid})" if self.process else f"at {self.url}"
        return f"{self.kind} {started}"

    def was_sent(self, request_id: str) -> bool:
        """Return True if the server has been sent the request: it then answers, also to an abort."""
        return request_id in self.remote_ids

    def release(self, request_id: str) -> None:
        """Forget the id at the server."""
        self.remote_ids.pop(request_id, None)


class Client:
    """HTTP client for servers.

    Args:
        timeout_s: limit for an answer.
    """

    def __init__(self, timeout_s: float) -> None:
        import httpx

        self.timeout_s, self.errors = timeout_s, httpx
        verify = httpx.create_ssl_context(trust_env=False)
        # httpx searches all connections of a pool at each request; several pools make thousands at once cheap.
        self.pools = [
            httpx.AsyncClient(
                timeout=httpx.Timeout(timeout_s, pool=None),
                limits=httpx.Limits(max_connections=None),
                trust_env=False,  # no proxy between a trainer and its engine
                verify=verify,
            )
            for _ in range(_POOLS)
        ]
        self.next_pool = cycle(self.pools)

    async def healthy(self, server: Server, path: str) -> bool:
        """Return True if a server's health endpoint answers 200."""
        try:
            response = await next(self.next_pool).get(server.url + path, timeout=min(10.0, self.timeout_s))
        except self.errors.HTTPError:
            return False
        return response.status_code == 200

    async def until_up(self, server: Server, path: str, limit_s: float) -> None:
        """Wait until a server is healthy.

        Raises:
            RuntimeError: our own server has ended.
            TimeoutError: it is not healthy in time.
        """
        end = time.monotonic() + limit_s
        while not await self.healthy(server, path):
            if server.process is not None and (code := server.process.ended()) is not None:
                raise RuntimeError(f"{server.name} ended with status {code}{server.log_tail}")
            if time.monotonic() > end:
                raise TimeoutError(f"{server.name} was not ready within {limit_s:g} s")
            await asyncio.sleep(_RETRY_S)

    async def post(self, server: Server, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """POST JSON and return the JSON of the response (None if it has none).

        Raises:
            TimeoutError: no answer in time.
            RuntimeError: the server refuses the request.
            ServerFailure: it cannot be reached or has failed.
        """
        return await self._request(server, "POST", path, json=body, **options)

    async def get(self, server: Server, path: str, **options: Any) -> Any:
        """GET JSON; raises as `post`."""
        return await self._request(server, "GET", path, **options)

    async def _request(self, server: Server, method: str, path: str, **options: Any) -> Any:
        try:
            response = await next(self.next_pool).request(method, server.url + path, **options)
        except self.errors.TimeoutException:
            raise TimeoutError(f"{server.name} has not answered {path} within {self.timeout_s:g} s") from None
        except self.errors.TransportError as error:
            raise ServerFailure(f"{path}: {type(error).__name__} {error}", unreachable=True) from None
        if is_temporary(response.status_code):
            raise ServerFailure(f"{path}: status {response.status_code}, {response.text[:300]}", unreachable=True)
        if response.status_code != 200:
            status = response.status_code
            raise RuntimeError(f"{server.name} refused {path} with status {status}: {response.text[:500]}")
        try:
            return response.json()
        except ValueError:  # some endpoints answer nothing but 200
            if "<html" in response.text[:1000].lower():  # a proxy in front of the server
                page = response.text[:200]
                raise ServerFailure(f"{path}: the response is an HTML page: {page!r}", unreachable=True) from None
            return None

    async def close(self) -> None:
        """Close all connections."""
        for pool in self.pools:
            await pool.aclose()


def logprob_of(value: float | None) -> float:
    """Decode a log-prob. JSON has no NaN: SGLang sends null for it, and vLLM -9999."""
    return math.nan if value is None or value <= -9999.0 else float(value)


def check_output(output: ServerOutput, server: Server, engine_id: str) -> ServerOutput:
    """Return the output if it can be trained on.

    Args:
        engine_id: of the engine that pushed weights to the server.

    Raises:
        ServerFailure: the server has restarted since: its weights have no label of an engine.
        RuntimeError: another run pushes weights to it, it does not report which weights sampled which token, or the
            completion has an unknown finish reason.
    """
    for label in {str(span["version"]) for span in output.spans}:
        _, separator, owner = label.partition("@")
        if separator and owner != engine_id:
            raise RuntimeError(
                f"{server.name} sampled with weights that another run sent to it (version {label}): each run needs its "
                "own servers"
            )
        if not separator:
            raise ServerFailure(f"it sampled with its initial weights (version {label})")
    ends = [0, *(span["end"] for span in output.spans)]
    if [span["start"] for span in output.spans] != ends[:-1] or ends[-1] != len(output.token_ids):
        raise RuntimeError(
            f"{server.name} does not report which weights sampled each of {len(output.token_ids)} tokens"
        )
    if output.reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"{server.name} ended a completion with {output.reason!r}")
    return output


def store_output(state: RequestState, output: ServerOutput | Exception) -> FinishReason:
    """Store a server's completion in the request's state and return its finish reason; raise if it is an error."""
    if isinstance(output, Exception):
        raise output
    state.token_ids, state.logprobs = list(output.token_ids), list(output.logprobs)
    state.versions = [
        (span["start"], int(span["version"].partition("@")[0])) for span in output.spans if span["end"] > span["start"]
    ]
    for candidates in output.candidates:
        state.candidate_counts.append(len(candidates))
        state.candidate_ids.extend(candidates)
    if state.diverged():
        raise ValueError(DIVERGED)
    limit = state.request.sampling.max_completion_tokens
    if output.reason == "length" and len(state.token_ids) < limit:
        raise RuntimeError(
            f"a completion was cut at {len(state.token_ids)} of {limit} tokens: the "
            "server's context is shorter than the model's, or its cache is full"
        )
    return "length" if output.reason == "length" else "stop"
