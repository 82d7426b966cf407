"""What has changed, told to the pages that are open: one stream for each, which says that a run has something new."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable

from atomrl.ui.catalog import Catalog, Stamp

POLL_S = 0.25
ENDED_S = 2.0
"""Runs that have ended are looked at this often: they can only be resumed or removed."""
SILENT_S = 60.0
"""A run without a summary that was written to within this time is looked at as one that runs, whatever its lock says:
it may be on another machine, or of a version without locks."""
HEARTBEAT_S = 10.0
MAX_STREAMS = 64


def written(stamp: Stamp) -> float:
    """When a run's files were last written, as its stamp has it: seconds since 1970."""
    return max((file[-1] for file in stamp[:-1] if file), default=0) / 1e9


class Watcher:
    """Looks at the runs as long as a page is open, once for all pages.

    Args:
        catalog: of the runs.

    Attributes:
        streams: how many there are.
        ending: whether the server ends; so do the streams then.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog, self.streams = catalog, 0
        self.ending: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._stamps: dict[str, Stamp] = {}
        self._looked = self._looked_at_all = -ENDED_S

    def stamps(self) -> dict[str, Stamp]:
        """Of each run what tells whether it has changed; at most four times a second anew."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < 0.8 * POLL_S:
                return self._stamps
            everything = now - self._looked_at_all >= ENDED_S
            stamps = {}
            for entry in self.catalog.entries():
                old = self._stamps.get(entry.id)
                running = old is None or old[-1] or (old[1] is None and time.time() - written(old) < SILENT_S)
                stamps[entry.id] = entry.look() if everything or old is None or running else old
            self._stamps, self._looked = stamps, now
            if everything:
                self._looked_at_all = now
            return stamps

    async def stream(self) -> AsyncIterator[bytes]:
        """Events: `changed` with ids of runs, `gone` likewise; a comment from time to time keeps the line open."""
        self.streams += 1
        try:
            seen = await asyncio.to_thread(self.stamps)
            yield b"retry: 1000\nevent: ready\ndata: []\n\n"
            silent = time.monotonic()
            while not self.ending():
                await asyncio.sleep(POLL_S)
                now = await asyncio.to_thread(self.stamps)
                if now is seen:
                    continue
                changed = [run for run, stamp in now.items() if seen.get(run) != stamp]
                gone = [run for run in seen if run not in now]
                seen = now
                for name, runs in (("changed", changed), ("gone", gone)):
                    if runs:
                        yield f"event: {name}\ndata: {json.dumps(runs)}\n\n".encode()
                        silent = time.monotonic()
                if time.monotonic() - silent > HEARTBEAT_S:
                    yield b": nothing new\n\n"
                    silent = time.monotonic()
        finally:
            self.streams -= 1
