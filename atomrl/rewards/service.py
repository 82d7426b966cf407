"""What rewards that ask a service over HTTP have in common: time-outs, retries, a circuit breaker, secret keys.

Requests run on an event loop in one thread, whoever asks: breaker, counts, cache and budget are one for the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr

from atomrl.event_loop import EventLoopThread
from atomrl.progress import progress
from atomrl.rewards.breaker import Breaker
from atomrl.rewards.errors import NoScore, RewardError, RewardStop, require
from atomrl.secrets import is_variable, left_out
from atomrl.types import Sample, Trajectory

if TYPE_CHECKING:
    import httpx

MAX_ANSWER_BYTES = 1 << 25
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 60.0
"""Before a retry: the first wait, which doubles each time, and the longest."""


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be the address of a service: http://HOST:PORT/PATH")
    if parts.username or parts.password:
        raise ValueError("must hold no password; name the environment variable that has it: headers_env or api_key_env")
    if left_out(url) != url:
        raise ValueError("must hold no key; name the environment variable that has it: headers_env or api_key_env")
    return url


Url = Annotated[str, AfterValidator(_checked_url)]


class Again(Exception):
    """A request that failed and may be sent again.

    Args:
        wait_s: that the service asked to wait, if it did.
        served: the service may have done the work all the same.
    """

    def __init__(self, message: str, wait_s: float | None = None, served: bool = False) -> None:
        super().__init__(message)
        self.wait_s, self.served = wait_s, served


class _Link:
    """An event loop in a thread of its own, and the connections of a service on it."""

    def __init__(self, client: httpx.AsyncClient, concurrency: int) -> None:
        self.client, self.slots, self.probe = client, asyncio.Semaphore(concurrency), asyncio.Lock()
        self.loop = EventLoopThread("reward service")


class RewardService(BaseModel, ABC):
    """A reward that asks a service over HTTP. Its fields are the `args` of a config.

    What may be sent again is, at most `retries` times, with waits that double: requests that found no connection or
    lost it, and answers 429 and 5xx, which may say how long to wait (`Retry-After`). A time-out is not: the service is
    still at work. Whatever ends without a score is a `NoScore`.

    Raises:
        RewardError: httpx is not installed, or a variable of the environment is not set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    api_key_env: str | None = None
    """The environment variable with the key that is sent as `Authorization: Bearer KEY`."""
    headers_env: dict[str, str] = {}
    """Other headers: name -> the environment variable that has the value."""
    timeout_s: float = Field(10.0, gt=0)
    """From sending a request to the end of its answer."""
    connect_timeout_s: float = Field(5.0, gt=0)
    retries: int = Field(3, ge=0)
    concurrency: int = Field(8, ge=1)
    """Requests at a time."""
    breaker_failures: int = Field(5, ge=1)
    """Requests in a row that fail before none is sent any more..."""
    breaker_open_s: float = Field(30.0, gt=0)
    """...for so long; then one is tried."""

    concurrent: ClassVar[bool] = True
    """Several calls may wait beside each other."""

    _headers: dict[str, str] = PrivateAttr(default_factory=dict)
    _breaker: Breaker = PrivateAttr()
    _counts: Counter[str] = PrivateAttr(default_factory=Counter)
    _link: _Link | None = PrivateAttr(None)
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)
    _random: random.Random = PrivateAttr(default_factory=random.Random)

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Where requests are sent."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        """A score, None or a `NoScore` for each."""

    def model_post_init(self, context: Any) -> None:
        require(type(self).__name__, "httpx", "http")
        self._breaker = Breaker(self.breaker_failures, self.breaker_open_s)
        self._headers = {name: _from_environment(variable) for name, variable in self.headers_env.items()}
        if self.api_key_env is not None:
            self._headers["Authorization"] = f"Bearer {_from_environment(self.api_key_env)}"

    def check(self, sample: Sample) -> None:
        """Whether a sample has what a request needs.

        Raises:
            RewardError: it has not.
        """

    def totals(self) -> dict[str, float]:
        """What was asked since the run began."""
        return {name: float(self._counts[name]) for name in ("requests", "retries")} | {
            "breaker_opened": float(self._counts["breaker_opened"] + self._breaker.opened)
        }

    def restore(self, totals: Mapping[str, float]) -> None:
        """Go on from the `totals` of a run that is resumed."""
        self._counts.update({name: int(value) for name, value in totals.items()})

    def close(self) -> None:
        """End the thread and its connections; another call starts them again."""
        with self._starting:
            link, self._link = self._link, None
        if link is not None:
            link.loop.close(link.client.aclose())

    def together(self, asked: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """What each coroutine returns or raises, `concurrency` requests at a time. Any thread may call it.

        Raises:
            RewardStop: one of them raised it.
        """
        with self._starting:
            self._link = self._link or _Link(self._client(), self.concurrency)
            link = self._link
        found = link.loop.start(_gathered(asked))
        try:
            results = found.result()
        except CancelledError:
            raise RuntimeError(f"{self.endpoint}: closed while it was asked") from None
        except BaseException:
            found.cancel()
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

    async def post(self, body: Mapping[str, Any]) -> Any:
        """The JSON that the service answers to JSON.

        Raises:
            NoScore: it has not.
            RewardStop: the request may not be sent.
        """
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        try:
            return _parsed(await self._retried(content), self.endpoint)
        except NoScore as error:
            raise NoScore(error.kind, self._hidden(str(error))) from None

    async def _retried(self, content: bytes) -> bytes:
        assert self._link is not None
        async with self._link.slots:
            for sent in range(1, self.retries + 2):
                try:
                    return await self._admitted(content, again=sent > 1)
                except Again as problem:
                    wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (sent - 1)) * self._random.uniform(0.5, 1.0)
                    wait_s = wait_s if problem.wait_s is None else problem.wait_s
                    if sent > self.retries or wait_s > MAX_WAIT_S:
                        asked = f", and asks to wait for {wait_s:g} s" if wait_s > MAX_WAIT_S else ""
                        raise NoScore("error", f"{problem} ({sent} requests{asked})") from None
                await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    async def _admitted(self, content: bytes, again: bool) -> bytes:
        """One request, if the breaker lets it through; while one probes, the others wait for what it finds."""
        assert self._link is not None
        breaker = self._breaker
        if breaker.state == "half-open":
            async with self._link.probe:
                if breaker.state == "half-open":
                    return await self.attempt(content, again)
        if breaker.state == "open":
            raise NoScore(
                "error",
                f"the circuit breaker of {self.endpoint} is open for another {breaker.open_for:.1f} s, after "
                f"{breaker.failures} failures in a row, the last: {breaker.reason}",
            )
        return await self.attempt(content, again)

    async def attempt(self, content: bytes, again: bool) -> bytes:
        """The answer to one request; `again`: it was sent before.

        Raises:
            Again: it may be sent again.
            NoScore: it may not.
        """
        import httpx

        assert self._link is not None
        progress()
        self._counts.update(requests=1, retries=int(again))
        try:
            async with asyncio.timeout(self.timeout_s):
                async with self._link.client.stream("POST", self.endpoint, content=content) as response:
                    answer = await self._read(response)
        except TimeoutError:
            self._breaker.failed(message := f"{self.endpoint} has not answered within {self.timeout_s:g} s")
            raise NoScore("timeout", message) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._breaker.failed(message := f"{self.endpoint}: no connection: {_text(error)}")
            raise Again(message) from error
        except httpx.TransportError as error:
            self._breaker.failed(message := f"{self.endpoint}: the connection broke: {_text(error)}")
            raise Again(message, served=True) from error
        except httpx.DecodingError as error:
            raise NoScore("invalid", f"{self.endpoint}: the answer cannot be decoded: {_text(error)}") from error
        return self._checked(response, answer)

    async def _read(self, response: httpx.Response) -> bytes:
        """The body of an answer, which may not be of any size."""
        answer = bytearray()
        async for part in response.aiter_bytes():
            answer += part
            if len(answer) > MAX_ANSWER_BYTES:
                raise NoScore("invalid", f"{self.endpoint}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
        return bytes(answer)

    def _checked(self, response: httpx.Response, answer: bytes) -> bytes:
        """The body of an answer that is one."""
        status = response.status_code
        message = f"{self.endpoint}: HTTP {status}: {answer[:300].decode(errors='replace').strip()}"
        if status >= 500:
            self._breaker.failed(message)
        if status == 429 or status >= 500:
            raise Again(message, _retry_after(response.headers.get("Retry-After", "")))
        self._breaker.succeeded()
        if not 200 <= status < 300:
            place = f" to {response.headers.get('Location')}" if status < 400 else ""
            raise NoScore("error", message + place)
        return answer

    def _hidden(self, message: str) -> str:
        """A message without the keys, which a service may repeat."""
        for value in self._headers.values():
            for secret in (value, value.removeprefix("Bearer ")):
                message = message.replace(secret, "***")
        return message


async def _gathered(asked: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*asked, return_exceptions=True)


def _from_environment(variable: str) -> str:
    if not is_variable(variable):
        raise RewardError("headers_env and api_key_env name environment variables, as in MY_KEY; they are not the keys")
    value = os.environ.get(variable, "").strip()
    if not value:
        raise RewardError(f"the environment variable {variable} is not set; it has the key of a reward's service")
    if not (value.isascii() and value.isprintable()):
        raise RewardError(f"the environment variable {variable} has characters that no header can have")
    return value


def _parsed(answer: bytes, endpoint: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(answer, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        shown = answer[:100].decode(errors="replace")
        raise NoScore("invalid", f"{endpoint}: the answer is no JSON ({error}): {shown!r}") from None


def _retry_after(value: str) -> float | None:
    """Seconds of a `Retry-After`, which is a number or a date."""
    if value.strip().isdecimal():
        return float(value)
    with suppress(ValueError):
        when = parsedate_to_datetime(value)
        return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return None


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
