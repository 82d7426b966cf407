"""What rewards that ask a service over HTTP have in common: time-outs, waiting for a service that is away, secret keys.

Requests run on an event loop in one thread, whoever asks: outage, counts, cache and budget are one for the run.
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

from atomrl import outages
from atomrl.episodes import FailureKind
from atomrl.event_loop import EventLoopThread
from atomrl.outages import Outage, ServiceGone, may_pass, retry_after
from atomrl.progress import progress
from atomrl.rewards.errors import NoScore, RewardError, RewardStop, require
from atomrl.secrets import is_variable, left_out
from atomrl.types import Sample, Trajectory

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
MAX_ANSWER_BYTES = 1 << 25
OF_ITS_CONTENT = frozenset({400, 413, 422})
"""Statuses of HTTP that are about one request; with any other below 500 the service answers none."""


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
        fault: what it is where it was the request's own, as may be: the service answers others.
    """

    def __init__(
        self, message: str, wait_s: float | None = None, served: bool = False, fault: FailureKind | None = None
    ) -> None:
        super().__init__(message)
        self.wait_s, self.served, self.fault = wait_s, served, fault


class _Link:
    """An event loop in a thread of its own, and the connections of a service on it."""

    def __init__(self, client: httpx.AsyncClient, concurrency: int) -> None:
        self.client, self.slots = client, asyncio.Semaphore(concurrency)
        self.loop = EventLoopThread("reward service")


class RewardService(BaseModel, ABC):
    """A reward that asks a service over HTTP. Its fields are the `args` of a config.

    A service that is away is waited for (`outages.Outage`): requests that found no connection, lost it or were not
    answered in time, answers 429 and 5xx, and what is no JSON. Where it answers others meanwhile, a request that broke
    the connection, timed out, or was answered by 500 or by no JSON may be what is wrong: it is sent again at most
    `retries` times (once after a time-out, since the service is still at work), and is then a `NoScore`.

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
    wait_s: float = Field(600.0, ge=0)
    """How long a service that is away is waited for before the run ends."""
    retries: int = Field(3, ge=1)
    """Of a request while others are answered. At least one: what a service had under way when it went away looks like
    such a request."""
    concurrency: int = Field(8, ge=1)
    """Requests at a time."""

    concurrent: ClassVar[bool] = True
    """Several calls may wait beside each other."""

    _headers: dict[str, str] = PrivateAttr(default_factory=dict)
    _outage: Outage = PrivateAttr()
    _answers: int = PrivateAttr(0)
    _counts: Counter[str] = PrivateAttr(default_factory=Counter)
    _link: _Link | None = PrivateAttr(None)
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Where requests are sent."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        """A score, None or a `NoScore` for each."""

    def model_post_init(self, context: Any) -> None:
        require(type(self).__name__, "httpx", "http")
        self._outage = Outage(self.endpoint, self.wait_s, "reward.wait_s")
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
        return {name: float(self._counts[name]) for name in ("requests", "retries")}

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

    async def post(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """What the service answers to JSON.

        Args:
            read: makes of its JSON what is wanted, or raises `Again`.

        Raises:
            NoScore: it gives none to this request.
            RewardStop: it answers none, has been away for too long, or the request may not be sent.
        """
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        try:
            return await self._retried(content, read)
        except (NoScore, RewardStop) as error:
            error.args = (self._hidden(str(error)),)
            raise

    async def _retried(self, content: bytes, read: Callable[[Any], T]) -> T:
        assert self._link is not None
        async with self._link.slots:
            faults = sent = 0
            others = self._answers
            while True:
                sent += 1
                try:
                    answer = read(_parsed(await self.attempt(content, again=sent > 1), self.endpoint))
                except Again as problem:
                    if problem.fault == "invalid" and not self._answers:
                        raise RewardStop(f"reward: {problem}; it has never answered as it should") from None
                    if problem.fault and self._answers > others:
                        faults += 1
                        if faults > (1 if problem.fault == "timeout" else self.retries):
                            raise NoScore(problem.fault, f"{problem} ({sent} requests)") from None
                        wait_s = outages.FIRST_S
                    else:
                        wait_s = self._pause_s(problem)
                    others = self._answers
                else:
                    self._answered()
                    return answer
                await asyncio.sleep(wait_s)

    def _pause_s(self, problem: Again) -> float:
        try:
            return self._outage.pause_s(self._hidden(str(problem)), problem.wait_s)
        except ServiceGone as gone:
            raise RewardStop(f"reward: {gone}") from None

    def _answered(self) -> None:
        self._answers += 1
        self._outage.answered()

    async def attempt(self, content: bytes, again: bool) -> bytes:
        """The answer to one request; `again`: it was sent before.

        Raises:
            Again: it may be sent again.
            NoScore: it may not.
            RewardStop: the service answers no request like that.
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
            message = f"{self.endpoint} has not answered within {self.timeout_s:g} s (timeout_s)"
            raise Again(message, served=True, fault="timeout") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._counts["requests"] -= 1  # it was not sent
            raise Again(f"{self.endpoint}: no connection: {_text(error)}") from error
        except httpx.TransportError as error:
            message = f"{self.endpoint}: the connection broke: {_text(error)}"
            raise Again(message, served=True, fault="error") from error
        except httpx.DecodingError as error:
            message = f"{self.endpoint}: the answer cannot be decoded: {_text(error)}"
            raise Again(message, served=True, fault="invalid") from error
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
        if 200 <= status < 300:
            return answer
        place = f" to {response.headers.get('Location')}" if status < 400 else ""
        message = f"{self.endpoint}: HTTP {status}: {answer[:300].decode(errors='replace').strip()}{place}"
        if may_pass(status):
            fault: FailureKind | None = "error" if status == 500 else None
            raise Again(message, retry_after(response.headers.get("Retry-After", "")), fault=fault)
        if status in OF_ITS_CONTENT:
            self._answered()
            raise NoScore("error", message)
        raise RewardStop(f"reward: {message}")

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
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        shown = answer[:100].decode(errors="replace")
        raise Again(f"{endpoint}: the answer is no JSON ({error}): {shown!r}", served=True, fault="invalid") from None


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
