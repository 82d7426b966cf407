"""A worker process of environments (`worker_main`): it plays many episodes at once, each on a thread.

The trainer pickles what it sends to a worker; the worker's answers are JSON.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, get_type_hints

from atomrl.common.errors import describe_error, did_you_mean, replace_surrogates, reraise_as
from atomrl.common.functions import find_function
from atomrl.common.outages import ServiceFault, is_away, retry_after_of
from atomrl.common.secrets import mask_secrets
from atomrl.common.workers import send_answer
from atomrl.data.columns import PLACE
from atomrl.environments.builtin import ENVIRONMENTS
from atomrl.types import Problem, Reply

Replies = Reply | str | Sequence[Reply] | None
"""An environment's reply. Several replies are tool messages, one for each call; None: no opening."""
Send = Callable[[Replies], str]
"""Sends a reply to the model and returns its next turn. Raises `Cut` if there are no more turns, and `Closed` if the
episode was aborted."""


class EpisodeError(ValueError):
    """An environment cannot be used at all: it is unknown, or does not accept its arguments."""


class InvalidReply(ValueError):
    """An environment's reply or outcome has a wrong type or value."""


class Cut(Exception):
    """There are no more turns: the limit on turns or on tokens is reached. An environment may catch it to return an
    outcome; otherwise the outcome is 0."""


class Closed(BaseException):
    """The episode was aborted."""


# --------------------------------------------------------------------------------------------------------------------
# The worker's messages and its main loop.

MAX_MESSAGE = 500


class Start(NamedTuple):
    """Start an episode."""

    key: int
    name: str
    """Name or path of the environment."""
    args: dict[str, Any]
    problem: Problem
    seed: int
    max_characters: int
    """Replies are cut to this many characters."""
    rendered: str
    """Text of the prompt's tokens."""


class Say(NamedTuple):
    """Send an episode the model's turn, or `CUT`, or `CLOSE`."""

    key: int
    turn: str | int


CUT, CLOSE = 0, 1
"""There are no more turns; the episode is aborted."""


class Ping(NamedTuple):
    """Ask for a `pong`."""


def worker_main(connection: Connection) -> None:
    """Play episodes until the connection is closed.

    Each answer is a list of a key, a word, and values:

        [key, "opening" or "reply", replies, seconds]    replies: as `to_json` gives each; may be empty
        [key, "end", outcome, seconds]
        [key, "failed", kind of failure, message, seconds]
        [key, "away", message, pause that the service asks for]    an unavailable service ended the episode
        [null, "ready"]                 the environment is imported
        [null, "unusable", reason]      the environment cannot be used
        [null, "thread", key, id]       native id of the episode's thread
        [null, "left_behind"]           a thread is still in a call that has timed out
        [null, "pong"]
    """
    lock, inboxes, process = threading.Lock(), dict[int, SimpleQueue[Any]](), os.getpid()
    functions: dict[str, Callable[..., Any]] = {}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # each asynchronous episode has an event loop, with files of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def answer(*message: Any) -> None:
        if os.getpid() != process:
            os._exit(1)  # a fork that an environment made runs on in the episode's code
        with lock:
            try:
                send_answer(connection, message)
            except OSError:
                os._exit(1)  # the trainer has ended, or an environment has closed the connection

    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # unpickling runs code of the problem's columns
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
            args = (functions[message.name], message, inboxes, answer)
            try:
                threading.Thread(target=_run_episode, args=args, daemon=True).start()
            except RuntimeError as error:  # the system's limit on threads
                del inboxes[message.key]
                answer(message.key, "failed", "error", describe_error(error, place=True), 0.0)
        elif (inbox := inboxes.get(message.key)) is not None:
            inbox.put(message.turn)


