"""The synchronous loop: collect, learn, hand the weights over, report; then again.

It knows stages and protocols, no engine, back end or algorithm by name.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_rows, to_training_batches, trained_completions
from atomrl.data.stream import PromptStream
from atomrl.loop.report import Stopwatch, rollout_metrics, update_metrics
from atomrl.metrics import Metrics
from atomrl.protocols import Algorithm, RewardComputer, RolloutEngine, TrainingBackend
from atomrl.stages import AdvantageBatch, PromptBatch, RewardBatch, SamplingParams

log = logging.getLogger(__name__)
MAX_REFILLS = 20


class RunRecord(Protocol):
    """Where a run writes: `tracking.run_directory` is the real one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_rollouts(self, step: int, rewarded: RewardBatch, advantages: Mapping[tuple[int, int], float]) -> None:
        """`advantages` by (prompt, completion); a completion that was not trained on has none."""
        ...

    def checkpoint(self, step: int) -> AbstractContextManager[Path]: ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop is made of; `assembly` builds it from a config."""

    engine: RolloutEngine
    trainer: TrainingBackend
    algorithm: Algorithm
    stream: PromptStream
    processor: DataProcessor
    rewards: RewardComputer
    sampling: SamplingParams
    record: RunRecord
    evaluate: Callable[[int], object]
    """Evaluates on held-out problems, where there are any, after this many steps, and records the result."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many of everything."""

    steps: int
    prompts_per_step: int
    updates_per_epoch: int
    epochs_per_step: int
    max_row_tokens: int | None
    eval_every_steps: int
    save_every_steps: int
    seed: int


@dataclass
class Progress:
    """What has to be known to go on: saved with every checkpoint."""

    step: int = 0
    position: int = 0
    wall_s: float = 0.0
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """step -> metrics of the evaluation after it; "0" is before training."""
    algorithm_state: dict[str, float] = field(default_factory=dict)


Save = Callable[[Path, Progress], None]
BEFORE_UPDATES = "no update of this step had begun: model and optimizer are those of the step before"


class NoSignal(RuntimeError):
    """The data gives too few groups that the algorithm accepts."""


def train(parts: Parts, schedule: Schedule, progress: Progress, save: Save) -> bool:
    """Run the remaining steps of reinforcement learning; the engine gets the trainer's weights first.

    Returns:
        Whether the last step was reached (see `run_steps`).
    """
    parts.stream.position = progress.position
    parts.algorithm.state.update(progress.algorithm_state)
    parts.engine.load_weights(parts.trainer.weights(), version=progress.step)

    def one_step(step: int) -> dict[str, float]:
        metrics = run_step(parts, schedule, step)
        if schedule.eval_every_steps and step % schedule.eval_every_steps == 0 and step < schedule.steps:
            parts.evaluate(step)
        progress.position = parts.stream.position
        progress.algorithm_state = dict(parts.algorithm.state)
        return metrics

    return run_steps(one_step, parts.record, progress, save, schedule)


def run_steps(
    one_step: Callable[[int], dict[str, float]], record: RunRecord, progress: Progress, save: Save, schedule: Schedule
) -> bool:
    """Call `one_step` for each remaining step, log what it returns, and save when it is due and at the end.

    Args:
        one_step: step number -> metrics.
        record: where the metrics go.
        progress: where to start; changed in place.
        save: writes a checkpoint into a folder.
        schedule: how many steps there are and how often to save.

    Returns:
        Whether the last step was reached; False after Ctrl-C or SIGTERM, which end the step under way and save.

    Raises:
        Exception: whatever a step raises. Where it came before the step's first update, the steps done are saved.
    """
    saved = progress.step
    with stop_request() as stopped:
        while progress.step < schedule.steps and not stopped():
            started = time.perf_counter()
            try:
                metrics = one_step(progress.step + 1)
            except Exception as error:
                if saved != progress.step and BEFORE_UPDATES in getattr(error, "__notes__", ()):
                    save_checkpoint(record, progress, save)
                    log.warning("step %d failed; the %d steps before it are saved", progress.step + 1, progress.step)
                raise
            progress.step += 1
            progress.wall_s += time.perf_counter() - started
            record.log(progress.step, metrics)
            if schedule.save_every_steps and progress.step % schedule.save_every_steps == 0:
                saved = save_checkpoint(record, progress, save)
        if saved != progress.step:
            save_checkpoint(record, progress, save)
    return progress.step >= schedule.steps


@contextmanager
def before_updates() -> Iterator[None]:
    """Notes on an error that the weights were not touched yet, so that `run_steps` may save the steps before."""
    try:
        yield
    except Exception as error:
        error.add_note(BEFORE_UPDATES)
        raise


def save_checkpoint(record: RunRecord, progress: Progress, save: Save) -> int:
    """Model, optimizer and progress, written aside and renamed when complete. Returns the step."""
    with record.checkpoint(progress.step) as folder:
        save(folder, progress)
    return progress.step


def run_step(parts: Parts, schedule: Schedule, step: int) -> dict[str, float]:
    """One step: rollouts, rewards, rows, annotations, advantages, updates, weights."""
    watch = Stopwatch()
    with before_updates():
        rewarded = collect(parts, schedule.prompts_per_step, step, watch)
    credited, results = learn(parts.trainer, parts.algorithm, rewarded, schedule, step, watch)
    with watch("sync_weights"):
        parts.engine.load_weights(parts.trainer.weights(), version=step)
    credit = dict(zip(trained_completions(rewarded, schedule.max_row_tokens), mean_advantages(credited), strict=True))
    parts.record.log_rollouts(step, rewarded, credit)
    special_ids = frozenset(parts.processor.tokenizer.all_special_ids)
    return rollout_metrics(rewarded, credited, special_ids) | update_metrics(results) | watch.metrics(rewarded)


