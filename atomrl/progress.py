"""What this process is at, and whether it gets on; `HangWatch` ends one that does not."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Self

HUNG = 75
"""The exit code of a run that hung: `EX_TEMPFAIL`, since it can be gone on with."""
_TICK_S = 1.0
_GRACE_S = 5.0
_phases: list[str] = []
_signs = 0
_waits_until = 0.0


def progress() -> None:
    """Say that this process gets on: a token was drawn, a micro-batch computed, a reward came."""
    global _signs
    _signs += 1  # one that is lost between two threads has the other one's


def wait_for_service(seconds: float) -> None:
    """Say that this process waits for so long, since a service is away: that is no hang."""
    global _waits_until
    _waits_until = max(_waits_until, time.monotonic() + seconds)


def waits_for_service() -> bool:
    """Whether it does."""
    return time.monotonic() < _waits_until


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What is done inside is watched, and called so."""
    progress()
    _phases.append(name)
    try:
        yield
    finally:
        _phases.remove(name)
        progress()


class HangWatch:
    """A thread that ends this process where no phase under way has shown progress for a time: a context manager.

    A blocked call cannot be made to raise, so the stacks of all threads are written, then one message, and the process
    exits with `HUNG`; what a killed run leaves is there to go on from. Time in which the process itself stood still
    does not count, nor what lies between phases. Some seconds are added, in which who waits for another process with
    the same limit says whom it waits for.

    Args:
        limit_s: how long there may be no progress.
        names: what a phase is of, for the message; of others it is "training".
        limit_name: the key of the limit.
    """

    def __init__(self, limit_s: float, names: Mapping[str, str], limit_name: str) -> None:
        self.limit_s, self.names, self.limit_name = limit_s, names, limit_name
        self._seen, self._silent_s = _signs, 0.0
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._work, name="watch over hangs", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _work(self) -> None:
        began = time.monotonic()
        while not self._closed.wait(_TICK_S):
            passed, began = time.monotonic() - began, time.monotonic()
            if (hung := self.look(passed)) and not self._closed.is_set():
                self._end(hung)

    def look(self, passed_s: float) -> str | None:
        """The phase that has hung, if one has; so many seconds after the last look."""
        under_way, signs = _phases[:], _signs
        silent = under_way and signs == self._seen and not waits_for_service()
        self._silent_s = self._silent_s + min(passed_s, 2 * _TICK_S) if silent else 0.0
        self._seen = signs
        return under_way[-1] if silent and self._silent_s > self.limit_s + _GRACE_S else None

    def _end(self, name: str) -> None:
        try:
            with suppress(Exception):  # whoever reads it may be gone
                output = sys.__stderr__ or sys.stderr
                faulthandler.dump_traceback(output, all_threads=True)
                print(
                    f"error: {self.names.get(name, 'training')} ({name}) has made no progress for {self.limit_s:g} s "
                    f"({self.limit_name}); above is where each thread stands. A run goes on from its newest "
                    f"checkpoint with --resume; if it was slow and not stuck, give it a larger {self.limit_name}",
                    file=output,
                    flush=True,
                )
        finally:
            os._exit(HUNG)
