"""Server-sent events that notify open pages of changed runs, and the client of the process that knows configs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from atomrl.tools.ui.catalog import Catalog, Stamp

POLL_S = 0.25
ENDED_S = 2.0
"""Polling interval of ended runs, which can only be resumed or removed."""
SILENT_S = 60.0
"""A run without a summary that was written to within this time is polled as a running one, even without a lock: it may
be on another machine, or of a version without locks."""
HEARTBEAT_S = 10.0
MAX_STREAMS = 64


def written(stamp: Stamp) -> float:
    """Return when a run's files were last written, by its stamp: seconds since 1970."""
    return max((file[-1] for file in stamp[:-1] if file), default=0) / 1e9


class Watcher:
    """Polls the runs while pages are open, once for all of them.

    Args:
        catalog: the runs.

    Attributes:
        streams: number of open streams.
        ending: returns True when the server shuts down, which ends the streams.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog, self.streams = catalog, 0
        self.ending: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._stamps: dict[str, Stamp] = {}
        self._looked = self._looked_at_all = -ENDED_S

    def stamps(self) -> dict[str, Stamp]:
        """Return the stamp of each run by id; refreshed at most four times a second."""
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
        """Yield the events `changed` and `gone` with ids of runs; regular comments keep the connection open."""
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


# --------------------------------------------------------------------------------------------------------------------
# Questions that need the config schema, and with it torch: another process answers them, and ends when it is idle.

IDLE_S = 120.0
CACHED = 64


class Questions:
    """Client of the process `answers.py`, which is started on demand."""

    def __init__(self) -> None:
        self._command = [sys.executable, "-P", "-m", "atomrl.tools.ui.answers"]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None
        self._cache: dict[str, dict[str, Any]] = {}

    def about(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Describe a config (`answers.about`): `kind`, `changed` (key -> default and value), `equation`, ...; only
        `errors` if this version does not accept it."""
        question = json.dumps({"config": config}, default=str)
        if question not in self._cache:
            answer = self._ask(question)
            if "failed" in answer:
                return answer
            if len(self._cache) >= CACHED:
                self._cache.clear()
            self._cache[question] = answer
        return self._cache[question]

    def check(self, text: str) -> dict[str, Any]:
        """Describe a config's YAML text; `errors` has a line for each mistake. `own` is the config in AtomRL's layout,
        if the text has the six-section layout."""
        return self._ask(json.dumps({"yaml": text}))

    def advantages(self, config: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        """Recompute advantages (`arithmetic.advantages`); only `errors` if this version does not accept the config."""
        return self._ask(json.dumps({"config": config, "step": step}, default=str))

    def token(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """Explain a token's loss (`arithmetic.token`); only `errors` if this version does not accept the config."""
        return self._ask(json.dumps({"config": config, "token": row}, default=str))

    def close(self) -> None:
        """End the process; pending questions get the answer `failed`."""
        if self._process is not None:
            self._process.kill()
        with self._lock:
            self._end()

    def _ask(self, question: str) -> dict[str, Any]:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            try:
                if self._process is None:
                    self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert self._process.stdin is not None and self._process.stdout is not None
                self._process.stdin.write(question.encode() + b"\n")
                self._process.stdin.flush()
                answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            except (OSError, ValueError) as error:
                self._end()
                return {"failed": f"the process that knows configs has ended: {error}"}
            self._timer = threading.Timer(IDLE_S, self.close)
            self._timer.daemon = True
            self._timer.start()
            return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
