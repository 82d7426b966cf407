"""Episodes in worker processes that can be killed, so that no environment can hang or end a run."""

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

from atomrl.common.errors import Outage, ServiceGone, said_as
from atomrl.common.processes import WorkerProcess
from atomrl.config import EnvironmentConfig
from atomrl.environments.worker import CLOSE, CUT, EpisodeError, Ping, Say, Start
from atomrl.types import FailureKind, Reply, Sample

# --------------------------------------------------------------------------------------------------------------------
# The trainer's end of the connection to a worker: it never waits for the worker.

_AT_ONCE, _READS = 1 << 16, 64


class Channel:
    """Messages to and from a worker, framed as its `multiprocessing.connection.Connection` frames them.

    What a worker does not take is kept until it does, and what it says is there once it is whole: one that is stopped,
    or stuck in the middle of a message, keeps nobody waiting.

    Args:
        connection: to the worker; nobody else may use it.
    """

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=connection.fileno())
        self._out, self._in = bytearray(), bytearray()
        self.ended = False
        """The worker has closed its end, or died."""

    @property
    def pending(self) -> bool:
        """Whether the worker has not taken all that was sent."""
        return bool(self._out)

    def send(self, message: bytes) -> None:
        """Send, now or once the worker takes it."""
        self._out += struct.pack("!i", len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as the worker takes it."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError:  # heard as its end
            self._out.clear()

    def receive(self) -> list[bytes]:
        """All whole messages that have come.

        Raises:
            ValueError: it is no message.
        """
        try:
            for _ in range(_READS):
                part = self._socket.recv(_AT_ONCE, socket.MSG_DONTWAIT)
                self._in += part
                if not part:
                    self.ended = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        found = []
        while len(self._in) >= 4:
            (size,) = struct.unpack_from("!i", self._in)
            if size < 0:
                raise ValueError("no message of a worker")
            if len(self._in) < 4 + size:
                break
            found.append(bytes(self._in[4 : 4 + size]))
            del self._in[: 4 + size]
        return found

    def detach(self) -> None:
        """Leave the connection to be closed by who opened it."""
        self._socket.detach()


TICK_S = 0.05
FLUSH_S = 0.005
PONG_S = 0.1
LOAD_LIMIT_S = 300.0
"""For starting a worker and importing the environment in it; no part of an episode's time."""
MAX_ENDED_LOADING = 4
CHARACTERS_PER_TOKEN = 32
"""Of a reply, at most: what is beyond is not even sent."""


class Answer(NamedTuple):
    """What an environment said, once."""

    replies: tuple[Reply, ...] = ()
    """Several: messages of the same role. Empty: it said nothing, before the model's first turn, or the episode has
    ended."""
    ended: bool = False
    outcome: float | None = None
    failure: FailureKind | None = None
    message: str = ""
    """Of the failure."""
    seconds: float = 0.0
    anew: bool = False
    """It has ended since a service that was away answered other than before: begin it again."""

    @property
    def reply(self) -> Reply | None:
        """The first of them."""
        return self.replies[0] if self.replies else None


@dataclass(eq=False)
class _Worker(WorkerProcess):
    channel: Channel = field(init=False)
    episodes: dict[int, _Episode] = field(default_factory=dict)
    ready: bool = False
    """It has imported the environment."""
    retiring: bool = False
    """One of its episodes hangs, or has left a thread behind: it gets no others, and is ended with the last."""
    alone: bool = False
    """For episodes that may have been what ended another worker, one at a time until it has answered."""
    pong_by: float | None = None
    """When it has to have answered, or it is stuck as a whole."""
    ran: dict[int, float] = field(default_factory=dict)
    """Key -> seconds of the processor that the thread of a late episode had had when it was asked."""

    def __post_init__(self) -> None:
        self.channel = Channel(self.connection)

    @property
    def suspected(self) -> bool:
        """Whether one of its episodes may be what ended another worker."""
        return any(episode.suspect for episode in self.episodes.values())

    def kill(self) -> None:
        """End it and all that it started."""
        self.channel.detach()
        super().kill()


@dataclass(eq=False)
class _Episode:
    key: int
    start: bytes
    """What begins it in a worker."""
    worker: _Worker | None = None
    said: list[Any] = field(default_factory=list)
    """To the environment so far: texts, and `CUT`."""
    heard: list[bytes] = field(default_factory=list)
    """Hashes of its answers, which a repetition must give again."""
    repeated: int = 0
    """Answers that its worker has given, up to `len(heard)` for the second time."""
    suspect: bool = False
    thread: int = 0
    """Of its worker, by the system's number."""
    deadline: float = 0.0
    outage: Outage | None = None
    """Of a service that ended it, until it has come further than then."""
    not_before: float = 0.0
    """When it is played again after that."""


class EnvironmentPool:
    """Plays episodes of one environment; workers start when they are first needed.

    Every episode that is asked has an answer: one that takes longer than its time gives the failure `timeout`, one that
    ends its process the failure `crash`; no other episode notices, but for the time. Episodes of a worker that had to
    be ended are played again in another, from what was said to them; one that then answers other than before fails.
    One that ends with an error of a service (`outages.is_away`) is played again likewise, after growing pauses of up to
    `wait_s` together; one that then answers other than before is to begin anew (`Answer.anew`).
    Time in which nobody listened does not count, if the answer is there by then.

    One thread at a time may use it.

    Args:
        settings: the section `environment`.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self.workers: list[_Worker] = []
        self._episodes: dict[int, _Episode] = {}
        self._asked: dict[int, _Episode] = {}
        """Those that owe an answer."""
        self._homeless: deque[_Episode] = deque()
        self._answers: list[tuple[int, Answer]] = []
        self._clock, self._seen, self._ended_loading, self._keys = 0.0, time.monotonic(), 0, 0

    @property
    def waiting(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._answers or self._asked)

    def start(self, sample: Sample, seed: int) -> int:
        """Begin an episode; its key. Its first answer is what the environment says before the model's first turn.

        Raises:
            EpisodeError: the sample cannot be sent to a worker.
        """
        self._keys += 1
        settings = self.settings
        most = CHARACTERS_PER_TOKEN * settings.max_reply_tokens
        with said_as(EpisodeError, f"environment: sample {sample.sample_id!r} cannot be sent to a worker", Exception):
            start = pickle.dumps(Start(self._keys, settings.function, dict(settings.args), sample, seed, most))
        episode = self._episodes[self._keys] = self._asked[self._keys] = _Episode(self._keys, start)
        self._homeless.append(episode)
        self._house()
        return episode.key

    def say(self, key: int, text: str) -> None:
        """What the model wrote. An answer is to come."""
        self._tell(key, text)

    def cut(self, key: int) -> None:
        """There is no further turn. The last answer is to come."""
        self._tell(key, CUT)

    def end(self, key: int) -> None:
        """Give an episode up."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            self._asked.pop(key, None)
            self._answers = [(other, answer) for other, answer in self._answers if other != key]
            self._leave(episode, closing=True)

    def answers(self, wait_s: float) -> list[tuple[int, Answer]]:
        """What has been answered since; after at most `wait_s` seconds nothing.

        Raises:
            EpisodeError: a worker cannot import the environment, or call it; a service that it asks is away for too
                long, or answers what it must not.
        """
        end = time.monotonic() + wait_s
        while True:
            self._hear(min(TICK_S, max(0.0, end - time.monotonic())))
            self._judge()
            self._house()
            if self._answers or not self.waiting or time.monotonic() >= end:
                found, self._answers = self._answers, []
                return found

    def close(self) -> None:
        """End every worker."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        self._episodes.clear()
        self._asked.clear()
        self._homeless.clear()
        self._answers.clear()

    # ---- Workers ----

    def _tell(self, key: int, what: str | int) -> None:
        episode = self._episodes[key]
        episode.said.append(what)
        self._asked[key] = episode
        if episode.worker is not None:
            episode.deadline = self._deadline(episode.worker)
            self._send(episode.worker, Say(key, what))

    def _house(self) -> None:
        """Give episodes without a worker one; those that may have ended theirs one where no other such is, once there
        is."""
        size, kept, now = self.settings.workers, deque[_Episode](), time.monotonic()
        while self._homeless:
            episode = self._homeless.popleft()
            if episode.key not in self._episodes:
                continue
            if episode.not_before > now:
                kept.append(episode)
                continue
            alike = [one for one in self.workers if not one.retiring and one.alone == episode.suspect]
            room = [one for one in alike if not one.suspected] if episode.suspect else alike
            if len(alike) < size and not (episode.suspect and room):
                worker = _Worker.start("atomrl.environments.worker")
                worker.alone = episode.suspect
                self.workers.append(worker)
            elif room:
                worker = min(room, key=lambda one: len(one.episodes))
            else:
                kept.append(episode)
                continue
            self._move_in(episode, worker)
        self._homeless = kept

    def _move_in(self, episode: _Episode, worker: _Worker) -> None:
        episode.worker, episode.repeated, episode.thread = worker, 0, 0
        worker.episodes[episode.key] = episode
        episode.deadline = self._deadline(worker)
        worker.channel.send(episode.start)
        for what in episode.said:
            self._send(worker, Say(episode.key, what))

    def _deadline(self, worker: _Worker) -> float:
        """When an episode that is asked now has to have answered."""
        return self._clock + (self.settings.timeout_s if worker.ready else LOAD_LIMIT_S)

    def _send(self, worker: _Worker, message: Say | Ping) -> None:
        worker.channel.send(pickle.dumps(message))

    def _hear(self, wait_s: float) -> None:
        connections = {worker.connection: worker for worker in self.workers}
        if not connections:
            time.sleep(0.0 if self._answers else wait_s)  # all wait for a service
            return
        if any(worker.channel.pending for worker in self.workers):
            wait_s = min(wait_s, FLUSH_S)
        for connection in wait(list(connections), timeout=0.0 if self._answers else wait_s):
            self._listen(connections[connection])  # type: ignore[index]
        for worker in self.workers:
            worker.channel.flush()
        now = time.monotonic()
        self._clock += min(now - self._seen, 2 * TICK_S)
        self._seen = now

    def _listen(self, worker: _Worker) -> None:
        """All that a worker has said."""
        try:
            answers = [json.loads(message) for message in worker.channel.receive()]
        except ValueError:
            self._lost(worker)
            return
        for answer in answers:
            if worker in self.workers:
                self._take(worker, answer)
        if worker.channel.ended and worker in self.workers:
            self._lost(worker)

    def _take(self, worker: _Worker, answer: Any) -> None:
        key, word, *rest = answer
        if word == "unusable":
            raise EpisodeError(f"environment.function: {self.settings.function!r} cannot be used: {rest[0]}")
        if key is None:
            self._ended_loading = 0
            if word == "thread":
                if (begun := worker.episodes.get(rest[0])) is not None:
                    begun.thread = rest[1]
            elif word == "pong":
                worker.pong_by = None
                self._time_out(worker)
            elif word == "left_behind":
                worker.retiring = True
            else:
                worker.ready = True
                for episode in worker.episodes.values():
                    episode.deadline = self._clock + self.settings.timeout_s
            return
        if key not in worker.episodes:  # given up
            return
        episode = worker.episodes[key]
        if word == "away":
            self._wait_for_service(episode, *rest)
            return
        # The time that it took is not a part of what it says.
        digest = hashlib.blake2b(json.dumps([word, *rest[:1]]).encode(), digest_size=16).digest()
        place, episode.repeated = episode.repeated, episode.repeated + 1
        if place < len(episode.heard):
            episode.deadline = self._clock + self.settings.timeout_s
            if episode.heard[place] != digest:
                message = "it answered other than before when it was played again, after its worker process had ended"
                if anew := episode.outage is not None:
                    episode.outage.answered()
                failed = Answer(ended=True, failure="error", message=message, seconds=rest[-1], anew=anew)
                self._finish(episode, failed)
            return
        episode.heard.append(digest)
        if episode.outage is not None:
            episode.outage.answered()
            episode.outage = None
        episode.suspect = False
        if word == "end":
            self._finish(episode, Answer(ended=True, outcome=rest[0], seconds=rest[1]))
        elif word == "failed":
            self._finish(episode, Answer(ended=True, failure=rest[0], message=rest[1], seconds=rest[2]))
        else:
            self._asked.pop(key, None)
            parts, seconds = rest
            self._answers.append((key, Answer(tuple(Reply(**part) for part in parts), seconds=seconds)))

    def _wait_for_service(self, episode: _Episode, reason: str, asked_s: float | None) -> None:
        """An episode has ended since a service is away: it is played again later."""
        settings = self.settings
        episode.outage = episode.outage or Outage(
            f"a service of environment {settings.function!r}", settings.wait_s, "environment.wait_s"
        )
        with said_as(EpisodeError, "environment", ServiceGone):
            episode.not_before = time.monotonic() + episode.outage.pause_s(reason, asked_s)
        self._leave(episode, closing=False)
        self._homeless.append(episode)

    def _finish(self, episode: _Episode, answer: Answer) -> None:
        """The last answer of an episode."""
        del self._episodes[episode.key]
        self._asked.pop(episode.key, None)
        self._answers.append((episode.key, answer))
        self._leave(episode, closing=False)

    def _leave(self, episode: _Episode, closing: bool) -> None:
        """Take an episode out of its worker, which ends with its last one where it is of no further use."""
        worker, episode.worker = episode.worker, None
        if worker is None:
            return
        del worker.episodes[episode.key]
        if closing:
            self._send(worker, Say(episode.key, CLOSE))
        if (worker.retiring or worker.alone) and not worker.episodes:
            self._kill(worker)

    def _judge(self) -> None:
        """Who took too long."""
        for worker in [*self.workers]:
            if worker.pong_by is not None and self._clock >= worker.pong_by:
                self._stuck(worker)
                continue
            if worker.pong_by is None and self._late(worker):
                if not worker.ready:
                    raise EpisodeError(f"environment.function: importing it took over {LOAD_LIMIT_S:.0f} s")
                worker.pong_by = self._clock + PONG_S
                worker.ran = {one.key: worker.thread_seconds(one.thread) for one in self._late(worker)}
                self._send(worker, Ping())

    def _late(self, worker: _Worker) -> list[_Episode]:
        return [one for one in self._asked.values() if one.worker is worker and self._clock >= one.deadline]

    def _time_out(self, worker: _Worker) -> None:
        """Some of its episodes hang, and it does not: they are over, and it is ended after the others."""
        for episode in self._late(worker):
            worker.retiring = True
            self._finish(episode, self._too_late(episode))

    def _stuck(self, worker: _Worker) -> None:
        """A worker does not answer. A late episode that has run meanwhile, as no other, is what holds the interpreter:
        what waits for it has next to nothing of the processor. The others then need not be tried one by one."""
        ran = {one.key: worker.thread_seconds(one.thread) - worker.ran.get(one.key, 0.0) for one in self._late(worker)}
        most = max(ran.values(), default=0.0)
        holding = [key for key, seconds in ran.items() if seconds == most > 0]
        if len(holding) == 1:
            late = self._episodes[holding[0]]
            self._finish(late, self._too_late(late))
        self._lost(worker, stuck=True, known=len(holding) == 1)

    def _too_late(self, episode: _Episode) -> Answer:
        message = f"over {self.settings.timeout_s:g} s for an answer (environment.timeout_s allows more)"
        return Answer(ended=True, failure="timeout", message=message, seconds=self._taken(episode))

    def _taken(self, episode: _Episode) -> float:
        """Seconds since it was asked; where it is played again, since it was for the second time."""
        return max(0.0, self._clock - episode.deadline + self.settings.timeout_s)

    def _lost(self, worker: _Worker, stuck: bool = False, known: bool = False) -> None:
        """A worker has ended, or one of its episodes keeps it from answering at all: its episodes are played again in
        others, those that were at work one by one, which tells which one it was, unless that is known."""
        if not worker.ready:
            self._ended_loading += 1
            if self._ended_loading >= MAX_ENDED_LOADING:
                raise EpisodeError("environment.function: importing it ends the worker process")
        episodes = [*worker.episodes.values()]
        worker.episodes.clear()
        self._kill(worker)
        for episode in episodes:
            episode.worker = None
            if episode.suspect and worker.ready and not known:
                message = "its process ended (by os._exit, a signal, or for want of memory)"
                crash = Answer(ended=True, failure="crash", message=message, seconds=self._taken(episode))
                self._finish(episode, self._too_late(episode) if stuck else crash)
            else:
                episode.suspect = episode.key in self._asked and worker.ready and not known
                self._homeless.append(episode)

    def _kill(self, worker: _Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            worker.kill()
