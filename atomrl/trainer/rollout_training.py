"""`RolloutTraining`: the part of `fit`'s step that samples groups, scores them, and sends weights to the engine."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from atomrl.batches import AdvantageBatch, RowBatch
from atomrl.common.chat_template import stop_tokens
from atomrl.common.metrics import Metrics
from atomrl.common.threads import single_thread
from atomrl.config import RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_rows
from atomrl.protocols import Algorithm, RolloutEngine, TrainingBackend, WeightTransfer
from atomrl.rewards.compute import Rewards
from atomrl.rewards.errors import RewardError
from atomrl.tracking.recorder import Recorder
from atomrl.trainer import build
from atomrl.trainer.evaluate import evaluate
from atomrl.trainer.loop import MAX_IDLE_STEPS, Evaluation, Progress
from atomrl.trainer.report.metrics import mean_advantages, rollout_metrics, update_metrics
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.report.tokens import TokenRecord, mark_recorded
from atomrl.trainer.sources import Groups, GroupSource
from atomrl.types import Problem, Trajectory

log = logging.getLogger(__name__)


class HeldOut(NamedTuple):
    """Engine, problems and rewards of evaluations."""

    engine: RolloutEngine
    problems: Sequence[Problem]
    rewards: Rewards


@dataclass(kw_only=True)
class RolloutTraining:
    """`loop.Training` on rollouts: samples groups, scores them, makes rows, and sends weights to the engine."""

    source: GroupSource
    transfer: WeightTransfer
    trainer: TrainingBackend
    algorithm: Algorithm
    processor: DataProcessor
    record: Recorder
    config: RunConfig
    progress: Progress
    sleeper: RolloutEngine | None = None
    """The engine, if it shares a GPU with the trainer: it sleeps during updates to free memory."""
    held_out: HeldOut | None = None
    totals: Callable[[], dict[str, float]] = dict
    """Called after rewards were computed; returns the run's totals (requests, cost) as metrics."""
    says_right: bool = True
    """Whether the first reward grades answers as right or wrong (`Rewards.says_right`)."""
    accepted: Groups = field(default_factory=list)
    refused: Groups = field(default_factory=list)

    @property
    def drawn(self) -> list[Trajectory]:
        """All trajectories of the step."""
        return [*chain(*self.accepted), *chain(*self.refused)]

    def collect(self, step: int, watch: Stopwatch) -> RowBatch:
        """Sample the groups of a step and score them; return the rows of those that the algorithm accepts.

        Draws other prompts if no completion has a reward.

        Raises:
            RewardError: the rewards are expected to fail for good (`Rewards.judge`), or no completion had a reward in
                `MAX_IDLE_STEPS` attempts.
        """
        config, failed = self.config, Groups()
        try:
            for tries in range(1, MAX_IDLE_STEPS + 1):
                self.accepted, self.refused = self.source.collect(config.items_per_step, step, watch)
                drawn = self.drawn
                if not drawn or any(item.reward is not None for item in drawn):
                    break
                failed += [*self.accepted, *self.refused]
                failures = [failure for item in drawn for failure in item.reward_failures]
                why = f"{failures[0].kind}: {failures[0].message}" if failures else "all returned None"
                log.warning("step %d: none of %d completions has a reward (%s); try %d", step, len(drawn), why, tries)
            else:
                text = f"no completion had a reward in {MAX_IDLE_STEPS} attempts, last: {why}"
                raise RewardError(f"step {step}: {text}", [*chain(*failed)])
        except RewardError as error:
            if error.scored:  # record the completions on which the reward failed
                self.record.log_rollouts(step, error.scored, {})
            raise
        finally:
            self.totals()
        self.refused = [*failed, *self.refused]
        self.progress.idle_steps = 0 if self.accepted else self.progress.idle_steps + 1
        rows = to_rows(list(chain(*self.accepted)), config.train.max_row_tokens, version=step - 1)
        return mark_recorded(rows, config.tracking.tokens if config.tracking.save_rollouts else 0)

    @contextmanager
    def updating(self) -> Iterator[None]:
        if self.sleeper is None:
            yield
            return
        self.sleeper.sleep()
        yield
        self.trainer.free_memory()  # the engine needs it on the same GPU
        self.sleeper.wake()

    def sync_weights(self, step: int, watch: Stopwatch) -> None:
        with watch("sync_weights"):
            self.transfer(step)

    def report(
        self, step: int, batch: AdvantageBatch, updates: Sequence[Metrics], tokens: TokenRecord, watch: Stopwatch
    ) -> dict[str, float]:
        drawn = self.drawn
        self.record.log_rollouts(step, drawn, mean_advantages(batch))
        if recorded := tokens.tensors():
            self.record.log_tokens(step, recorded, tokens.state)
        stops = {*stop_tokens(self.processor.tokenizer), *self.config.rollout.stop_token_ids}
        with single_thread():
            metrics = rollout_metrics(drawn, batch, stops, self.says_right)
        if self.source.curriculum.rejects:
            groups = len(self.accepted) + len(self.refused)
            metrics["rollout/groups_drawn"] = float(groups)
            metrics["rollout/groups_accepted"] = float(len(self.accepted))
            metrics["rollout/groups_missing"] = float(self.config.items_per_step - len(self.accepted))
            metrics["rollout/acceptance_rate"] = len(self.accepted) / max(1, groups)
        total = sum(item.prompt_tokens + item.response_tokens for item in drawn)
        curriculum = self.source.curriculum
        self.progress.position, self.progress.pending, self.progress.curriculum = curriculum.state()
        metrics |= watch.metrics(total) | update_metrics(updates)
        return metrics | self.source.metrics() | curriculum.metrics() | self.totals()

    def evaluate(self) -> Evaluation | None:
        if self.held_out is None:
            return None
        engine, problems, rewards = self.held_out
        try:
            with self.source.quiet():
                result = evaluate(
                    engine, problems, self.processor, rewards, build.eval_sampling(self.config),
                    says_right=self.says_right,
                )  # fmt: skip
        finally:
            self.totals()
        names = ("accuracy", "reward", "format", "reasoning_tokens")
        known = {name: value for name in names if not math.isnan(value := result.overall[name].mean)}
        return Evaluation(result.metrics(), known, result.rows)