def learn(
    trainer: TrainingBackend,
    algorithm: Algorithm,
    rewarded: RewardBatch,
    schedule: Schedule,
    step: int,
    watch: Stopwatch,
) -> tuple[AdvantageBatch, list[Metrics]]:
    """The second half of a step: from scored completions to updates.

    Returns:
        The rows with their advantages, and the metrics of each update.
    """
    rows = to_rows(rewarded, schedule.max_row_tokens)
    updates = schedule.updates_per_epoch * schedule.epochs_per_step
    # With a single update the policy still is the one of the start of the step: no need to compute it twice.
    needs = algorithm.advantages_read | (algorithm.needs - {"old_logprobs"}) if updates == 1 else algorithm.needs
    with watch("annotate"):
        credited = algorithm.advantages(trainer.annotate(rows, needs))
    with watch("update_actor"):
        batches = to_training_batches(
            credited,
            algorithm,
            updates=schedule.updates_per_epoch,
            epochs=schedule.epochs_per_step,
            seed=schedule.seed,
            step=step,
        )
        return credited, [trainer.train_step(batch, algorithm) for batch in batches]


def collect(parts: Parts, prompts: int, step: int, watch: Stopwatch) -> RewardBatch:
    """Rollouts and rewards of `prompts` prompts; where the algorithm refuses groups, of others in their place.

    Raises:
        NoSignal: `MAX_REFILLS` rounds did not fill the batch.
    """
    accept = parts.algorithm.accept_group
    kept: RewardBatch | None = None
    for _ in range(MAX_REFILLS):
        batch = parts.processor.to_prompt_batch(parts.stream.take(prompts))
        with watch("gen"):
            rollouts = parts.engine.generate(batch, replace(parts.sampling, step=step))
        with watch("reward"):
            rewarded = parts.rewards(rollouts)
        if parts.algorithm.extra_rollouts is not None:
            rewarded = replace(rewarded, baseline_rewards=baseline_rewards(parts, batch, step, watch))
        if accept is None:
            return rewarded
        # A completion without a token becomes no row: its reward is no signal.
        good = [
            index
            for index, (group, completions) in enumerate(zip(rewarded.rewards, rewarded.completions, strict=True))
            if accept([r for r, c in zip(group, completions, strict=True) if r is not None and c.token_ids])
        ]
        chosen = select_prompts(rewarded, good)
        kept = chosen if kept is None else join_prompts(kept, chosen)
        if len(kept.samples) >= prompts:
            return select_prompts(kept, list(range(prompts)))
    found = len(kept.samples) if kept else 0
    raise NoSignal(
        f"step {step}: {parts.algorithm.name} accepted {found} of {MAX_REFILLS * prompts} groups and needs {prompts}; "
        "the problems are too easy or too hard for this model: change the data, or raise completions_per_prompt"
    )


def baseline_rewards(parts: Parts, batch: PromptBatch, step: int, watch: Stopwatch) -> tuple[float | None, ...]:
    """The mean reward, by prompt, of completions that are drawn as the algorithm's `extra_rollouts` says."""
    with watch("gen"):
        extra = parts.engine.generate(
            batch, replace(parts.sampling, step=step, **(parts.algorithm.extra_rollouts or {}))
        )
    with watch("reward"):
        groups = [[reward for reward in group if reward is not None] for group in parts.rewards(extra).rewards]
    return tuple(sum(group) / len(group) if group else None for group in groups)


def select_prompts(batch: RewardBatch, index: list[int]) -> RewardBatch:
    """The prompts at `index` with all their completions."""

    def pick(groups: Any) -> tuple:
        return tuple(groups[i] for i in index)

    changes = {name: pick(getattr(batch, name)) for name in _by_prompt(batch)}
    return replace(batch, **changes, reward_parts={name: pick(part) for name, part in batch.reward_parts.items()})


def join_prompts(first: RewardBatch, second: RewardBatch) -> RewardBatch:
    """Both, one after the other."""
    changes = {name: getattr(first, name) + getattr(second, name) for name in _by_prompt(first)}
    parts = {name: _part(first, name) + _part(second, name) for name in {**first.reward_parts, **second.reward_parts}}
    failures = first.reward_failures + second.reward_failures
    return replace(first, **changes, reward_parts=parts, reward_failures=failures)


def _part(batch: RewardBatch, name: str) -> tuple[tuple[float | None, ...], ...]:
    """A part of the reward, which a batch lacks where no completion of it was given one."""
    return batch.reward_parts.get(name) or tuple((None,) * len(group) for group in batch.completions)


def _by_prompt(batch: RewardBatch) -> list[str]:
    """The fields that are there and hold an item for each prompt."""
    names = (item.name for item in fields(batch) if item.name not in _NOT_BY_PROMPT)
    return [name for name in names if getattr(batch, name) is not None]


_NOT_BY_PROMPT = {"policy_version", "reward_parts", "reward_failures", "part_weights"}


def mean_advantages(credited: AdvantageBatch) -> list[float]:
    """Mean advantage of each row's trained tokens, in the order of the rows."""
    tokens = credited.loss_mask.sum(1).clamp(min=1)
    return ((credited.advantages * credited.loss_mask).sum(1) / tokens).tolist()


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came; the second Ctrl-C interrupts at once."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        log.warning("stopping after this step (again to stop at once)")

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread: signals are the caller's business
        pass
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
