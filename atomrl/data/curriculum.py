"""The curriculum of a run: which prompt is sampled next, and which groups are trained on.

A `Curriculum` has an order of the prompts (`PromptStream`; by default each epoch is shuffled anew) and gates. A `Gate`
skips prompts before they are sampled and rejects groups after they are scored; the source of the groups then draws
others. `Sampler` and `Gate` are the base classes of a user's own. All state is in each checkpoint, so that a resumed
run draws the same prompts.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import threading
import traceback
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from atomrl.common.errors import ConfigError
from atomrl.common.functions import find_function
from atomrl.data.columns import IMAGES
from atomrl.data.files import DataError, error_list
from atomrl.data.stored import alike
from atomrl.types import Problem, Segment, Trajectory

if TYPE_CHECKING:
    from atomrl.config import CurriculumConfig

Group = Sequence[Trajectory]
"""The scored trajectories of one prompt."""


class PromptStream:
    """An endless stream of problems: every epoch has each problem once, in its own order.

    The order is a function of the seed and the epoch. So `position`, the number of problems drawn since the start of
    the run, is the whole state to resume from.

    Example:
        >>> problems = [Problem(problem_id=name, prompt=name, ground_truth="") for name in "abc"]
        >>> stream = PromptStream(problems, seed=0, shuffle=False)
        >>> [prompt_id for prompt_id, _ in stream.take(4)]
        ['0:a', '0:b', '0:c', '1:a']
        >>> stream.position = 2
        >>> [prompt_id for prompt_id, _ in stream.take(1)]
        ['0:c']
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        seed: int = 0,
        shuffle: bool = True,
        difficulty: Sequence[float] | None = None,
    ) -> None:
        """
        Args:
            difficulty: of each problem: an epoch goes from the lowest to the highest; equal ones are in the order of
                `shuffle`.

        Raises:
            DataError: no problems are given, or two have the same id.
        """
        if not problems:
            raise DataError("a stream needs at least one problem")
        same = [problem.problem_id for problem in alike(problems, lambda problem: problem.problem_id)]
        if len(set(same)) < len(same):
            count = len(problems) - len(same) + len(set(same))
            raise DataError(f"problem ids must be unique: {len(problems)} problems have {count} ids")
        self.problems = problems
        self.seed = seed
        self.shuffle = shuffle
        self.difficulty = difficulty
        self.position = 0
        self._order: tuple[int, MutableSequence[int]] = (-1, [])

    def take(self, count: int) -> list[tuple[str, Problem]]:
        """Return the next `count` problems, each with its prompt id `epoch:problem_id`; a batch may cross epochs."""
        start, self.position = self.position, self.position + count
        return [self.at(position) for position in range(start, self.position)]

    def next(self) -> int | None:
        """Return the next position. Never None: the stream is endless."""
        self.position += 1
        return self.position - 1

    def at(self, position: int) -> tuple[str, Problem]:
        """Return the problem at a position since the start of the run, with its prompt id."""
        epoch, index = divmod(position, len(self.problems))
        if self._order[0] != epoch:
            order = array("q", range(len(self.problems)))  # 8 bytes each, where a list has 40
            if self.shuffle:
                digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
                random.Random(int.from_bytes(digest, "little")).shuffle(order)
            if self.difficulty is not None:
                order = array("q", sorted(order, key=self.difficulty.__getitem__))
            self._order = (epoch, order)
        problem = self.problems[self._order[1][index]]
        return f"{epoch}:{problem.problem_id}", problem

    def settle(self, position: int) -> None:
        """Forget a position that is not drawn again. Nothing is kept of it here."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the problems in order; checkpoints store it to detect changed data."""
        digest, encoder = hashlib.blake2b(digest_size=16), json.JSONEncoder(sort_keys=True, default=str)
        for each in self.problems:
            columns, names = dict(each.columns), [image.name for image in each.images]
            if names:  # they are in the folder of a run
                columns[IMAGES] = names
            content = [each.problem_id, each.prompt, each.ground_truth, each.data_source, columns]
            digest.update(encoder.encode(content).encode() + b"\n")
        return digest.hexdigest()


