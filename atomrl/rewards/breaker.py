"""A circuit breaker: a service that fails again and again is left alone for a while."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal


class Breaker:
    """Closed, it lets every request through. After `limit` failures in a row it is open: no request is sent for
    `open_s` seconds. Then it is half-open: one request is sent, and closes it or opens it again.

    Args:
        limit: failures in a row that open it.
        open_s: seconds.
        clock: seconds that never go back.

    Example:
        >>> now = 0.0
        >>> breaker = Breaker(2, 30.0, lambda: now)
        >>> breaker.failed("HTTP 500"), breaker.failed("HTTP 503"), breaker.state
        (None, None, 'open')
        >>> now = 31.0
        >>> breaker.state
        'half-open'
        >>> breaker.succeeded(), breaker.state
        (None, 'closed')
    """

    def __init__(self, limit: int, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.open_s, self.clock = limit, open_s, clock
        self.failures = 0
        """In a row."""
        self.opened = 0
        """How often it was opened."""
        self.reason = ""
        """The last failure."""
        self._until = -math.inf

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        if self.failures < self.limit:
            return "closed"
        return "open" if self.clock() < self._until else "half-open"

    @property
    def open_for(self) -> float:
        """Seconds that it stays open."""
        return max(0.0, self._until - self.clock())

    def succeeded(self) -> None:
        """A request was answered."""
        self.failures = 0

    def failed(self, reason: str) -> None:
        """A request was not answered, or the service says that it cannot serve."""
        was_open = self.state == "open"  # and this request is from before
        self.failures += 1
        self.reason = reason
        if self.failures >= self.limit and not was_open:
            self._until = self.clock() + self.open_s
            self.opened += 1