def _run_episode(
    function: Callable[..., Any], start: Start, inboxes: dict[int, SimpleQueue[Any]], answer: Callable[..., None]
) -> None:
    """Play an episode on its thread, and send its answers."""
    began, opened, cut, inbox = time.perf_counter(), False, False, inboxes[start.key]
    answer(None, "thread", start.key, threading.get_native_id())
    sending = threading.Lock()

    def exchange(reply: Replies) -> str:
        nonlocal began, opened, cut
        if cut:
            raise Closed
        replies, seconds = as_replies(reply), time.perf_counter() - began
        if not replies and opened:
            raise InvalidReply("it replied None after the model's first turn; reply with text, or return the outcome")
        if not opened and any(each.reward is not None for each in replies):
            raise InvalidReply("its opening has a reward, but the model has not had a turn yet; open with text or None")
        word = "reply" if opened else "opening"
        opened = True
        most = start.max_characters // max(1, len(replies))
        if long := next((each for each in replies if each.images and len(each.text) > most), None):
            raise InvalidReply(f"its reply with pictures has {len(long.text)} characters; at most {most} are sent")
        parts = [to_json(replace(each, text=each.text[:most])) for each in replies]
        if left_behind.is_set():
            answer(None, "left_behind")
        answer(start.key, word, parts, seconds)
        turn = inbox.get()
        began = time.perf_counter()
        if turn == CLOSE:
            raise Closed
        if turn == CUT:
            cut = True
            raise Cut
        return str(turn)

    def send(reply: Replies) -> str:
        if not sending.acquire(blocking=False):
            raise InvalidReply("it sent a reply before the model answered the last one")
        try:
            return exchange(reply)
        finally:
            sending.release()

    try:
        outcome = play(function, start.problem, start.args, start.seed, send, start.rendered)
        answer(start.key, "end", outcome, time.perf_counter() - began)
    except Closed:
        if cut:  # the environment caught `Cut` and sent another reply
            answer(start.key, "end", 0.0, time.perf_counter() - began)
    except InvalidReply as error:
        message = replace_surrogates(str(error)[:MAX_MESSAGE])
        answer(start.key, "failed", "invalid", message, time.perf_counter() - began)
    except ServiceFault as error:
        answer(None, "unusable", replace_surrogates(str(error)[:MAX_MESSAGE]))
    except BaseException as error:  # also SystemExit, and asyncio's CancelledError
        if is_away(error):
            answer(start.key, "away", describe_error(error, place=True)[:MAX_MESSAGE], retry_after_of(error))
            return
        answer(start.key, "failed", "error", describe_error(error, place=True), time.perf_counter() - began)
    finally:
        del inboxes[start.key]


# --------------------------------------------------------------------------------------------------------------------
# Finding and playing environments: generator functions, async functions and classes.