def column_of_numbers(problems: Sequence[Problem], column: str, key: str) -> array[float]:
    """Return a column of all problems as numbers.

    Args:
        key: config key that names the column.

    Raises:
        DataError: a row has no number there; lists the rows.
    """
    numbers, errors = array("d"), list[str]()
    for problem in problems:
        value = problem.columns.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            errors.append(f"{problem.problem_id}: column {column!r} is {value!r}")
        else:
            numbers.append(value)
    if errors:
        raise DataError(f"{key}={column}: {len(errors)} rows have no number there:\n" + error_list(errors))
    return numbers


# The parts of a curriculum. A user's own are subclasses of `Sampler` and `Gate`, given by their path.


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


# The curriculum.


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
            for part in self._parts.values():
                part.observe(group)

    @property
    def _parts(self) -> dict[str, Part]:
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
            found = [item for part in self._parts.values() for item in part.metrics().items()]
            return {f"curriculum/{name}": float(value) for name, value in found}


# A curriculum as the config says.

GROUP_FILTER = "algorithm.group_filter"
"""Name of the gate that the algorithm asks for."""
P = TypeVar("P", bound=Part)


def build_curriculum(
    config: CurriculumConfig,
    problems: Sequence[Problem],
    seed: int = 0,
    shuffle: bool = True,
    group_filter: Callable[[Sequence[float]], bool] | None = None,
) -> Curriculum:
    """Return the curriculum of a config.

    Args:
        seed, shuffle: of the order of the prompts, unless the sampler is the user's.
        group_filter: the algorithm's filter of groups by their rewards.

    Raises:
        ConfigError: a class of the user's cannot be made.
        DataError: a prompt has no difficulty.
    """
    sampler, gates = config.sampler, dict[str, Gate]()
    if sampler is not None and sampler.type == "custom":
        args = sampler.args
        own = _custom("curriculum.sampler", sampler.function, Sampler, problems, **args)  # type: ignore[type-abstract]
        stream: PromptStream = SampledStream(problems, own, f"curriculum.sampler ({sampler.function})")
    else:
        difficulty = None
        if sampler is not None:
            difficulty = column_of_numbers(problems, sampler.field, "curriculum.sampler.field")
            difficulty = difficulty if sampler.easiest == "min" else array("d", (-number for number in difficulty))
        stream = PromptStream(problems, seed, shuffle, difficulty)
    for number, gate in enumerate(config.gates):
        if gate.type == "custom":
            gates[gate.function] = _custom(f"curriculum.gates.{number}", gate.function, Gate, **gate.args)
        else:
            gates[gate.type] = SolvedGate(gate.groups, gate.reward)
    if group_filter is not None:
        gates[GROUP_FILTER] = RewardFilter(group_filter)
    return Curriculum(stream, gates)


def check_classes(config: CurriculumConfig) -> None:
    """Check the user's classes, before any data are read.

    Raises:
        ConfigError: a path names no subclass of `Sampler` or `Gate`, or a class learns but has no state.
    """
    if config.sampler is not None and config.sampler.type == "custom":
        _class_at("curriculum.sampler", config.sampler.function, Sampler)  # type: ignore[type-abstract]
    for number, gate in enumerate(config.gates):
        if gate.type == "custom":
            _class_at(f"curriculum.gates.{number}", gate.function, Gate)


def _class_at(where: str, path: str, kind: type[P]) -> type[P]:
    """Import a class of the user's; see `check_classes`."""
    try:
        own = find_function(path)
    except ValueError as error:
        raise ConfigError(f"{where}.function: {error}") from error
    if not (isinstance(own, type) and issubclass(own, kind)):
        raise ConfigError(f"{where}.function={path}: must be a subclass of atomrl.data.curriculum.{kind.__name__}")
    if own.observe is not Part.observe and (own.state is Part.state or own.load is Part.load):
        raise ConfigError(
            f"{where}.function={path}: {own.__name__}.observe learns from groups, so the class needs state and load "
            "too: a resumed run has to continue from what was learned"
        )
    return own


