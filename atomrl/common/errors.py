"""Error messages with suggestions, and waiting for services that are temporarily unavailable.

A run waits for each of its services (retrievers, judges, rewards over HTTP, tools, servers of environments and engines)
with an `Outage`, up to a time that the config sets. Then the run ends: no step is trained without a service's answers.
"""

from __future__ import annotations

import difflib
import errno
import http.client
import logging
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import ClassVar

from atomrl.common.hangs import progress, wait_for_service
from atomrl.common.secrets import without_secrets

# --------------------------------------------------------------------------------------------------------------------
# Messages

MAX_LISTED = 100


class ConfigError(ValueError):
    """An invalid config. The message names the key, what is wrong and what to do."""


@contextmanager
def reraise_as(kind: type[Exception], message: str, *caught: type[Exception]) -> Iterator[None]:
    """Re-raise errors of the block as another type, with a message in front.

    Args:
        kind: type of the raised error.
        message: beginning of its message.
        caught: types of the errors that are re-raised.

    Example:
        >>> with reraise_as(ValueError, "config of model a/b", KeyError, OSError):
        ...     raise OSError("no such file")
        Traceback (most recent call last):
        ...
        ValueError: config of model a/b: no such file
    """
    try:
        yield
    except caught as error:
        raise kind(f"{message}: {error}") from error


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`; None if none is similar.

    Args:
        cutoff: minimum similarity, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], what: str = "valid:", cutoff: float = 0.6) -> str:
    """Suggest the nearest known name; if none is similar, list all of them after `what`, unless there are too many.

    Example:
        >>> did_you_mean("trian", ["train", "eval"]), did_you_mean("zzz", ["train", "eval"], "valid:")
        ("did you mean 'train'?", 'valid: train, eval')
    """
    known = list(known)
    near = nearest(name, known, cutoff)
    if near is None and len(known) > MAX_LISTED:
        return f"none of the {len(known)} valid names is similar"
    return f"did you mean {near!r}?" if near else f"{what} {', '.join(known)}"


def describe_error(error: BaseException, place: bool = False) -> str:
    """Format the type and message of an exception, even if its `__str__` raises, with known secrets redacted.

    Args:
        place: append the file and line that raised it.

    Example:
        >>> describe_error(ValueError("no number"))
        'ValueError: no number'
    """
    try:
        text = str(error)
    except Exception as another:
        text = f"(its __str__ raises {type(another).__name__})"
    frames = traceback.extract_tb(error.__traceback__) if place else []
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return replace_surrogates(f"{type(error).__name__}: {without_secrets(text)[:300]}{where}")


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which neither tokenizers nor files accept, and join pairs of them to one character.

    Example:
        >>> replace_surrogates("a\\ud800b") == "a\\ufffdb", replace_surrogates("\\ud83d\\ude42") == "\\U0001f642"
        (True, True)
    """
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --------------------------------------------------------------------------------------------------------------------
# Unavailable services

log = logging.getLogger(__name__)
FIRST_S, LONGEST_S = 1.0, 30.0
"""Shortest and longest pause between requests, unless the service asks for a longer one."""
LOG_EVERY_S = 30.0
"""Seconds between log messages about a service that is still unavailable."""
BUSY = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which the same request may succeed later."""
_AWAY = (
    ConnectionError,
    TimeoutError,
    socket.gaierror,
    http.client.IncompleteRead,
    http.client.BadStatusLine,
)
_READING = ("/socket.py", "/ssl.py", "/asyncio/streams.py")
"""Files in which a TimeoutError of a connection is raised; others may come from a timeout of the user's own."""
_UNREACHABLE = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_NAMED = {
    "requests": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
    "urllib3": ("HTTPError",),
    "httpx": ("TransportError",),
    "httpx2": ("TransportError",),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "websockets": ("ConnectionClosed", "InvalidHandshake"),
    "openai": ("APIConnectionError",),
    "anthropic": ("APIConnectionError",),
    "grpc": ("FutureTimeoutError",),
}
"""Errors of clients that may not be installed, by top-level module."""

_WITH_CODE = ("urllib", "google", "tornado")
"""Top-level modules of clients whose errors have the HTTP status in `code`."""


class ServiceGone(Exception):
    """A service has been unavailable for longer than the limit."""


class ServiceFault(Exception):
    """A service gives invalid answers and would again: the wrong service, or a wrong configuration of it."""


class Outage:
    """The failures of a service, or of one request to it, until it answers again.

    Pauses grow with the time since the first failure, from 1 to 30 seconds; a longer `Retry-After` is respected.

    Args:
        name: name of the service, for messages.
        limit_s: seconds to wait; 0: not at all.
        key: config key that sets the limit.
        clock: a monotonic clock, in seconds.

    Example:
        >>> now = [0.0]
        >>> outage = Outage("http://127.0.0.1:9/score", 60.0, "reward.wait_s", lambda: now[0])
        >>> pauses = []
        >>> while now[0] < 60:
        ...     pauses.append(outage.pause_s("no connection"))
        ...     now[0] += pauses[-1]
        >>> pauses
        [1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 28.0]
    """

    _logged_at: ClassVar[dict[str, float]] = {}
    """Service -> time of the last log message about it."""

    def __init__(self, name: str, limit_s: float, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.limit_s, self.key, self.clock = name, limit_s, key, clock
        self.since: float | None = None
        """Time of the first failure since the last answer."""
        self._logged = False
        """A log message has been written about this outage."""

    def pause_s(self, reason: str, asked_s: float | None = None) -> float:
        """Record a failure, and return the seconds to wait before the next request.

        Args:
            reason: how it failed.
            asked_s: seconds that the service asks to wait (`Retry-After`).

        Raises:
            ServiceGone: it has been unavailable for `limit_s`, or asks to wait beyond that.
        """
        progress()
        now = self.clock()
        self.since = now if self.since is None else self.since
        away_s = now - self.since
        pause = max(asked_s or 0.0, min(max(away_s, FIRST_S), LONGEST_S))
        left = self.limit_s - away_s
        if left <= 0 or (asked_s or 0.0) > left:
            asks = f", and asks to wait for {asked_s:g} s" if (asked_s or 0.0) > max(left, 0.0) else ""
            raise ServiceGone(
                f"{self.name} has been unavailable for {away_s:.0f} s{asks} ({self.key}={self.limit_s:g}): {reason}. "
                "Nothing was trained on that; when it is available again, --resume continues with the interrupted step"
            )
        pause = min(pause, left)
        wait_for_service(pause)
        last = self._logged_at.get(self.name)
        if last is None or now - last >= LOG_EVERY_S:
            self._logged_at[self.name], self._logged = now, True
            log.warning(
                "%s is unavailable (%s): waiting up to %.0f s more (%s=%g)",
                self.name,
                reason,
                left,
                self.key,
                self.limit_s,
            )
        return pause

    def answered(self) -> None:
        """Record an answer: the outage is over."""
        if self._logged and self.since is not None:
            log.warning("%s is available again after %.0f s", self.name, self.clock() - self.since)
        self.since, self._logged = None, False


def is_away(error: BaseException) -> bool:
    """Return True if an error means that a service was unreachable, broke off or is too busy, and may answer later.

    Causes of the error are checked as well. A TimeoutError counts only if it was raised while reading from a
    connection.

    Example:
        >>> is_away(ConnectionRefusedError()), is_away(ValueError("no number"))
        (True, False)
    """
    return any(map(_is_away, _causes(error)))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        reason = getattr(seen, "reason", None)  # urllib's URLError
        seen = reason if isinstance(reason, BaseException) else seen.__cause__


def _is_away(error: BaseException) -> bool:
    if type(error) is BrokenPipeError:  # a pipe to a process, which has most likely crashed
        return False
    if (status := status_of(error)) is not None:
        return is_temporary(status)
    if type(error) is TimeoutError:
        return any(frame.filename.endswith(_READING) for frame in traceback.extract_tb(error.__traceback__))
    if isinstance(error, _AWAY) or (isinstance(error, OSError) and error.errno in _UNREACHABLE):
        return True
    return any(kind.__name__ in _NAMED.get(kind.__module__.partition(".")[0], ()) for kind in type(error).__mro__)


def is_busy(error: BaseException) -> bool:
    """Return True if a service, or a proxy in front of it, says that it cannot answer now: a temporary status other
    than 500. Other errors of `is_away` may be due to the request itself, if the service answers others.

    Example:
        >>> import urllib.error
        >>> is_busy(urllib.error.HTTPError("http://h", 503, "", {}, None)), is_busy(ConnectionResetError())
        (True, False)
    """
    return any((status := status_of(each)) and is_temporary(status) and status != 500 for each in _causes(error))


def is_temporary(status: int) -> bool:
    """Return True if an HTTP status means that the same request may succeed later."""
    return status in BUSY or status >= 500


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a client's error; None if it has none.

    The attribute `code` counts only in errors of `_WITH_CODE`: `SystemExit` and a user's own errors have one too.

    Example:
        >>> import urllib.error
        >>> status_of(urllib.error.HTTPError("http://h", 503, "", {}, None)), status_of(SystemExit(500))
        (503, None)
    """
    for holder in (error, getattr(error, "response", None)):
        coded = any(kind.__module__.partition(".")[0] in _WITH_CODE for kind in type(holder).__mro__)
        for name in ("status_code", "status", *(["code"] if coded else [])):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 300 <= value <= 599:
                return value
    return None


def retry_after_of(error: BaseException) -> float | None:
    """Return the seconds of the `Retry-After` header of an error's response; None if there is none."""
    for holder in (error, getattr(error, "response", None)):
        headers = getattr(holder, "headers", None)
        if headers is not None and hasattr(headers, "get"):
            return retry_after(str(headers.get("Retry-After") or ""))
    return None


def retry_after(value: str) -> float | None:
    """Parse the value of `Retry-After`, a number or a date, into seconds.

    Example:
        >>> retry_after("7"), retry_after("soon")
        (7.0, None)
    """
    if value.strip().isdecimal():
        return float(value)
    with suppress(ValueError):
        when = parsedate_to_datetime(value)
        return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return None
