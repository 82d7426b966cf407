"""Run reward calls in worker processes that can be killed, so that no reward can hang or crash the run.

A worker is a fresh interpreter (no fork of a process with threads) that does not import torch unless a user's reward
does, so replacing one takes a fraction of a second. Requests are pickled by the trainer; replies are JSON, because the
trainer must not unpickle anything from a process that handled a model's output.
"""

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

from atomrl.common.processes import WorkerProcess, seed_everything, send_answer
from atomrl.rewards.calling import Outcome, Score, Scorer, Task, call, failed, find_scorer, instantiate
from atomrl.rewards.errors import RewardError
from atomrl.rewards.table import POOLED
from atomrl.types import FailureKind

# --------------------------------------------------------------------------------------------------------------------
# The worker process.


def serve(connection: Connection) -> None:
    """Main loop of a worker.

    For each request (name, args, payloads) it sends the error of loading the reward (None if it loaded), and then the
    `Outcome` of each payload.

    Args:
        connection: pipe to the trainer.
    """
    loaded: dict[str, Scorer] = {}
    while True:
        try:
            name, args, payloads = connection.recv()
            key = f"{name} {args!r}"
            if key not in loaded:
                loaded[key] = _load(name, args)
        except EOFError:
            return
        except (Exception, SystemExit) as error:
            send_answer(connection, f"{type(error).__name__}: {error}")
            continue
        send_answer(connection, None)
        for payload in payloads:
            seed_everything(payload["seed"])
            send_answer(connection, call(loaded[key], payload))


def _load(name: str, args: dict[str, Any]) -> Scorer:
    scorer = find_scorer(name, args)
    if scorer.name in POOLED:
        POOLED[scorer.name].warm_up()
    return instantiate(scorer)


# --------------------------------------------------------------------------------------------------------------------
# The pool in the trainer's process.

TICK_S = 0.05
LOAD_LIMIT_S = 300.0
"""Time limit for starting a worker and importing a reward's module in it. Not part of `timeout_s`."""
MAX_ENDED_LOADING = 4
"""Consecutive workers that end while they import a reward, after which the batch fails."""
MAX_CHUNK = 16
"""Calls that are sent to a worker in one message."""


