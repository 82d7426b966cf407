"""The simulation against the scheduler itself: what the one does in its time, the other must do in the same order."""

# ruff: noqa: B023  (what is waited for is looked at before the loop goes on)

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

from atomrl.config import AsynchronousConfig
from atomrl.trainer.async_source import AsyncRolloutSource
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.types import GenerationOutput, Segment
from tests.trainer.scripted import make_parts

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from simulated_parts import Machine, lognormal
from simulation import Simulation

STEPS, GROUPS, MEMBERS = 8, 3, 4


class Kept(list):
    """A list that knows what was appended to it."""

    def __init__(self):
        self.all = []

    def append(self, item):
        super().append(item)
        self.all.append(item)

    def new(self):
        places, self.all = self.all, []
        return places


class Noted(Simulation):
    """Keeps what happens, in its order: what comes from outside (a letter in `OUTSIDE`), and what is decided."""

    def __init__(self, *args):
        self.notes = []
        super().__init__(*args)
        self.again = Kept()

    def ask(self):
        if self.step < self.steps:
            self.notes.append(("collect", self.step + 1))
        super().ask()

    def begun(self, group):
        self.notes.append(("submitted", group.position))

    def received(self, item):
        self.notes.append(("drawn", item.group.position, item.index, list(item.spans)))

    def shortened(self, group):
        self.notes.append(("cut", group.position))

    def rewarded(self, groups):
        self.notes += [("rewarded", group.position) for group in groups if group.ready]

    def trained(self, groups):
        self.notes.append(("trained", [group.position for group in groups]))

    def learned(self):
        self.notes.append(("update", self.version + 1))
        super().learned()

    def released(self):
        self.notes.append(("updated", self.again.new()))


class Replayed:
    """A `AsyncRolloutSource` whose engine, rewards and trainer do what a test says, one thing at a time."""

    seeded = exact = True
    returns_candidates = False

    def __init__(self, folder, settings):
        parts = make_parts(folder, lambda problem, index: "x", lambda item: float(item.index % 2))
        source = parts.source
        self.polls = self.polls_of_trainer = self.taken_in = 0
        self.in_transfer, self.transferred = False, queue.Queue()
        self.version, self.held, self.submitted, self.given = 0, set(), [], queue.Queue()
        self.rewarded, self.one_by_one = defaultdict(threading.Event), source.rewards
        self.scoring = {}
        """Thread that scores a group, by its position and oldest version."""
        self.asked, self.results = queue.Queue(), queue.Queue()
        self.scheduler = AsyncRolloutSource(
            engine=self, transfer=self.transfer, algorithm=source.algorithm, curriculum=source.curriculum,
            processor=source.processor, rewards=self, sampling=source.sampling, settings=settings,
            groups=GROUPS, steps=STEPS,
        )  # fmt: skip
        self.thread = threading.Thread(target=self.trainer, daemon=True)
        self.thread.start()

    def submit(self, requests):
        if not (self.in_transfer and threading.current_thread() is self.thread):  # there, requests begin anew
            self.submitted += [int(request.group_id.partition(":")[2]) for request in requests]
        self.held |= {request.request_id for request in requests}

    def poll(self, wait_s):
        self.polls += 1
        self.polls_of_trainer += threading.current_thread() is self.thread
        try:
            name, spans = self.given.get(timeout=wait_s)
        except queue.Empty:
            return []
        assert name in self.held
        self.taken_in = self.polls
        self.held.remove(name)
        segments = tuple(
            Segment(origin="model", token_ids=(5,), logprobs=(-1.0,), policy_version=version) for version, _ in spans
        )
        return [GenerationOutput(request_id=name, segments=segments, text="x", finish_reason="stop")]

    def abort(self, names):
        self.held -= set(names)
        return []

    def transfer(self, version):
        self.in_transfer = True
        self.transferred.get(timeout=300)
        self.version = version

    def __call__(self, items, judge=True):
        assert not judge  # of a group: failures are judged over a step
        place = int(items[0].problem.problem_id)
        versions = {part.policy_version for item in items for part in item.segments} - {None}
        self.scoring[place, min(versions)] = threading.current_thread()
        self.rewarded[place, min(versions)].wait(300)
        return self.one_by_one(items)

    def judge(self, items):
        pass

    def trainer(self):
        while (asked := self.asked.get()) is not None:
            try:
                what, number = asked
                if what == "collect":
                    groups, _ = self.scheduler.collect(GROUPS, number, Stopwatch())
                    self.results.put([int(group[0].problem.problem_id) for group in groups])
                else:
                    self.results.put(self.update(number))
            except Exception as error:
                self.results.put(error)

    def update(self, version):
        """Send weights; return the positions of groups that were dropped for them, some of which are there again."""
        waited, submitted = self.to_be_drawn_again(), len(self.submitted)
        self.scheduler.update(version)
        self.in_transfer = False
        waiting = self.to_be_drawn_again()
        return sorted((waiting | {*self.submitted[submitted:]} & {*self.submitted[:submitted]}) - waited)

    def to_be_drawn_again(self):
        return {position for position, step in self.scheduler.curriculum.state().pending if not step}


