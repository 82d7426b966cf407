"""How a reward of each kind is found, called and checked: the same in this process and in a worker."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

from atomrl.rewards.errors import RewardError
from atomrl.rewards.table import LOADING, POOLED, REWARDS, AnyReward, find_reward, importable_name
from atomrl.types import Trajectory

Style = Literal["columns", "compute_score", "compute_scores", "trajectories"]
"""TRL's; verl's of one completion, and of a batch; a class that is called with trajectories."""
MAX_MESSAGE = 500


@dataclass(frozen=True)
class Scorer:
    """A reward, ready to be called."""

    name: str
    """What `find_reward` finds it by, or the name of a function that only this process has."""
    function: AnyReward
    style: Style
    args: Mapping[str, Any]
    in_process: bool
    """Not in a worker: a built-in that cannot hang, or a function that a worker could not find."""
    by_row: bool
    """Each completion is scored for itself, so that calls may be split as is best for speed and safety."""
    timeout_s: float
    """Of one call in a worker."""


@dataclass
class Outcome:
    """What rewards gave some completions: every list has one element for each."""

    values: list[float | None]
    failures: list[str | None]
    """`KIND: message` where there is no usable value."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """What a `compute_score` or a batch reward reported beside the reward."""
    seconds: float = 0.0
    call_failed: bool = False
    """The call as a whole failed; one completion at a time, some may do better."""

    @classmethod
    def empty(cls, size: int) -> Outcome:
        """Neither values nor failures; for `fill`."""
        return cls([None] * size, [None] * size)

    def fill(self, rows: Sequence[int], given: Outcome) -> None:
        """Take the outcome of a call with these rows."""
        for place, row in enumerate(rows):
            self.values[row], self.failures[row] = given.values[place], given.failures[place]
            for name, values in given.parts.items():
                self.parts.setdefault(name, [None] * len(self.values))[row] = values[place]


def failed(size: int, failure: str, seconds: float = 0.0, call_failed: bool = True) -> Outcome:
    """No value for a whole call."""
    return Outcome([None] * size, [failure[:MAX_MESSAGE]] * size, {}, seconds, call_failed)


def find_scorer(
    name: str, args: Mapping[str, Any], function: AnyReward | None = None, timeout_s: float = math.inf
) -> Scorer:
    """The reward of a name, its signature checked.

    Args:
        name: as for `find_reward`.
        args: what every call passes beside the rows (a class: what it is made with).
        function: one that only this process has, in place of what `name` would find.

    Raises:
        RewardError: there is none, its package is missing, or it does not take what it would be given.
    """
    local = function is not None
    function = find_reward(name) if function is None else function
    # by the function, not by the name: a dotted path may lead to a built-in
    built_in = next((key for key, value in REWARDS.items() if value is function), None)
    style = _style(function)
    _check_signature(name, function, style, args)
    if built_in in POOLED:
        POOLED[built_in].check(built_in)
    return Scorer(
        name=built_in or name,
        function=function,
        style=style,
        args=dict(args),
        in_process=(local and built_in is None)
        or (built_in is not None and built_in not in POOLED)
        or importable_name(function) in LOADING.values(),
        by_row=(style == "compute_score" and not is_async(function)) or built_in is not None,
        timeout_s=timeout_s,
    )


def is_async(function: AnyReward) -> bool:
    """Whether calling it gives something to wait for; such a reward gets all completions at once."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(called)


def _parameters(function: AnyReward) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have none to check
        return None


def _style(function: AnyReward) -> Style:
    if inspect.isclass(function):
        return "trajectories"
    names = _parameters(function) or {}
    if "completions" in names:
        return "columns"
    return "compute_score" if "solution_str" in names else "compute_scores" if "solution_strs" in names else "columns"


def _check_signature(name: str, function: AnyReward, style: Style, args: Mapping[str, Any]) -> None:
    parameters = _parameters(function)
    if parameters is None:
        return
    required = [key for key, item in parameters.items() if item.default is item.empty and item.kind not in _ANY]
    missing = [key for key in required if key not in args] if style == "trajectories" else []
    if missing:
        raise RewardError(f"reward {name!r} needs args: {{{missing[0]}: ...}}")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    shown = f"({', '.join(map(str, parameters.values()))})"
    if style == "columns" and not takes_any:
        raise RewardError(
            f"reward {name!r} must take **columns: def f(prompts, completions, ground_truth, **columns), not {shown} "
            "(or be verl's compute_score(data_source, solution_str, ground_truth, extra_info))"
        )
    if style == "trajectories" and not any("__call__" in vars(base) for base in getattr(function, "__mro__", ())):
        raise RewardError(f"reward {name!r} is a class without __call__(self, trajectories)")
    unknown = [key for key in args if key not in parameters and (style == "columns" or not takes_any)]
    if unknown:
        raise RewardError(f"reward {name!r} has no argument {unknown[0]!r}: {shown}")


def instantiate(scorer: Scorer) -> Scorer:
    """A reward that is a class, as an instance made with its args; any other as it is."""
    if scorer.style != "trajectories" or not isinstance(scorer.function, type):
        return scorer
    make: AnyReward = scorer.function
    return replace(scorer, function=make(**scorer.args), args={})


