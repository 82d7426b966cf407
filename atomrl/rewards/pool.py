"""A pool of worker processes that can be killed, so that no reward can hang or end a run."""

import multiprocessing.connection
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from atomrl.common.processes import WorkerProcess, say, seed_everything
from atomrl.rewards.calling import Outcome, Score, Scorer, Task, call, failed, find_scorer, instantiate
from atomrl.rewards.errors import RewardError
from atomrl.rewards.table import POOLED
from atomrl.types import FailureKind

# --------------------------------------------------------------------------------------------------------------------
# The processes that rewards run in.
#
# The trainer starts each as a fresh interpreter (no fork of a process with threads), so one that hangs costs a fraction
# of a second to replace. It does not import torch, unless a user's reward does.
#
# What a worker gets is pickled by the trainer; what it answers is JSON, so that nothing that ran beside a model's
# output is ever unpickled by the trainer.


def serve(connection: Connection) -> None:
    """Answer each (name, args, payloads) with what went wrong when the reward was loaded, None if nothing did, and then
    with the outcome of each payload.

    Args:
        connection: to the trainer.
    """
    loaded: dict[str, Scorer] = {}
    while True:
        try:
            name, args, payloads = connection.recv()
            key = f"{name} {args!r}"
            if key not in loaded:
                loaded[key] = _loaded(name, args)
        except EOFError:
            return
        except (Exception, SystemExit) as error:
            say(connection, f"{type(error).__name__}: {error}")
            continue
        say(connection, None)
        for payload in payloads:
            seed_everything(payload["seed"])
            say(connection, call(loaded[key], payload))


def _loaded(name: str, args: dict[str, Any]) -> Scorer:
    scorer = find_scorer(name, args)
    if scorer.name in POOLED:
        POOLED[scorer.name].warm_up()
    return instantiate(scorer)


TICK_S = 0.05
LOAD_LIMIT_S = 300.0
"""For starting a worker and importing a reward's module in it; no part of a completion's time."""
MAX_ENDED_LOADING = 4
MAX_CHUNK = 16