def until(there, what):
    end = time.monotonic() + 120
    while not there():
        assert time.monotonic() < end, str(what)
        time.sleep(0.0005)


def replay(notes, engine):
    """Do what came from outside, in the same order, and compare what is decided."""
    scheduler, submitted, oldest = engine.scheduler, [], {}
    for number, (what, *about) in enumerate(notes):
        where = notes[max(0, number - 8) : number + 1]
        if what == "collect":
            engine.asked.put((what, about[0]))
            until(lambda: scheduler.step == about[0], where)
        elif what == "submitted":
            submitted += about * MEMBERS
            oldest.pop(about[0], None)
            until(lambda: len(engine.submitted) >= len(submitted), where)
            assert engine.submitted[: len(submitted)] == submitted, where
        elif what == "drawn":
            place, index, spans = about
            versions = [version for version, _ in spans]
            oldest[place] = min([*versions, oldest.get(place, versions[0])])
            name = f"0:{place}/{index}"
            engine.given.put((name, spans))
            until(lambda: name not in engine.held, where)
            scored = place, oldest[place]
            until(lambda: engine.polls > engine.taken_in or (not engine.held and scored in engine.scoring), where)
        elif what == "cut":
            until(lambda: not any(name.startswith(f"0:{about[0]}/") for name in engine.held), where)
        elif what == "rewarded":
            scored = about[0], oldest[about[0]]
            engine.rewarded[scored].set()
            until(lambda: scored in engine.scoring and not engine.scoring[scored].is_alive(), where)
        elif what == "update":
            polls = engine.polls_of_trainer
            engine.asked.put((what, about[0]))
            until(lambda: engine.in_transfer or engine.polls_of_trainer > polls or engine.results.qsize(), where)
        elif what == "updated":
            polls = engine.polls
            engine.transferred.put(None)
            assert engine.results.get(timeout=120) == sorted(about[0]), where
            until(lambda: engine.polls > polls or not engine.held, where)
        else:
            assert what == "trained" and engine.results.get(timeout=120) == about[0], where
    assert engine.submitted == submitted


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "keys",
    [
        {"max_staleness": 0},
        {"max_staleness": 1},
        {"max_staleness": 3},
        {"max_staleness": 1, "on_update": "abort"},
        {"max_staleness": 2, "on_update": "wait"},
        {"max_staleness": 1, "oversampling": 1.5},
        {"max_staleness": 1, "min_completions": 2},
        {"max_staleness": 0, "oversampling": 2.0, "min_completions": 3, "on_update": "abort"},
    ],
    ids=lambda keys: " ".join(map(str, keys.values())),
)
def test_the_scheduler_does_what_the_simulation_does_in_the_same_order(tmp_path, keys, seed):
    """Every group that is submitted, trained on, dropped and cut, by a scheduler that gets the same outputs, rewards
    and demands in the same order."""
    settings, rng = AsynchronousConfig(timeout_s=600, **keys), random.Random(seed)
    machine = Machine(
        engines=1, slots=rng.choice((3, 8, 40)), token_s=lambda rows: 1.0 + 0.1 * rows, length=lognormal(6, 1.0, 60),
        learn_s=rng.choice((5.0, 30.0)), transfer_s=2.0, groups=GROUPS, members=MEMBERS,
        beside_s=lambda rng: rng.choice((0.0, 4.0)), reward_s=lambda rng: rng.expovariate(0.1),
    )  # fmt: skip
    simulation = Noted(machine, settings, STEPS, seed)
    simulation.run()
    engine = Replayed(tmp_path, settings)
    try:
        replay(simulation.notes, engine)
    finally:
        engine.asked.put(None)
        engine.scheduler.close()