def _custom(where: str, path: str, kind: type[P], *given: Any, **args: Any) -> P:
    """Make a part of the user's.

    Raises:
        ConfigError: its class is wrong (`check_classes`), or does not take the arguments.
    """
    own = _class_at(where, path, kind)
    with _named(f"{where} ({path})"):
        return own(*given, **args)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Context that raises errors of a user's class as a ConfigError with their place."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if last.filename == __file__ else f" ({Path(last.filename).name}, line {last.lineno})"
        raise ConfigError(f"{where}: {type(error).__name__}: {error}{place}") from error


def check_curriculum(config: CurriculumConfig, problems: Sequence[Problem]) -> None:
    """Call each method of the user's classes once, on instances that are thrown away.

    Raises:
        ConfigError: one fails, or does not continue from its state.
    """
    own = {f"curriculum.gates.{n} ({gate.function})": n for n, gate in enumerate(config.gates) if gate.type == "custom"}
    sampled = config.sampler is not None and config.sampler.type == "custom"
    if not own and not sampled:
        return
    first, second = build_curriculum(config, problems), build_curriculum(config, problems)
    parts = {where: ([*first.gates.values()][n], [*second.gates.values()][n]) for where, n in own.items()}
    for where, (gate, restored) in parts.items():
        with _named(where):
            _check_bool(where, "admits", gate.admits(problems[0]))
            group = _made_up(f"0:{problems[0].problem_id}", problems[0])
            _check_bool(where, "accepts", gate.accepts(group))
            _check_part(where, gate, restored, group)
    if isinstance(first.stream, SampledStream) and isinstance(second.stream, SampledStream):
        where = first.stream.name
        with _named(where):
            position = first.stream.next()
            if position is None:
                raise ConfigError(f"{where}: next() returned None at the start: there is no prompt to sample")
            _check_part(where, first.stream.sampler, second.stream.sampler, _made_up(*first.stream.at(position)))
            if [first.stream.sampler.next() for _ in range(8)] != [second.stream.sampler.next() for _ in range(8)]:
                raise ConfigError(
                    f"{where}: after load(state) next() returns other prompts than it would have without; state() has "
                    "to return all that decides on them, and random numbers have to come from a seed in it"
                )

    names = Counter(name for part in first._parts.values() for name in part.metrics())
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(
            f"curriculum: several parts have a metric {twice[0]!r}, of which one would be lost: rename one"
        )


def _made_up(prompt_id: str, problem: Problem) -> Group:
    """Return two trajectories of a prompt, with rewards 0 and 1."""
    segments = (Segment(origin="prompt", token_ids=(1,)), Segment(origin="model", token_ids=(1,), logprobs=(0.0,)))
    return [
        Trajectory(
            prompt_id=prompt_id, index=index, problem=problem, segments=segments, text="", finish_reason="stop",
            reward=float(index), reward_parts={"made_up": float(index)}, part_weights={"made_up": 1.0},
        )
        for index in range(2)
    ]  # fmt: skip


def _check_bool(where: str, method: str, result: object) -> None:
    if not isinstance(result, bool):
        raise ConfigError(f"{where}: {method} must return True or False, but returned {result!r}")


def _check_part(where: str, part: Part, restored: Part, group: Group) -> None:
    """Check that a part learns, and that another one continues from its state.

    Raises:
        ConfigError: it does not.
    """
    part.observe(group)
    state = dict(part.state())
    written = json.loads(json.dumps(state))
    if written != state:
        raise ConfigError(
            f"{where}: state() returned {state!r}, which is {written!r} once it is written as JSON: use strings as "
            "keys of dicts, and lists"
        )
    restored.load(written)
    if dict(restored.state()) != state:
        raise ConfigError(f"{where}: after load({state!r}), state() returned {dict(restored.state())!r}")
    for name, value in part.metrics().items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: metrics() must return numbers by name, but {name} is {value!r}")
