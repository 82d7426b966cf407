"""A discrete-event simulation of the asynchronous loop: what waits for what, on this machine and on clusters.

    python benchmarks/simulate_cluster.py RESULTS      results.json of benchmarks/async_vs_sync.py: how far it is off
    python benchmarks/simulate_cluster.py              2 to 1,024 GPUs, and the plan for 64 GPUs and a 32B model

Simulated is the policy of `atomrl/loop/scheduler.py`: open groups up to those that the trainer waits for and
`max_staleness` steps more (times `oversampling`), the oldest complete groups are trained on, what becomes too old when
weights change is dropped and drawn again, and with `wait` the engine is emptied first. An engine is a number of slots
that each draw one completion at a time, all at one pace. A step of the trainer, a transfer, lengths and waits are what
the machine says they are. Assumptions of the clusters are at the top of this file, each with where it is from.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Model:
    """A dense model: numbers of its config.json."""

    name: str
    parameters: float
    layers: int
    kv_numbers: int
    """Of a layer and token: keys and values x heads x size of a head."""
    tensor_parallel: int
    """GPUs of an engine, so that weights leave room for a cache."""


SMALL = Model("Qwen2.5-1.5B", 1.54e9, 28, 2 * 2 * 128, 1)
LARGE = Model("Qwen2.5-32B", 32.5e9, 64, 2 * 8 * 128, 4)
FLOPS, MFU = 990e12, 0.40
"""Of an H100 in bfloat16 (NVIDIA's data sheet, dense), and the share of it that training reaches."""
HBM_BYTES_S, HBM_SHARE, HBM_BYTES = 3.35e12, 0.6, 80e9
"""Memory bandwidth (the same data sheet), the share that decoding reaches, and the memory."""
TOKEN_S = 0.004
"""Least time of a token of an engine: kernels to launch, and exchanges within a layer."""
LINK_BYTES_S = 50e9
"""Between two nodes: an adapter of 400 Gbit/s. An update goes down a chain of engines, each of which passes it on."""
TRAINED_BYTES = 16
"""Of a parameter while it is trained: weights, gradient, Adam's two moments, in float32."""
PROMPT, MEDIAN, SIGMA, LONGEST = 512, 3000, 0.9, 16384
"""Tokens: prompts, and completions that are log-normal with a limit."""
GROUPS, MEMBERS = 128, 8
"""Of a step; kept when GPUs are added, as an algorithm's batch is."""
REWARD_S = 5.0
"""Mean of a group's rewards, exponentially distributed."""


@dataclass
class Machine:
    """What the simulated loop runs on."""

    slots: int
    """Completions that are drawn at once, in all engines."""
    learn_s: float
    """A step of the trainer, but for waiting and the transfer."""
    transfer_s: float
    draw_s: Callable[[random.Random, int], float]
    """(chance, busy slots) -> seconds from a slot's being given to a completion until it is free again."""
    beside_s: Callable[[random.Random], float] = lambda rng: 0.0
    """Seconds that a completion takes without a slot (a tool)."""
    reward_s: Callable[[random.Random], float] = lambda rng: 0.0
    """Seconds that a group's rewards take."""
    groups: int = GROUPS
    members: int = MEMBERS


@dataclass
class Policy:
    """Keys of the section `asynchronous`; `synchronous` is no section: all completions, then all rewards."""

    synchronous: bool = False
    max_staleness: int = 1
    on_update: str = "keep"
    oversampling: float = 1.0


@dataclass(eq=False)
class Group:
    version: int
    left: int
    ready: bool = False
    dropped: bool = False


class Simulation:
    """One run: `run` gives what it took."""

    def __init__(self, machine: Machine, policy: Policy, steps: int, seed: int = 0) -> None:
        self.machine, self.policy, self.steps, self.rng = machine, policy, steps, random.Random(seed)
        self.now, self.number = 0.0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.waiting: deque[Group] = deque()
        self.open: list[Group] = []
        self.busy, self.busy_s, self.since = 0, 0.0, 0.0
        self.version, self.wanted, self.step, self.draining = 0, 0, 0, False
        self.dropped, self.staleness = 0, [0]
        self.waited_s = self.asked = self.ended = 0.0

    def at(self, delay: float, then: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + delay, self.number, then))

    def run(self) -> dict[str, float]:
        self.ask()
        while self.events and self.step <= self.steps:
            moment, _, then = heapq.heappop(self.events)
            self.busy_s += self.busy * (moment - self.now)
            self.now = moment
            then()
        return {
            "steps_per_hour": 3600 * self.steps / self.ended,
            "trainer_idle": self.waited_s / self.ended,
            "engine_idle": 1 - self.busy_s / (self.machine.slots * self.ended),
            "staleness_mean": statistics.fmean(self.staleness),
            "dropped": self.dropped / self.steps,
        }

    def ask(self) -> None:
        """The trainer wants the groups of the next step."""
        self.step += 1
        if self.step > self.steps:
            self.ended = self.now
            return
        self.wanted, self.asked = self.machine.groups, self.now
        self.submit()
        self.give()

    def submit(self) -> None:
        if self.draining:
            return
        ahead = 0 if self.policy.synchronous else min(self.policy.max_staleness, self.steps - self.step)
        limit = math.ceil(self.policy.oversampling * (self.wanted + ahead * self.machine.groups))
        while len(self.open) < limit:
            group = Group(self.version, self.machine.members)
            self.open.append(group)
            self.waiting.extend([group] * self.machine.members)
        self.fill()

    def fill(self) -> None:
        """Free slots take completions that wait."""
        while self.waiting and self.busy < self.machine.slots:
            group = self.waiting.popleft()
            if group.dropped:
                continue
            self.busy += 1
            seconds = self.machine.draw_s(self.rng, min(self.machine.slots, self.busy + len(self.waiting)))
            self.at(seconds, lambda group=group: self.drawn(group))

    def drawn(self, group: Group) -> None:
        self.busy -= 1
        self.at(self.machine.beside_s(self.rng), lambda: self.complete(group))
        self.fill()

    def complete(self, group: Group) -> None:
        group.left -= 1
        if self.policy.synchronous:
            if not any(group.left for group in self.open):  # one call with the whole batch
                self.at(max(self.machine.reward_s(self.rng) for _ in self.open), self.all_scored)
        elif not group.left:
            self.at(self.machine.reward_s(self.rng), lambda: self.scored(group))

    def all_scored(self) -> None:
        for group in self.open:
            group.ready = True
        self.give()

    def scored(self, group: Group) -> None:
        group.ready = True
        self.give()

    def give(self) -> None:
        """The trainer takes the oldest groups once there are enough."""
        ready = [group for group in self.open if group.ready]
        if not self.wanted or len(ready) < self.wanted:
            return
        taken = sorted(ready, key=lambda group: group.version)[: self.wanted]
        self.staleness += [self.version - group.version for group in taken]
        self.open = [group for group in self.open if group not in taken]
        self.wanted = 0
        self.waited_s += self.now - self.asked
        self.submit()
        self.at(self.machine.learn_s, self.learned)

    def learned(self) -> None:
        if self.policy.on_update == "wait" and any(group.left for group in self.open):
            self.draining = True
            self.at(0.05, self.learned)
            return
        self.at(self.machine.transfer_s, self.transferred)

    def transferred(self) -> None:
        self.draining, self.version = False, self.version + 1
        for group in [g for g in self.open if g.version < self.version - self.policy.max_staleness]:
            group.dropped = True
            self.dropped += 1
            self.open.remove(group)
        self.ask()


