"""The loop: collect, learn, hand the weights over, report; then again.

Where the groups come from is the source's business (`trainer/sources.py`). It knows types and protocols, no engine,
back end or algorithm by name.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from atomrl.atoms.masks import masked_sum
from atomrl.batches import AdvantageBatch, RowBatch, end_to_end
from atomrl.common.chat_template import stop_tokens
from atomrl.common.metrics import Metrics
from atomrl.common.threads import one
from atomrl.config import RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_rows, to_training_batches, with_advantages
from atomrl.objectives.advantage import given
from atomrl.protocols import Algorithm, ModelInput, RolloutEngine, TrainingBackend, WeightTransfer
from atomrl.rewards.compute import first_values
from atomrl.rewards.errors import RewardError
from atomrl.rewards.table import says_right
from atomrl.tracking.recorder import Recorder
from atomrl.trainer.report import Stopwatch, TokenRecord, marked, rollout_metrics, update_metrics
from atomrl.trainer.sources import Groups, GroupSource

log = logging.getLogger(__name__)
PHASES: Mapping[str, frozenset[ModelInput]] = {
    "old_log_prob": frozenset({"old_logprobs", "old_entropy"}),
    "ref": frozenset({"ref_logprobs"}),
    "teacher": frozenset({"teacher_logprobs"}),
    "values": frozenset({"values"}),
    "scores": frozenset({"scores"}),
}
"""What a back end computes before the advantages, by the name of its `timing_s/` (verl's): a forward pass of one model
each."""
MAX_IDLE_STEPS = 3
"""Steps in a row without a group that the algorithm accepts, after which a run ends."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step of reinforcement learning is made of."""

    source: GroupSource
    transfer: WeightTransfer
    trainer: TrainingBackend
    algorithm: Algorithm
    processor: DataProcessor
    record: Recorder
    sleeper: RolloutEngine | None = None
    """The engine where it shares a GPU with the trainer: it sleeps while that works, for its memory."""


@dataclass
class Progress:
    """What has to be known to go on: saved with every checkpoint."""

    step: int = 0
    position: int = 0
    """In the stream of prompts."""
    pending: Sequence[tuple[int, int]] = ()
    """Position and step of groups before it that are still to be trained on (`GroupSource.state`)."""
    wall_s: float = 0.0
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """step -> metrics of the evaluation after it; "0" is before training."""
    algorithm_state: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    """Optimizer steps that changed weights of the policy, or of what is in its place."""
    idle_steps: int = 0
    """The last steps in which no group was accepted; counts up to `MAX_IDLE_STEPS`."""
    graded: bool = False
    """The first reward function has given values that say no right or wrong: nothing is called accuracy any more."""


Save = Callable[[Path, Progress], Callable[[], None] | None]
"""Writes a checkpoint into a folder; or begins to, and what it returns waits until it is written."""


class StepFailed(Exception):
    """A step failed before its first update: model and optimizer are those of the step before."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def run_steps(
    one_step: Callable[[int], dict[str, float]], record: Recorder, progress: Progress, save: Save, config: RunConfig
) -> bool:
    """Call `one_step` for each remaining step, log what it returns, and save when it is due and at the end.

    The end is the last step, or `MAX_IDLE_STEPS` in a row without a group that the algorithm accepts: there is nothing
    left to learn then, or nothing that can be.

    Args:
        one_step: step number -> metrics.
        record: where the metrics go.
        progress: where to start; changed in place.
        save: writes a checkpoint into a folder.
        config: how many steps there are and how often to save.

    Returns:
        Whether the end was reached; False after Ctrl-C or SIGTERM, which end the step under way and save.

    Raises:
        Exception: whatever a step raises. Where it came before the step's first update (`before_updates`), the steps
            done are saved.
    """
    failed, steps, every = None, config.train.steps, config.checkpoint.every_steps
    checkpoints = Checkpoints(record, save, progress.step)
    if progress.idle_steps >= MAX_IDLE_STEPS:  # resumed all the same
        progress.idle_steps = 0
    with stop_request() as stopped, checkpoints:
        while progress.step < steps and progress.idle_steps < MAX_IDLE_STEPS and not stopped():
            started = time.perf_counter()
            try:
                metrics = one_step(progress.step + 1)
            except StepFailed as failure:
                failed = failure.error
                break
            progress.step += 1
            left_out = metrics.get("actor/skipped_updates", 0.0) + metrics.get("actor/empty_updates", 0.0)
            progress.updates += int(metrics.get("training/updates", 0.0) - left_out)
            progress.wall_s += time.perf_counter() - started
            record.log(progress.step, metrics)
            checkpoints.end()
            if every and progress.step % every == 0:
                checkpoints.begin(progress)
        if checkpoints.step != progress.step:
            checkpoints.begin(progress)
    if failed:
        log.warning("step %d failed; the %d steps before it are saved", progress.step + 1, progress.step)
        raise failed from failed.__cause__
    if progress.idle_steps >= MAX_IDLE_STEPS:
        log.warning(
            "the run ends after step %d: no group of %d steps in a row was accepted: all completions of a group "
            "earn the same. Their reward (critic/score/mean) says whether the problems are too easy or too hard",
            progress.step, MAX_IDLE_STEPS,
        )  # fmt: skip
    return progress.step >= steps or progress.idle_steps >= MAX_IDLE_STEPS


@contextmanager
def before_updates() -> Iterator[None]:
    """The part of a step in which the weights are not touched: an error there lets `run_steps` save the steps done."""
    try:
        yield
    except Exception as error:
        raise StepFailed(error) from error


class Checkpoints:
    """Model, optimizer and progress, each time written aside and renamed when complete: a context manager.

    A back end may write them while the next step is taken. A step that fails meanwhile leaves the checkpoint whole, if
    it can still be, or absent.

    Args:
        record: gives the folders.
        save: writes, or begins to.
        step: of the newest.
    """

    def __init__(self, record: Recorder, save: Save, step: int) -> None:
        self.record, self.save, self.step = record, save, step
        self._open = ExitStack()
        self._wait: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self, progress: Progress) -> None:
        """Save as all is now."""
        self.end()
        self.step = progress.step
        with ExitStack() as folders:
            self._wait = self.save(folders.enter_context(self.record.checkpoint(progress.step)), progress)
            self._open = folders.pop_all()
        if self._wait is None:
            self.end()

    def end(self) -> None:
        """Wait for what is under way."""
        wait, self._wait = self._wait, None
        with self._open.pop_all():
            if wait is not None:
                wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return self.end()
        with suppress(Exception):  # what ends the run says more
            self.end()


def run_step(parts: Parts, config: RunConfig, step: int, progress: Progress) -> dict[str, float]:
    """One step: rollouts, rewards, rows, advantages, updates, weights."""
    watch = Stopwatch()
    with before_updates():
        try:
            accepted, refused = collect(parts.source, config.items_per_step, step, watch)
        except RewardError as error:
            if error.scored:  # what it failed on can be read
                parts.record.log_rollouts(step, error.scored, {})
            raise
    progress.idle_steps = 0 if accepted else progress.idle_steps + 1
    drawn = [*chain(*accepted), *chain(*refused)]
    rows = to_rows(list(chain(*accepted)), config.train.max_row_tokens, version=step - 1)
    rows, tokens = marked(rows, config.tracking.tokens if config.tracking.save_rollouts else 0), TokenRecord()
    if parts.sleeper:
        parts.sleeper.sleep()
    state = progress.algorithm_state
    batch, results = learn(parts.trainer, parts.algorithm, rows, state, watch, config, step=step, tokens=tokens)
    if parts.sleeper:
        parts.trainer.free_memory()  # of the same GPU, where the engine finds no room otherwise
        parts.sleeper.wake()
    with watch("sync_weights"):
        parts.transfer(step)
    parts.record.log_rollouts(step, drawn, mean_advantages(batch))
    if recorded := tokens.tensors():
        parts.record.log_tokens(step, recorded, tokens.state)
    stops = {*stop_tokens(parts.processor.tokenizer), *config.rollout.stop_token_ids}
    with one():
        metrics = rollout_metrics(drawn, batch, stops)
    progress.graded |= not says_right(first_values(drawn))
    if progress.graded:
        metrics.pop("train/accuracy", None)
    if parts.algorithm.keeps_group:
        groups = len(accepted) + len(refused)
        metrics["rollout/groups_drawn"] = float(groups)
        metrics["rollout/groups_accepted"] = float(len(accepted))
        metrics["rollout/groups_missing"] = float(config.items_per_step - len(accepted))
        metrics["rollout/acceptance_rate"] = len(accepted) / max(1, groups)
    total = sum(item.prompt_tokens + item.response_tokens for item in drawn)
    return metrics | watch.metrics(total) | update_metrics(results) | parts.source.metrics()


def collect(source: GroupSource, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
    """The groups of a step, of which one completion at least has a reward: a step that has none is no step, and is done
    with other prompts.

    Raises:
        RewardError: the rewards judge that there will be none (`Rewards.judge`), or there is none `MAX_IDLE_STEPS`
            times.
    """
    failed: Groups = []
    for tries in range(1, MAX_IDLE_STEPS + 1):
        accepted, refused = source.collect(groups, step, watch)
        drawn = [*chain(*accepted), *chain(*refused)]
        if not drawn or any(item.reward is not None for item in drawn):
            return accepted, [*failed, *refused]
        failed += [*accepted, *refused]
        why = next((f"{one.kind}: {one.message}" for item in drawn for one in item.reward_failures), "all gave None")
        log.warning("step %d: none of %d completions has a reward (%s); try %d", step, len(drawn), why, tries)
    error = RewardError(f"step {step}: no completion has had a reward {MAX_IDLE_STEPS} times in a row, the last: {why}")
    error.scored = [*chain(*failed)]
    raise error


def learn(
    trainer: TrainingBackend,
    algorithm: Algorithm,
    rows: RowBatch,
    state: dict[str, float],
    watch: Stopwatch,
    config: RunConfig | None = None,
    step: int = 0,
    tokens: TokenRecord | None = None,
) -> tuple[AdvantageBatch, list[Metrics]]:
    """The second half of a step: from rows to updates. `state` becomes the algorithm's after it.

    Args:
        config: of a run on rollouts: how often it updates on its rows, and the seed of their split. None: once.
        step: number of the step, which has a split of its own.
        tokens: gets what the updates saw of the rows that are marked as recorded.

    Returns:
        The rows with their advantages, and the metrics of each update: none where there is no row.
    """
    if not rows.rows:
        return AdvantageBatch(**vars(rows), advantages=rows.tokens.float()), []
    updates, epochs = (config.updates_per_epoch, config.train.epochs_per_step) if config else (1, 1)
    needs = algorithm.needs
    if updates * epochs == 1:  # the policy still is the one of the start of the step: no need to compute it twice
        needs = algorithm.advantage_inputs | (needs - {"old_logprobs"})
    phases = {"forward": needs} if trainer.concurrent else PHASES
    for phase, names in phases.items():
        if asked := needs & names:
            with watch(phase):
                rows = trainer.forward_only(rows, asked)
    with watch("adv"), one():  # its sums are over all tokens
        batch = with_advantages(algorithm, rows, state)
        state.update(batch.state)
    with watch("update_actor"):
        seed = config.seed if config else 0
        parts = to_training_batches(batch, algorithm, updates=updates, epochs=epochs, seed=seed, step=step)
        results = []
        for part in parts:
            results.append(trainer.train_step(part, algorithm))
            if tokens is not None and part.recorded is not None:
                tokens.add(part, trainer.token_numbers())
        return batch, results


def mean_advantages(batch: AdvantageBatch) -> dict[int, float]:
    """Mean advantage of each trajectory's trained tokens, by its index."""
    batch = end_to_end(batch)
    tokens = batch.loss_mask.sum(1).clamp(min=1)
    means: list[float] = ((batch.advantages * batch.loss_mask).sum(1) / tokens).tolist()
    return dict(zip(given(batch.trajectory_index).tolist(), means, strict=True))


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came; the second Ctrl-C interrupts at once."""
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        log.warning("stopping after this step (again to stop at once)")

    with suppress(ValueError):  # not the main thread: signals are the caller's business
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------------------------------------------------------
# Training on rows that come from data: demonstrations, preferences, windows of text.

EVAL_SAMPLES = 64
"""Held-out samples in a forward pass of their own."""


def supervised_step(
    trainer: TrainingBackend, algorithm: Algorithm, rows: RowBatch, state: dict[str, float]
) -> dict[str, float]:
    """One optimizer step on rows. `state` becomes the algorithm's after it.

    Returns:
        The metrics of the update, `timing_s/*`, and how many tokens it had.
    """
    watch = Stopwatch()
    _, results = learn(trainer, algorithm, rows, state, watch)
    return watch.metrics(int(rows.lengths.sum())) | update_metrics(results)


def nll_per_token(trainer: TrainingBackend, batches: Iterable[RowBatch]) -> float:
    """Mean negative log-likelihood of the rows' trained tokens, in nats; every token weighs the same."""
    total, tokens = 0.0, 0
    for rows in batches:
        scored = trainer.forward_only(rows, frozenset({"old_logprobs"}))
        total -= masked_sum(given(scored.old_logprobs).double(), rows.loss_mask).item()
        tokens += int(rows.loss_mask.sum())
    return total / max(1, tokens) if tokens else torch.nan
