"""Rewards that call an HTTP service: their base class `RewardService`.

It has time-outs, retries, waiting for an unavailable service, and API keys. All requests run on one event loop in a
thread, whichever thread calls, so outage, counters, cache and budget are shared by the whole run.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr

from atomrl.common import outages
from atomrl.common.event_loop import EventLoopThread
from atomrl.common.hangs import progress
from atomrl.common.outages import Outage, ServiceGone, is_temporary, retry_after
from atomrl.common.secrets import is_variable, mask_secrets
from atomrl.rewards.errors import NoScore, RewardError, RewardStop, require
from atomrl.types import FailureKind, Problem, Trajectory

if TYPE_CHECKING:
    import httpx


T = TypeVar("T")
MAX_ANSWER_BYTES = 1 << 25
REQUEST_ERRORS = frozenset({400, 413, 422})
"""HTTP statuses that concern a single request. Any other 3xx or 4xx (wrong URL, wrong key) ends the run."""


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be the address of a service: http://HOST:PORT/PATH")
    if parts.username or parts.password:
        raise ValueError(
            "must not contain a password; name the environment variable that has it: headers_env or api_key_env"
        )
    if mask_secrets(url) != url:
        raise ValueError(
            "must not contain a key; name the environment variable that has it: headers_env or api_key_env"
        )
    return url


Url = Annotated[str, AfterValidator(_check_url)]


class RetryableError(Exception):
    """A failed request that may be sent again.

    Args:
        message: what happened.
        wait_s: delay that the service asked for (`Retry-After`).
        served: the service may have processed (and charged for) the request.
        fault: the failure kind if the request itself may be the cause, None if only the service can be.
    """

    def __init__(
        self, message: str, wait_s: float | None = None, served: bool = False, fault: FailureKind | None = None
    ) -> None:
        super().__init__(message)
        self.wait_s, self.served, self.fault = wait_s, served, fault


class _Connection:
    """An event loop in a thread, with the HTTP client of a service."""

    def __init__(self, client: httpx.AsyncClient, concurrency: int) -> None:
        self.client, self.slots = client, asyncio.Semaphore(concurrency)
        self.loop = EventLoopThread("reward service")


class RewardService(BaseModel, ABC):
    """Base class of rewards that call an HTTP service. Its fields are the reward's `args`.

    An unavailable service is retried for up to `wait_s` (`outages.Outage`). Unavailable means: no connection, a broken
    one, a time-out, status 429 or 5xx, or a reply that is not JSON. If the service answers other requests meanwhile,
    the request itself may be the cause of a broken connection, a time-out, a 500 or a reply that is not JSON. It is
    then retried at most `retries` times (once after a time-out, because the service may still be processing it), and
    its completions get a `NoScore`.

    Raises:
        RewardError: httpx is not installed, or an environment variable is not set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    api_key_env: str | None = None
    """Environment variable with the key that is sent as `Authorization: Bearer KEY`."""
    headers_env: dict[str, str] = {}
    """Other headers: name -> environment variable with the value."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit from sending a request to the end of its reply."""
    connect_timeout_s: float = Field(5.0, gt=0)
    wait_s: float = Field(600.0, ge=0)
    """Seconds to wait for an unavailable service before the run ends."""
    retries: int = Field(3, ge=1)
    """Retries of a request while other requests succeed. At least one, because requests in progress when a service
    restarts fail in the same way."""
    concurrency: int = Field(8, ge=1)
    """Maximum number of simultaneous requests."""

    concurrent: ClassVar[bool] = True
    """`Rewards` may call it from several threads at once."""

    _headers: dict[str, str] = PrivateAttr(default_factory=dict)
    _outage: Outage = PrivateAttr()
    _answers: int = PrivateAttr(0)
    _counts: Counter[str] = PrivateAttr(default_factory=Counter)
    _connection: _Connection | None = PrivateAttr(None)
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """URL that requests are sent to."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        """Return a score, None or a `NoScore` for each trajectory."""

    def model_post_init(self, context: Any) -> None:
        require(type(self).__name__, "httpx", "http")
        self._outage = Outage(self.endpoint, self.wait_s, "reward.wait_s")
        self._headers = {name: _from_environment(variable) for name, variable in self.headers_env.items()}
        if self.api_key_env is not None:
            self._headers["Authorization"] = f"Bearer {_from_environment(self.api_key_env)}"

    def check(self, problem: Problem) -> None:
        """Check that a problem has the columns that a request needs.

        Raises:
            RewardError: one is missing.
        """

    def totals(self) -> dict[str, float]:
        """Return cumulative counters of the run."""
        return {name: float(self._counts[name]) for name in ("requests", "retries")}

    def restore(self, totals: Mapping[str, float]) -> None:
        """Restore the `totals` of a resumed run."""
        self._counts.update({name: int(value) for name, value in totals.items()})

    def close(self) -> None:
        """End the thread and close the connections; a later call starts them again."""
        with self._starting:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.loop.close(connection.client.aclose())

    def gather(self, requests: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run coroutines on the event loop, `concurrency` requests at a time. Thread-safe.

        Returns:
            The result of each coroutine, or the exception that it raised.

        Raises:
            RewardStop: one of them raised it.
        """
        with self._starting:
            self._connection = self._connection or _Connection(self._client(), self.concurrency)
            connection = self._connection
        future = connection.loop.start(_gather(requests))
        try:
            results = future.result()
        except CancelledError:
            raise RuntimeError(f"{self.endpoint}: closed during a request") from None
        except BaseException:
            future.cancel()
            raise
        stop = next((result for result in results if isinstance(result, RewardStop)), None)
        if stop is not None:
            raise stop
        return results

    def _client(self) -> httpx.AsyncClient:
        import httpx

        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.AsyncClient(
            headers={"Content-Type": "application/json", **self._headers},
            timeout=httpx.Timeout(None, connect=self.connect_timeout_s),
            limits=limits,
        )

    async def post(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Send a JSON request and return the parsed reply.

        Args:
            body: of the request.
            read: extracts the result from the reply's JSON, or raises `RetryableError`.

        Raises:
            NoScore: this request has no score.
            RewardStop: the service rejects all requests or was unavailable for `wait_s`, or the budget is exhausted.
        """
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        try:
            return await self._post_with_retries(content, read)
        except (NoScore, RewardStop) as error:
            error.args = (self._redact(str(error)),)
            raise

    async def _post_with_retries(self, content: bytes, read: Callable[[Any], T]) -> T:
        """Send a request until it is answered.

        `faults` counts the failures after which other requests were answered, so that this one is the likely cause. The
        other failures are an outage of the service.
        """
        assert self._connection is not None
        async with self._connection.slots:
            faults = sent = 0
            answers_before = self._answers
            while True:
                sent += 1
                try:
                    answer = read(_parse_json(await self.attempt(content, again=sent > 1), self.endpoint))
                except RetryableError as problem:
                    if problem.fault == "invalid" and not self._answers:
                        raise RewardStop(f"reward: {problem}; it has never returned a valid answer") from None
                    if problem.fault and self._answers > answers_before:
                        faults += 1
                        if faults > (1 if problem.fault == "timeout" else self.retries):
                            raise NoScore(problem.fault, f"{problem} ({sent} requests)") from None
                        wait_s = outages.FIRST_S
                    else:
                        wait_s = self._pause_s(problem)
                    answers_before = self._answers
                else:
                    self._record_answer()
                    return answer
                await asyncio.sleep(wait_s)

    def _pause_s(self, problem: RetryableError) -> float:
        try:
            return self._outage.pause_s(self._redact(str(problem)), problem.wait_s)
        except ServiceGone as gone:
            raise RewardStop(f"reward: {gone}") from None

    def _record_answer(self) -> None:
        self._answers += 1
        self._outage.answered()

    async def attempt(self, content: bytes, again: bool) -> bytes:
        """Send a request once and return the reply's body. Set `again` for retries, which are counted.

        Raises:
            RetryableError: it may be sent again.
            NoScore: it may not.
            RewardStop: the service rejects such requests.
        """
        import httpx

        assert self._connection is not None
        progress()
        self._counts.update(requests=1, retries=int(again))
        try:
            async with asyncio.timeout(self.timeout_s):
                async with self._connection.client.stream("POST", self.endpoint, content=content) as response:
                    answer = await self._read(response)
        except TimeoutError:
            message = f"{self.endpoint} has not answered within {self.timeout_s:g} s (timeout_s)"
            raise RetryableError(message, served=True, fault="timeout") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._counts["requests"] -= 1  # it was not sent
            raise RetryableError(f"{self.endpoint}: no connection: {_text(error)}") from error
        except httpx.TransportError as error:
            message = f"{self.endpoint}: the connection broke: {_text(error)}"
            raise RetryableError(message, served=True, fault="error") from error
        except httpx.DecodingError as error:
            message = f"{self.endpoint}: the answer cannot be decoded: {_text(error)}"
            raise RetryableError(message, served=True, fault="invalid") from error
        return self._checked(response, answer)

    async def _read(self, response: httpx.Response) -> bytes:
        """Read the body of a reply, up to `MAX_ANSWER_BYTES`."""
        answer = bytearray()
        async for part in response.aiter_bytes():
            answer += part
            if len(answer) > MAX_ANSWER_BYTES:
                raise NoScore("invalid", f"{self.endpoint}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
        return bytes(answer)

    def _checked(self, response: httpx.Response, answer: bytes) -> bytes:
        """Return the body if the status is 2xx, else raise the error that the status means (see `attempt`)."""
        status = response.status_code
        if 200 <= status < 300:
            return answer
        place = f" to {response.headers.get('Location')}" if status < 400 else ""
        message = f"{self.endpoint}: HTTP {status}: {answer[:300].decode(errors='replace').strip()}{place}"
        if is_temporary(status):
            fault: FailureKind | None = "error" if status == 500 else None
            raise RetryableError(message, retry_after(response.headers.get("Retry-After", "")), fault=fault)
        if status in REQUEST_ERRORS:
            self._record_answer()
            raise NoScore("error", message)
        raise RewardStop(f"reward: {message}")

    def _redact(self, message: str) -> str:
        """Replace the keys in a message, which a service may echo, by `***`."""
        for value in self._headers.values():
            for secret in (value, value.removeprefix("Bearer ")):
                message = message.replace(secret, "***")
        return message


async def _gather(requests: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*requests, return_exceptions=True)


def _from_environment(variable: str) -> str:
    """Read a key from the environment, and check that it can be sent in a header."""
    if not is_variable(variable):
        raise RewardError("headers_env and api_key_env name environment variables, as in MY_KEY; they are not the keys")
    value = os.environ.get(variable, "").strip()
    if not value:
        raise RewardError(f"the environment variable {variable} is not set; it has the key of a reward's service")
    if not (value.isascii() and value.isprintable()):
        raise RewardError(f"the environment variable {variable} has characters that a header cannot contain")
    return value


def _parse_json(answer: bytes, endpoint: str) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        shown = answer[:100].decode(errors="replace")
        message = f"{endpoint}: the answer is not JSON ({error}): {shown!r}"
        raise RetryableError(message, served=True, fault="invalid") from None


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