def measured_machine(report: Mapping[str, Any], waiting: str) -> Machine:
    """This machine as benchmarks/async_vs_sync.py measured it without waiting, with the waiting that it injected."""
    from async_vs_sync import LONGEST_S, SHORTEST_S

    alone, scale = report["alone"], report["scale"]
    completions = report["prompts"] * report["completions"]
    tail = waiting == "tail"
    return Machine(
        slots=completions,
        learn_s=alone["learn_s"] - alone["sync_s"],
        transfer_s=alone["sync_s"],
        draw_s=lambda rng, busy: alone["gen_s"] * busy / completions,
        beside_s=lambda rng: tail * scale * min(LONGEST_S, SHORTEST_S / max(rng.random(), 1e-9)),
        reward_s=lambda rng: 0.0 if tail else report["step_s"],
        groups=report["prompts"],
        members=report["completions"],
    )


def policy_of(variant: str) -> Policy:
    from async_vs_sync import VARIANTS

    keys = VARIANTS[variant].get("asynchronous")
    return Policy(synchronous=True) if keys is None else Policy(**{"max_staleness": 1, **keys})


def compare(report: Mapping[str, Any]) -> str:
    """Simulated beside measured."""
    lines = ["| waiting | | measured steps an hour | simulated | off by |", "|---|---|---|---|---|"]
    errors = []
    for waiting in dict.fromkeys(run["waiting"] for run in report["runs"]):
        machine = measured_machine(report, waiting)
        for variant in dict.fromkeys(run["variant"] for run in report["runs"]):
            runs = [run for run in report["runs"] if (run["waiting"], run["variant"]) == (waiting, variant)]
            measured = statistics.median(run["steps_per_hour"] for run in runs)
            found = Simulation(machine, policy_of(variant), runs[0]["steps"]).run()["steps_per_hour"]
            errors.append(found / measured - 1)
            lines.append(f"| {waiting} | {variant} | {measured:,.0f} | {found:,.0f} | {errors[-1]:+.0%} |")
    size = statistics.median(map(abs, errors))
    return "\n".join([*lines, "", f"median error {size:.0%}, largest {max(map(abs, errors)):.0%}"])


