"""Plays episodes in worker processes that can be killed, so that no environment can hang or end a run."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atomrl.common.errors import reraise_as
from atomrl.common.outages import Outage, ServiceGone
from atomrl.common.workers import LOAD_LIMIT_S, PROCESS_ENDED, TICK_S, PoolWorker, WorkerPool
from atomrl.config import EnvironmentConfig
from atomrl.environments.worker import CLOSE, CUT, EpisodeError, Ping, Say, Start, from_json
from atomrl.types import FailureKind, Problem, Reply

PONG_S = 0.1
"""Time in which a worker must answer a ping; otherwise an episode holds its interpreter."""
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


class EnvironmentPool(WorkerPool["_Worker"]):
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
        super().__init__("atomrl.environments.worker", _Worker)
        self.settings = settings
        self.episodes: dict[int, _Episode] = {}
        """Episodes that have not ended, by key."""
        self._pending: dict[int, _Episode] = {}
        """Episodes whose answer is awaited."""
        self._unassigned: deque[_Episode] = deque()
        """Episodes without a worker."""
        self._answers: list[tuple[int, Answer]] = []
        self._keys = 0

    @property
    def waiting(self) -> bool:
        """True if an answer is awaited."""
        return bool(self._answers or self._pending)

    def start(self, problem: Problem, seed: int, rendered: str = "") -> int:
        """Start an episode and return its key. Its first answer is the environment's opening.

        Args:
            seed: of the completion.
            rendered: text of the prompt's tokens.

        Raises:
            EpisodeError: the problem cannot be pickled.
        """
        self._keys += 1
        settings = self.settings
        max_characters = CHARACTERS_PER_TOKEN * settings.max_reply_tokens
        with reraise_as(
            EpisodeError, f"environment: problem {problem.problem_id!r} cannot be sent to a worker", Exception
        ):
            request = Start(self._keys, settings.function, dict(settings.args), problem, seed, max_characters, rendered)
            start = pickle.dumps(request)
        episode = self.episodes[self._keys] = self._pending[self._keys] = _Episode(self._keys, start)
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
        episode = self.episodes.pop(key, None)
        if episode is not None:
            self._pending.pop(key, None)
            self._answers = [(other, answer) for other, answer in self._answers if other != key]
            self._detach(episode, close=True)

    def answers(self, wait_s: float) -> list[tuple[int, Answer]]:
        """Return new answers as (key, answer), waiting at most `wait_s` seconds for the first.

        Raises:
            EpisodeError: a worker cannot import or call the environment, or a service that it needs is unavailable for
                too long or returns invalid answers.
        """
        end = time.monotonic() + wait_s
        while True:
            wait_s = 0.0 if self._answers else min(TICK_S, max(0.0, end - time.monotonic()))
            for worker, message in self.receive(wait_s):
                self._handle(worker, message)
            self._check_deadlines()
            self._assign_workers()
            if self._answers or not self.waiting or time.monotonic() >= end:
                answers, self._answers = self._answers, []
                return answers

    def close(self) -> None:
        """Kill all workers."""
        super().close()
        self.episodes.clear()
        self._pending.clear()
        self._unassigned.clear()
        self._answers.clear()

    # ---- Episodes and their workers ----

    def _send_turn(self, key: int, turn: str | int) -> None:
        episode = self.episodes[key]
        episode.turns.append(turn)
        self._pending[key] = episode
        if episode.worker is not None:
            episode.deadline = self._deadline(episode.worker)
            episode.worker.send(Say(key, turn))

    def _assign_workers(self) -> None:
        """Assign unassigned episodes to the worker with the fewest, starting workers as needed.

        Suspects (episodes that may have crashed their worker) have workers of their own, one suspect at a time, so that
        the next crash tells which one it was.
        """
        size, remaining, now = self.settings.workers, deque[_Episode](), time.monotonic()
        while self._unassigned:
            episode = self._unassigned.popleft()
            if episode.key not in self.episodes:  # aborted
                continue
            if episode.not_before > now:
                remaining.append(episode)
                continue
            alike = [one for one in self.workers if not one.retiring and one.alone == episode.suspect]
            free = [one for one in alike if not one.has_suspect] if episode.suspect else alike
            if len(alike) < size and not (episode.suspect and free):
                worker = self.start_worker()
                worker.alone = episode.suspect
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
        worker.send_bytes(episode.start)
        for turn in episode.turns:
            worker.send(Say(episode.key, turn))

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
            worker.send(Say(episode.key, CLOSE))
        if (worker.retiring or worker.alone) and not worker.episodes:
            self.kill(worker)

    def _finish(self, episode: _Episode, answer: Answer) -> None:
        """Store the last answer of an episode."""
        del self.episodes[episode.key]
        self._pending.pop(episode.key, None)
        self._answers.append((episode.key, answer))
        self._detach(episode, close=False)

    def _deadline(self, worker: _Worker) -> float:
        """Return the deadline of a turn that is sent now."""
        return self.clock + (self.settings.timeout_s if worker.ready else LOAD_LIMIT_S)

    # ---- Messages of workers ----

    def _handle(self, worker: _Worker, message: Any) -> None:
        """Handle a message of `worker.worker_main`, or None for the end of the worker."""
        if message is None:
            self._replace(worker)
            return
        key, word, *rest = message
        if word == "unusable":
            raise EpisodeError(f"environment.function: {self.settings.function!r} cannot be used: {rest[0]}")
        if key is None:
            self.loaded()
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
                    episode.deadline = self.clock + self.settings.timeout_s
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
            episode.deadline = self.clock + self.settings.timeout_s
            if episode.answer_hashes[index] != digest:
                message = "its replies changed when it was replayed, after its worker process had ended"
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
            self._answers.append((episode.key, Answer(tuple(map(from_json, replies)), seconds=seconds)))

    def _wait_for_service(self, episode: _Episode, reason: str, asked_s: float | None) -> None:
        """Schedule the replay of an episode that ended because a service is unavailable.

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
            if worker.pong_by is not None and self.clock >= worker.pong_by:
                self._replace_stuck(worker)
                continue
            if worker.pong_by is None and self._late(worker):
                if not worker.ready:
                    raise EpisodeError(f"environment.function: importing it took over {LOAD_LIMIT_S:.0f} s")
                worker.pong_by = self.clock + PONG_S
                worker.cpu_seconds = {one.key: worker.thread_seconds(one.thread) for one in self._late(worker)}
                worker.send(Ping())

    def _late(self, worker: _Worker) -> list[_Episode]:
        return [one for one in self._pending.values() if one.worker is worker and self.clock >= one.deadline]

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
            late = self.episodes[holding[0]]
            self._finish(late, self._timeout(late))
        self._replace(worker, stuck=True, culprit_known=len(holding) == 1)

    def _replace(self, worker: _Worker, stuck: bool = False, culprit_known: bool = False) -> None:
        """Kill a worker that has ended or is stuck, and replay its episodes in others.

        Unless the culprit is known, all episodes with a turn under way become suspects, which are replayed one by one
        (`_assign_workers`). A suspect whose worker ends again has failed.
        """
        if not worker.ready and self.crashed_while_loading():
            raise EpisodeError("environment.function: importing it ends the worker process")
        episodes = [*worker.episodes.values()]
        worker.episodes.clear()
        self.kill(worker)
        for episode in episodes:
            episode.worker = None
            if episode.suspect and worker.ready and not culprit_known:
                crash = Answer(ended=True, failure="crash", message=PROCESS_ENDED, seconds=self._elapsed(episode))
                self._finish(episode, self._timeout(episode) if stuck else crash)
            else:
                episode.suspect = episode.key in self._pending and worker.ready and not culprit_known
                self._unassigned.append(episode)

    def _timeout(self, episode: _Episode) -> Answer:
        message = f"over {self.settings.timeout_s:g} s for an answer (raise environment.timeout_s)"
        return Answer(ended=True, failure="timeout", message=message, seconds=self._elapsed(episode))

    def _elapsed(self, episode: _Episode) -> float:
        """Return the seconds since the turn was sent; in a replay, since it was sent again."""
        return max(0.0, self.clock - episode.deadline + self.settings.timeout_s)


@dataclass(eq=False)
class _Worker(PoolWorker):
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

    @property
    def has_suspect(self) -> bool:
        """True if one of its episodes may have crashed another worker."""
        return any(episode.suspect for episode in self.episodes.values())


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
