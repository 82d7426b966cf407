"""The processes that environments run in: many episodes at once, each on a thread of its own.

What a worker gets is pickled by the trainer; what it answers is JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple, get_type_hints

from atomrl.common.errors import ServiceFault, asked_wait, did_you_mean, is_away, said_as
from atomrl.common.functions import find_function
from atomrl.common.processes import say
from atomrl.common.secrets import left_out
from atomrl.environments.builtin import ENVIRONMENTS
from atomrl.types import Reply, Sample

# --------------------------------------------------------------------------------------------------------------------
# Calls of functions that may take too long, on threads that are left behind then.

GRACE_S = 0.1
"""In which a coroutine that took too long may end by itself."""
left_behind = threading.Event()
"""A thread of this process goes on with a call that nobody waits for."""


class TooLong(Exception):
    """A call took too long."""


class CallThread:
    """A thread that makes calls, one after the other. It ends when it is told to, or is left behind with a call.

    Example:
        >>> thread = CallThread()
        >>> thread.run(lambda: 6 * 7, limit_s=5)
        42
        >>> thread.end()
    """

    def __init__(self) -> None:
        self.lost = False
        """It does not come back from a call."""
        self._work: SimpleQueue[tuple[Callable[[], Any], float | None, Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, function: Callable[[], Any], limit_s: float | None = None) -> Any:
        """What a function returns, or raises; of a coroutine, what that does.

        Raises:
            TooLong: it does not within `limit_s` seconds. A coroutine is cancelled; what does not end all the same
                goes on, and no other call is made any more.
        """
        if self.lost:
            raise TooLong("a call before it has not come back")
        result: Future[Any] = Future()
        self._work.put((function, limit_s, result))
        try:
            return result.result(None if limit_s is None else limit_s + GRACE_S)
        except TimeoutError:
            if result.done():  # it is the function's own
                raise
            self.lost = True
            left_behind.set()
            raise TooLong(f"no answer within {limit_s:g} s") from None

    def end(self, last: Callable[[], Any] | None = None) -> None:
        """Make a last call, unless an earlier one has not come back, and end."""
        try:
            if last is not None and not self.lost:
                self.run(last)
        finally:
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            function, limit_s, result = work
            try:
                found = function()
                result.set_result(asyncio.run(_within(found, limit_s)) if inspect.isawaitable(found) else found)
            except BaseException as error:  # also SystemExit: whoever asked for it is told
                result.set_exception(error)


async def _within(result: Any, limit_s: float | None) -> Any:
    timer = asyncio.timeout(limit_s)
    try:
        async with timer:
            return await result
    except TimeoutError:
        if not timer.expired():
            raise
        raise TooLong(f"no answer within {limit_s:g} s") from None


# --------------------------------------------------------------------------------------------------------------------
# An episode from the environment's side: how each kind of environment is found, made and played.

Said = Reply | str | Sequence[Reply] | None
"""What an environment says at once. Several replies are messages of the tool role, as many as calls were made."""
Send = Callable[[Said], str]
"""Says something to the model and waits for what it writes; None is nothing, before its first turn. It raises `Cut`
where there is no room for the answer, and `Closed` where nobody waits for it."""


class EpisodeError(ValueError):
    """An environment cannot be used at all: it is unknown, or does not take what it would be given."""


class Misplayed(ValueError):
    """An environment said or returned what it cannot."""


class Cut(Exception):
    """There is no further turn: the limit on turns or on tokens is reached. An environment may catch it to return an
    outcome; otherwise it is 0."""


class Closed(BaseException):
    """The episode is given up."""


def find_environment(name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """A built-in environment, or a user's own by its path, its signature checked.

    Args:
        name: of the table, `my_module.f`, or `./my_file.py:f`.
        args: what it is called with beside the sample (and `seed`, where it takes one).

    Raises:
        EpisodeError: there is none, it does not take its `args`, or it cannot be played on this machine.

    Example:
        >>> find_environment("search_r1", {"topk": 3}).__name__
        'search_r1'
    """
    known = ENVIRONMENTS.get(name)
    if "." not in name and ":" not in name and known is None:
        hint = did_you_mean(name, ENVIRONMENTS, "built in are")
        raise EpisodeError(f"function: unknown environment {name!r}; {hint} (your own is ./my_file.py:f)")
    if known and known.package and find_spec(name) is None:
        raise EpisodeError(f"function: {name} is not installed: pip install {known.package}")
    try:
        function = find_function(known.path if known else name)
    except ValueError as error:
        raise EpisodeError(f"function: {error}") from error
    if not _is_coroutine(function) and not inspect.isgeneratorfunction(function) and not _is_class(function):
        raise EpisodeError(
            f"function: {name!r} is no environment: a generator function f(sample, ...) that yields "
            "replies, an async function f(sample, say, ...), or a class with reset(sample) and step(text)"
        )
    positional = [] if _is_class(function) else [None] * (2 if _is_coroutine(function) else 1)
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **args, **_seed(signature.parameters, args, 0))
    except TypeError as error:
        raise EpisodeError(f"args: {name!r} takes {signature}: {error}") from error
    if known:
        _check_types(function, args)
    if known and known.check:
        with said_as(EpisodeError, f"function: {name!r}", RuntimeError), said_as(EpisodeError, "args", ValueError):
            find_function(known.check)(**args)
    return function


def _check_types(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """That `args` are what the type hints say.

    Raises:
        EpisodeError: one is not.
    """
    from pydantic import TypeAdapter, ValidationError

    hints = get_type_hints(function)
    for name, value in args.items():
        try:
            TypeAdapter(hints.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            raise EpisodeError(
                f"args.{name}: {error.errors(include_url=False)[0]['msg']}, not {left_out(value, name)!r}"
            ) from error


def _is_class(function: Callable[..., Any]) -> bool:
    return inspect.isclass(function) and all(callable(getattr(function, part, None)) for part in ("reset", "step"))


def _is_coroutine(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


def _seed(parameters: Mapping[str, Any], args: Mapping[str, Any], seed: int) -> dict[str, int]:
    return {"seed": seed} if "seed" in parameters and "seed" not in args else {}


def play(function: Callable[..., Any], sample: Sample, args: Mapping[str, Any], seed: int, say: Send) -> float | None:
    """Play an episode to its end; its outcome.

    Raises:
        Closed: it was given up.
        Misplayed: its outcome is no finite number.
        Exception: whatever the environment raises.
    """
    given = dict(args) | _seed(inspect.signature(function).parameters, args, seed)
    try:
        if _is_class(function):
            outcome = _step(function(**given), sample, say)
        elif _is_coroutine(function):
            outcome = asyncio.run(function(sample, _waiting(say), **given))
        else:
            outcome = _drive(function(sample, **given), say)
    except Cut:
        return 0.0
    if outcome is None:
        return None
    if (number := _number(outcome)) is None:
        raise Misplayed(f"it returned {outcome!r:.100}; an environment returns a finite number, or None")
    return number


def _drive(episode: Generator[Any, str, Any], say: Send) -> Any:
    """A generator: it yields what is said, and is sent what the model wrote."""
    try:
        said = next(episode)
        while True:
            try:
                text = say(said)
            except Cut as cut:
                episode.throw(cut)
                raise  # it went on as if nothing had happened
            said = episode.send(text)
    except StopIteration as end:
        return end.value
    finally:
        episode.close()


def _step(environment: Any, sample: Sample, say: Send) -> Any:
    """A class: `step` returns a reply, or the outcome."""
    try:
        text = say(environment.reset(sample))
        while isinstance(said := environment.step(text), Reply | str | list):
            text = say(said)
        return said
    finally:
        if callable(close := getattr(environment, "close", None)):
            close()


def _waiting(say: Send) -> Callable[..., Any]:
    async def wait(said: Said = None) -> str:
        return await asyncio.to_thread(say, said)

    return wait


def as_replies(said: Any) -> list[Reply]:
    """What an environment said; nothing where it said None.

    Raises:
        Misplayed: it is no reply, no text, no list of replies of the tool role and not None, or a reward is no finite
            number.
    """
    if said is None:
        return []
    replies = said if isinstance(said, list | tuple) and said else [said]
    found = [Reply(text=reply) if isinstance(reply, str) else reply for reply in replies]
    for reply in found:
        if not isinstance(reply, Reply):
            raise Misplayed(f"it said {said!r:.100}; an environment says a Reply, text, or (at first) None")
        if not isinstance(reply.text, str) or reply.role not in ("", "tool", "user"):
            raise Misplayed(f"a Reply has a text and the role '', 'tool' or 'user', not {reply!r:.200}")
        if not isinstance(reply.label, str):
            raise Misplayed(f"the label of a Reply is a text, not {reply.label!r:.100}")
        if len(found) > 1 and reply.role != "tool":
            raise Misplayed(f"several replies at once have the role 'tool', not {reply.role!r}")
        if reply.reward is not None and _number(reply.reward) is None:
            raise Misplayed(f"the reward of a Reply is a finite number, not {reply.reward!r}")
    return [
        replace(
            reply,
            text=plain(reply.text),
            label=plain(reply.label),
            reward=_number(reply.reward),
        )
        for reply in found
    ]


def _number(value: Any) -> float | None:
    """As a float; None where it is no finite number."""
    try:
        number = math.nan if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def described(error: BaseException) -> str:
    """An exception in words, also of one that has none: `str` of it is its author's."""
    try:
        text = str(error)
    except Exception as another:
        text = f"(its words raise {type(another).__name__})"
    return plain(f"{type(error).__name__}: {text[:300]}")