def length(rng: random.Random) -> float:
    return min(LONGEST, rng.lognormvariate(math.log(MEDIAN), SIGMA))


MEAN = statistics.fmean(length(random.Random(seed)) for seed in range(20000))
"""Tokens of a completion."""


def token_s(model: Model, rows: float) -> float:
    """Seconds of a token of every completion in one engine: weights and cache are read once."""
    cache = rows * (PROMPT + MEAN / 2) * model.layers * model.kv_numbers * 2
    read = (2 * model.parameters + cache) / (model.tensor_parallel * HBM_BYTES_S * HBM_SHARE)
    return TOKEN_S + read


def least_trainers(model: Model) -> int:
    """GPUs whose memory holds the training state, with a fifth left for activations."""
    return math.ceil(TRAINED_BYTES * model.parameters / (0.8 * HBM_BYTES))


def rows_of(model: Model) -> int:
    """Completions that an engine's memory has room for."""
    free = model.tensor_parallel * HBM_BYTES * 0.9 - 2 * model.parameters
    return min(256, int(free / ((PROMPT + MEAN) * model.layers * model.kv_numbers * 2)))


def step_tokens() -> float:
    return GROUPS * MEMBERS * (PROMPT + MEAN)


def cluster(model: Model, trainers: int, engines: int) -> Machine:
    """A trainer on so many GPUs, and so many engines."""
    slots = engines * rows_of(model)
    # 6 a parameter and token for forward and backward pass, 2 for the forward pass that checkpointing repeats
    learn_s = 8 * model.parameters * step_tokens() / (trainers * FLOPS * MFU)
    return Machine(
        slots=slots,
        learn_s=learn_s,
        transfer_s=2 * model.parameters / LINK_BYTES_S,
        draw_s=lambda rng, busy: length(rng) * token_s(model, min(busy, slots) / engines),
        reward_s=lambda rng: rng.expovariate(1 / REWARD_S),
    )


