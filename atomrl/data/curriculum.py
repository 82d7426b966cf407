"""The curriculum of a run: which prompt is sampled next, and which groups are trained on.

A `Curriculum` has an order of the prompts (`PromptStream`; by default each epoch is shuffled anew) and gates. A `Gate`
skips prompts before they are sampled and rejects groups after they are scored; the source of the groups then draws
others. `Sampler` and `Gate` are the base classes of a user's own. All state is in each checkpoint, so that a resumed
run draws the same prompts.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from atomrl.common.errors import ConfigError
from atomrl.data.prompt_stream import PromptStream
from atomrl.types import Problem, Trajectory

Group = Sequence[Trajectory]
"""The scored trajectories of one prompt."""


class Part:
    """Base class of the parts of a curriculum that learn from groups. By default it learns nothing."""

    def observe(self, group: Group) -> None:
        """Learn from a scored group. Called once per group, when it is trained on or rejected, with prompt, texts and
        rewards of its trajectories (`problem`, `text`, `total_reward`; None: no reward)."""

    def state(self) -> Mapping[str, Any]:
        """Return what the part has learned, as JSON, for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the part, logged each step as `curriculum/NAME`."""
        return {}


class Sampler(Part, ABC):
    """Base class of a user's order of the prompts: `curriculum.sampler: {type: custom, function: PATH}`.

    Args:
        problems: all problems of the run. `curriculum.sampler.args` are passed by name after it.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems

    @abstractmethod
    def next(self) -> int | None:
        """Return the index in `problems` of the prompt to sample next; None: there is none now. The step then continues
        with fewer groups."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Return all that decides on the next prompts, as JSON, for a checkpoint."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


class Gate(Part):
    """Base class of a decision on prompts and groups: `curriculum.gates: [{type: custom, function: PATH}]`."""

    def admits(self, problem: Problem) -> bool:
        """Return whether a prompt is sampled now. Called before each prompt; False skips it in this epoch."""
        return True

    def accepts(self, group: Group) -> bool:
        """Return whether a scored group is trained on; False: it is recorded, and another one is sampled instead."""
        return True


class SolvedGate(Gate):
    """Drops a prompt for the rest of the run once `groups` groups of it in a row had only rewards of at least
    `reward`."""

    def __init__(self, groups: int, reward: float) -> None:
        self.groups, self.reward = groups, reward
        self._in_a_row: dict[str, int] = {}

    def admits(self, problem: Problem) -> bool:
        return self._in_a_row.get(problem.problem_id, 0) < self.groups

    def observe(self, group: Group) -> None:
        rewards, name = rewards_of(group), group[0].problem.problem_id
        if rewards and min(rewards) >= self.reward:
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        elif rewards and self.admits(group[0].problem):  # what is dropped stays so
            self._in_a_row.pop(name, None)

    def state(self) -> Mapping[str, Any]:
        return {"in_a_row": dict(self._in_a_row)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._in_a_row = dict(state["in_a_row"])

    def metrics(self) -> Mapping[str, float]:
        return {"solved": float(sum(count >= self.groups for count in self._in_a_row.values()))}


class RewardFilter(Gate):
    """Accepts groups by their rewards alone: the algorithm's `group_filter` (dynamic sampling: DAPO, arXiv:2503.14476,
    section 3.2)."""

    def __init__(self, accepts_rewards: Callable[[Sequence[float]], bool]) -> None:
        self.accepts_rewards = accepts_rewards

    def accepts(self, group: Group) -> bool:
        return self.accepts_rewards(rewards_of(group))


def rewards_of(group: Group) -> list[float]:
    """Return the rewards of a group, without those that are missing and those of trajectories without a sampled
    token."""
    written = [item for item in group if any(part.origin == "model" and part.token_ids for part in item.segments)]
    return [item.total_reward for item in written if item.total_reward is not None]


class SampledStream(PromptStream):
    """A stream in the order of a user's `Sampler`. A prompt id is `position:problem_id`.

    Args:
        sampler: chooses the problems.
        name: of the sampler, for messages.
    """

    def __init__(self, problems: Sequence[Problem], sampler: Sampler, name: str) -> None:
        super().__init__(problems, shuffle=False)
        self.sampler, self.name = sampler, name
        self._drawn: dict[int, int] = {}
        """Position -> index of its problem, for positions that may be drawn again."""

    def next(self) -> int | None:
        index = self.sampler.next()
        if index is None:
            return None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.problems):
            raise ConfigError(f"{self.name}: next() returned {index!r}, not an index of {len(self.problems)} problems")
        position = super().next()
        assert position is not None
        self._drawn[position] = index
        return position

    def at(self, position: int) -> tuple[str, Problem]:
        problem = self.problems[self._drawn[position]]
        return f"{position}:{problem.problem_id}", problem

    def settle(self, position: int) -> None:
        self._drawn.pop(position, None)

    def state(self, pending: Sequence[int]) -> dict[str, Any]:
        """Return the sampler's state, and the problems at the positions that will be drawn again."""
        return {"sampler": dict(self.sampler.state()), "drawn": {str(place): self._drawn[place] for place in pending}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.sampler.load(state["sampler"])
        self._drawn = {int(key): value for key, value in state["drawn"].items()}


class Draw(NamedTuple):
    """A prompt to sample."""

    position: int
    """Number of the draw since the start of the run."""
    step: int
    """Step from which the seeds of its completions are derived."""
    prompt_id: str
    problem: Problem


class CurriculumState(NamedTuple):
    """All that a resumed run needs to draw the same prompts."""

    position: int = 0
    """Position in the stream of prompts."""
    pending: Sequence[tuple[int, int]] = ()
    """Position and step of the draws whose groups are neither trained on nor rejected yet. Step 0: of a group that is
    sampled again, with new seeds."""
    parts: Mapping[str, Any] = {}
    """State of the sampler and of each gate, by name."""


class Curriculum:
    """Chooses the prompts of a run and the groups to train on. Its methods may be called from several threads.

    Example:
        >>> problems = [Problem(problem_id=name, prompt=name, ground_truth="") for name in "abc"]
        >>> curriculum = Curriculum(PromptStream(problems, shuffle=False))
        >>> [draw.prompt_id for draw in curriculum.take(2, step=1)]
        ['0:a', '0:b']
        >>> resumed = Curriculum(PromptStream(problems, shuffle=False))
        >>> resumed.load(curriculum.state())
        >>> [draw.prompt_id for draw in resumed.take(3, step=2)]  # two groups were lost
        ['0:a', '0:b', '0:c']
    """

    def __init__(self, stream: PromptStream, gates: Mapping[str, Gate] | None = None) -> None:
        """
        Args:
            stream: the prompts in their order.
            gates: by name; all have to admit a prompt and accept a group.
        """
        self.stream, self.gates = stream, dict(gates or {})
        self._again: list[tuple[int, int]] = []
        self._open: dict[str, tuple[int, int]] = {}
        """Prompt id -> position and step, for draws whose groups are neither trained on nor rejected."""
        self.is_empty = False
        """True if there was no prompt at the last draw, and no group since."""
        self._lock = threading.RLock()

    @property
    def rejects(self) -> bool:
        """True if a gate may reject a group."""
        return any(type(gate).accepts is not Gate.accepts for gate in self.gates.values())

    def next(self, step: int) -> Draw | None:
        """Draw a prompt: first those that are pending, then the next of the stream that all gates admit.

        Args:
            step: step of the draw, unless it was pending with another one.

        Returns:
            None if there is no prompt until a group is observed.
        """
        with self._lock:
            if self._again:
                position, own = self._again.pop(0)
            elif not self.is_empty and (found := self._next_admitted()) is not None:
                position, own = found, step
            else:
                self.is_empty = True
                return None
            draw = Draw(position, own or step, *self.stream.at(position))
            self._open[draw.prompt_id] = (position, draw.step)
            return draw

    def _next_admitted(self) -> int | None:
        for _ in range(2 * len(self.stream.problems)):  # each problem at least once
            position = self.stream.next()
            if position is None or all(gate.admits(self.stream.at(position)[1]) for gate in self.gates.values()):
                return position
            self.stream.settle(position)
        return None

    def take(self, count: int, step: int) -> list[Draw]:
        """Draw up to `count` prompts."""
        draws: list[Draw] = []
        while len(draws) < count and (draw := self.next(step)) is not None:
            draws.append(draw)
        return draws

    def again(self, draw: Draw) -> None:
        """Have a draw sampled again, whose group was dropped; with the seeds of a later step."""
        with self._lock:
            del self._open[draw.prompt_id]
            self._again.append((draw.position, 0))

    def accepts(self, group: Group) -> bool:
        """Return whether a scored group is trained on."""
        with self._lock:
            return all(gate.accepts(group) for gate in self.gates.values())

    def observe(self, group: Group) -> None:
        """Learn from a group that is trained on or rejected from here on; its draw is no longer pending."""
        with self._lock:
            position, _ = self._open.pop(group[0].prompt_id, (-1, 0))
            self.stream.settle(position)
            self.is_empty = False
            for part in self.parts.values():
                part.observe(group)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts that have a state, by name."""
        own: dict[str, Part] = {"sampler": self.stream.sampler} if isinstance(self.stream, SampledStream) else {}
        return own | self.gates

    def state(self, with_pending: bool = True) -> CurriculumState:
        """Return the state for a checkpoint.

        Args:
            with_pending: the draws that are pending now are drawn again after `load`.
        """
        with self._lock:
            pending = sorted([*self._again, *self._open.values()]) if with_pending else []
            parts = {
                name: dict(gate.state()) for name, gate in self.gates.items() if type(gate).state is not Part.state
            }
            if isinstance(self.stream, SampledStream):
                parts["sampler"] = self.stream.state([position for position, _ in pending])
            return CurriculumState(self.stream.position, pending, deepcopy(parts))  # parts go on learning

    def load(self, state: CurriculumState) -> None:
        """Continue from a state. Parts that it does not have stay as they are."""
        with self._lock:
            self.stream.position, self._open, self.is_empty = state.position, {}, False
            self._again = [(position, step) for position, step in state.pending]
            parts = deepcopy(dict(state.parts))
            for name, gate in self.gates.items():
                if name in parts:
                    gate.load(parts[name])
            if isinstance(self.stream, SampledStream) and "sampler" in parts:
                self.stream.load(parts["sampler"])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all parts, as `curriculum/NAME`."""
        with self._lock:
            found = [item for part in self.parts.values() for item in part.metrics().items()]
            return {f"curriculum/{name}": float(value) for name, value in found}