def call(scorer: Scorer, payload: Mapping[str, Any]) -> Outcome:
    """One call of a reward, guarded and checked. It never raises but for Ctrl-C."""
    started = time.perf_counter()
    size = len(payload["trajectories"] if scorer.style == "trajectories" else payload["completions"])
    ask, read = _STYLES[scorer.style]
    try:
        result = ask(scorer, payload)
        outcome = _listed(asyncio.run(_waited(result)) if inspect.isawaitable(result) else result, size, read)
    except (Exception, SystemExit) as error:
        outcome = failed(size, f"error: {_describe(error)}")
    outcome.seconds = time.perf_counter() - started
    return outcome


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


async def _waited(result: Any) -> Any:
    return await result


def _listed(result: Any, size: int, read: Callable[[Any], Outcome]) -> Outcome:
    """The outcome of a list with one value for each completion."""
    if hasattr(result, "tolist"):  # numpy, torch
        result = result.tolist()
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Sequence):
        text = f"invalid: it must return a list of numbers, not {type(result).__name__}"
        return failed(size, text, call_failed=False)
    if len(result) != size:
        return failed(size, f"invalid: it returned {len(result)} values for {size} completions", call_failed=False)
    outcome = Outcome.empty(size)
    for row, value in enumerate(result):
        outcome.fill([row], read(value))
    return outcome


def _call_columns(scorer: Scorer, payload: Mapping[str, Any]) -> Any:
    given = {"prompts": payload["prompts"], "completions": payload["completions"], **payload["columns"]}
    return scorer.function(**given, **scorer.args)


def _call_trajectories(scorer: Scorer, payload: Mapping[str, Any]) -> Any:
    return scorer.function(payload["trajectories"])


def _verl_columns(payload: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What verl calls a reward's arguments, a list each."""
    columns, completions = payload["columns"], payload["completions"]
    return {
        "data_source": columns["data_source"],
        "solution_str": completions,
        "ground_truth": columns["ground_truth"],
        "extra_info": [item or {} for item in columns.get("extra_info", [None] * len(completions))],
    }


def _taken(function: AnyReward, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments, those that a function takes."""
    parameters = _parameters(function) or {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {key: value for key, value in given.items() if takes_any or key in parameters}


def _call_compute_score(scorer: Scorer, payload: Mapping[str, Any]) -> Any:
    columns = _verl_columns(payload)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    calls = [{**_taken(scorer.function, row), **scorer.args} for row in rows]
    if not is_async(scorer.function):
        return [scorer.function(**call) for call in calls]

    async def together() -> list[Any]:
        return await asyncio.gather(*(scorer.function(**call) for call in calls), return_exceptions=True)

    return together()


def _call_compute_scores(scorer: Scorer, payload: Mapping[str, Any]) -> Any:
    given = {f"{name}s": column for name, column in _verl_columns(payload).items()}
    return scorer.function(**_taken(scorer.function, given), **scorer.args)


def _read_number(value: Any) -> Outcome:
    number = None if value is None else as_number(value)
    if value is None or number is not None:
        return Outcome([number], [None])
    text = f"invalid: it returned {repr(value)[:100]}; return a finite number, or None for no value"
    return failed(1, text, call_failed=False)


def _read_score(result: Any) -> Outcome:
    """Of what verl's function gave one completion: a number, or a dict with `score` and other numbers."""
    if isinstance(result, Exception):
        return failed(1, f"error: {_describe(result)}", call_failed=False)
    if not isinstance(result, Mapping):
        return _read_number(result)
    if "score" not in result:
        return failed(1, f"invalid: the dict that it returned has no 'score' (but {list(result)})", call_failed=False)
    outcome = _read_number(result["score"])
    for key, value in result.items():
        if key != "score" and isinstance(value, Real) and math.isfinite(value):
            outcome.parts[str(key)] = [float(value)]
    return outcome


def _read_trajectory(result: Any) -> Outcome:
    """Of what a class gave one trajectory: a number, or the trajectory with its reward and its parts."""
    if not isinstance(result, Trajectory):
        return _read_number(result)
    outcome = _read_number(result.reward)
    outcome.parts |= {name: _read_number(part).values for name, part in result.reward_parts.items()}
    return outcome


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_STYLES: Mapping[Style, tuple[Callable[[Scorer, Mapping[str, Any]], Any], Callable[[Any], Outcome]]] = {
    "columns": (_call_columns, _read_number),
    "compute_score": (_call_compute_score, _read_score),
    "compute_scores": (_call_compute_scores, _read_score),
    "trajectories": (_call_trajectories, _read_trajectory),
}
"""How a reward is asked, and how its answer for one completion is read."""


def as_number(value: Any) -> float | None:
    """A finite number as a float, whatever library made it; None for anything else.

    Example:
        >>> as_number(True), as_number("1"), as_number(float("nan"))
        (1.0, None, None)
    """
    try:
        number = float(value) if isinstance(value, Real) or hasattr(value, "item") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