def best_share(model: Model, gpus: int, policy: Policy, steps: int) -> tuple[int, int, dict[str, float]]:
    """GPUs to train on, engines, and what comes of it, where the steps an hour are most."""
    found = []
    for sixteenths in range(1, 16):
        trainers = max(least_trainers(model), round(gpus * sixteenths / 16))
        engines = (gpus - trainers) // model.tensor_parallel
        if engines and not any(trainers == share for share, _, _ in found):
            found.append((trainers, engines, Simulation(cluster(model, trainers, engines), policy, steps).run()))
    return max(found, key=lambda item: item[2]["steps_per_hour"])


def scaling(model: Model, steps: int, sizes: Sequence[int]) -> str:
    """Idle shares by number of GPUs, each with the best division into trainer and engines."""
    lines = [
        f"| GPUs, {model.name} | staleness | train | steps an hour | of the fewest | trainer idle | engines idle |",
        "|---|---|---|---|---|---|---|",
    ]
    fitting = [gpus for gpus in sizes if gpus >= least_trainers(model) + model.tensor_parallel]
    for staleness in (0, 1, 4):
        first = 0.0
        for gpus in fitting:
            trainers, _, found = best_share(model, gpus, Policy(max_staleness=staleness), steps)
            each = found["steps_per_hour"] / gpus
            first = first or each
            lines.append(
                f"| {gpus} | {staleness} | {trainers} | {found['steps_per_hour']:.2f} | {each / first:.0%} | "
                f"{found['trainer_idle']:.0%} | {found['engine_idle']:.0%} |"
            )
    return "\n".join(lines)


def plan(model: Model, gpus: int, steps: int) -> str:
    """The arithmetic of a step."""
    trainers, engines, found = best_share(model, gpus, Policy(max_staleness=1), steps)
    machine = cluster(model, trainers, engines)
    rows, tokens, drawn = rows_of(model), step_tokens() / 1e6, GROUPS * MEMBERS * MEAN
    slow, alone = token_s(model, rows), token_s(model, 1)
    pace, weights = engines * rows / slow, 2 * model.parameters / 1e9
    sync = Simulation(machine, Policy(synchronous=True), steps).run()
    step_s, sync_s = 3600 / found["steps_per_hour"], 3600 / sync["steps_per_hour"]
    return f"""\
- tokens: {GROUPS} groups x {MEMBERS} x ({PROMPT} of the prompt + {MEAN:,.0f}) = {tokens:.2f} million a step
- training, {trainers} GPUs: 8 x {model.parameters:.3g} x {tokens:.2f}e6 / ({trainers} x {FLOPS:.3g} x {MFU}) = \
{machine.learn_s:.0f} s
- drawing, {engines} engines of {model.tensor_parallel} GPUs, {rows} completions each: a token of all takes \
{slow * 1000:.1f} ms, so {drawn / 1e6:.2f} million tokens / {pace:,.0f} a second = {drawn / pace:.0f} s with all slots \
busy; the longest completion alone takes {LONGEST:,} x {alone * 1000:.1f} ms = {LONGEST * alone:.0f} s
- a transfer: {weights:.0f} GB / {LINK_BYTES_S / 1e9:.0f} GB/s = {machine.transfer_s:.1f} s
- together {step_s:.0f} s a step, {3600 / step_s:.1f} an hour (trainer idle {found["trainer_idle"]:.0%}, engines idle \
{found["engine_idle"]:.0%}); the same GPUs synchronously {sync_s:.0f} s"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="of benchmarks/async_vs_sync.py")
    parser.add_argument("--steps", type=int, default=12, help="of each simulated run on a cluster")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2**n for n in range(1, 11)])
    arguments = parser.parse_args()
    if arguments.results:
        print(compare(json.loads(arguments.results.read_text(encoding="utf-8"))))
        return 0
    for model in (SMALL, LARGE):
        print(f"{scaling(model, arguments.steps, arguments.gpus)}\n", flush=True)
    print(f"64 GPUs and {LARGE.name}, one step off:\n\n{plan(LARGE, 64, arguments.steps)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