class _Batch:
    """The calls of one `WorkerPool.run`."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.waiting = deque(tasks)
        """Tasks not yet assigned to a worker."""
        self.answers: SimpleQueue[tuple[Task, Outcome] | Exception] = SimpleQueue()
        self.cancelled = False


@dataclass(eq=False)
class _RewardWorker(WorkerProcess):
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


class WorkerPool:
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
            batch.cancelled = True
            dispatcher.wake()


class _Dispatcher:
    """The thread that starts workers, assigns tasks and receives results.

    Linux delivers a worker's parent-death signal when the thread that started it ends. So one thread starts all
    workers and lives as long as they do.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[_RewardWorker] = []
        self.batches: list[_Batch] = []
        self.new: SimpleQueue[_Batch] = SimpleQueue()
        self.ending = False
        self._owner = os.getpid()
        self._wakeup_reader, self._wakeup_writer = multiprocessing.connection.Pipe(duplex=False)
        self._clock = 0.0  # like time.monotonic(), but it stops while this process is stopped
        self._seen = time.monotonic()
        self._ended_loading = 0
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self._thread.start()

    def take(self, batch: _Batch) -> None:
        """Queue a batch."""
        self.new.put(batch)
        self.wake()

    def wake(self) -> None:
        """Wake the thread from waiting."""
        with suppress(OSError):  # the thread has ended and closed the pipe
            self._wakeup_writer.send_bytes(b"")

    def end(self) -> None:
        """Kill the workers and end the thread."""
        if os.getpid() == self._owner:  # a forked child must not kill its parent's workers
            self.ending = True
            self.wake()
            self._thread.join()

    def _work(self) -> None:
        error: Exception = RewardError("the rewards were closed while they were computed")
        try:
            while not self.ending:
                self._receive()
                self._assign()
        except Exception as caught:
            error = caught
        for worker in [*self.workers]:
            self._kill(worker)
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
            self._kill(worker)
        self.batches = [batch for batch in self.batches if not batch.cancelled]
        while waiting := [batch for batch in self.batches if batch.waiting and not batch.cancelled]:
            idle = next((worker for worker in self.workers if not worker.pending), None)
            if idle is None:
                if len(self.workers) >= self.size:
                    return
                idle = _RewardWorker.start("atomrl.rewards.pool")
                self.workers.append(idle)
            if idle.connection.poll(0):  # an idle worker sends nothing, so this is the end of its stream
                self._kill(idle)
                continue
            busy = Counter(worker.batch for worker in self.workers if worker.pending)
            self._send(idle, min(waiting, key=lambda batch: busy[batch]))

    def _send(self, worker: _RewardWorker, batch: _Batch) -> None:
        """Send a worker the next tasks of a batch, all of one reward.

        Several tasks per message keep the worker busy; few enough that the load stays balanced.
        """
        scorer = batch.waiting[0].scorer
        size = max(1, min(MAX_CHUNK, len(batch.waiting) // (2 * self.size)))
        chunk = list(islice(batch.waiting, size))
        if any(task.scorer is not scorer for task in chunk):
            chunk = chunk[:1]
        try:
            worker.connection.send((scorer.name, dict(scorer.args), [task.payload() for task in chunk]))
        except (BrokenPipeError, ConnectionResetError):
            self._kill(worker)
            return
        except Exception as error:  # pickling may run code of the user's classes
            self._fail(batch, scorer, f": the columns cannot be sent to a worker process: {error!r}", error)
            return
        worker.batch = batch
        worker.pending.extend(batch.waiting.popleft() for _ in chunk)
        limit = scorer.timeout_s if id(scorer) in worker.loaded else LOAD_LIMIT_S
        worker.loading, worker.deadline = True, self._clock + limit

    def _receive(self) -> None:
        """Wait for messages for one tick, and handle results, crashes and exceeded time limits."""
        busy = [worker for worker in self.workers if worker.pending]
        sources = [self._wakeup_reader, *(worker.connection for worker in busy)]
        ready = multiprocessing.connection.wait(sources, timeout=TICK_S if busy else None)
        while self._wakeup_reader.poll(0):
            self._wakeup_reader.recv_bytes()
        now = time.monotonic()
        self._clock += min(now - self._seen, 2 * TICK_S)  # a longer gap: this process was stopped
        self._seen = now
        for worker in busy:
            if worker not in self.workers:  # killed above, when its batch failed
                continue
            if worker.connection in ready:
                try:
                    answer = worker.answer()
                except (EOFError, OSError, ValueError):
                    crash = "its process ended (by os._exit, a signal, or for want of memory)"
                    self._replace(worker, "crash", crash)
                else:
                    self._handle(worker, answer)
            elif self._clock >= worker.deadline:
                task = worker.pending[0]
                if worker.loading and id(task.scorer) not in worker.loaded:
                    self._fail(worker.batch, task.scorer, f": importing it took over {LOAD_LIMIT_S:.0f} s")
                    continue
                completions = f" for {len(task.rows)} completions" if len(task.rows) > 1 else ""
                limit = f"{task.scorer.timeout_s:g} s{completions} (a larger timeout_s of the reward allows more)"
                self._replace(worker, "timeout", f"over {limit}")

    def _handle(self, worker: _RewardWorker, answer: Any) -> None:
        """Handle a worker's message: the result of loading a reward, or the outcome of the running task."""
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

    def _replace(self, worker: _RewardWorker, failure: FailureKind, message: str) -> None:
        """Kill a worker that crashed or timed out: its running task has failed, the others are queued again."""
        self._kill(worker)
        task = worker.pending[0]
        if worker.loading:  # the task has not started: killed while idle, or importing the reward ended the process
            self._ended_loading += 1
            if self._ended_loading >= MAX_ENDED_LOADING:
                self._fail(worker.batch, task.scorer, ": importing it ends the worker process")
                return
        else:
            worker.pending.popleft()
            worker.batch.answers.put((task, failed(len(task.rows), failure, message, task.scorer.timeout_s)))
        worker.batch.waiting.extendleft(reversed(worker.pending))

    def _fail(self, batch: _Batch, scorer: Scorer, reason: str, cause: Exception | None = None) -> None:
        """End a batch with an error of one of its rewards."""
        error = RewardError(f"reward {scorer.name!r}{reason}")
        error.__cause__ = cause
        for worker in [worker for worker in self.workers if worker.batch is batch and worker.pending]:
            self._kill(worker)
        batch.cancelled = True
        batch.answers.put(error)

    def _kill(self, worker: _RewardWorker) -> None:
        self.workers.remove(worker)
        worker.kill()
