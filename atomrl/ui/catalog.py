"""The runs below a folder, each read when it is asked for, and kept while it is looked at."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atomrl.reading import Run, find_runs
from atomrl.reading.lock import is_held
from atomrl.reading.state import FAILURE, silence
from atomrl.reading.studies import is_study
from atomrl.ui.cards import card, unreadable

SCAN_S = 2.0
"""Seconds after which the folder is searched for new runs again."""
CLOCK_S = 10.0
"""A run on another machine is looked at anew this often, though nothing is written."""
KEPT = 6
"""Runs that are kept in memory beside those that are running."""
WATCHED = ("metrics.jsonl", "summary.json", "findings.jsonl", "config.yaml", FAILURE)
Stamp = tuple[Any, ...]


def id_of(name: str) -> str:
    """What a run or a study is asked for by: a hash of its place, so that it is the same for the next server."""
    return blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


class UnknownRun(LookupError):
    """There is no run with this id, or it is gone."""


class Entry:
    """A run that was found.

    Attributes:
        id: a hash of its place.
        name: its place below the folder.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.id = id_of(name)
        self.lock = threading.Lock()
        self.run: Run | None = None
        self.stamp: Stamp = ()
        self.card: dict[str, Any] = {}

    def look(self) -> Stamp:
        """What tells whether something has changed, without reading."""
        stamps: list[Any] = []
        for name in WATCHED:
            try:
                status = os.lstat(self.path / name)
                stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                stamps.append(None)
        ended = stamps[1] is not None
        return (*stamps, not ended and (self._at_work() or self._by_the_clock()))

    def _at_work(self) -> int:
        """Whether a process holds the run: 0 or 1; 2 where it stands still, since nothing is written then."""
        if not is_held(self.path):
            return 0
        return 1 if silence(self.path, self.card.get("step_seconds")) is None else 2

    def _by_the_clock(self) -> int:
        """Of a run whose lock says nothing here, which runs until it has been silent for long: changes with time."""
        return int(time.time() / CLOCK_S) if self.card.get("status") == "running" else 0


class Catalog:
    """The runs of a folder. Its methods may be called from several threads.

    Args:
        root: is searched; links in it are not followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self._scanned = -SCAN_S
        self._used: list[Entry] = []

    def entries(self) -> list[Entry]:
        """All runs, by name."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_S:
                self._scan()
                self._scanned = time.monotonic()
            return list(self._entries.values())

    def entry(self, run_id: str) -> Entry:
        """A run by its id.

        Raises:
            UnknownRun: there is none.
        """
        for entries in (self._entries.values(), self.entries()):
            for entry in entries:
                if entry.id == run_id:
                    if not entry.path.is_dir():
                        raise UnknownRun(run_id)
                    return entry
        raise UnknownRun(run_id)

    @contextmanager
    def reading(self, entry: Entry) -> Iterator[Run]:
        """The run, read up to now. One thread at a time has it, so several that ask at once do not each read it."""
        with entry.lock:
            if entry.run is None:
                entry.run = Run(entry.path)
            else:
                entry.run.refresh()
            self._keep(entry)
            yield entry.run

    def studies(self) -> dict[str, tuple[Path, list[Entry]]]:
        """The studies whose trials are among the runs: place below the folder -> folder and runs."""
        found: dict[str, tuple[Path, list[Entry]]] = {}
        for entry in self.entries():
            place = entry.path.parent.parent
            if entry.path.parent.name == "runs" and place.is_relative_to(self.root) and is_study(place):
                name = place.relative_to(self.root).as_posix()
                found.setdefault(self.root.resolve().name if name == "." else name, (place, []))[1].append(entry)
        return found

    def card(self, entry: Entry) -> dict[str, Any]:
        """What the list shows of a run; made anew where something has changed."""
        stamp = entry.look()
        if entry.stamp != stamp or not entry.card:
            try:
                with self.reading(entry) as run:
                    if entry.stamp != stamp or not entry.card:
                        entry.card = card(run, entry.id, entry.name)
                        entry.stamp = stamp
            except Exception as error:  # of files that nobody thought of: the list has the other runs all the same
                return unreadable(entry.id, entry.name, error)
        return entry.card

    def _scan(self) -> None:
        found = {}
        for path in find_runs(self.root):
            name = path.relative_to(self.root).as_posix()
            name = self.root.resolve().name if name == "." else name
            found[name] = self._entries.get(name) or Entry(path, name)
        self._entries = found

    def _keep(self, entry: Entry) -> None:
        """Forget what was read of runs that nobody has looked at for longest."""
        with self._lock:
            self._used = [other for other in self._used if other is not entry and other.run is not None] + [entry]
            ended = [other for other in self._used[:-1] if not (other.stamp and other.stamp[-1])]
            for other in ended[: max(0, len(ended) - KEPT)]:
                if other.lock.acquire(blocking=False):
                    other.run = None
                    other.lock.release()