class _Batch:
    """The calls of one `WorkerPool.run`."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.waiting = deque(tasks)
        """Those that no worker has been given."""
        self.answers: SimpleQueue[tuple[Task, Outcome] | Exception] = SimpleQueue()
        self.given_up = False


@dataclass(eq=False)
class _RewardWorker(WorkerProcess):
    batch: _Batch = field(default_factory=lambda: _Batch(()))
    """Whose tasks it has."""
    pending: deque[Task] = field(default_factory=deque)
    """What it was given and has not answered; the first is under way."""
    loading: bool = False
    loaded: set[int] = field(default_factory=set)
    """The rewards (their `id`) that it has answered for before."""
    deadline: float = 0.0


class WorkerPool:
    """Runs reward calls in processes of their own; they start when first needed.

    Several threads may run calls at once; each free worker takes from the batch that has the fewest, so that slow calls
    hold up those of their own batch first.

    Every task has an outcome: a call that is not over in its time, or that ends its process, gives the failure
    `timeout` or `crash`; its worker is killed and replaced. Time in which this process itself stood still (a suspended
    machine, SIGSTOP) does not count.

    No worker outlives the pool: `close`, the end of the interpreter and (on Linux at once, elsewhere for idle workers)
    any death of this process end them. Ctrl-C and SIGTERM are this process's business; workers ignore them.

    Args:
        workers: the most processes at a time.
    """

    def __init__(self, workers: int) -> None:
        self.size = workers
        self._lock = threading.Lock()
        self._dispatcher: _Dispatcher | None = None

    @property
    def pids(self) -> list[int]:
        """Of the workers alive."""
        return [worker.process.pid for worker in self._dispatcher.workers] if self._dispatcher else []

    def close(self) -> None:
        """Kill every process; a later `run` starts new ones. A `run` under way ends with a RewardError."""
        with self._lock:
            if self._dispatcher is not None:
                self._finalizer()
            self._dispatcher = None

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[Task, Outcome], None, None]:
        """The outcome of each task as it comes. Close it to end before that.

        Raises:
            RewardError: a reward cannot be loaded in a worker, or its columns cannot be sent to one.
        """
        if not tasks:
            return
        batch = _Batch(tasks)
        with self._lock:
            if self._dispatcher is None:
                self._dispatcher = _Dispatcher(self.size)
                self._finalizer = weakref.finalize(self, self._dispatcher.end)
            dispatcher = self._dispatcher
            dispatcher.take(batch)
        try:
            for _ in tasks:
                answer = batch.answers.get()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            batch.given_up = True
            dispatcher.ring()


class _Dispatcher:
    """The thread that starts workers, gives them calls and hears their answers.

    On Linux a child is told of the end of the thread that started it: this one lives as long as its workers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[_RewardWorker] = []
        self.batches: list[_Batch] = []
        self.new: SimpleQueue[_Batch] = SimpleQueue()
        self.ending = False
        self._owner = os.getpid()
        self._bell, self._button = multiprocessing.connection.Pipe(duplex=False)
        self._clock = 0.0
        self._seen = time.monotonic()
        self._ended_loading = 0
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self._thread.start()

    def take(self, batch: _Batch) -> None:
        self.new.put(batch)
        self.ring()

    def ring(self) -> None:
        """Wake the thread."""
        with suppress(OSError):  # it has ended
            self._button.send_bytes(b"")

    def end(self) -> None:
        """Kill the workers and end the thread."""
        if os.getpid() == self._owner:  # in a fork of this process they are not its own
            self.ending = True
            self.ring()
            self._thread.join()

    def _work(self) -> None:
        error: Exception = RewardError("the rewards were closed while they were computed")
        try:
            while not self.ending:
                self._hear()
                self._assign()
        except Exception as caught:
            error = caught
        for worker in [*self.workers]:
            self._kill(worker)
        self._button.close()
        self._bell.close()
        while not self.new.empty():
            self.batches.append(self.new.get())
        for batch in self.batches:
            batch.answers.put(error)

    def _assign(self) -> None:
        """Give every idle worker something to do, starting workers as needed."""
        while not self.new.empty():
            self.batches.append(self.new.get())
        for given_up in [worker for worker in self.workers if worker.pending and worker.batch.given_up]:
            self._kill(given_up)
        self.batches = [batch for batch in self.batches if not batch.given_up]
        while waiting := [batch for batch in self.batches if batch.waiting and not batch.given_up]:
            worker = next((worker for worker in self.workers if not worker.pending), None)
            if worker is None:
                if len(self.workers) >= self.size:
                    return
                worker = _RewardWorker.start("atomrl.rewards.pool")
                self.workers.append(worker)
            if worker.connection.poll(0):  # an idle worker has nothing to say: it has ended
                self._kill(worker)
                continue
            busy = Counter(worker.batch for worker in self.workers if worker.pending)
            self._give(worker, min(waiting, key=lambda batch: busy[batch]))

    def _give(self, worker: _RewardWorker, batch: _Batch) -> None:
        """Calls of one reward: enough to keep a worker busy, few enough to share them out evenly."""
        scorer = batch.waiting[0].scorer
        most = max(1, min(MAX_CHUNK, len(batch.waiting) // (2 * self.size)))
        chunk = list(islice(batch.waiting, most))
        if any(task.scorer is not scorer for task in chunk):
            chunk = chunk[:1]
        try:
            worker.connection.send((scorer.name, dict(scorer.args), [task.payload() for task in chunk]))
        except (BrokenPipeError, ConnectionResetError):
            self._kill(worker)
            return
        except Exception as error:  # pickling runs code of the columns' own
            self._fail(batch, scorer, f": the columns cannot be sent to a worker process: {error!r}", error)
            return
        worker.batch = batch
        worker.pending.extend(batch.waiting.popleft() for _ in chunk)
        limit = scorer.timeout_s if id(scorer) in worker.loaded else LOAD_LIMIT_S
        worker.loading, worker.deadline = True, self._clock + limit

    def _hear(self) -> None:
        """What busy workers say, or fail to say in time, within one tick."""
        busy = [worker for worker in self.workers if worker.pending]
        sources = [self._bell, *(worker.connection for worker in busy)]
        ready = multiprocessing.connection.wait(sources, timeout=TICK_S if busy else None)
        while self._bell.poll(0):
            self._bell.recv_bytes()
        now = time.monotonic()
        self._clock += min(now - self._seen, 2 * TICK_S)
        self._seen = now
        for worker in busy:
            if worker not in self.workers:  # another one's failure ended its batch
                continue
            if worker.connection in ready:
                try:
                    answer = worker.answer()
                except (EOFError, OSError, ValueError):
                    crash = "its process ended (by os._exit, a signal, or for want of memory)"
                    self._lost(worker, "crash", crash)
                else:
                    self._take(worker, answer)
            elif self._clock >= worker.deadline:
                task = worker.pending[0]
                if worker.loading and id(task.scorer) not in worker.loaded:
                    self._fail(worker.batch, task.scorer, f": importing it took over {LOAD_LIMIT_S:.0f} s")
                    continue
                completions = f" for {len(task.rows)} completions" if len(task.rows) > 1 else ""
                limit = f"{task.scorer.timeout_s:g} s{completions} (a larger timeout_s of the reward allows more)"
                self._lost(worker, "timeout", f"over {limit}")

    def _take(self, worker: _RewardWorker, answer: Any) -> None:
        """What a worker said: that it loaded a reward, or the outcome of the call under way."""
        task = worker.pending[0]
        if not worker.loading:
            worker.pending.popleft()
            scores, *rest = answer
            worker.batch.answers.put((task, Outcome([Score(*score) for score in scores], *rest)))
        elif answer is not None:
            self._fail(worker.batch, task.scorer, f" cannot be loaded in a worker process: {answer}")
            return
        worker.loading, self._ended_loading = False, 0
        worker.loaded.add(id(task.scorer))
        worker.deadline = self._clock + task.scorer.timeout_s

    def _lost(self, worker: _RewardWorker, failure: FailureKind, message: str) -> None:
        """A worker ended or has to: the call under way failed, those behind it are put back."""
        self._kill(worker)
        task = worker.pending[0]
        if worker.loading:  # it ended before it began: killed while idle, or by the module that it imports
            self._ended_loading += 1
            if self._ended_loading >= MAX_ENDED_LOADING:
                self._fail(worker.batch, task.scorer, ": importing it ends the worker process")
                return
        else:
            worker.pending.popleft()
            worker.batch.answers.put((task, failed(len(task.rows), failure, message, task.scorer.timeout_s)))
        worker.batch.waiting.extendleft(reversed(worker.pending))

    def _fail(self, batch: _Batch, scorer: Scorer, reason: str, cause: Exception | None = None) -> None:
        """A batch cannot go on, because of one of its rewards."""
        error = RewardError(f"reward {scorer.name!r}{reason}")
        error.__cause__ = cause
        for worker in [worker for worker in self.workers if worker.batch is batch and worker.pending]:
            self._kill(worker)
        batch.given_up = True
        batch.answers.put(error)

    def _kill(self, worker: _RewardWorker) -> None:
        self.workers.remove(worker)
        worker.kill()
