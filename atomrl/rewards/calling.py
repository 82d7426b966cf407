"""Call one reward function: detect its calling convention, check its signature, validate what it returns.

The trainer's process and the worker processes (`pool`) share this code.
"""

import asyncio
import hashlib
import inspect
import math
import re
import time
import traceback
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, NamedTuple, Self

from pydantic import ValidationError

from atomrl.common.errors import is_away, nearest
from atomrl.common.functions import subscripts
from atomrl.common.secrets import mask_secrets
from atomrl.rewards.errors import NoScore, RewardError, RewardStop
from atomrl.rewards.table import CLASSES, POOLED, REWARDS, AnyReward, find_reward, importable_name
from atomrl.types import FailureKind, Trajectory

STANDARD_COLUMNS = ("prompts", "completions", "ground_truth", "data_source", "completion_tokens", "completion_ids")
"""Arguments that every reward of the style `columns` receives besides the data's own columns. `completion_ids` is
passed only to functions that name it."""
VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The parameters of verl's `compute_score`."""
Style = Literal["columns", "compute_score", "compute_scores", "trajectories"]
"""Calling convention: TRL's; verl's for one completion; verl's for a batch; a class called with trajectories."""
MAX_MESSAGE = 500
"""Characters of a failure's message that are kept."""


@dataclass(frozen=True, eq=False)
class Scorer:
    """A reward function with its arguments and calling convention."""

    name: str
    """Name for `find_reward`, or the label of a function that exists in this process only."""
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


