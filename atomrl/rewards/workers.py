"""`RewardPool`: calls of rewards in worker processes, so that no reward can hang or crash the run.

A worker does not import torch unless a user's reward does, so replacing one takes a
fraction of a second.
"""

import multiprocessing.connection
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from atomrl.common.redaction import register_secrets, without_secrets
from atomrl.common.secrets import mask_secrets, secrets_of
from atomrl.common.workers import (
    LOAD_LIMIT_S,
    PROCESS_ENDED,
    TICK_S,
    PoolWorker,
    WorkerPool,
    seed_everything,
    send_answer,
)
from atomrl.rewards.calling import Outcome, Score, Task, call, failed, instantiate
from atomrl.rewards.errors import RewardError
from atomrl.rewards.scorer import Scorer, find_scorer
from atomrl.rewards.table import POOLED
from atomrl.types import FailureKind

MAX_CHUNK = 16
"""Calls that are sent to a worker in one message."""


def worker_main(connection: Connection) -> None:
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
        """Handle a message of `worker_main`, or None for the end of the worker."""
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
