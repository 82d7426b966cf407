"""The processes that environments run in: many episodes at once, each on a thread of its own.

What a worker gets is pickled by the trainer; what it answers is JSON.
"""

from __future__ import annotations

import os
import resource
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from atomrl.environments.calls import left_behind
from atomrl.environments.playing import (
    Closed,
    Cut,
    Misplayed,
    Said,
    as_replies,
    described,
    find_environment,
    plain,
    play,
)
from atomrl.outages import ServiceFault, asked_wait, is_away
from atomrl.types import Sample
from atomrl.worker_process import say

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
