"""Call one reward function, in this process or in a worker that can be killed.

`find_scorer` detects the calling convention and checks the signature, `call` calls the function and validates what it
returns, and `RewardPool` runs calls in worker processes, so that no reward can hang or crash the run.
"""

import asyncio
import hashlib
import inspect
import logging
import math
import multiprocessing.connection
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import islice, takewhile
from multiprocessing.connection import Connection
from numbers import Real
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, Self

from pydantic import ValidationError

from atomrl.common.errors import describe_error, nearest
from atomrl.common.functions import subscripts
from atomrl.common.outages import is_away, is_busy
from atomrl.common.secrets import mask_secrets, register_secrets, secrets_of, without_secrets
from atomrl.common.workers import (
    LOAD_LIMIT_S,
    PROCESS_ENDED,
    TICK_S,
    PoolWorker,
    WorkerPool,
    seed_everything,
    send_answer,
)
from atomrl.data.columns import IMAGES
from atomrl.rewards.errors import NoScore, RewardError, RewardStop
from atomrl.rewards.table import CLASSES, POOLED, REWARDS, AnyReward, find_reward, importable_name
from atomrl.types import FailureKind, Problem, Trajectory

log = logging.getLogger(__name__)
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
    parameters = _parameters(function) or {}
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
        by_row=(style == "compute_score" and not _is_async(function)) or built_in in REWARDS,
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
            return f"{how}, but it receives only {', '.join(sorted(available))}: give it a default, or a value in args"
        near = nearest(name, [*STANDARD_COLUMNS, *columns])
        return (
            f"it needs a column {name!r} ({how}), but the data has {', '.join(map(repr, columns)) or 'none'}, besides "
            f"what every reward receives ({', '.join(STANDARD_COLUMNS)}): "
            + (f"did you mean {near!r}? Else rename" if near else "rename")
            + " the parameter to a column of the data, or give it a default or a value in args"
        )
    return None


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
            # Call the function with the arguments of its calling convention.
            result: Any
            if scorer.style == "trajectories":
                result = function(payload["trajectories"])
            elif scorer.style == "columns":
                prompts, completions = payload["prompts"], payload["completions"]
                result = function(prompts=prompts, completions=completions, **payload["columns"], **args)
            else:
                # verl's: the parameters that the function has; a function for a batch has them in the plural.
                columns, batch = payload["columns"], scorer.style == "compute_scores"
                values = {
                    "data_source": columns["data_source"],
                    "solution_str": payload["completions"],
                    "ground_truth": columns["ground_truth"],
                    "extra_info": [item or {} for item in columns.get("extra_info", [None] * size)],
                }
                parameters = _parameters(function) or {}
                arguments = {f"{name}s" if batch else name: column for name, column in values.items()}
                if not _takes_any(parameters):
                    arguments = {name: column for name, column in arguments.items() if name in parameters}
                if batch:
                    result = function(**arguments, **args)
                else:
                    rows = [dict(zip(arguments, row, strict=True)) for row in zip(*arguments.values(), strict=True)]
                    result = [function(**row, **args) for row in rows]
            # Await an async function: its one call, or its calls for each completion.
            if inspect.isawaitable(result) or (scorer.style == "compute_score" and _is_async(function)):
                result = asyncio.run(_await(result))
            # Check that there is one value per completion, and parse the values.
            if hasattr(result, "tolist"):  # numpy, torch
                result = result.tolist()
            if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Sequence):
                outcome = failed(size, "invalid", f"it must return a list of numbers, not {type(result).__name__}")
            elif len(result) != size:
                outcome = failed(size, "invalid", f"it returned {len(result)} values for {size} completions")
            else:
                outcome = Outcome([_parse_score(value) for value in result])
        except RewardStop:
            raise
        except BaseException as error:  # also SystemExit, and asyncio's CancelledError
            if isinstance(error, KeyboardInterrupt) and scorer.in_process:
                raise
            message = describe_error(error, place=True) + _messages_hint(error, payload)
            outcome = failed(size, _kind_of(error), message)
        return outcome._replace(seconds=time.perf_counter() - started)


def _kind_of(error: BaseException) -> FailureKind:
    return "busy" if is_busy(error) else "away" if is_away(error) else "error"


_warned: set[tuple[str, str]] = set()
"""Reward and torch setting that `_torch_settings` has warned about."""


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
        "default device": (torch.get_default_device, torch.set_default_device),
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


# --------------------------------------------------------------------------------------------------------------------
# Calls in worker processes. A worker does not import torch unless a user's reward does, so replacing one takes a
# fraction of a second.

MAX_CHUNK = 16
"""Calls that are sent to a worker in one message."""


