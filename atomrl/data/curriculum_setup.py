"""Build the curriculum of a config, and check the user's samplers and gates in it."""

from __future__ import annotations

import inspect
import json
import math
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from atomrl.common.errors import ConfigError
from atomrl.common.functions import find_function
from atomrl.data.curriculum import Curriculum, Gate, Group, Part, RewardFilter, SampledStream, Sampler, SolvedGate
from atomrl.data.files import DataError, error_list
from atomrl.data.prompt_stream import PromptStream
from atomrl.types import Problem, Segment, Trajectory

if TYPE_CHECKING:
    from atomrl.config import CurriculumConfig

GROUP_FILTER = "algorithm.group_filter"
"""Name of the gate that the algorithm asks for."""
P = TypeVar("P", bound=Part)


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
        place = (
            ""
            if last.filename in (__file__, inspect.getfile(Part))
            else f" ({Path(last.filename).name}, line {last.lineno})"
        )
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

    names = Counter(name for part in first.parts.values() for name in part.metrics())
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