def plain(text: str) -> str:
    """With halves of characters replaced, which no tokenizer and no file takes; two that belong together are one.

    Example:
        >>> plain("a\\ud800b") == "a\\ufffdb", plain("\\ud83d\\ude42") == "\\U0001f642"
        (True, True)
    """
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


MAX_MESSAGE = 500


class Start(NamedTuple):
    """Begin an episode."""

    key: int
    name: str
    args: dict[str, Any]
    sample: Sample
    seed: int
    most_characters: int
    """Of a reply; what is beyond is cut."""


class Say(NamedTuple):
    """What the model wrote, or that there is no further turn, or that the episode is given up."""

    key: int
    what: str | int


CUT, CLOSE = 0, 1


class Ping(NamedTuple):
    """Is anybody there?"""


def serve(connection: Connection) -> None:
    """Play the episodes that are begun, until the connection is closed.

    Each of its answers is a list: a key, a word, and what belongs to it: `opening` and `reply` with a list of text,
    role, reward and label of each message (empty: nothing is said) and seconds; `end` with the outcome and seconds;
    `failed` with a kind, a message and seconds; `away` with a message and the seconds that a service asks to wait for,
    where that ended the episode. The key None is of no episode: `pong`; `thread` with a key and
    the number of the thread that plays it; `unusable` with a reason; `left_behind`: threads go on with calls that
    nobody waits for.
    """
    lock, inboxes, process = threading.Lock(), dict[int, SimpleQueue[Any]](), os.getpid()
    functions: dict[str, Callable[..., Any]] = {}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # an event loop for each episode that is asynchronous
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def answer(*message: Any) -> None:
        if os.getpid() != process:
            os._exit(1)  # a fork that an environment has made goes on by mistake
        with lock:
            try:
                say(connection, message)
            except OSError:
                os._exit(1)  # an environment has closed it, or there is nobody any more

    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # unpickling runs code of the columns' own
            answer(None, "unusable", f"{type(error).__name__}: {error}"[:MAX_MESSAGE])
            continue
        if isinstance(message, Ping):
            answer(None, "pong")
        elif isinstance(message, Start):
            try:
                if message.name not in functions:
                    functions[message.name] = find_environment(message.name, message.args)
                    answer(None, "ready")
            except (Exception, SystemExit) as error:
                answer(None, "unusable", f"{type(error).__name__}: {error}"[:MAX_MESSAGE])
                continue
            inboxes[message.key] = SimpleQueue()
            work = (functions[message.name], message, inboxes, answer)
            try:
                threading.Thread(target=_play, args=work, daemon=True).start()
            except RuntimeError as error:  # there are as many as the machine allows
                del inboxes[message.key]
                answer(message.key, "failed", "error", _describe(error), 0.0)
        elif (inbox := inboxes.get(message.key)) is not None:
            inbox.put(message.what)


