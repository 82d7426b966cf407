"""Plays episodes in worker processes that can be killed, so that no environment can hang or end a run."""

from __future__ import annotations

import hashlib
import json
import pickle
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from atomrl.common.errors import Outage, ServiceGone, reraise_as
from atomrl.common.processes import WorkerProcess
from atomrl.config import EnvironmentConfig
from atomrl.environments.worker import CLOSE, CUT, EpisodeError, Ping, Say, Start
from atomrl.types import FailureKind, Problem, Reply

TICK_S = 0.05
FLUSH_S = 0.005
PONG_S = 0.1
"""Time in which a worker must answer a ping; otherwise an episode holds its interpreter."""
LOAD_LIMIT_S = 300.0
"""Limit for starting a worker and importing the environment; not part of an episode's time."""
MAX_LOAD_CRASHES = 4
CHARACTERS_PER_TOKEN = 32
"""A reply is cut at `max_reply_tokens` times this many characters, before it is sent."""


class Answer(NamedTuple):
    """The environment's answer to one turn."""

    replies: tuple[Reply, ...] = ()
    """Several replies have the same role. Empty if the environment has no opening, or the episode has ended."""
    ended: bool = False
    outcome: float | None = None
    failure: FailureKind | None = None
    message: str = ""
    """Error message of the failure."""
    seconds: float = 0.0
    anew: bool = False
    """The episode ended because a replay after an outage gave other answers: start it again from the beginning."""

    @property
    def reply(self) -> Reply | None:
        """The first reply."""
        return self.replies[0] if self.replies else None


