"""The training loop. `fit` trains every kind of run: RL, SFT, preferences, reward models, pretraining.

What differs between kinds of run is a `Training`: where rows come from, who gets the new weights, and what is reported.
`trainer/rl.py` has the one that samples completions, `trainer/offline.py` those that read a data set.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self

from atomrl.batches import AdvantageBatch, RowBatch
from atomrl.common.metrics import Metrics
from atomrl.common.threads import single_thread
from atomrl.config import RunConfig
from atomrl.data.rows import to_training_batches, with_advantages
from atomrl.protocols import Algorithm, ModelInput, TrainingBackend
from atomrl.tracking.recorder import Recorder
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.report.tokens import TokenRecord

log = logging.getLogger(__name__)
MAX_IDLE_STEPS = 3
"""Consecutive steps without a group that the algorithm accepts, after which a run ends."""


@dataclass
class Progress:
    """The state of a run beside model and optimizer. Saved with every checkpoint."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Position in the stream of prompts."""
    pending: Sequence[tuple[int, int]] = ()
    """Position and step of earlier groups that have not been trained on yet (`CurriculumState`)."""
    curriculum: Mapping[str, Any] = field(default_factory=dict)
    """State of the parts of the curriculum (`CurriculumState.parts`)."""
    wall_s: float = 0.0
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """step -> metrics of the evaluation after it; "0" is before training."""
    algorithm_state: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    """Optimizer steps that changed weights."""
    idle_steps: int = 0
    """Consecutive steps without an accepted group, up to `MAX_IDLE_STEPS`."""


class Evaluation(NamedTuple):
    """Result of an evaluation on held-out data."""

    metrics: Mapping[str, float]
    headline: dict[str, float]
    """Values for the summary."""
    rows: Sequence[Mapping[str, Any]] = ()
    """One per completion, or per problem."""


