"""Call one reward function, and validate what it returns."""

import asyncio
import hashlib
import inspect
import logging
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from atomrl.common.errors import describe_error
from atomrl.common.outages import is_away, is_busy
from atomrl.common.redaction import without_secrets
from atomrl.common.secrets import mask_secrets
from atomrl.data.columns import IMAGES
from atomrl.rewards.errors import NoScore, RewardError, RewardStop
from atomrl.rewards.scorer import VERL_PARAMETERS, Scorer, is_async, parameters_of, takes_any
from atomrl.types import FailureKind, Problem, Trajectory

log = logging.getLogger(__name__)

MAX_MESSAGE = 500
"""Characters of a failure's message that are kept."""
_warned: set[tuple[str, str]] = set()
"""Reward and torch setting that `_torch_settings` has warned about."""


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

    def alone(self, row: int) -> Self:
        """Return a call for the completion of one row, which needs no other one's data."""
        columns = {name: [values[row]] for name, values in self.columns.items()}
        return replace(self, rows=[0], trajectories=[self.trajectories[row]], columns=columns)

    def payload(self) -> dict[str, Any]:
        """Return the call's data. A reward of the user's own gets lists and dicts of its own for each completion, so
        that changes to them affect neither another completion, nor another reward, nor the problem.

        `seed` depends on the first trajectory only, so a reward that draws random numbers is reproducible.
        """
        items = self.items
        digest = hashlib.blake2b(items[0].trajectory_id.encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        own = copied if self.scorer.built_in is None else lambda value: value
        if self.scorer.style == "trajectories":
            if self.scorer.built_in is None:
                items = [replace(item, problem=_copied_problem(item.problem)) for item in items]
            return {"trajectories": items, "seed": seed}
        names = [name for name in self.columns if self.scorer.style == "columns" or name in VERL_PARAMETERS]
        prompts = [item.problem.prompt for item in items]
        ids = [list(item.token_ids[item.prompt_tokens :]) for item in items] if self.scorer.ids else []
        return {
            "prompts": [p if isinstance(p, str) else [own(dict(message)) for message in p] for p in prompts],
            "completions": [
                [{"role": "assistant", "content": item.turn}]
                if self.scorer.messages and not isinstance(item.problem.prompt, str)
                else item.turn
                for item in items
            ],
            "columns": {name: [own(self.columns[name][row]) for row in self.rows] for name in names}
            | ({"completion_ids": ids} if self.scorer.ids else {}),
            "num_turns": [num_turns(item) for item in items],
            "seed": seed,
        }


def copied(value: Any) -> Any:
    """Copy the lists, tuples, sets and dicts of a value, at any depth. What is in them is shared, and not copied.

    Example:
        >>> tests = {"inputs": ["1"]}
        >>> copied(tests) == tests, copied(tests)["inputs"] is tests["inputs"]
        (True, False)
    """
    kind = type(value)
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(map(copied, value))
    return value.copy() if kind is set else value


def _copied_problem(problem: Problem) -> Problem:
    prompt = problem.prompt if isinstance(problem.prompt, str) else tuple(map(copied, problem.prompt))
    columns, truth = {name: copied(value) for name, value in problem.columns.items()}, copied(problem.ground_truth)
    return replace(problem, prompt=prompt, ground_truth=truth, columns=columns)


def num_turns(trajectory: Trajectory) -> int:
    """Return the number of messages of a conversation as verl counts them, with the whole prompt as one: 2 for a
    completion of a single turn."""
    if trajectory.episode is None:
        return 2
    turns = trajectory.episode.turns
    return 1 + len(turns) + sum(turn.reply_tokens > 0 for turn in turns)


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Collect the columns that rewards receive besides prompts and completions. Missing values are None."""
    problems = [item.problem for item in trajectories]
    names = dict.fromkeys(name for problem in problems for name in problem.columns)
    columns = {name: [problem.columns.get(name) for problem in problems] for name in names}
    if any(item.images for item in trajectories):
        columns[IMAGES] = [[image.path for image in item.images] for item in trajectories]
    return {
        **columns,
        "ground_truth": [problem.ground_truth for problem in problems],
        "data_source": [problem.data_source for problem in problems],
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
    """Call a reward in this process, catch whatever it raises and validate its return value.

    Raises:
        RewardStop: the reward ends the run.
        KeyboardInterrupt: Ctrl-C.
    """
    function, args = scorer.function, copied(dict(scorer.args))
    with scorer.lock, _torch_settings(scorer.name) if scorer.in_process else nullcontext():
        started = time.perf_counter()
        size = len(payload["trajectories"] if scorer.style == "trajectories" else payload["completions"])
        try:
            result: Any
            if scorer.style == "trajectories":
                result = function(payload["trajectories"])
            elif scorer.style == "columns":
                prompts, completions = payload["prompts"], payload["completions"]
                result = function(prompts=prompts, completions=completions, **payload["columns"], **args)
            else:
                result = _call_as_verl(scorer, payload, args)
            # Await an async function: its one call, or its calls for each completion.
            if inspect.isawaitable(result) or (scorer.style == "compute_score" and is_async(function)):
                result = asyncio.run(_await(result))
            outcome = _parse_result(result, size)
        except RewardStop:
            raise
        except BaseException as error:  # also SystemExit, and asyncio's CancelledError
            if isinstance(error, KeyboardInterrupt) and scorer.in_process:
                raise
            message = describe_error(error, place=True) + _messages_hint(error, payload)
            outcome = failed(size, _kind_of(error), message)
        return outcome._replace(seconds=time.perf_counter() - started)


def _call_as_verl(scorer: Scorer, payload: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    """Call a function of verl's interface with the parameters that it has: once for a batch, with their names in the
    plural, or once for each completion."""
    columns, turns, batch = payload["columns"], payload["num_turns"], scorer.style == "compute_scores"
    values = {
        "data_source": columns["data_source"],
        "solution_str": payload["completions"],
        "ground_truth": columns["ground_truth"],
        "extra_info": [
            {**(item or {}), "num_turns": turns} if isinstance(item or {}, Mapping) else item
            for item, turns in zip(columns.get("extra_info", [None] * len(turns)), turns, strict=True)
        ],
    }
    parameters = parameters_of(scorer.function) or {}
    arguments = {f"{name}s" if batch else name: column for name, column in values.items()}
    if not takes_any(parameters):
        arguments = {name: column for name, column in arguments.items() if name in parameters}
    if batch:
        return scorer.function(**arguments, **args)
    rows = [dict(zip(arguments, row, strict=True)) for row in zip(*arguments.values(), strict=True)]
    return [scorer.function(**row, **args) for row in rows]


def _parse_result(result: Any, size: int) -> Outcome:
    """Check that there is one value per completion, and parse the values."""
    if hasattr(result, "tolist"):  # numpy, torch
        result = result.tolist()
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Sequence):
        return failed(size, "invalid", f"it must return a list of numbers, not {type(result).__name__}")
    if len(result) != size:
        return failed(size, "invalid", f"it returned {len(result)} values for {size} completions")
    return Outcome([_parse_score(value) for value in result])


def _kind_of(error: BaseException) -> FailureKind:
    return "busy" if is_busy(error) else "away" if is_away(error) else "error"


@contextmanager
def _torch_settings(name: str) -> Iterator[None]:
    """Restore torch's default dtype, default device, grad mode and number of threads, which the trainer depends on, if
    a reward in its process changes them; and log which reward does."""
    torch = sys.modules.get("torch")  # a reward that does not import it cannot change it
    if torch is None:
        yield
        return
    settings = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (torch.get_default_device, _set_default_device),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
    }
    before = {setting: get() for setting, (get, _) in settings.items()}
    try:
        yield
    finally:
        for setting, (get, restore) in settings.items():
            if (value := get()) == before[setting]:
                continue
            restore(before[setting])
            if (name, setting) not in _warned:
                _warned.add((name, setting))
                log.warning(
                    "reward %r has set torch's %s to %s in the training process; it is %s again after each call",
                    name, setting, value, before[setting],
                )  # fmt: skip


def _set_default_device(device: Any) -> None:
    """Set torch's default device; for the CPU by clearing it, since a device that was set, the CPU too, adds a mode to
    every later call of torch, which also moves what `torch.as_tensor` is given."""
    sys.modules["torch"].set_default_device(None if device.type == "cpu" else device)


async def _await(result: Any) -> Any:
    """Await one result, or a list of results, whose exceptions are returned in place of values."""
    return await asyncio.gather(*result, return_exceptions=True) if isinstance(result, list) else await result


def _messages_hint(error: BaseException, payload: Mapping[str, Any]) -> str:
    """Return a hint if a function seems to have read a text as messages (`completion[0]["content"]`), else ""."""
    has_texts = any(isinstance(item, str) for item in payload.get("completions", ()))
    indexed_text = isinstance(error, TypeError | AttributeError) and re.search(
        r"string ind(ices|exes) must be integers|'str' object has no attribute '(get|items|keys)'", str(error)
    )
    if not (indexed_text and has_texts):
        return ""
    return (
        "; completions are strings here: use completion instead of completion[0]['content'], or set `completions: "
        "messages` for the function in reward.functions, for prompts that are messages (as in TRL)"
    )


def _parse_score(value: Any) -> Score:
    """Parse one value: a number, None, verl's dict with `score`, a trajectory with a reward, or an exception."""
    if isinstance(value, NoScore):
        return Score(failure=value.kind, message=without_secrets(str(value))[:MAX_MESSAGE])
    if isinstance(value, BaseException):
        return failed(1, _kind_of(value), describe_error(value, place=True)).scores[0]
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
    return Score(None, parts, "invalid", f"it returned {without_secrets(repr(value))[:100]}; return {expected}")


def _as_number(value: Any) -> float | None:
    """Convert a finite number of any library to a float; return None for anything else.

    Example:
        >>> _as_number(True), _as_number(Decimal("0.5")), _as_number("1"), _as_number(float("nan"))
        (1.0, 0.5, None, None)
    """
    if isinstance(value, str | bytes):  # NumPy's too
        return None
    try:
        number = float(value) if isinstance(value, Real | Decimal) or hasattr(value, "item") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
