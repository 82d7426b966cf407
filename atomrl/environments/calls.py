"""Calls of functions that may take too long, on threads that are left behind then."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

GRACE_S = 0.1
"""In which a coroutine that took too long may end by itself."""
left_behind = threading.Event()
"""A thread of this process goes on with a call that nobody waits for."""


class TooLong(Exception):
    """A call took too long."""


class CallThread:
    """A thread that makes calls, one after the other. It ends when it is told to, or is left behind with a call.

    Example:
        >>> thread = CallThread()
        >>> thread.run(lambda: 6 * 7, limit_s=5)
        42
        >>> thread.end()
    """

    def __init__(self) -> None:
        self.lost = False
        """It does not come back from a call."""
        self._work: SimpleQueue[tuple[Callable[[], Any], float | None, Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, function: Callable[[], Any], limit_s: float | None = None) -> Any:
        """What a function returns, or raises; of a coroutine, what that does.

        Raises:
            TooLong: it does not within `limit_s` seconds. A coroutine is cancelled; what does not end all the same
                goes on, and no other call is made any more.
        """
        if self.lost:
            raise TooLong("a call before it has not come back")
        result: Future[Any] = Future()
        self._work.put((function, limit_s, result))
        try:
            return result.result(None if limit_s is None else limit_s + GRACE_S)
        except TimeoutError:
            if result.done():  # it is the function's own
                raise
            self.lost = True
            left_behind.set()
            raise TooLong(f"no answer within {limit_s:g} s") from None

    def end(self, last: Callable[[], Any] | None = None) -> None:
        """Make a last call, unless an earlier one has not come back, and end."""
        try:
            if last is not None and not self.lost:
                self.run(last)
        finally:
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            function, limit_s, result = work
            try:
                found = function()
                result.set_result(asyncio.run(_within(found, limit_s)) if inspect.isawaitable(found) else found)
            except BaseException as error:  # also SystemExit: whoever asked for it is told
                result.set_exception(error)


async def _within(result: Any, limit_s: float | None) -> Any:
    timer = asyncio.timeout(limit_s)
    try:
        async with timer:
            return await result
    except TimeoutError:
        if not timer.expired():
            raise
        raise TooLong(f"no answer within {limit_s:g} s") from None
