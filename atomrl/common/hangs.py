"""Detection of hangs: code reports its `phase` and `progress`, and `HangWatch` ends a process without progress."""

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
"""Exit code of a run that hung: `EX_TEMPFAIL`, because it can be resumed."""
_TICK_S = 1.0
HANG_GRACE_S = 5.0
"""Seconds added to the limit of a `HangWatch`."""
open_phases: list[str] = []
"""Names of the phases that this process is in, the innermost last."""
_signs = 0
_waits_until = 0.0


def progress() -> None:
    """Report progress of this process: a sampled token, a computed micro-batch, a reward."""
    global _signs
    _signs += 1  # a race of two threads may lose one, which leaves the other's


def wait_for_service(seconds: float) -> None:
    """Report that this process will wait for an unavailable service for this long, which does not count as a hang."""
    global _waits_until
    _waits_until = max(_waits_until, time.monotonic() + seconds)


def waits_for_service() -> bool:
    """Return True while the process waits for an unavailable service."""
    return time.monotonic() < _waits_until


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Watch the block for hangs, under a name for messages."""
    progress()
    open_phases.append(name)
    try:
        yield
    finally:
        open_phases.remove(name)
        progress()


class HangWatch:
    """Context manager with a thread that ends this process if there is no progress in a phase for too long.

    A blocked call cannot be interrupted, so it prints the stacks of all threads and a message, and exits with `HUNG`;
    the run can be resumed as after a kill. Time in which the process was stopped, and time between phases, does not
    count. A few seconds are added to the limit, so that code that waits for another process with the same limit can
    report first.

    Args:
        limit_s: time limit without progress.
        names: descriptions of phases for the message; default "training".
        limit_name: config key of the limit.
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
            if (hung := self.check(passed)) and not self._closed.is_set():
                self._end(hung)

    def check(self, passed_s: float) -> str | None:
        """Check for progress, and return the phase that hangs, or None.

        Args:
            passed_s: seconds since the last call.
        """
        phases, signs = open_phases[:], _signs
        silent = phases and signs == self._seen and not waits_for_service()
        self._silent_s = self._silent_s + min(passed_s, 2 * _TICK_S) if silent else 0.0
        self._seen = signs
        return phases[-1] if silent and self._silent_s > self.limit_s + HANG_GRACE_S else None

    def _end(self, name: str) -> None:
        try:
            with suppress(Exception):  # the reader of stderr may be gone
                output = sys.__stderr__ or sys.stderr
                faulthandler.dump_traceback(output, all_threads=True)
                print(
                    f"error: {self.names.get(name, 'training')} ({name}) has made no progress for {self.limit_s:g} s "
                    f"({self.limit_name}); the stack of each thread is above. Use --resume to continue from the newest "
                    f"checkpoint; if it was slow and not stuck, raise {self.limit_name}",
                    file=output,
                    flush=True,
                )
        finally:
            os._exit(HUNG)
