"""The processes that environments run in: many episodes at once, each on a thread of its own.

What a worker gets is pickled by the trainer; what it answers is JSON.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from atomrl.environments.playing import Closed, Cut, Misplayed, Said, as_replies, find_environment, play
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
    `failed` with a kind and a message. The key None is of no episode: `pong`, or `unusable` with a reason.
    """
    lock, inboxes = threading.Lock(), dict[int, SimpleQueue[Any]]()
    functions: dict[str, Callable[..., Any]] = {}

    def answer(*message: Any) -> None:
        with lock:
            say(connection, message)

    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
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
            inbox = inboxes[message.key] = SimpleQueue()
            work = (functions[message.name], message, inbox, answer)
            threading.Thread(target=_play, args=work, daemon=True).start()
        elif message.key in inboxes:
            inboxes[message.key].put(message.what)
            if message.what == CLOSE:
                del inboxes[message.key]


def _play(function: Callable[..., Any], start: Start, inbox: SimpleQueue[Any], answer: Callable[..., None]) -> None:
    """An episode, on its thread."""
    began, opened = time.perf_counter(), False

    def hand_over(said: Said) -> str:
        nonlocal began, opened
        replies, seconds = as_replies(said), time.perf_counter() - began
        if not replies and opened:
            raise Misplayed("it said None after the model's first turn; say a Reply or text, or return the outcome")
        word = "reply" if opened else "opening"
        opened = True
        most = start.most_characters // max(1, len(replies))
        parts = [asdict(replace(reply, text=reply.text[:most])) for reply in replies]
        answer(start.key, word, parts, seconds)
        what = inbox.get()
        began = time.perf_counter()
        if what == CLOSE:
            raise Closed
        if what == CUT:
            raise Cut
        return str(what)

    try:
        outcome = play(function, start.sample, start.args, start.seed, hand_over)
        answer(start.key, "end", outcome, time.perf_counter() - began)
    except Closed:
        pass
    except Misplayed as error:
        answer(start.key, "failed", "invalid", str(error)[:MAX_MESSAGE])
    except (Exception, SystemExit) as error:
        answer(start.key, "failed", "error", _describe(error))


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"