@dataclass(frozen=True)
class Task:
    """One call of a reward function."""

    part: str
    """Name of the reward term that this call contributes to."""
    scorer: Scorer
    rows: Sequence[int]
    """Indices of the trajectories to score."""
    trajectories: Sequence[Trajectory]
    columns: Mapping[str, Sequence[Any]]
    """Column name -> one value per trajectory, for all `trajectories`."""

    @property
    def items(self) -> list[Trajectory]:
        return [self.trajectories[row] for row in self.rows]

    def split(self) -> list[Self]:
        """Return one task per completion."""
        return [replace(self, rows=[row]) for row in self.rows]

    def payload(self) -> dict[str, Any]:
        """Return the call's data: fresh lists, so that a reward that mutates them cannot affect another one.

        `seed` depends on the first trajectory only, so a reward that draws random numbers is reproducible.
        """
        items = self.items
        digest = hashlib.blake2b(items[0].trajectory_id.encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        if self.scorer.style == "trajectories":
            return {"trajectories": items, "seed": seed}
        prompts = [item.problem.prompt for item in items]
        ids = [list(item.token_ids[item.prompt_tokens :]) for item in items] if self.scorer.ids else []
        return {
            "prompts": [p if isinstance(p, str) else [dict(message) for message in p] for p in prompts],
            "completions": [
                [{"role": "assistant", "content": item.turn}]
                if self.scorer.messages and not isinstance(item.problem.prompt, str)
                else item.turn
                for item in items
            ],
            "columns": {name: [values[row] for row in self.rows] for name, values in self.columns.items()}
            | ({"completion_ids": ids} if self.scorer.ids else {}),
            "seed": seed,
        }


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Collect the columns that rewards receive besides prompts and completions. Missing values are None."""
    samples = [item.problem for item in trajectories]
    names = dict.fromkeys(name for problem in samples for name in problem.columns)
    return {
        **{name: [problem.columns.get(name) for problem in samples] for name in names},
        "ground_truth": [problem.ground_truth for problem in samples],
        "data_source": [problem.data_source for problem in samples],
        "completion_tokens": [item.response_tokens for item in trajectories],
    }


class Score(NamedTuple):
    """The score of one completion, or the reason why there is none."""

    value: float | None = None
    parts: Mapping[str, float | None] = {}
    """Additional numbers that a `compute_score` or a reward class returned."""
    failure: FailureKind | None = None
    """Set if the reward returned no usable value."""
    message: str = ""
    """Description of the failure."""


class Outcome(NamedTuple):
    """The result of one call. Workers send it as plain tuples."""

    scores: Sequence[Score]
    """One per completion."""
    seconds: float = 0.0
    call_failed: bool = False
    """The whole call failed; retrying one completion at a time may give some scores."""


def failed(size: int, failure: FailureKind, message: str, seconds: float = 0.0) -> Outcome:
    """Return the outcome of a call without any score. An `invalid` return value is not worth a retry by completion."""
    score = Score(failure=failure, message=message[:MAX_MESSAGE])
    return Outcome([score] * size, seconds, call_failed=failure != "invalid")


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
        completions: format of completions if the prompt is a message list; None infers it from the function.

    Raises:
        RewardError: there is no such reward, a package is missing, or its parameters do not fit.
    """
    local = function is not None
    function = find_reward(name) if function is None else function
    # Compare functions, not names: a dotted path may lead to a built-in.
    built_in = next((key for key, value in REWARDS.items() if value is function), None)
    style = _style(function)
    _check_signature(name, function, style, args)
    if built_in is not None and built_in in POOLED:
        POOLED[built_in].check(args)
    return Scorer(
        name=built_in or name,
        function=function,
        style=style,
        args=dict(args),
        in_process=(local and built_in is None)
        or (built_in is not None and built_in not in POOLED)
        or importable_name(function) in CLASSES.values(),
        by_row=(style == "compute_score" and not _is_async(function)) or built_in is not None,
        timeout_s=timeout_s,
        messages=completions == "messages" or (completions is None and _expects_messages(function)),
        ids="completion_ids" in (_parameters(function) or {}) and "completion_ids" not in args,
    )


def missing_column(scorer: Scorer, columns: Collection[str]) -> str | None:
    """Return an error message if the data lack a column that the reward reads, else None.

    A column is required by a parameter without a default, and by a subscript `columns["name"]` of `**columns` outside
    of `try`, unless the function also tests for it with `in` or `get`. Other accesses are not detected.

    Args:
        columns: names of the data's columns, without `STANDARD_COLUMNS`.
    """
    parameters = _parameters(scorer.function)
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
            return f"{how}, and it is given {', '.join(sorted(available))}: give it a default, or a value in args"
        near = nearest(name, columns)
        return (
            f"it needs a column {name!r} ({how}), and the data have {', '.join(map(repr, columns)) or 'none'}, besides "
            f"what every reward is given ({', '.join(STANDARD_COLUMNS)}): "
            + (f"did you mean {near!r}? Else name" if near else "name")
            + " the column as the data do, give the parameter a default, or a value in args"
        )
    return None


def _expects_messages(function: AnyReward) -> bool:
    """Return True for TRL's own rewards, and if `completions` is annotated as a list of lists of dicts."""
    if str(getattr(function, "__module__", "")).startswith("trl."):
        return True
    parameter = (_parameters(function) or {}).get("completions")
    return parameter is not None and bool(re.search(r"list\[list\[(dict|Dict)", str(parameter.annotation), re.I))


def _is_async(function: AnyReward) -> bool:
    """Return True for coroutine functions. They receive all completions in one call, to await them concurrently."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(called)


def _parameters(function: AnyReward) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


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
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [key for key, item in parameters.items() if item.default is item.empty and item.kind not in variadic]
    missing = [key for key in required if key not in args] if style == "trajectories" else []
    if missing:
        raise RewardError(f"reward {name!r} needs args: {{{missing[0]}: ...}}")
    shown = f"({', '.join(map(str, parameters.values()))})"
    if style == "columns" and not _takes_any(parameters):
        raise RewardError(
            f"reward {name!r} must take **columns: def f(prompts, completions, ground_truth, **columns), not {shown} "
            "(or be verl's compute_score(data_source, solution_str, ground_truth, extra_info))"
        )
    if style == "trajectories" and not any("__call__" in vars(base) for base in getattr(function, "__mro__", ())):
        raise RewardError(f"reward {name!r} is a class without __call__(self, trajectories)")
    unknown = [key for key in args if key not in parameters and (style == "columns" or not _takes_any(parameters))]
    if unknown:
        raise RewardError(f"reward {name!r} has no argument {unknown[0]!r}: {shown}")


def instantiate(scorer: Scorer) -> Scorer:
    """Construct a reward class with its args; return any other scorer unchanged.

    Raises:
        RewardError: an argument is invalid.
    """
    if scorer.style != "trajectories":
        return scorer
    try:
        return replace(scorer, function=scorer.function(**scorer.args), args={})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("args", *map(str, first["loc"])))
        reason = (
            f"{first['msg'].removeprefix('Value error, ')} (got {mask_secrets(first['input'], key)!r})"
            if first["loc"]
            else first["msg"]
        )
        raise RewardError(f"reward {scorer.name!r}: {key}: {reason}") from None


def call(scorer: Scorer, payload: Mapping[str, Any]) -> Outcome:
    """Call a reward, catch its exceptions and validate its return value. Raises only Ctrl-C and `RewardStop`."""
    started = time.perf_counter()
    size = len(payload["trajectories"] if scorer.style == "trajectories" else payload["completions"])
    try:
        result = _invoke(scorer, payload)
        outcome = _parse_scores(asyncio.run(_await(result)) if inspect.isawaitable(result) else result, size)
    except RewardStop:
        raise
    except (Exception, SystemExit) as error:
        outcome = failed(size, "away" if is_away(error) else "error", _describe(error) + _messages_hint(error, payload))
    return outcome._replace(seconds=time.perf_counter() - started)


def _invoke(scorer: Scorer, payload: Mapping[str, Any]) -> Any:
    """Call the function with the arguments of its calling convention."""
    function, args = scorer.function, scorer.args
    if scorer.style == "trajectories":
        return function(payload["trajectories"])
    completions, columns = payload["completions"], payload["columns"]
    if scorer.style == "columns":
        return function(prompts=payload["prompts"], completions=completions, **columns, **args)
    arguments = {
        "data_source": columns["data_source"],
        "solution_str": completions,
        "ground_truth": columns["ground_truth"],
        "extra_info": [item or {} for item in columns.get("extra_info", [None] * len(completions))],
    }
    parameters = _parameters(function) or {}
    if scorer.style == "compute_scores":
        arguments = {f"{name}s": column for name, column in arguments.items()}
    accepted = {name: column for name, column in arguments.items() if name in parameters or _takes_any(parameters)}
    if scorer.style == "compute_scores":
        return function(**accepted, **args)
    rows = [dict(zip(accepted, row, strict=True)) for row in zip(*accepted.values(), strict=True)]
    answers = [function(**row, **args) for row in rows]
    return _gather(answers) if _is_async(function) else answers


async def _gather(answers: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*answers, return_exceptions=True)


async def _await(result: Any) -> Any:
    return await result


def _messages_hint(error: BaseException, payload: Mapping[str, Any]) -> str:
    """Return a hint if a function seems to have read a text as messages (`completion[0]["content"]`), else ""."""
    has_texts = any(isinstance(item, str) for item in payload.get("completions", ()))
    indexed_text = isinstance(error, TypeError | AttributeError) and re.search(
        r"string ind(ices|exes) must be integers|'str' object has no attribute '(get|items|keys)'", str(error)
    )
    if not (indexed_text and has_texts):
        return ""
    return (
        "; completions are texts here: read completion in place of completion[0]['content'], or set `completions: "
        "messages` beside the function in reward.functions, for prompts that are messages (as TRL gives them)"
    )


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


def _parse_scores(result: Any, size: int) -> Outcome:
    """Validate a return value: a sequence with one value per completion."""
    if hasattr(result, "tolist"):  # numpy, torch
        result = result.tolist()
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Sequence):
        return failed(size, "invalid", f"it must return a list of numbers, not {type(result).__name__}")
    if len(result) != size:
        return failed(size, "invalid", f"it returned {len(result)} values for {size} completions")
    return Outcome([_parse_score(value) for value in result])


def _parse_score(value: Any) -> Score:
    """Parse one value: a number, None, verl's dict with `score`, a trajectory with a reward, or an exception."""
    if isinstance(value, NoScore):
        return Score(failure=value.kind, message=str(value)[:MAX_MESSAGE])
    if isinstance(value, Exception):
        return Score(failure="away" if is_away(value) else "error", message=_describe(value)[:MAX_MESSAGE])
    parts: dict[str, float | None] = {}
    if isinstance(value, Trajectory):
        parts = {name: _as_number(part) for name, part in value.reward_parts.items()}
        value = value.reward
    elif isinstance(value, Mapping) and "score" in value:
        numbers = {str(key): _as_number(part) for key, part in value.items() if key != "score"}
        parts = {key: number for key, number in numbers.items() if number is not None}
        value = value["score"]
    number = _as_number(value)
    if value is None or number is not None:
        return Score(number, parts)
    expected = "a finite number (in a dict as 'score'), or None for no value"
    return Score(None, parts, "invalid", f"it returned {repr(value)[:100]}; return {expected}")


def _as_number(value: Any) -> float | None:
    """Convert a finite number of any library to a float; return None for anything else.

    Example:
        >>> _as_number(True), _as_number("1"), _as_number(float("nan"))
        (1.0, None, None)
    """
    try:
        number = float(value) if isinstance(value, Real) or hasattr(value, "item") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