class Training(Protocol):
    """Interface of a kind of run to `fit`: the parts of a step that differ between kinds."""

    @property
    def trainer(self) -> TrainingBackend: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def record(self) -> Recorder: ...

    def collect(self, step: int, watch: Stopwatch) -> RowBatch:
        """Return the rows of a step: sample completions and score them, or read a data set. Changes no weights."""

    def updating(self) -> AbstractContextManager[None]:
        """Context of the update: an engine on the trainer's GPU sleeps meanwhile."""

    def sync_weights(self, step: int, watch: Stopwatch) -> None:
        """Send the new weights to the engine, verified."""

    def report(
        self, step: int, batch: AdvantageBatch, updates: Sequence[Metrics], tokens: TokenRecord, watch: Stopwatch
    ) -> dict[str, float]:
        """Record what the step sampled, and return its metrics."""

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the held-out data; None without any."""

    def totals(self) -> dict[str, float]:
        """Return what the run has spent besides time (requests, money), for the summary."""


Save = Callable[[Path, Progress], Callable[[], None] | None]
"""Writes a checkpoint into a folder. May return before it is written: calling the result then waits for it."""
Callback = Callable[[int, Mapping[str, float]], bool | None]
"""Called after each step with its number and metrics; True ends the run after this step."""


def fit(
    training: Training,
    config: RunConfig,
    progress: Progress,
    save: Save,
    evaluate: Callable[[int], None] = lambda step: None,
    callbacks: Sequence[Callback] = (),
) -> bool:
    """Train from `progress` to the last step.

    Ends early after `MAX_IDLE_STEPS` steps without an accepted group, since there is nothing left to learn. Ctrl-C and
    SIGTERM end the current step, save, and return.

    Args:
        progress: where to start; updated in place.
        save: writes a checkpoint into a folder.
        evaluate: evaluates the current weights and records the result under a step.

    Returns:
        True if the end was reached or a callback ended the run, False after a stop request.

    Raises:
        Exception: any error of a step. If it was raised before the step's update, the steps done are saved first.
    """
    trainer, algorithm, record = training.trainer, training.algorithm, training.record
    steps, checkpoints, failure = config.train.steps, Checkpoints(record, save, progress.step), None
    ended = False
    if not progress.step and config.eval.before:
        evaluate(0)
    if progress.idle_steps >= MAX_IDLE_STEPS:  # resumed although it had ended
        progress.idle_steps = 0
    with stop_request() as stopped, checkpoints:
        while progress.step < steps and progress.idle_steps < MAX_IDLE_STEPS and not (ended or stopped()):
            step, watch, tokens = progress.step + 1, Stopwatch(), TokenRecord()
            try:
                rows = training.collect(step, watch)  # sample completions and score them
            except Exception as error:
                failure = error  # the weights are those of the step before: they can be saved
                break
            with training.updating():
                batch = compute_advantages(trainer, algorithm, rows, progress.algorithm_state, config, watch)
                updates = update_policy(trainer, algorithm, batch, config, step, watch, tokens)
            training.sync_weights(step, watch)
            metrics = training.report(step, batch, updates, tokens, watch)
            if is_due(step, config.eval.every_steps) and step < steps:
                evaluate(step)
            answers = [callback(step, metrics) for callback in callbacks]
            ended = True in answers
            progress.step = step
            progress.updates += updates_made(metrics)
            progress.wall_s += time.perf_counter() - watch.started
            record.log(step, metrics)
            checkpoints.end()
            if is_due(step, config.checkpoint.every_steps):
                checkpoints.begin(progress)
        if checkpoints.step != progress.step:
            checkpoints.begin(progress)
    if failure is not None:
        log.warning("step %d failed; the %d steps before it are saved", progress.step + 1, progress.step)
        raise failure
    done = progress.step >= steps or progress.idle_steps >= MAX_IDLE_STEPS or ended
    if progress.idle_steps >= MAX_IDLE_STEPS:
        log.warning(
            "the run ends after step %d: no group was accepted in %d steps in a row, because all completions of a "
            "group have equal rewards or no prompt is left. critic/score/mean shows whether the problems are too easy "
            "or too hard",
            progress.step, MAX_IDLE_STEPS,
        )  # fmt: skip
    if done and config.eval.after:
        evaluate(progress.step)
    return done


PHASES: Mapping[str, frozenset[ModelInput]] = {
    "old_log_prob": frozenset({"old_logprobs", "old_entropy", "old_squared_probs"}),
    "ref": frozenset({"ref_logprobs"}),
    "teacher": frozenset({"teacher_logprobs"}),
    "values": frozenset({"values"}),
    "scores": frozenset({"scores"}),
}
"""Forward passes before the advantages, one model each, by the name of their `timing_s/` (verl's names)."""


def compute_advantages(
    trainer: TrainingBackend,
    algorithm: Algorithm,
    rows: RowBatch,
    state: dict[str, float],
    config: RunConfig,
    watch: Stopwatch,
) -> AdvantageBatch:
    """Compute what the algorithm needs of its models (old and reference log-probs, values), then the advantages.

    Old log-probs are skipped in a step with a single update: the policy still is the old one then.

    Args:
        state: the algorithm's state; updated in place.
    """
    if not rows.rows:
        return AdvantageBatch(**vars(rows), advantages=rows.tokens.float())
    needs = algorithm.needs
    if config.updates_per_step == 1:
        needs = algorithm.advantage_inputs | (needs - {"old_logprobs"})
    phases = {"forward": needs} if trainer.concurrent else PHASES
    for phase, names in phases.items():
        if asked := needs & names:
            with watch(phase):
                rows = trainer.forward_only(rows, asked)
    with watch("adv"), single_thread():  # sums over all tokens: equal on any number of threads
        batch = with_advantages(algorithm, rows, state)
    state.update(batch.state)
    return batch


def update_policy(
    trainer: TrainingBackend,
    algorithm: Algorithm,
    batch: AdvantageBatch,
    config: RunConfig,
    step: int,
    watch: Stopwatch,
    tokens: TokenRecord | None = None,
) -> list[Metrics]:
    """Make the optimizer steps of a step, and return the metrics of each; none for a batch without rows.

    Args:
        step: seeds the split into mini-batches.
        tokens: receives per-token numbers of the rows that are marked as recorded.
    """
    results: list[Metrics] = []
    if not batch.rows:
        return results
    epochs = config.updates_per_step // config.updates_per_epoch
    with watch("update_actor"):
        for part in to_training_batches(
            batch, algorithm, updates=config.updates_per_epoch, epochs=epochs, seed=config.seed, step=step
        ):
            results.append(trainer.train_step(part, algorithm))
            if tokens is not None and part.recorded is not None:
                tokens.add(part, trainer.token_numbers())
    return results


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every `every` steps happens after this one; 0 is never."""
    return bool(every) and step % every == 0


def updates_made(metrics: Mapping[str, float]) -> int:
    """Return how many optimizer steps of a step changed weights."""
    left_out = metrics.get("actor/skipped_updates", 0.0) + metrics.get("actor/empty_updates", 0.0)
    return int(metrics.get("training/updates", 0.0) - left_out)


class Checkpoints:
    """Writes checkpoints aside and renames them when they are complete. A context manager.

    A back end may write while the next step runs. If that step fails, the checkpoint is completed if possible, and
    absent otherwise.

    Args:
        record: creates the folders.
        save: writes, or begins to.
        step: of the newest checkpoint.
    """

    def __init__(self, record: Recorder, save: Save, step: int) -> None:
        self.record, self.save, self.step = record, save, step
        self._open = ExitStack()
        self._wait: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self, progress: Progress) -> None:
        """Save the current state."""
        self.end()
        self.step = progress.step
        with ExitStack() as folders:
            self._wait = self.save(folders.enter_context(self.record.checkpoint(progress.step)), progress)
            self._open = folders.pop_all()
        if self._wait is None:
            self.end()

    def end(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        wait, self._wait = self._wait, None
        with self._open.pop_all():
            if wait is not None:
                wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return self.end()
        with suppress(Exception):  # the error that ends the run says more
            self.end()


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C or SIGTERM. A second Ctrl-C interrupts at once."""
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        log.warning("stopping after this step (press again to stop immediately)")

    with suppress(ValueError):  # not the main thread: signals are the caller's business
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
