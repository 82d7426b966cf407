"""How a reward of each kind is found, called and checked: the same in this process and in a worker."""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from atomrl.rewards.errors import RewardError
from atomrl.rewards.table import LOADING, POOLED, REWARDS, RewardFunction, find_reward, importable_name
from atomrl.stages import RewardBatch, RolloutBatch

Style = Literal["columns", "compute_score", "batch"]
MAX_MESSAGE = 500


@dataclass(frozen=True)
class Scorer:
    """A reward, ready to be called."""

    name: str
    """What `find_reward` finds it by, or the name of a function that only this process has."""
    function: RewardFunction
    style: Style
    args: Mapping[str, Any]
    in_process: bool
    """Not in a worker: a built-in that cannot hang, or a function that a worker could not find."""
    by_row: bool
    """Each completion is scored for itself, so that calls may be split as is best for speed and safety."""


@dataclass
class Outcome:
    """What one call gave: every list has one element per completion of the call."""

    values: list[float | None]
    failures: list[str | None]
    """`KIND: message` where there is no usable value."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """What a `compute_score` or a batch reward reported beside the reward."""
    seconds: float = 0.0
    call_failed: bool = False
    """The call as a whole failed; one completion at a time, some may do better."""


def failed(size: int, failure: str, seconds: float = 0.0, call_failed: bool = True) -> Outcome:
    """No value for a whole call."""
    return Outcome([None] * size, [failure[:MAX_MESSAGE]] * size, {}, seconds, call_failed)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Several calls as one."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.parts)
    return Outcome(
        [value for outcome in outcomes for value in outcome.values],
        [failure for outcome in outcomes for failure in outcome.failures],
        {n: [v for o in outcomes for v in o.parts.get(n, [None] * len(o.values))] for n in names},
        sum(outcome.seconds for outcome in outcomes),
    )


def find_scorer(name: str, args: Mapping[str, Any], function: RewardFunction | None = None) -> Scorer:
    """The reward of a name, its signature checked.

    Args:
        name: as for `find_reward`.
        args: what every call passes beside the rows (a class: what it is made with).
        function: one that only this process has, in place of what `name` would find.

    Raises:
        RewardError: there is none, it is async, or it does not take what it would be given.
    """
    local = function is not None
    function = find_reward(name) if function is None else function
    # by the function, not by the name: a dotted path may lead to a built-in
    built_in = next((key for key, value in REWARDS.items() if value is function), None)
    called = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    if inspect.iscoroutinefunction(called):
        raise RewardError(f"reward {name!r} is async; write a plain function")
    style = _style(function)
    _check_signature(name, function, style, args)
    return Scorer(
        name=built_in or name,
        function=function,
        style=style,
        args=dict(args),
        in_process=(local and built_in is None)
        or (built_in is not None and built_in not in POOLED)
        or importable_name(function) in LOADING.values(),
        by_row=style == "compute_score" or built_in is not None,
    )


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have none to check
        return None


def _style(function: RewardFunction) -> Style:
    if inspect.isclass(function):
        return "batch"
    names = _parameters(function) or {}
    return "compute_score" if "solution_str" in names and "completions" not in names else "columns"


def _check_signature(name: str, function: RewardFunction, style: Style, args: Mapping[str, Any]) -> None:
    parameters = _parameters(function)
    if parameters is None:
        return
    required = [key for key, item in parameters.items() if item.default is item.empty and item.kind not in _ANY]
    missing = [key for key in required if key not in args] if style == "batch" else []
    if missing:
        raise RewardError(f"reward {name!r} needs args: {{{missing[0]}: ...}}")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    shown = f"({', '.join(map(str, parameters.values()))})"
    if style == "columns" and not takes_any:
        raise RewardError(
            f"reward {name!r} must take **columns: def f(prompts, completions, ground_truth, **columns), not {shown} "
            "(or be verl's compute_score(data_source, solution_str, ground_truth, extra_info))"
        )
    if style == "batch" and not any("__call__" in vars(base) for base in getattr(function, "__mro__", ())):
        raise RewardError(f"reward {name!r} is a class without __call__(self, rollout_batch)")
    unknown = [key for key in args if key not in parameters and (style == "columns" or not takes_any)]
    if unknown:
        raise RewardError(f"reward {name!r} has no argument {unknown[0]!r}: {shown}")


def instantiate(scorer: Scorer) -> Scorer:
    """A reward that is a class, as an instance made with its args; any other as it is."""
    if scorer.style != "batch":
        return scorer
    instance = scorer.function(**scorer.args)
    return Scorer(scorer.name, instance, "batch", {}, scorer.in_process, scorer.by_row)


def call(scorer: Scorer, payload: Mapping[str, Any]) -> Outcome:
    """One call of a reward, guarded and checked. It never raises but for Ctrl-C."""
    started = time.perf_counter()
    size = sum(map(len, payload["rollouts"].completions)) if "rollouts" in payload else len(payload["completions"])
    try:
        outcome = _STYLES[scorer.style](scorer, payload)
    except (Exception, SystemExit) as error:
        outcome = failed(size, f"error: {_describe(error)}")
    outcome.seconds = time.perf_counter() - started
    return outcome


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


def _call_columns(scorer: Scorer, payload: Mapping[str, Any]) -> Outcome:
    columns, size = payload["columns"], len(payload["completions"])
    result = scorer.function(prompts=payload["prompts"], completions=payload["completions"], **columns, **scorer.args)
    if hasattr(result, "tolist"):  # numpy, torch
        result = result.tolist()
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Sequence):
        return failed(
            size, f"invalid: it must return a list of numbers, not {type(result).__name__}", call_failed=False
        )
    if len(result) != size:
        return failed(size, f"invalid: it returned {len(result)} values for {size} completions", call_failed=False)
    return _checked(result)


def _call_compute_score(scorer: Scorer, payload: Mapping[str, Any]) -> Outcome:
    parameters = _parameters(scorer.function) or {}
    columns = payload["columns"]
    outcomes = []
    for row, text in enumerate(payload["completions"]):
        given = {
            "data_source": columns["data_source"][row],
            "solution_str": text,
            "ground_truth": columns["ground_truth"][row],
            "extra_info": columns.get("extra_info", {row: None})[row] or {},
        }
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        taken = {key: value for key, value in given.items() if takes_any or key in parameters}
        outcomes.append(_score_outcome(scorer.function(**taken, **scorer.args)))
    return joined(outcomes)


def _score_outcome(result: Any) -> Outcome:
    if not isinstance(result, Mapping):
        return _checked([result])
    if "score" not in result:
        return failed(1, f"invalid: the dict that it returned has no 'score' (but {list(result)})", call_failed=False)
    outcome = _checked([result["score"]])
    for key, value in result.items():
        if key != "score" and isinstance(value, Real) and math.isfinite(value):
            outcome.parts[str(key)] = [float(value)]
    return outcome


def _call_batch(scorer: Scorer, payload: Mapping[str, Any]) -> Outcome:
    rollouts: RolloutBatch = payload["rollouts"]
    shape = [len(group) for group in rollouts.completions]
    result = scorer.function(rollouts)
    if not isinstance(result, RewardBatch):
        text = f"invalid: it must return a RewardBatch, not {type(result).__name__}"
        return failed(sum(shape), text, call_failed=False)
    for values in (result.rewards, *result.reward_parts.values()):
        if [len(group) for group in values] != shape:
            text = f"invalid: its rewards have the shape {[len(group) for group in values]}, the completions {shape}"
            return failed(sum(shape), text, call_failed=False)
    outcome = _checked([value for group in result.rewards for value in group])
    for name, part in result.reward_parts.items():
        outcome.parts[name] = _checked([value for group in part for value in group]).values
    return outcome


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_STYLES = {"columns": _call_columns, "compute_score": _call_compute_score, "batch": _call_batch}


def _checked(values: Sequence[Any]) -> Outcome:
    numbers: list[float | None] = []
    failures: list[str | None] = []
    for value in values:
        number = None if value is None else as_number(value)
        usable = value is None or number is not None
        numbers.append(number)
        text = f"invalid: it returned {repr(value)[:100]}; return a finite number, or None for no value"
        failures.append(None if usable else text)
    return Outcome(numbers, failures)


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