def serve(connection: Connection) -> None:
    """Main loop of a worker.

    For each request (name, args, payloads) it answers `["unusable", reason]` if the reward cannot be loaded, and
    otherwise `["loaded"]` and then `["outcome", scores, seconds, call_failed]` for each payload.

    Args:
        connection: pipe to the trainer.
    """
    loaded: dict[str, Scorer] = {}
    while True:
        try:
            name, args, payloads = connection.recv()
            key = f"{name} {args!r}"
            if key not in loaded:
                register_secrets(secrets_of(args, mask_secrets(args)))
                scorer = find_scorer(name, args)
                if scorer.built_in in POOLED:
                    POOLED[scorer.built_in].warm_up()
                loaded[key] = instantiate(scorer)
        except EOFError:
            return
        except BaseException as error:  # also SystemExit, and asyncio's CancelledError
            send_answer(connection, ["unusable", without_secrets(f"{type(error).__name__}: {error}")])
            continue
        send_answer(connection, ["loaded"])
        for payload in payloads:
            seed_everything(payload["seed"])
            send_answer(connection, ["outcome", *call(loaded[key], payload)])


class _Batch:
    """The calls of one `RewardPool.run`."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.waiting = deque(tasks)
        """Tasks not yet assigned to a worker."""
        self.answers: SimpleQueue[tuple[Task, Outcome] | Exception] = SimpleQueue()
        self.cancelled = False


@dataclass(eq=False)
class _RewardWorker(PoolWorker):
    """A worker process and its state as seen by the dispatcher."""

    batch: _Batch = field(default_factory=lambda: _Batch(()))
    """The batch that its pending tasks belong to."""
    pending: deque[Task] = field(default_factory=deque)
    """Tasks sent and not yet answered; the first one is running."""
    loading: bool = False
    """It has not yet reported that the reward of the current message is loaded."""
    loaded: set[int] = field(default_factory=set)
    """`id` of each scorer that it has loaded."""
    deadline: float = 0.0
    """On the dispatcher's clock."""


class RewardPool:
    """Run reward calls in worker processes, which are started on demand.

    `run` may be called from several threads. A free worker takes its next task from the batch with the fewest busy
    workers, so slow calls mostly delay their own batch.

    Every task gets an outcome. A call that exceeds its time limit or ends its process has the failure `timeout` or
    `crash`, and its worker is replaced. Time during which this process was stopped (suspend, SIGSTOP) does not count.

    No worker outlives the pool: `close`, interpreter exit and any death of this process end them (on Linux at once,
    elsewhere when a worker is idle). Workers ignore SIGINT and SIGTERM; the trainer handles these.

    Args:
        workers: maximum number of processes.
    """

    def __init__(self, workers: int) -> None:
        self.size = workers
        self._lock = threading.Lock()
        self._dispatcher: _Dispatcher | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.process.pid for worker in self._dispatcher.workers] if self._dispatcher else []

    def close(self) -> None:
        """Kill all workers. A `run` in progress raises RewardError; a later `run` starts new workers."""
        with self._lock:
            if self._dispatcher is not None:
                self._finalizer()
            self._dispatcher = None

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[Task, Outcome], None, None]:
        """Yield (task, outcome) in the order of completion. Closing the generator cancels the remaining tasks.

        Raises:
            RewardError: a reward cannot be imported in a worker, or its columns cannot be pickled.
        """
        if not tasks:
            return
        batch = _Batch(tasks)
        with self._lock:
            if self._dispatcher is None or not self._dispatcher.thread.is_alive():
                self._dispatcher = _Dispatcher(self.size)
                self._finalizer = weakref.finalize(self, self._dispatcher.end)
            dispatcher = self._dispatcher
            dispatcher.new.put(batch)
            dispatcher.wake()
        try:
            for _ in tasks:
                answer = batch.answers.get()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            batch.cancelled = True
            dispatcher.wake()


