"""What has changed, told to the pages that are open: one stream for each, which says that a run has something new."""

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


# --------------------------------------------------------------------------------------------------------------------
# What only the config's schema can answer: it needs torch, so another process answers, which ends when it is idle.

IDLE_S = 120.0
KEPT = 64


class Questions:
    """Asks the process, and starts it when it is needed.

    Args:
        imports: without effect, for callers that still give it: nothing is imported to look at a config.
    """

    def __init__(self, imports: bool = False) -> None:
        del imports
        self._command = [sys.executable, "-P", "-m", "atomrl.tools.ui.answers"]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None
        self._known: dict[str, dict[str, Any]] = {}

    def about(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`kind` of run, `changed` (key -> default and value), `equation` (a page of text); of a config that this
        version does not take, `errors`."""
        question = json.dumps({"config": config}, default=str)
        if question not in self._known:
            answer = self._ask(question)
            if "failed" in answer:
                return answer
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[question] = answer
        return self._known[question]

    def check(self, text: str) -> dict[str, Any]:
        """The same of a config's text, with the command line that runs it; `errors` has a line for each mistake.
        Of one in the six-section layout, `own` is the same in AtomRL's."""
        return self._ask(json.dumps({"yaml": text}))

    def advantages(self, config: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        """What a run's algorithm makes of the rewards of a step, as `arithmetic.advantages` says it; of a config that
        this version does not take, `errors`."""
        return self._ask(json.dumps({"config": config, "step": step}, default=str))

    def token(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """How a token's part of the loss was made, as `arithmetic.token` says it; of a config that this version does
        not take, `errors`."""
        return self._ask(json.dumps({"config": config, "token": row}, default=str))

    def close(self) -> None:
        """End the process; who waits for an answer gets none."""
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
