"""Find a reward function by its name, detect its calling convention and check its signature."""

import inspect
import math
import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from atomrl.common.errors import nearest
from atomrl.common.functions import subscripts
from atomrl.rewards.errors import RewardError
from atomrl.rewards.table import CLASSES, POOLED, REWARDS, AnyReward, find_reward, importable_name

STANDARD_COLUMNS = ("prompts", "completions", "ground_truth", "data_source", "completion_tokens", "completion_ids")
"""Arguments that every reward of the style `columns` receives besides the data's own columns. `completion_ids` is
passed only to functions that name it."""
VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The parameters of verl's `compute_score`."""
Style = Literal["columns", "compute_score", "compute_scores", "trajectories"]
"""Calling convention: TRL's; verl's for one completion; verl's for a batch; a class called with trajectories."""


@dataclass(frozen=True, eq=False)
class Scorer:
    """A reward function with its arguments and calling convention."""

    name: str
    """Name for `find_reward`, or the label of a function that exists in this process only."""
    built_in: str | None
    """Key of `REWARDS` or `CLASSES`; None for a function of the user's own, whatever its name."""
    function: AnyReward
    style: Style
    args: Mapping[str, Any]
    in_process: bool
    """Runs in the trainer's process: a built-in that cannot hang, or a function that a worker cannot import."""
    by_row: bool
    """Completions are scored independently, so a call may be split into one per completion."""
    timeout_s: float
    """Time limit of one call in a worker."""
    messages: bool = False
    """Pass completions as message lists if the prompt is one, as TRL does."""
    ids: bool = False
    """The function has a parameter `completion_ids`: the token ids of each completion, as in TRL."""
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Held during a call in this process, if only one thread at a time may call the function."""


def find_scorer(
    name: str,
    args: Mapping[str, Any],
    function: AnyReward | None = None,
    timeout_s: float = math.inf,
    completions: Literal["text", "messages"] | None = None,
) -> Scorer:
    """Look up a reward and check its signature.

    Args:
        name: as for `find_reward`.
        args: keyword arguments of every call; for a class, the arguments of its constructor.
        function: a function that exists in this process only; used instead of looking up `name`.
        timeout_s: time limit of one call in a worker.
        completions: format of completions if the prompt is a message list; None: messages for TRL's
            own rewards, and if the parameter is annotated as a list of lists of dicts.

    Raises:
        RewardError: there is no such reward, a package is missing, or its parameters do not fit.
    """
    local = function is not None
    function = find_reward(name) if function is None else function
    # Compare functions, not names: a dotted path may lead to a built-in, and a user's function may have its name.
    built_in = next((key for key, value in REWARDS.items() if value is function), None)
    path = importable_name(function)
    built_in = built_in or next((key for key, value in CLASSES.items() if value == path), None)
    style = _style(function)
    _check_signature(name, function, style, args)
    parameters = parameters_of(function) or {}
    annotation = str(parameters["completions"].annotation) if "completions" in parameters else ""
    expects_messages = str(getattr(function, "__module__", "")).startswith("trl.") or re.search(
        r"list\[list\[(dict|Dict)", annotation, re.I
    )
    if built_in is not None and built_in in POOLED:
        POOLED[built_in].check(args)
    return Scorer(
        name=built_in or name,
        built_in=built_in,
        function=function,
        style=style,
        args=dict(args),
        in_process=(local and built_in is None) or (built_in is not None and built_in not in POOLED),
        by_row=(style == "compute_score" and not is_async(function)) or built_in in REWARDS,
        timeout_s=timeout_s,
        messages=completions == "messages" or (completions is None and bool(expects_messages)),
        ids="completion_ids" in parameters and "completion_ids" not in args,
    )


def missing_column(scorer: Scorer, columns: Collection[str]) -> str | None:
    """Return an error message if the data lack a column that the reward reads, else None.

    A column is required by a parameter without a default, and by a subscript `columns["name"]` of `**columns` outside
    of `try`, unless the function also tests for it with `in` or `get`. Other accesses are not detected.

    Args:
        columns: names of the data's columns, without `STANDARD_COLUMNS`.
    """
    parameters = parameters_of(scorer.function)
    if parameters is None or scorer.style == "trajectories":
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [name for name, item in parameters.items() if item.default is item.empty and item.kind not in variadic]
    if scorer.style == "columns":
        available = {*columns, *STANDARD_COLUMNS}
        rest = next((name for name, item in parameters.items() if item.kind is item.VAR_KEYWORD), None)
        read = subscripts(scorer.function, rest) if rest else []
    else:
        available, read = {f"{name}{'s' * (scorer.style == 'compute_scores')}" for name in VERL_PARAMETERS}, []
    for name in [*required, *read]:
        if name in available or name in scorer.args:
            continue
        how = f"its parameter {name!r} has no default" if name in required else f"it reads {rest}[{name!r}]"
        if scorer.style != "columns":
            return f"{how}, but it receives only {', '.join(sorted(available))}: give it a default, or a value in args"
        near = nearest(name, [*STANDARD_COLUMNS, *columns])
        return (
            f"it needs a column {name!r} ({how}), but the data has {', '.join(map(repr, columns)) or 'none'}, besides "
            f"what every reward receives ({', '.join(STANDARD_COLUMNS)}): "
            + (f"did you mean {near!r}? Else rename" if near else "rename")
            + " the parameter to a column of the data, or give it a default or a value in args"
        )
    return None


def is_async(function: AnyReward) -> bool:
    """Return True for coroutine functions. They receive all completions in one call, to await them concurrently."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(called)


def parameters_of(function: AnyReward) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None


def takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _style(function: AnyReward) -> Style:
    if inspect.isclass(function):
        return "trajectories"
    names = parameters_of(function) or {}
    if "completions" in names:
        return "columns"
    return "compute_score" if "solution_str" in names else "compute_scores" if "solution_strs" in names else "columns"


def _check_signature(name: str, function: AnyReward, style: Style, args: Mapping[str, Any]) -> None:
    parameters = parameters_of(function)
    if parameters is None:
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [key for key, item in parameters.items() if item.default is item.empty and item.kind not in variadic]
    missing = [key for key in required if key not in args] if style == "trajectories" else []
    if missing:
        raise RewardError(f"reward {name!r} needs args: {{{missing[0]}: ...}}")
    shown = f"({', '.join(map(str, parameters.values()))})"
    if style == "columns" and not takes_any(parameters):
        raise RewardError(
            f"reward {name!r} must take **columns: def f(prompts, completions, ground_truth, **columns), not {shown} "
            "(or be verl's compute_score(data_source, solution_str, ground_truth, extra_info))"
        )
    if style == "trajectories" and not any("__call__" in vars(base) for base in getattr(function, "__mro__", ())):
        raise RewardError(f"reward {name!r} is a class without __call__(self, trajectories)")
    unknown = [key for key in args if key not in parameters and (style == "columns" or not takes_any(parameters))]
    if unknown:
        raise RewardError(f"reward {name!r} has no argument {unknown[0]!r}: {shown}")