class _Dispatcher(WorkerPool[_RewardWorker]):
    """The thread that starts workers, assigns tasks and receives results.

    Linux delivers a worker's parent-death signal when the thread that started it ends. So one thread starts all
    workers and lives as long as they do.
    """

    def __init__(self, size: int) -> None:
        super().__init__(__name__, _RewardWorker)
        self.size = size
        self.batches: list[_Batch] = []
        self.new: SimpleQueue[_Batch] = SimpleQueue()
        """Batches from other threads, which call `wake` after adding one."""
        self.ending = False
        self._owner = os.getpid()
        self._wakeup_reader, self._wakeup_writer = multiprocessing.connection.Pipe(duplex=False)
        self.thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self.thread.start()

    def wake(self) -> None:
        """Wake the thread from waiting."""
        with suppress(OSError):  # the thread has ended and closed the pipe
            self._wakeup_writer.send_bytes(b"")

    def end(self) -> None:
        """Kill the workers and end the thread."""
        if os.getpid() == self._owner:  # a forked child must not kill its parent's workers
            self.ending = True
            self.wake()
            self.thread.join()

    def _work(self) -> None:
        error: Exception = RewardError("the rewards were closed while they were computed")
        try:
            while not self.ending:
                busy = any(worker.pending for worker in self.workers)
                for worker, message in self.receive(TICK_S if busy else None, self._wakeup_reader):
                    self._handle(worker, message)
                while self._wakeup_reader.poll(0):
                    self._wakeup_reader.recv_bytes()
                for worker in [*self.workers]:
                    if worker.pending and self.clock >= worker.deadline:
                        self._time_out(worker)
                self._assign()
        except Exception as caught:
            error = caught
        self.close()
        self._wakeup_writer.close()
        self._wakeup_reader.close()
        while not self.new.empty():
            self.batches.append(self.new.get())
        for batch in self.batches:
            batch.answers.put(error)

    def _assign(self) -> None:
        """Assign tasks to idle workers, and start workers as needed."""
        while not self.new.empty():
            self.batches.append(self.new.get())
        for worker in [worker for worker in self.workers if worker.pending and worker.batch.cancelled]:
            self.kill(worker)
        self.batches = [batch for batch in self.batches if not batch.cancelled]
        while waiting := [batch for batch in self.batches if batch.waiting and not batch.cancelled]:
            idle = next((worker for worker in self.workers if not worker.pending), None)
            if idle is None:
                if len(self.workers) >= self.size:
                    return
                idle = self.start_worker()
            busy = Counter(worker.batch for worker in self.workers if worker.pending)
            self._send(idle, min(waiting, key=lambda batch: busy[batch]))

    def _send(self, worker: _RewardWorker, batch: _Batch) -> None:
        """Send a worker the next tasks of a batch, all of one reward.

        Several tasks per message keep the worker busy; few enough that the load stays balanced.
        """
        scorer = batch.waiting[0].scorer
        size = max(1, min(MAX_CHUNK, len(batch.waiting) // (2 * self.size)))
        chunk = list(takewhile(lambda task: task.scorer is scorer, islice(batch.waiting, size)))
        try:
            worker.send((scorer.name, dict(scorer.args), [task.payload() for task in chunk]))
        except Exception as error:  # pickling may run code of the user's classes
            self._fail(batch, scorer, f": the columns cannot be sent to a worker process: {error!r}", error)
            return
        worker.batch = batch
        worker.pending.extend(batch.waiting.popleft() for _ in chunk)
        limit = scorer.timeout_s if id(scorer) in worker.loaded else LOAD_LIMIT_S
        worker.loading, worker.deadline = True, self.clock + limit

    def _handle(self, worker: _RewardWorker, message: Any) -> None:
        """Handle a message of `serve`, or None for the end of the worker."""
        if message is None:
            self._replace(worker, "crash", PROCESS_ENDED)
            return
        task, (word, *values) = worker.pending[0], message
        if word == "unusable":
            self._fail(worker.batch, task.scorer, f" cannot be loaded in a worker process: {values[0]}")
            return
        if word == "outcome":
            worker.pending.popleft()
            scores, *rest = values
            worker.batch.answers.put((task, Outcome([Score(*score) for score in scores], *rest)))
        self.loaded()
        worker.loading = False
        worker.loaded.add(id(task.scorer))
        worker.deadline = self.clock + task.scorer.timeout_s

    def _time_out(self, worker: _RewardWorker) -> None:
        """Replace a worker whose running task exceeds its time limit."""
        task = worker.pending[0]
        if worker.loading and id(task.scorer) not in worker.loaded:
            self._fail(worker.batch, task.scorer, f": importing it took over {LOAD_LIMIT_S:.0f} s")
            return
        completions = f" for {len(task.rows)} completions" if len(task.rows) > 1 else ""
        limit = f"{task.scorer.timeout_s:g} s{completions} (raise the reward's timeout_s)"
        self._replace(worker, "timeout", f"over {limit}")

    def _replace(self, worker: _RewardWorker, failure: FailureKind, message: str) -> None:
        """Kill a worker that crashed or timed out: its running task has failed, the others are queued again."""
        self.kill(worker)
        if not worker.pending:
            return  # it was idle
        task = worker.pending[0]
        if not worker.loading:
            worker.pending.popleft()
            worker.batch.answers.put((task, failed(len(task.rows), failure, message, task.scorer.timeout_s)))
        elif self.crashed_while_loading():  # the task has not started: importing the reward ended the process
            self._fail(worker.batch, task.scorer, ": importing it ends the worker process")
            return
        worker.batch.waiting.extendleft(reversed(worker.pending))

    def _fail(self, batch: _Batch, scorer: Scorer, reason: str, cause: Exception | None = None) -> None:
        """End a batch with an error of one of its rewards."""
        error = RewardError(f"reward {scorer.name!r}{reason}")
        error.__cause__ = cause
        for worker in [worker for worker in self.workers if worker.batch is batch and worker.pending]:
            self.kill(worker)
        batch.cancelled = True
        batch.answers.put(error)
