"""Parts of a simulated loop: the machine, completions, groups and engines."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Chance = Callable[[random.Random], float]


def nothing(rng: random.Random) -> float:
    return 0.0


@dataclass(frozen=True)
class Machine:
    """The machine of a simulated loop."""

    engines: int
    slots: int
    """Completions that one engine draws at once."""
    token_s: Callable[[float], float]
    """Rows -> seconds in which an engine draws a token of each."""
    length: Chance
    """Tokens of a completion."""
    learn_s: float
    """A step of the trainer, but for waiting and the transfer."""
    transfer_s: float
    groups: int
    members: int
    beside_s: Chance = nothing
    """Seconds that a completion takes without a slot."""
    reward_s: Chance = nothing
    """Seconds that a group's rewards take."""
    output_s: float = 0.0
    """Seconds of the driver for a completion."""
    shared: float = 1.0
    """Pace of trainer and engine while both compute: under 1 where they share cores."""


@dataclass(eq=False)
class Completion:
    group: Group
    index: int
    tokens: float
    beside_s: float
    start: float = 0.0
    """Work of the engine from which the newest version samples."""
    spans: list[tuple[int, float]] = field(default_factory=list)
    """(version, tokens)"""


@dataclass(eq=False)
class Group:
    position: int
    version: int
    engine: Engine
    waiting: list[Completion] = field(default_factory=list)
    finished: list[Completion] = field(default_factory=list)
    ready: bool = False

    @property
    def oldest(self) -> int:
        drawn = [version for item in self.finished for version, _ in item.spans]
        return min([*drawn, *([self.version] if self.waiting else [])])

    @property
    def drawing(self) -> bool:
        return bool(self.waiting)

    @property
    def drawn(self) -> int:
        return len(self.finished)


class Engine:
    """Slots at one pace. `work` is the tokens that a slot would have drawn since the start."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.work = self.since = self.busy_s = self.tokens = 0.0
        self.active: list[tuple[float, int, Completion]] = []
        self.queue: deque[Completion] = deque()
        self.held = 0
        """Completions that have not arrived, drawn or not."""
        self.stands, self.slow, self.stamp = False, 1.0, 0

    def pace(self) -> float:
        rows = len(self.active)
        return 0.0 if self.stands or not rows else self.slow / self.machine.token_s(rows)

    def settle(self, now: float) -> None:
        """Bring `work` up to date; before anything changes that the pace depends on."""
        if pace := self.pace():
            passed = now - self.since
            self.work += pace * passed
            self.busy_s += passed
            self.tokens += pace * passed * len(self.active)
        self.since = now

    def mark(self, item: Completion, version: int) -> None:
        """Record that tokens since `start` are of this version."""
        item.spans.append((version, self.work - item.start))
        item.start = self.work


def lognormal(median: float, sigma: float, limit: float) -> Chance:
    """Completions that are cut at a limit."""
    return lambda rng: min(limit, rng.lognormvariate(math.log(median), sigma))
