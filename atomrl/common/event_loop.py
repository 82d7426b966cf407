"""An event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 5.0


class EventLoopThread:
    """An asyncio event loop in a thread, for callers without one; any thread may submit tasks.

    Args:
        name: name of the thread.

    Example:
        >>> import asyncio
        >>> loop = EventLoopThread("sums")
        >>> loop.start(asyncio.sleep(0, result=3)).result()
        3
        >>> loop.close(asyncio.sleep(0))
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def start(self, task: Coroutine[Any, Any, T]) -> Future[T]:
        """Submit a task, and return its future."""
        return asyncio.run_coroutine_threadsafe(task, self.loop)

    def close(self, last: Coroutine[Any, Any, Any]) -> None:
        """Cancel all tasks, run a last one, and end the thread; after 5 s it is left to end with the process."""
        with suppress(TimeoutError):
            self.start(self._end(last)).result(_END_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_END_S)
        if not self.thread.is_alive():
            self.loop.close()

    async def _end(self, last: Coroutine[Any, Any, Any]) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await last
