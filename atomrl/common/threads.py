"""Choose the number of CPU threads of a run: all on an idle machine, fewer if other processes run and that is faster.

The threads of a parallel region spin until the last of them is done. Where another process takes a core, each of the
many small regions of a step waits for a thread that is not scheduled. The cost depends on the sizes of the products, so
it is measured on the run's own work while others take cores (docs/development/benchmarks.md).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FIXED_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that fix the number of threads."""
UPDATE_S = 0.5
"""Seconds between two measurements of the load."""
BUSY = 0.25
"""The machine is busy where this many cores are missing for all threads to run."""
QUIET_S = 3.0
"""Seconds that the machine must not be busy before it counts as idle."""
BLOCK_S, BLOCK_UNITS = 0.2, 3
"""Least seconds and units of a block of a trial."""
PAUSE_S, PAUSE_TIMES = 20.0, 100.0
"""Least seconds until the next trial, and as a multiple of the cost of the last one."""
MOVED = 0.5
"""Change in the cores that others take, since the last trial, that starts another one."""
EXPIRES_S = 600.0
"""Seconds after which another trial starts even if the load has not changed; the work may have."""


@dataclass
class Trial:
    """Three blocks of units, with fewer threads, all, and fewer again, so that a steady drift cancels out."""

    number: int = 0
    """Index of the current block, 0 to 2; 3: done."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * 3)
    work: list[float] = field(default_factory=lambda: [0.0] * 3)
    units: int = 0
    """Units of this block so far."""

    @property
    def all_threads(self) -> bool:
        return self.number == 1

    def add(self, work: float, seconds: float) -> bool:
        """Add a unit; return True where the trial is done."""
        at = self.number
        self.seconds[at] += seconds
        self.work[at] += work
        self.units += 1
        enough = self.units >= BLOCK_UNITS and self.seconds[at] >= BLOCK_S
        hopeless = at == 1 and self.seconds[1] >= BLOCK_S / 4 and self._pace(1) > 1.5 * self._pace(0)
        if enough or hopeless:
            self.number, self.units = (3 if hopeless else at + 1), 0
        return self.number == 3

    def _pace(self, at: int) -> float:
        return self.seconds[at] / self.work[at]

    def gain(self) -> float:
        """Return the time with fewer threads divided by that with all."""
        fewer = [self._pace(at) for at in (0, 2) if self.work[at]]
        return sum(fewer) / len(fewer) / self._pace(1)

    def cost_s(self) -> float:
        """Return the seconds lost compared with the better number of threads."""
        slower = [1] if self.gain() < 1 else [0, 2]
        best = min(self._pace(0), self._pace(1))
        return max(0.0, sum(self.seconds[at] - best * self.work[at] for at in slower))


@dataclass
class Chooser:
    """Choose the number of threads for one kind of work, from measured loads and times.

    Args:
        max_threads: threads on an idle machine.
        cpus: CPUs that this process may use.
    """

    max_threads: int
    cpus: int
    busy: bool = False
    wins: bool = True
    """Fewer threads are faster while the machine is busy."""
    trial: Trial | None = None
    _others: float = 0.0
    _tried_with: float = -1.0
    _tried: float = 0.0
    _next: float = 0.0
    _quiet_since: float | None = None

    def update(self, others: float, now: float) -> None:
        """Update with the number of cores that other processes used since the last call."""
        self._others = others
        # All threads cannot run at once: the machine is busy. It counts as idle again only after `QUIET_S`.
        if self.max_threads - (self.cpus - others) >= BUSY:
            self._quiet_since = None
            self.busy = True
            outdated = abs(others - self._tried_with) >= MOVED or now - self._tried >= EXPIRES_S
            if self.trial is None and now >= self._next and outdated:
                self.trial = Trial()
        elif self.busy:
            if self._quiet_since is None:
                self._quiet_since = now
            if now - self._quiet_since >= QUIET_S:
                self.busy, self.trial = False, None

    def count(self) -> int:
        """Return the threads for the next unit."""
        if not self.busy or (self.trial.all_threads if self.trial else not self.wins):
            return self.max_threads
        return min(self.max_threads - 1, max(1, round(self.cpus - self._others)))

    def done(self, work: float, seconds: float, now: float) -> None:
        """Record the time of a unit that ran with `count` threads. `work` is proportional to its expected time."""
        if self.trial is None or not self.trial.add(work, seconds):
            return
        self.wins = self.trial.gain() < 1.03  # as fast: leave the core to the others
        self._tried_with, self._tried = self._others, now
        self._next = now + max(PAUSE_S, PAUSE_TIMES * self.trial.cost_s())
        self.trial = None


class Load:
    """Measures the cores that other processes take, of the CPUs that this process may use."""

    def __init__(self) -> None:
        self.cpus = os.sched_getaffinity(0)
        self._last = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        """Return the time, idle and total seconds of the CPUs, and CPU seconds of this process."""
        idle = total = 0
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *counts = line.split()
                if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self.cpus:
                    numbers = [int(count) for count in counts[:8]]  # guests are part of user and nice
                    idle, total = idle + numbers[3] + numbers[4], total + sum(numbers)
        ticks = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), idle / ticks, total / ticks, time.process_time()

    def others(self) -> float | None:
        """Return the cores taken since the last call; None where the kernel does not count, as in some sandboxes."""
        before, self._last = self._last, self._read()
        passed, idle, total, own = (new - old for new, old in zip(self._last, before, strict=True))
        if total <= 0 or passed <= 0:
            return None
        return max(0.0, len(self.cpus) - (idle + own) / passed)


class AdaptiveThreads:
    """Chooses the number of threads for the thread that computes."""

    def __init__(self, max_threads: int, load: Load, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_threads, self.load, self.clock = max_threads, load, clock
        self.thread = threading.get_ident()
        self.choosers: dict[str, Chooser] = {}
        self.updated, self.set = clock(), max_threads
        self.others = 0.0

    def begin(self, kind: str) -> Chooser:
        """Set the number of threads before a unit."""
        now = self.clock()
        if kind not in self.choosers:
            self.choosers[kind] = Chooser(self.max_threads, len(self.load.cpus))
            self.choosers[kind].update(self.others, now)
        if now - self.updated >= UPDATE_S:
            self.updated = now
            if (others := self.load.others()) is not None:
                self.others = others
                before = any(each.busy for each in self.choosers.values())
                for each in self.choosers.values():
                    each.update(others, now)
                if before != (after := any(each.busy for each in self.choosers.values())):
                    log.info("other processes use %.1f cores: %s", others, "busy" if after else "all threads again")
        chooser = self.choosers[kind]
        if (count := chooser.count()) != self.set:
            torch.set_num_threads(count)
            self.set = count
        return chooser


adapting: AdaptiveThreads | None = None
"""The thread chooser of the running block of `adaptive_threads`; None: the number of threads is fixed."""


@contextmanager
def adaptive_threads(enabled: bool = True) -> Iterator[None]:
    """Let each `unit` of this thread choose its number of threads within the block; on Linux, unless `FIXED_BY`."""
    global adapting
    count, before = torch.get_num_threads(), adapting
    possible = enabled and count > 1 and not any(os.environ.get(name) for name in FIXED_BY)
    if not possible or not hasattr(os, "sched_getaffinity") or not os.access("/proc/stat", os.R_OK):
        yield
        return
    adapting = AdaptiveThreads(count, Load())
    try:
        yield
    finally:
        adapting = before
        torch.set_num_threads(count)


@contextmanager
def unit(kind: str, work: float) -> Iterator[None]:
    """Run a unit of work of known size: a micro-batch (its tokens), a decode step (its rows)."""
    mine = adapting
    if mine is None or mine.thread != threading.get_ident():
        yield
        return
    chooser, started = mine.begin(kind), mine.clock()
    yield
    now = mine.clock()
    chooser.done(work, now - started, now)


@contextmanager
def fixed_threads(count: int | None) -> Iterator[None]:
    """Compute with this many threads within the block; None: no change."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def single_thread() -> AbstractContextManager[None]:
    """Compute with one thread within the block: for small work, and for sums whose order must not depend on threads."""
    return fixed_threads(1)


def max_threads() -> int:
    """Return the number of threads on an idle machine."""
    return torch.get_num_threads() if adapting is None else adapting.max_threads