class EnvironmentPool:
    """Plays episodes of one environment. Workers start when they are first needed; each plays many episodes, one thread
    each.

    Every turn gets an answer. A turn over its time limit fails with `timeout`, and an episode that ends its process
    with `crash`. Other episodes are only delayed: those of a killed worker are replayed in another one, from the turns
    sent so far, and fail if they then answer differently.

    An episode that ends with the error of a service (`outages.is_away`) is replayed as well, after growing pauses of up
    to `wait_s` in total; if it then answers differently, it has to start again (`Answer.anew`).

    Time in which the caller does not call `answers` does not count, provided that the answer is there by then.

    Not thread-safe.

    Args:
        settings: the section `environment`.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self.workers: list[_Worker] = []
        self._episodes: dict[int, _Episode] = {}
        self._pending: dict[int, _Episode] = {}
        """Episodes whose answer is awaited."""
        self._unassigned: deque[_Episode] = deque()
        """Episodes without a worker."""
        self._answers: list[tuple[int, Answer]] = []
        # Deadlines are on a clock that advances only while `answers` is called.
        self._clock, self._clock_read, self._load_crashes, self._keys = 0.0, time.monotonic(), 0, 0

    @property
    def waiting(self) -> bool:
        """True if an answer is awaited."""
        return bool(self._answers or self._pending)

    def start(self, problem: Problem, seed: int) -> int:
        """Start an episode and return its key. Its first answer is the environment's opening.

        Raises:
            EpisodeError: the sample cannot be pickled.
        """
        self._keys += 1
        settings = self.settings
        max_characters = CHARACTERS_PER_TOKEN * settings.max_reply_tokens
        with reraise_as(
            EpisodeError, f"environment: sample {problem.problem_id!r} cannot be sent to a worker", Exception
        ):
            request = Start(self._keys, settings.function, dict(settings.args), problem, seed, max_characters)
            start = pickle.dumps(request)
        episode = self._episodes[self._keys] = self._pending[self._keys] = _Episode(self._keys, start)
        self._unassigned.append(episode)
        self._assign_workers()
        return episode.key

    def say(self, key: int, text: str) -> None:
        """Send the model's turn to the environment; an answer follows."""
        self._send_turn(key, text)

    def cut(self, key: int) -> None:
        """Tell the environment that there are no more turns; the last answer follows."""
        self._send_turn(key, CUT)

    def end(self, key: int) -> None:
        """Abort an episode; no answer follows."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            self._pending.pop(key, None)
            self._answers = [(other, answer) for other, answer in self._answers if other != key]
            self._detach(episode, close=True)

    def answers(self, wait_s: float) -> list[tuple[int, Answer]]:
        """Return new answers as (key, answer), waiting at most `wait_s` seconds for the first.

        Raises:
            EpisodeError: a worker cannot import or call the environment, or a service that it needs is away for too
                long or returns invalid answers.
        """
        end = time.monotonic() + wait_s
        while True:
            self._receive(min(TICK_S, max(0.0, end - time.monotonic())))
            self._check_deadlines()
            self._assign_workers()
            if self._answers or not self.waiting or time.monotonic() >= end:
                answers, self._answers = self._answers, []
                return answers

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        self._episodes.clear()
        self._pending.clear()
        self._unassigned.clear()
        self._answers.clear()

    # ---- Episodes and their workers ----

    def _send_turn(self, key: int, turn: str | int) -> None:
        episode = self._episodes[key]
        episode.turns.append(turn)
        self._pending[key] = episode
        if episode.worker is not None:
            episode.deadline = self._deadline(episode.worker)
            self._send(episode.worker, Say(key, turn))

    def _assign_workers(self) -> None:
        """Assign unassigned episodes to the worker with the fewest, starting workers as needed.

        Suspects (episodes that may have crashed their worker) have workers of their own, one suspect at a time, so that
        the next crash tells which one it was.
        """
        size, remaining, now = self.settings.workers, deque[_Episode](), time.monotonic()
        while self._unassigned:
            episode = self._unassigned.popleft()
            if episode.key not in self._episodes:  # aborted
                continue
            if episode.not_before > now:
                remaining.append(episode)
                continue
            alike = [one for one in self.workers if not one.retiring and one.alone == episode.suspect]
            free = [one for one in alike if not one.has_suspect] if episode.suspect else alike
            if len(alike) < size and not (episode.suspect and free):
                worker = _Worker.start("atomrl.environments.worker")
                worker.alone = episode.suspect
                self.workers.append(worker)
            elif free:
                worker = min(free, key=lambda one: len(one.episodes))
            else:
                remaining.append(episode)
                continue
            self._attach(episode, worker)
        self._unassigned = remaining

    def _attach(self, episode: _Episode, worker: _Worker) -> None:
        """Start an episode in a worker, and replay the turns sent so far."""
        episode.worker, episode.answered, episode.thread = worker, 0, 0
        worker.episodes[episode.key] = episode
        episode.deadline = self._deadline(worker)
        worker.channel.send(episode.start)
        for turn in episode.turns:
            self._send(worker, Say(episode.key, turn))

    def _detach(self, episode: _Episode, close: bool) -> None:
        """Remove an episode from its worker. Kill a worker that gets no more episodes after its last one.

        Args:
            close: also abort the episode there.
        """
        worker, episode.worker = episode.worker, None
        if worker is None:
            return
        del worker.episodes[episode.key]
        if close:
            self._send(worker, Say(episode.key, CLOSE))
        if (worker.retiring or worker.alone) and not worker.episodes:
            self._kill(worker)

    def _finish(self, episode: _Episode, answer: Answer) -> None:
        """Store the last answer of an episode."""
        del self._episodes[episode.key]
        self._pending.pop(episode.key, None)
        self._answers.append((episode.key, answer))
        self._detach(episode, close=False)

    def _deadline(self, worker: _Worker) -> float:
        """Return the deadline of a turn that is sent now."""
        return self._clock + (self.settings.timeout_s if worker.ready else LOAD_LIMIT_S)

    def _send(self, worker: _Worker, message: Say | Ping) -> None:
        worker.channel.send(pickle.dumps(message))

    def _kill(self, worker: _Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            worker.kill()

    # ---- Messages of workers ----

    def _receive(self, wait_s: float) -> None:
        """Handle the messages of all workers, waiting at most `wait_s` seconds for one."""
        connections = {worker.connection: worker for worker in self.workers}
        if not connections:
            time.sleep(0.0 if self._answers else wait_s)  # all episodes wait for a service
            return
        if any(worker.channel.pending for worker in self.workers):
            wait_s = min(wait_s, FLUSH_S)
        for connection in wait(list(connections), timeout=0.0 if self._answers else wait_s):
            self._read(connections[connection])  # type: ignore[index]
        for worker in self.workers:
            worker.channel.flush()
        now = time.monotonic()
        self._clock += min(now - self._clock_read, 2 * TICK_S)
        self._clock_read = now

    def _read(self, worker: _Worker) -> None:
        """Handle all messages of a worker."""
        try:
            messages = [json.loads(message) for message in worker.channel.receive()]
        except ValueError:
            self._replace(worker)
            return
        for message in messages:
            if worker in self.workers:
                self._handle(worker, message)
        if worker.channel.ended and worker in self.workers:
            self._replace(worker)

    def _handle(self, worker: _Worker, message: Any) -> None:
        """Handle one message; `worker.serve` lists them."""
        key, word, *rest = message
        if word == "unusable":
            raise EpisodeError(f"environment.function: {self.settings.function!r} cannot be used: {rest[0]}")
        if key is None:
            self._load_crashes = 0
            if word == "thread":
                if (episode := worker.episodes.get(rest[0])) is not None:
                    episode.thread = rest[1]
            elif word == "pong":
                worker.pong_by = None
                self._time_out(worker)
            elif word == "left_behind":
                worker.retiring = True
            else:
                worker.ready = True
                for episode in worker.episodes.values():
                    episode.deadline = self._clock + self.settings.timeout_s
        elif key in worker.episodes:  # otherwise it was aborted
            self._handle_answer(worker.episodes[key], word, rest)

    def _handle_answer(self, episode: _Episode, word: str, rest: list[Any]) -> None:
        if word == "away":
            self._wait_for_service(episode, *rest)
            return
        # While an episode is replayed, its answers are compared with those before; the time taken may differ.
        digest = hashlib.blake2b(json.dumps([word, *rest[:1]]).encode(), digest_size=16).digest()
        index, episode.answered = episode.answered, episode.answered + 1
        if index < len(episode.answer_hashes):
            episode.deadline = self._clock + self.settings.timeout_s
            if episode.answer_hashes[index] != digest:
                message = "it answered other than before when it was played again, after its worker process had ended"
                if anew := episode.outage is not None:
                    episode.outage.answered()
                failed = Answer(ended=True, failure="error", message=message, seconds=rest[-1], anew=anew)
                self._finish(episode, failed)
            return
        episode.answer_hashes.append(digest)
        if episode.outage is not None:
            episode.outage.answered()
            episode.outage = None
        episode.suspect = False
        if word == "end":
            self._finish(episode, Answer(ended=True, outcome=rest[0], seconds=rest[1]))
        elif word == "failed":
            self._finish(episode, Answer(ended=True, failure=rest[0], message=rest[1], seconds=rest[2]))
        else:
            self._pending.pop(episode.key, None)
            replies, seconds = rest
            self._answers.append((episode.key, Answer(tuple(Reply(**reply) for reply in replies), seconds=seconds)))

    def _wait_for_service(self, episode: _Episode, reason: str, asked_s: float | None) -> None:
        """Schedule the replay of an episode that ended because a service is away.

        Args:
            asked_s: pause that the service asks for (`Retry-After`).
        """
        settings = self.settings
        episode.outage = episode.outage or Outage(
            f"a service of environment {settings.function!r}", settings.wait_s, "environment.wait_s"
        )
        with reraise_as(EpisodeError, "environment", ServiceGone):
            episode.not_before = time.monotonic() + episode.outage.pause_s(reason, asked_s)
        self._detach(episode, close=False)
        self._unassigned.append(episode)

    # ---- Time limits and crashes ----

    def _check_deadlines(self) -> None:
        """Ping workers with late episodes, and replace those that did not answer the ping."""
        for worker in [*self.workers]:
            if worker.pong_by is not None and self._clock >= worker.pong_by:
                self._replace_stuck(worker)
                continue
            if worker.pong_by is None and self._late(worker):
                if not worker.ready:
                    raise EpisodeError(f"environment.function: importing it took over {LOAD_LIMIT_S:.0f} s")
                worker.pong_by = self._clock + PONG_S
                worker.cpu_seconds = {one.key: worker.thread_seconds(one.thread) for one in self._late(worker)}
                self._send(worker, Ping())

    def _late(self, worker: _Worker) -> list[_Episode]:
        return [one for one in self._pending.values() if one.worker is worker and self._clock >= one.deadline]

    def _time_out(self, worker: _Worker) -> None:
        """End the late episodes of a worker that still answers. Their threads cannot be stopped, so the worker gets no
        new episodes, and is killed after its last one."""
        for episode in self._late(worker):
            worker.retiring = True
            self._finish(episode, self._timeout(episode))

    def _replace_stuck(self, worker: _Worker) -> None:
        """Replace a worker that does not answer: one of its episodes holds the interpreter (the GIL).

        It is the late episode whose thread used the CPU since the ping; threads that wait for the interpreter use next
        to nothing. If exactly one used the most, the others are not suspects.
        """
        used = {
            one.key: worker.thread_seconds(one.thread) - worker.cpu_seconds.get(one.key, 0.0)
            for one in self._late(worker)
        }
        most = max(used.values(), default=0.0)
        holding = [key for key, seconds in used.items() if seconds == most > 0]
        if len(holding) == 1:
            late = self._episodes[holding[0]]
            self._finish(late, self._timeout(late))
        self._replace(worker, stuck=True, culprit_known=len(holding) == 1)

    def _replace(self, worker: _Worker, stuck: bool = False, culprit_known: bool = False) -> None:
        """Kill a worker that has ended or is stuck, and replay its episodes in others.

        Unless the culprit is known, all episodes with a turn under way become suspects, which are replayed one by one
        (`_assign_workers`). A suspect whose worker ends again has failed.
        """
        if not worker.ready:
            self._load_crashes += 1
            if self._load_crashes >= MAX_LOAD_CRASHES:
                raise EpisodeError("environment.function: importing it ends the worker process")
        episodes = [*worker.episodes.values()]
        worker.episodes.clear()
        self._kill(worker)
        for episode in episodes:
            episode.worker = None
            if episode.suspect and worker.ready and not culprit_known:
                message = "its process ended (by os._exit, a signal, or for want of memory)"
                crash = Answer(ended=True, failure="crash", message=message, seconds=self._elapsed(episode))
                self._finish(episode, self._timeout(episode) if stuck else crash)
            else:
                episode.suspect = episode.key in self._pending and worker.ready and not culprit_known
                self._unassigned.append(episode)

    def _timeout(self, episode: _Episode) -> Answer:
        message = f"over {self.settings.timeout_s:g} s for an answer (environment.timeout_s allows more)"
        return Answer(ended=True, failure="timeout", message=message, seconds=self._elapsed(episode))

    def _elapsed(self, episode: _Episode) -> float:
        """Return the seconds since the turn was sent; in a replay, since it was sent again."""
        return max(0.0, self._clock - episode.deadline + self.settings.timeout_s)


@dataclass(eq=False)
class _Worker(WorkerProcess):
    channel: Channel = field(init=False)
    episodes: dict[int, _Episode] = field(default_factory=dict)
    ready: bool = False
    """It has imported the environment."""
    retiring: bool = False
    """One of its episodes hangs, or has left a thread behind: it gets no new ones, and is killed after its last."""
    alone: bool = False
    """Reserved for suspects, one at a time until it has answered."""
    pong_by: float | None = None
    """Deadline of its answer to a ping; None if there is none under way."""
    cpu_seconds: dict[int, float] = field(default_factory=dict)
    """Key of a late episode -> CPU seconds of its thread at the ping."""

    def __post_init__(self) -> None:
        self.channel = Channel(self.connection)

    @property
    def has_suspect(self) -> bool:
        """True if one of its episodes may have crashed another worker."""
        return any(episode.suspect for episode in self.episodes.values())

    def kill(self) -> None:
        """Kill the worker and all processes that it started."""
        self.channel.detach()
        super().kill()


@dataclass(eq=False)
class _Episode:
    key: int
    start: bytes
    """The pickled `Start` message."""
    worker: _Worker | None = None
    turns: list[Any] = field(default_factory=list)
    """Turns sent to the environment so far: texts, and `CUT`."""
    answer_hashes: list[bytes] = field(default_factory=list)
    """Hashes of its answers, which a replay must repeat."""
    answered: int = 0
    """Answers from its current worker; those up to `len(answer_hashes)` are repeated ones."""
    suspect: bool = False
    """It may have crashed its worker."""
    thread: int = 0
    """Native id of its thread in the worker."""
    deadline: float = 0.0
    outage: Outage | None = None
    """Outage of a service that ended it, until a replay has come further."""
    not_before: float = 0.0
    """Time of the next replay after an outage."""


_CHUNK_BYTES, _MAX_CHUNKS = 1 << 16, 64


class Channel:
    """Non-blocking messages to and from a worker, framed as by `multiprocessing.connection.Connection`.

    Unsent bytes are buffered, and a message is returned once it is complete. So a worker that is stopped, or stuck in
    the middle of a message, does not block the caller.

    Args:
        connection: to the worker; nothing else may use it.
    """

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=connection.fileno())
        self._out, self._in = bytearray(), bytearray()
        self.ended = False
        """The worker has closed its end, or died."""

    @property
    def pending(self) -> bool:
        """True if there are unsent bytes."""
        return bool(self._out)

    def send(self, message: bytes) -> None:
        """Send a message, or buffer what the worker does not accept yet."""
        self._out += struct.pack("!i", len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send buffered bytes, as far as the worker accepts them."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError:  # `receive` will report the end
            self._out.clear()

    def receive(self) -> list[bytes]:
        """Return all complete messages.

        Raises:
            ValueError: the bytes are not a message.
        """
        try:
            for _ in range(_MAX_CHUNKS):
                chunk = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
                self._in += chunk
                if not chunk:
                    self.ended = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        messages = []
        while len(self._in) >= 4:
            (size,) = struct.unpack_from("!i", self._in)
            if size < 0:
                raise ValueError("no message of a worker")
            if len(self._in) < 4 + size:
                break
            messages.append(bytes(self._in[4 : 4 + size]))
            del self._in[: 4 + size]
        return messages

    def detach(self) -> None:
        """Release the socket without closing it; the connection owns it."""
        self._socket.detach()
