"""A discrete-event simulation of the loops: what waits for what.

What is decided (how many groups are open, which are trained on, dropped and cut short) is asked of
`atomrl.trainer.sources`, as `AsyncRolloutSource` does. Around it are simulated

- engines: each has slots that draw at one pace, which depends on how many are taken; a group goes whole to the engine
  that holds the fewest completions; for new weights all stand at once;
- the driver: one process, which takes outputs one after the other;
- rewards of a group, waiting beside a completion (tools), learning, and the transfer of weights.

Left out: groups that the algorithm refuses, evaluations, and checkpoints.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from simulated_parts import Completion, Engine, Group, Machine

from atomrl.config import AsynchronousConfig
from atomrl.trainer.staleness import groups_to_truncate, open_limit, select_groups, too_old


class Simulation:
    """One run: `run` gives what it took.

    Args:
        machine: what it runs on.
        settings: the section `asynchronous`; None: the synchronous loop, all completions, then all rewards.
        steps, seed: of the run.
        skip: steps at its beginning that are not counted.
        tail: steps at its end that are not counted.
    """

    def __init__(
        self,
        machine: Machine,
        settings: AsynchronousConfig | None,
        steps: int,
        seed: int = 0,
        skip: int = 0,
        tail: int = 0,
    ) -> None:
        self.machine, self.steps, self.rng, self.skip, self.tail = machine, steps, random.Random(seed), skip, tail
        self.synchronous, self.settings = settings is None, settings or AsynchronousConfig(max_staleness=0)
        self.now, self.number = 0.0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.engines = [Engine(machine) for _ in range(machine.engines)]
        self.open: dict[int, Group] = {}
        self.again: list[int] = []
        self.position = self.version = self.wanted = self.step = 0
        self.hold = self.stands = self.learning = False
        self.late: list[Completion] = []
        self.driver_free = 0.0
        self.learned_work = self.learn_since = 0.0
        self.learn_slow, self.learn_stamp = 1.0, 0
        self.behind: dict[int, float] = {}
        self.dropped = self.cut = 0
        self.waited_s = self.asked = self.began = self.ended = 0.0

    def at(self, moment: float, then: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (moment, self.number, then))

    def run(self) -> dict[str, float]:
        self.ask()
        while not self.ended:
            self.now, _, then = heapq.heappop(self.events)
            then()
        passed = self.ended - self.began
        total, tokens = sum(self.behind.values()), sum(engine.tokens for engine in self.engines)
        full = self.machine.slots / self.machine.token_s(self.machine.slots) * self.machine.engines
        return {
            "steps_per_hour": 3600 * (self.steps - self.skip - self.tail) / passed,
            "trainer_idle": self.waited_s / passed,
            "engine_idle": 1 - sum(engine.busy_s for engine in self.engines) / (len(self.engines) * passed),
            "engine_use": tokens / (full * passed),
            "staleness_mean": sum(age * count for age, count in self.behind.items()) / total,
            "staleness_max": max(self.behind),
            "dropped": self.dropped,
        }

    # ---- The trainer ----

    def ask(self) -> None:
        """The trainer wants the groups of the next step."""
        self.step += 1
        if self.step > self.steps - self.tail:
            for engine in self.engines:
                engine.settle(self.now)
            self.ended = self.now
            return
        if self.step == self.skip + 1:
            self.began, self.waited_s, self.behind = self.now, 0.0, {}
            for engine in self.engines:
                engine.settle(self.now)
                engine.busy_s = engine.tokens = 0.0
        self.wanted, self.asked = self.machine.groups, self.now
        self.give()
        if self.wanted:
            self.submit()
            self.shorten()

    def give(self) -> None:
        """The trainer takes its groups once there are enough."""
        ready = [group for group in self.open.values() if group.ready]
        if not self.wanted or len(ready) < self.wanted:
            return
        found = select_groups(ready, self.wanted)
        for group in found:
            del self.open[group.position]
            for version, tokens in (span for item in group.finished for span in item.spans):
                self.behind[self.version - version] = self.behind.get(self.version - version, 0.0) + tokens
        self.wanted = 0
        self.waited_s += self.now - self.asked
        self.trained(found)
        self.learning, self.learned_work, self.learn_since = True, 0.0, self.now
        self.share()
        self.submit()

    def trained(self, groups: Sequence[Group]) -> None:
        """They are what the step learns from."""

    def share(self) -> None:
        """Trainer and engines slow each other down where they share cores; plan what ends next."""
        both = self.machine.shared < 1 and self.learning and any(engine.pace() for engine in self.engines)
        slow = self.machine.shared if both else 1.0
        for engine in self.engines:
            if engine.slow != slow:
                engine.settle(self.now)
                engine.slow = slow
                self.plan(engine)
        if not self.learning:
            return
        self.learned_work += (self.now - self.learn_since) * self.learn_slow
        self.learn_since, self.learn_slow = self.now, slow
        self.learn_stamp += 1
        stamp, left = self.learn_stamp, self.machine.learn_s - self.learned_work
        self.at(self.now + left / slow, lambda: self.learned() if stamp == self.learn_stamp else None)

    def learned(self) -> None:
        """Weights wait for engines that are to finish what they hold."""
        self.learning, self.learn_slow, self.hold, self.asked = False, 1.0, True, self.now
        self.stand()

    def stand(self) -> None:
        """The engines draw no more until the weights are there, where nothing is to be finished before."""
        if self.settings.on_update == "wait" and any(engine.held for engine in self.engines):
            return
        self.stands = True
        for engine in self.engines:
            engine.settle(self.now)
            engine.stands = True
            self.plan(engine)
        self.share()
        self.waited_s += self.now - self.asked
        self.at(self.now + self.machine.transfer_s, self.transferred)

    def transferred(self) -> None:
        begun = []
        if self.settings.on_update == "abort":
            begun = [replace(item, spans=[]) for group in self.open.values() for item in self.withdraw(group)]
        for engine in self.engines:
            for _, _, item in engine.active:
                engine.mark(item, self.version)
        self.version += 1
        for item in begun:
            item.group.version = self.version
            item.group.waiting.append(item)
            self.hand(item)
        for group in too_old(self.open.values(), self.settings, self.version):
            self.withdraw(group)
            del self.open[group.position]
            self.again.append(group.position)
            self.dropped += 1
        self.hold = self.stands = False
        self.released()
        for engine in self.engines:
            engine.stands = False
            self.fill(engine)
        late, self.late = self.late, []
        for item in late:
            self.at(self.now, lambda item=item: self.take(item))
        self.share()
        self.submit()
        self.ask()

    def released(self) -> None:
        """The engines have the weights."""

    # ---- Engines and driver ----

    def submit(self) -> None:
        """Submit the allowed groups, unless the trainer uses the engines."""
        if self.hold:
            return
        if self.synchronous:
            limit = self.wanted
        else:
            limit = open_limit(self.settings, self.machine.groups, self.wanted, self.steps - self.step)
        touched = {}
        while len(self.open) < limit:
            position = self.again.pop(0) if self.again else self.position
            self.position = max(self.position, position + 1)
            engine = min(self.engines, key=lambda engine: engine.held)
            group = Group(position, self.version, engine)
            self.open[position] = group
            for index in range(self.machine.members):
                item = Completion(group, index, self.machine.length(self.rng), self.machine.beside_s(self.rng))
                group.waiting.append(item)
                self.hand(item)
            touched[id(engine)] = engine
            self.begun(group)
        for engine in touched.values():
            self.fill(engine)
        if touched:
            self.share()

    def begun(self, group: Group) -> None:
        """It is submitted."""

    def hand(self, item: Completion) -> None:
        item.group.engine.held += 1
        item.group.engine.queue.append(item)

    def fill(self, engine: Engine) -> None:
        """Free slots take completions that wait."""
        engine.settle(self.now)
        while engine.queue and len(engine.active) < self.machine.slots:
            item = engine.queue.popleft()
            item.start, self.number = engine.work, self.number + 1
            heapq.heappush(engine.active, (engine.work + item.tokens, self.number, item))
        self.plan(engine)

    def plan(self, engine: Engine) -> None:
        """When its next completion has its last token."""
        engine.stamp += 1
        if pace := engine.pace():
            stamp, moment = engine.stamp, engine.since + max(0.0, engine.active[0][0] - engine.work) / pace
            self.at(moment, lambda: self.drawn(engine) if stamp == engine.stamp else None)

    def drawn(self, engine: Engine) -> None:
        engine.settle(self.now)
        _, _, item = heapq.heappop(engine.active)
        engine.mark(item, self.version)
        self.at(self.now + item.beside_s, lambda: self.arrived(item))
        self.fill(engine)
        if not engine.active:
            self.share()

    def arrived(self, item: Completion) -> None:
        """At the driver, which takes one after the other."""
        if item in item.group.waiting:
            self.driver_free = max(self.now, self.driver_free) + self.machine.output_s
            self.at(self.driver_free, lambda: self.take(item))

    def take(self, item: Completion) -> None:
        group = item.group
        if item not in group.waiting:  # given up
            return
        if self.stands:
            self.late.append(item)
            return
        group.engine.held -= 1
        group.waiting.remove(item)
        group.finished.append(item)
        self.received(item)
        if not group.waiting:
            self.complete(group)
        if self.synchronous:
            return
        self.shorten()
        self.submit()
        if self.hold:
            self.stand()

    def shorten(self) -> None:
        """Groups that go on without their last completions."""
        for short in groups_to_truncate(self.open.values(), self.settings, self.wanted):
            self.withdraw(short)
            self.cut += 1
            self.shortened(short)
            self.complete(short)

    def received(self, item: Completion) -> None:
        """The driver has it."""

    def shortened(self, group: Group) -> None:
        """It is one of them."""

    def withdraw(self, group: Group) -> list[Completion]:
        """Take back what an engine has of a group."""
        engine, gone = group.engine, group.waiting
        group.waiting = []
        engine.settle(self.now)
        engine.active = [entry for entry in engine.active if entry[2] not in gone]
        heapq.heapify(engine.active)
        engine.queue = deque(item for item in engine.queue if item not in gone)
        self.late = [item for item in self.late if item not in gone]
        engine.held -= len(gone)
        self.fill(engine)
        return gone

    # ---- Rewards ----

    def complete(self, group: Group) -> None:
        if not self.synchronous:
            self.at(self.now + self.machine.reward_s(self.rng), lambda: self.scored([group]))
        elif not any(other.waiting for other in self.open.values()):  # one call with the whole batch
            seconds = max(self.machine.reward_s(self.rng) for _ in self.open)
            self.at(self.now + seconds, lambda: self.scored([*self.open.values()]))

    def scored(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if self.open.get(group.position) is group:
                group.ready = True
        self.rewarded(groups)
        self.give()
        self.submit()

    def rewarded(self, groups: Sequence[Group]) -> None:
        """Their rewards are there."""