def _play(
    function: Callable[..., Any], start: Start, inboxes: dict[int, SimpleQueue[Any]], answer: Callable[..., None]
) -> None:
    """An episode, on its thread."""
    began, opened, over, inbox = time.perf_counter(), False, False, inboxes[start.key]
    answer(None, "thread", start.key, threading.get_native_id())
    speaking = threading.Lock()

    def hand_over(said: Said) -> str:
        nonlocal began, opened, over
        if over:
            raise Closed
        replies, seconds = as_replies(said), time.perf_counter() - began
        if not replies and opened:
            raise Misplayed("it said None after the model's first turn; say a Reply or text, or return the outcome")
        if not opened and any(reply.reward is not None for reply in replies):
            raise Misplayed("the reward of its first words is of no turn: there has been none")
        word = "reply" if opened else "opening"
        opened = True
        most = start.most_characters // max(1, len(replies))
        parts = [asdict(replace(reply, text=reply.text[:most])) for reply in replies]
        if left_behind.is_set():
            answer(None, "left_behind")
        answer(start.key, word, parts, seconds)
        what = inbox.get()
        began = time.perf_counter()
        if what == CLOSE:
            raise Closed
        if what == CUT:
            over = True
            raise Cut
        return str(what)

    def say_alone(said: Said) -> str:
        if not speaking.acquire(blocking=False):
            raise Misplayed("it said something before the model had answered what it said last")
        try:
            return hand_over(said)
        finally:
            speaking.release()

    try:
        outcome = play(function, start.sample, start.args, start.seed, say_alone)
        answer(start.key, "end", outcome, time.perf_counter() - began)
    except Closed:
        if over:  # it went on as if nothing had happened
            answer(start.key, "end", 0.0, time.perf_counter() - began)
    except Misplayed as error:
        answer(start.key, "failed", "invalid", plain(str(error)[:MAX_MESSAGE]), time.perf_counter() - began)
    except ServiceFault as error:
        answer(None, "unusable", plain(str(error)[:MAX_MESSAGE]))
    except BaseException as error:  # also SystemExit, and asyncio's CancelledError
        if is_away(error):
            answer(start.key, "away", _describe(error)[:MAX_MESSAGE], asked_wait(error))
            return
        answer(start.key, "failed", "error", _describe(error), time.perf_counter() - began)
    finally:
        del inboxes[start.key]


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return described(error) + plain(place)