def find_environment(name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a built-in environment by name, or a custom one by path, after checking its signature.

    Args:
        name: a key of `ENVIRONMENTS`, `my_module.f`, or `./my_file.py:f`.
        args: its arguments besides the problem (and `seed` and `rendered`, which it may take).

    Raises:
        EpisodeError: it does not exist, does not accept `args`, or cannot be played on this machine.

    Example:
        >>> find_environment("search_r1", {"topk": 3}).__name__
        'search_r1'
    """
    built_in = ENVIRONMENTS.get(name)
    if "." not in name and ":" not in name and built_in is None:
        hint = did_you_mean(name, ENVIRONMENTS, "built in:")
        raise EpisodeError(f"function: unknown environment {name!r}; {hint} (write your own as ./my_file.py:f)")
    if built_in and built_in.package and find_spec(name) is None:
        raise EpisodeError(f"function: {name} is not installed: pip install {built_in.package}")
    try:
        function = find_function(built_in.path if built_in else name)
    except ValueError as error:
        raise EpisodeError(f"function: {error}") from error
    is_async = inspect.iscoroutinefunction(function)
    if not is_async and not inspect.isgeneratorfunction(function) and not _is_class(function):
        raise EpisodeError(
            f"function: {name!r} is not an environment: a generator function f(problem, ...) that yields "
            "replies, an async function f(problem, say, ...), or a class with reset(problem) and step(text)"
        )
    # Bind the arguments as an episode will pass them, so that a wrong name fails before the run.
    positional = [] if _is_class(function) else [None] * (2 if is_async else 1)
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **args, **_own_arguments(signature.parameters, args, 0, ""))
    except TypeError as error:
        raise EpisodeError(f"args: {name!r} has the parameters {signature}: {error}") from error
    if built_in:
        _check_types(function, args)
    if built_in and built_in.check:
        with (
            reraise_as(EpisodeError, f"function: {name!r}", RuntimeError),
            reraise_as(EpisodeError, "args", ValueError),
        ):
            find_function(built_in.check)(**args)
    return function


def _check_types(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Validate `args` against the type hints.

    Raises:
        EpisodeError: one has another type.
    """
    from pydantic import TypeAdapter, ValidationError

    hints = get_type_hints(function)
    for name, value in args.items():
        try:
            TypeAdapter(hints.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            raise EpisodeError(
                f"args.{name}: {error.errors(include_url=False)[0]['msg']}, not {mask_secrets(value, name)!r}"
            ) from error


def _is_class(function: Callable[..., Any]) -> bool:
    return inspect.isclass(function) and all(callable(getattr(function, part, None)) for part in ("reset", "step"))


def _own_arguments(
    parameters: Mapping[str, Any], args: Mapping[str, Any], seed: int, rendered: str
) -> dict[str, int | str]:
    """Return the arguments that an episode gives to an environment which has these parameters."""
    given: dict[str, int | str] = {"seed": seed, "rendered": rendered}
    return {name: value for name, value in given.items() if name in parameters and name not in args}


def play(
    function: Callable[..., Any],
    problem: Problem,
    args: Mapping[str, Any],
    seed: int,
    send: Send,
    rendered: str = "",
) -> float | None:
    """Play an episode to its end and return its outcome.

    Args:
        seed, rendered: seed of the completion and text of the prompt's tokens, for parameters of these names.

    Raises:
        Closed: it was aborted.
        InvalidReply: its outcome is not a finite number.
        Exception: any error of the environment.
    """
    kwargs = dict(args) | _own_arguments(inspect.signature(function).parameters, args, seed, rendered)
    try:
        if _is_class(function):
            outcome = _play_class(function(**kwargs), problem, send)
        elif inspect.iscoroutinefunction(function):

            async def send_async(reply: Replies = None) -> str:
                return await asyncio.to_thread(send, reply)

            outcome = asyncio.run(function(problem, send_async, **kwargs))
        else:
            outcome = _play_generator(function(problem, **kwargs), send)
    except Cut:
        return 0.0
    if outcome is None:
        return None
    if (number := _finite(outcome)) is None:
        raise InvalidReply(f"it returned {outcome!r:.100}; it must return a finite number, or None")
    return number


def _play_generator(episode: Generator[Any, str, Any], send: Send) -> Any:
    """Play a generator, which yields replies and is sent the model's turns."""
    try:
        reply = next(episode)
        while True:
            try:
                turn = send(reply)
            except Cut as cut:
                episode.throw(cut)
                raise  # the environment caught it and yielded another reply
            reply = episode.send(turn)
    except StopIteration as end:
        return end.value
    finally:
        episode.close()


def _play_class(environment: Any, problem: Problem, send: Send) -> Any:
    """Play an object whose `step` returns a reply or the outcome."""
    try:
        turn = send(environment.reset(problem))
        while isinstance(result := environment.step(turn), Reply | str | list):
            turn = send(result)
        return result
    finally:
        if callable(close := getattr(environment, "close", None)):
            close()


def as_replies(reply: Any) -> list[Reply]:
    """Validate an environment's reply; None gives an empty list. Pictures become the bytes of their files, and each has
    its `<image>` in the text.

    Raises:
        InvalidReply: it is not a Reply, text, a list of tool replies or None, a reward is not finite, or a picture
            cannot be read or has no place.
    """
    if reply is None:
        return []
    items = reply if isinstance(reply, list | tuple) and reply else [reply]
    replies = [Reply(text=item) if isinstance(item, str) else item for item in items]
    for item in replies:
        if not isinstance(item, Reply):
            raise InvalidReply(f"it replied {reply!r:.100}; a reply must be a Reply, text, or (at first) None")
        if not isinstance(item.text, str) or item.role not in ("", "tool", "user"):
            raise InvalidReply(f"a Reply must have a text and the role '', 'tool' or 'user', not {item!r:.200}")
        if not isinstance(item.label, str):
            raise InvalidReply(f"the label of a Reply must be text, not {item.label!r:.100}")
        if len(replies) > 1 and item.role != "tool":
            raise InvalidReply(f"several replies at once must have the role 'tool', not {item.role!r}")
        if item.reward is not None and _finite(item.reward) is None:
            raise InvalidReply(f"the reward of a Reply must be a finite number, not {item.reward!r}")
        if not isinstance(item.special_tokens, bool):
            raise InvalidReply(f"special_tokens of a Reply must be true or false, not {item.special_tokens!r:.100}")
    return [
        replace(
            item,
            text=replace_surrogates(_with_places(item.text, images)),
            images=images,
            label=replace_surrogates(item.label),
            reward=_finite(item.reward),
        )
        for item, images in zip(replies, map(_pictures, replies), strict=True)
    ]


def _pictures(reply: Reply) -> tuple[bytes, ...]:
    """Return the bytes of the pictures of a reply."""
    if not isinstance(reply.images, list | tuple):
        raise InvalidReply(f"the images of a Reply must be a list, not {type(reply.images).__name__}")
    return tuple(map(_bytes_of, reply.images))


def _bytes_of(picture: Any) -> bytes:
    from atomrl.data.pictures import content_of

    with reraise_as(InvalidReply, "a picture of a Reply", ValueError, OSError):
        content = content_of(picture)
        return Path(content).read_bytes() if isinstance(content, str) else content


def _with_places(text: str, images: Sequence[bytes]) -> str:
    """Return a text with a place for each picture, before it if it has none."""
    if not images:
        return text
    places = text.count(PLACE)
    if places not in (0, len(images)):
        raise InvalidReply(f"a Reply has {len(images)} pictures, but its text {places} places for them ({PLACE})")
    return text if places else PLACE * len(images) + text


def to_json(reply: Reply) -> dict[str, Any]:
    """Return the fields of a reply that `as_replies` has returned, as JSON has them."""
    return vars(reply) | {"images": [base64.b64encode(picture).decode() for picture in reply.images]}


def from_json(reply: Mapping[str, Any]) -> Reply:
    """Return a reply from its fields: the inverse of `to_json`.

    Example:
        >>> one = Reply(text="<image>", images=(b"picture",))
        >>> from_json(to_json(one)) == one
        True
    """
    return Reply(**{**reply, "images": tuple(map(base64.b64decode, reply["images"]))})


def _finite(value: Any) -> float | None:
    """Convert to float; None if it is not a finite number."""
    try:
        number = math.nan if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


# --------------------------------------------------------------------------------------------------------------------
# Calls with a time limit, on threads.

CANCEL_S = 0.1
"""Time in which a cancelled coroutine may end."""
left_behind = threading.Event()
"""Set when a thread of this process is still in a call that has timed out."""


class TooLong(Exception):
    """A call timed out."""


class CallThread:
    """A thread that makes calls one after the other, with a time limit. A call that does not return keeps its thread.

    Example:
        >>> thread = CallThread()
        >>> thread.run(lambda: 6 * 7, limit_s=5)
        42
        >>> thread.end()
    """

    def __init__(self) -> None:
        self.lost = False
        """True after a call that did not return in time."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], float | None, Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, function: Callable[[], Any], limit_s: float | None = None) -> Any:
        """Call a function, or await its coroutine, and return the result or raise its exception.

        Raises:
            TooLong: it takes over `limit_s` seconds. A coroutine is cancelled. If it does not end, or a function runs
                on, all later calls raise `TooLong` as well.
        """
        if self.lost:
            raise TooLong("an earlier call has not returned")
        result: Future[Any] = Future()
        self._calls.put((function, limit_s, result))
        try:
            return result.result(None if limit_s is None else limit_s + CANCEL_S)
        except TimeoutError:
            if result.done():  # the function's own error
                raise
            self.lost = True
            left_behind.set()
            raise TooLong(f"no answer within {limit_s:g} s") from None

    def end(self, last: Callable[[], Any] | None = None) -> None:
        """End the thread, after a last call unless an earlier one has not returned."""
        try:
            if last is not None and not self.lost:
                self.run(last)
        finally:
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, limit_s, future = call
            try:
                result = function()
                future.set_result(asyncio.run(_with_limit(result, limit_s)) if inspect.isawaitable(result) else result)
            except BaseException as error:  # also SystemExit: the caller gets it
                future.set_exception(error)


async def _with_limit(result: Any, limit_s: float | None) -> Any:
    timer = asyncio.timeout(limit_s)
    try:
        async with timer:
            return await result
    except TimeoutError:
        if not timer.expired():
            raise
        raise TooLong(f"no answer within {limit_s:g} s") from None
