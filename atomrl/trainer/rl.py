"""Reinforcement learning: `RLRun` sets up a run on rollouts, `RolloutTraining` is its part of a step of `fit`."""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.batches import AdvantageBatch, RowBatch, concat_turns
from atomrl.common.chat_template import stop_tokens
from atomrl.common.files import model_identity, write_text
from atomrl.common.metrics import Metrics
from atomrl.common.threads import single_thread
from atomrl.config import RunConfig, load_config
from atomrl.data.checks import repetitions
from atomrl.data.problems import DataProcessor, PromptStream, load_problems
from atomrl.data.rows import to_rows
from atomrl.data.stored import read_lengths, write_lengths
from atomrl.models.loading import compute_dtype, model_config_only, resolve_folder
from atomrl.models.memory import count_parameters
from atomrl.objectives.choice import not_none
from atomrl.pool.codec import problem_json
from atomrl.pool.store import RolloutPool
from atomrl.pool.weights import PublishedWeights, WeightFollower
from atomrl.protocols import Algorithm, RewardFunction, RolloutEngine, TrainingBackend, WeightTransfer
from atomrl.rewards.compute import build_rewards, move_models
from atomrl.rewards.errors import RewardError
from atomrl.tracking.checkpoints import tokenizer_identity
from atomrl.tracking.recorder import Recorder
from atomrl.trainer import build
from atomrl.trainer.auto import with_engine, with_share
from atomrl.trainer.base import Evaluation, PreparedRun, identity
from atomrl.trainer.checks.config import check_companions
from atomrl.trainer.checks.data import (
    check_group_size,
    check_held_out,
    check_images,
    check_pool,
    check_row_limit,
    check_temperature,
)
from atomrl.trainer.checks.engine import check_correction, check_end, check_engine
from atomrl.trainer.checks.environment import check_columns, check_environment, check_outcome, with_tools
from atomrl.trainer.cluster import open_cluster
from atomrl.trainer.evaluate import evaluate
from atomrl.trainer.loop import MAX_IDLE_STEPS, Progress, stop_request
from atomrl.trainer.memory import takes_turns, why_two_copies
from atomrl.trainer.own_functions.sources import function_sources
from atomrl.trainer.own_functions.trial import check_own_functions
from atomrl.trainer.pool_source import PoolSource
from atomrl.trainer.report.metrics import rollout_metrics, update_metrics
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.report.tokens import TokenRecord, mark_recorded
from atomrl.trainer.sources import AsyncRolloutSource, EngineSource, Groups, GroupSource
from atomrl.types import DISTRIBUTION_KEYS, Problem, Trajectory
from atomrl.weight_sync import InProcessTransfer

log = logging.getLogger(__name__)
REWARD_TOTALS = "reward_totals.json"
"""File in the run's folder: requests to reward services and their cost, over all attempts of the run."""


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
        if self.algorithm.keeps_group:
            groups = len(self.accepted) + len(self.refused)
            metrics["rollout/groups_drawn"] = float(groups)
            metrics["rollout/groups_accepted"] = float(len(self.accepted))
            metrics["rollout/groups_missing"] = float(self.config.items_per_step - len(self.accepted))
            metrics["rollout/acceptance_rate"] = len(self.accepted) / max(1, groups)
        total = sum(item.prompt_tokens + item.response_tokens for item in drawn)
        self.progress.position, self.progress.pending = self.source.state()
        return metrics | watch.metrics(total) | update_metrics(updates) | self.source.metrics() | self.totals()


def mean_advantages(batch: AdvantageBatch) -> dict[int, float]:
    """Return the mean advantage over the trained tokens of each trajectory, by its index."""
    batch = concat_turns(batch)
    tokens = batch.loss_mask.sum(1).clamp(min=1)
    means: list[float] = ((batch.advantages * batch.loss_mask).sum(1) / tokens).tolist()
    return dict(zip(not_none(batch.trajectory_index).tolist(), means, strict=True))


class RLRun(PreparedRun):
    """A run that trains on sampled completions.

    Args:
        config: of the run.
        local_rewards: reward functions that exist only in this process, by their names in the config.
    """

    def __init__(self, config: RunConfig, local_rewards: Mapping[str, RewardFunction] | None = None) -> None:
        self._local_rewards = local_rewards or {}
        self.engine: RolloutEngine | None = None
        """From `open` on, unless another process samples and there is no evaluation."""
        self.path = path = build.model_path(config)

        # The engine comes first: whether its log-probs are exact decides if the algorithm is corrected for them.
        config, self.engine_reason = with_engine(config, path)
        objective = config.algorithm
        assert not isinstance(objective, RewardModelObjective), "the kind of run is chosen by the algorithm"
        engine = check_engine(config, path)
        if instead := build.engine_class(config.rollout, path, config.model)[1]:
            self.engine_reason += f"; the hf engine draws in its place: {instead}"
        check_correction(config, engine)
        on_policy = config.rollout.source == "engine" and not (
            config.asynchronous and config.asynchronous.max_staleness
        )
        exact = (engine.exact and on_policy) or config.rollout.logprobs_over == "none"
        objective = build.corrected(objective, exact)
        config = config.model_copy(update={"algorithm": objective})  # this config is saved, and compared on resuming
        self.algorithm = build.algorithm_of(config)

        # The user's functions are called once on made-up numbers before any file is read.
        device, trusted = build.device_name(config.model.device), config.model.trust_remote_code
        check_own_functions(self.algorithm, config, device)
        if config.cluster is not None and "reward" in config.cluster.resources:
            device = build.actor_model(config.model).device
        self.rewards = build_rewards(config.reward, local_rewards, device=device, trust_remote_code=trusted)

        # Tokenizer and environment, before problems: prompts are rendered with their template and tools.
        self.tokenizer = build.policy_tokenizer(config)
        check_end(config, path, self.tokenizer)
        check_companions(config, self.algorithm, path, self.tokenizer)
        config = with_tools(config, self.tokenizer)
        check_environment(config, self.tokenizer)
        check_outcome(config)
        reader = build.image_reader(config, path)
        self.images = build.image_store(config, reader)
        self.processor = build.processor(config, self.tokenizer, build.prompt_limit(config, path), reader)

        # Problems, and whether rewards and environment have the columns that they need.
        self._measured: dict[Path, tuple[str, Sequence[int]]] = {}
        """File -> its key and the numbers of tokens of all prompts, to be written when the run has a folder."""
        self.held_out, self._held_out_lengths = self._load(config, "eval")
        problems, self._lengths = self._load(config, "train")
        self.stream = PromptStream(problems, seed=config.seed, shuffle=config.data.shuffle)
        check_held_out(config, problems, self.held_out)
        self.rewards.check_sources(chain(problems, self.held_out))
        check_columns(config, problems, self.held_out)
        check_images(config, self.images, self.algorithm, path)
        if config.environment is None:
            with TemporaryDirectory() as folder:  # the run's own is not written yet
                first = problems[0] if self.images is None else self.images.in_folder(problems[0], folder)
                self.rewards.try_functions(first)

        # The number of steps may depend on the number of problems, and the checks of sizes on the steps.
        self.config = build.with_steps(config, len(problems))
        check_row_limit(self._lengths, config.train.max_row_tokens)
        check_group_size(self.algorithm, config.rollout.completions_per_prompt)
        check_temperature(config)
        if config.rollout.source == "pool":
            check_pool(config, self.pool_identity)

    def _load(self, config: RunConfig, split: Literal["train", "eval"]) -> tuple[Sequence[Problem], Sequence[int]]:
        """Return the problems of a split whose prompts are short enough, and the numbers of tokens of these."""
        report = load_problems(config.data, split, config.seed, images=self.images)
        file = config.run_dir / f"prompt_lengths.{split}"
        versions = [version(name) for name in ("transformers", "tokenizers")]
        key = repr([report.problems.digest, tokenizer_identity(self.tokenizer), self.processor.settings, *versions])
        lengths = read_lengths(file, key, len(report.problems))
        if lengths is None:
            lengths = self.processor.lengths(report.problems)
            self._measured[file] = key, lengths
        return self.processor.filter_overlong(report.problems, report.source, lengths)

    @property
    def function_sources(self) -> Mapping[str, str]:
        return function_sources(self.config, self._local_rewards)

    @property
    def identity(self) -> dict[str, str]:
        config = self.config
        paths = [config.teacher.path] if config.teacher else []
        uses = [*config.reward.functions, *config.reward.by_data_source.values()]
        paths += [str(use.args["path"]) for use in uses if use.function == "reward_model"]
        judges = {f"model ({path})": model_identity(resolve_folder(path)) for path in paths}
        return identity(self.stream, self.processor, self.path) | judges

    @property
    def pool_identity(self) -> dict[str, str]:
        """Hashes and settings that a pool's groups depend on. The trainer must have the same."""
        keys = (*DISTRIBUTION_KEYS, "completions_per_prompt")
        sampling = {f"rollout.{key}": str(getattr(self.config.rollout, key)) for key in keys}
        shown = load_config(self.config.to_tree())  # without secrets, as the pool keeps it
        judged = {"reward": shown.reward.model_dump_json(exclude={"workers", "wait_s"})}
        if shown.environment is not None:
            judged["environment"] = shown.environment.model_dump_json(exclude={"workers", "timeout_s", "wait_s"})
        return self.identity | sampling | judged

    def describe_data(self) -> Sequence[str]:
        lengths = self._held_out_lengths
        held_out = describe_problems("eval", self.held_out, lengths) if self.held_out else ["eval: none"]
        pictures = self.images.describe() if self.images is not None else []
        return [*describe_problems("train", self.stream.problems, self._lengths), *held_out, *pictures]

    def describe_batch(self) -> Sequence[str]:
        """Describe prompts x completions -> rows -> optimizer steps -> micro-batches, passes, engine."""
        drawn = f"rollout.engine={self.config.rollout.engine} ({self.engine_reason})"
        return [*batch_lines(self.config, len(self.stream.problems)), drawn]

    def open(self, stack: ExitStack) -> RolloutTraining:
        config, progress = self.config, self.progress
        for file, (key, lengths) in self._measured.items():
            write_lengths(file, key, lengths)
        stack.callback(self.rewards.close)
        stack.callback(self.save_totals)
        if self.cluster is not None and "reward" in self.cluster.wanted:
            move_models(self.rewards, self.cluster)
        # The engine; a run that reads a pool needs one only for evaluations.
        pooled, engine, base = config.rollout.source == "pool", None, None
        if not pooled or self.held_out:
            engine_config, share = with_share(config, self.algorithm)
            rollout = engine_config.rollout
            lines = [f"rollout.engine={rollout.engine} ({self.engine_reason})"]
            if share is not None:
                lines.append(f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} ({share})")
            for line in lines:
                self._note(line)
            device = build.device_name(config.model.device).partition(":")[0]
            shape = model_config_only(self.path, config.model.trust_remote_code)
            compute = compute_dtype(config.model.dtype, device).itemsize
            reason = why_two_copies(config, shape, device, compute)
            base = self.trainer.frozen_base() if reason is None else None
            engine = build.build_engine(engine_config, self.path, self.tokenizer, self.cluster, base, self.image_reader)
            stack.callback(engine.close)
            if base is not None:
                self._note(f"the engine uses the trainer's base weights: {base.bytes / 2**30:.2f} GiB are held once")
            elif config.model.lora is not None:
                size = f"{count_parameters(shape) * compute / 2**30:.2f} GiB in the engine"
                self._note(f"trainer and engine each hold the base weights, {size}: {reason}")
        self.engine = engine
        # The source of the step's groups, and the way of new weights to the engine.
        source: GroupSource
        transfer: WeightTransfer
        if pooled:
            source, transfer = self._open_pool(stack, base is not None)
        else:
            engine = not_none(engine)
            self.stream.position = progress.position
            transfer = InProcessTransfer(self.trainer, engine, self.record.progress.note, shared=base is not None)
            # The engine has loaded the weights of the folder that training starts from.
            if engine.version != progress.step or config.model.quantization:
                transfer(progress.step)
            if config.asynchronous is None:
                source = EngineSource(**self.drawing(engine))
            else:
                source = asynchronous = AsyncRolloutSource(
                    **self.drawing(engine),
                    transfer=transfer,
                    settings=config.asynchronous,
                    groups=config.items_per_step,
                    steps=config.train.steps,
                    done=progress.step,
                    pending=progress.pending,
                )
                transfer = asynchronous.update
        stack.callback(source.close)
        if (kept := self.record.directory.path / REWARD_TOTALS).exists():
            self.rewards.restore(json.loads(kept.read_text(encoding="utf-8")))
        self.source = source
        return RolloutTraining(
            source=source,
            transfer=transfer,
            trainer=self.trainer,
            algorithm=self.algorithm,
            processor=self.processor,
            record=self.record,
            config=config,
            progress=progress,
            sleeper=engine if takes_turns(config, build.device_name(config.model.device)) else None,
            totals=self.save_totals,
            says_right=self.rewards.says_right,
        )

    def _note(self, line: str) -> None:
        log.info(line)
        self.record.directory.log_file.note(line)

    def drawing(self, engine: RolloutEngine) -> dict[str, Any]:
        """Return the arguments that `EngineSource` and `AsyncRolloutSource` share."""
        return {
            "engine": engine,
            "algorithm": self.algorithm,
            "stream": self.stream,
            "processor": self.processor,
            "rewards": self.rewards,
            "sampling": build.train_sampling(self.config),
        }

    def _open_pool(self, stack: ExitStack, shared: bool) -> tuple[GroupSource, WeightTransfer]:
        """Return a source that reads a pool, and a transfer that publishes weights for the processes that fill it."""
        config, step = self.config, self.progress.step
        pool = RolloutPool(config.pool_file, config.pool)
        stack.callback(pool.close)
        pool.check_identity(self.pool_identity)
        reader = pool.start_run(config.run_name, resumed=step > 0)
        source = PoolSource(pool, reader, self.algorithm, config.run_dir / "checkpoints", done=step)
        published = PublishedWeights(config.run_dir)
        engine_alone = None
        if self.engine is not None:
            engine_alone = InProcessTransfer(self.trainer, self.engine, self.record.progress.note, shared)

        def transfer(version: int) -> None:
            published.write(self.trainer, version, reader)
            if engine_alone is not None:
                engine_alone(version)

        transfer(step)
        return source, transfer

    def totals(self) -> dict[str, float]:
        return self.rewards.totals()

    def save_totals(self) -> dict[str, float]:
        """Save the totals of reward services, also after a failed step: the cost has been spent."""
        if totals := self.totals():
            write_text(self.record.directory.path / REWARD_TOTALS, json.dumps(totals, indent=1) + "\n")
        return totals

    def evaluate(self) -> Evaluation | None:
        if not self.held_out:
            return None
        try:
            with self.source.quiet():
                result = evaluate(
                    not_none(self.engine), self.held_out, self.processor, self.rewards,
                    build.eval_sampling(self.config), says_right=self.rewards.says_right,
                )  # fmt: skip
        finally:
            self.save_totals()
        overall = result.overall
        names = ("accuracy", "reward", "format", "reasoning_tokens")
        known = {name: value for name in names if not math.isnan(value := overall[name].mean)}
        return Evaluation(result.metrics(), known, result.rows)


def describe_problems(name: str, problems: Sequence[Problem], prompt_tokens: Sequence[int]) -> list[str]:
    """Describe a split: number of problems, their sources, prompt lengths."""
    sources = Counter(problem.data_source for problem in problems)
    lengths = sorted(prompt_tokens)
    return [
        f"{name}: {len(problems)} problems ({', '.join(f'{source} x{count}' for source, count in sources.items())})",
        *(f"       {line}" for line in repetitions(problems)),
        f"       prompt tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}",
    ]


def batch_lines(config: RunConfig, problems: int) -> list[str]:
    """Prompts x completions -> rows -> optimizer steps -> micro-batches, and passes over the problems."""
    rollout, train = config.rollout, config.train
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    update_rows, updates = train.rows_per_update or rows, config.updates_per_step
    longest = config.data.max_prompt_tokens + rollout.max_completion_tokens
    row_tokens = min(longest, train.max_row_tokens or longest)
    tokens = train.micro_batch_tokens(build.device_name(config.model.device).partition(":")[0])
    micro_rows = min(update_rows, max(1, tokens // row_tokens), train.rows_per_micro_batch or update_rows)
    prompts = train.steps * rollout.prompts_per_step
    dropping = config.environment is not None and config.environment.when_full == "drop_oldest"
    more = ", and more rows if turns are dropped" if dropping else ""
    return [
        f"a step: {rollout.prompts_per_step} prompts x {rollout.completions_per_prompt} completions = {rows} rows, "
        f"each of at most {row_tokens} tokens{more}",
        f"optimizer steps in a step: {rows} rows / {update_rows} rows_per_update x {train.epochs_per_step} epochs "
        f"= {updates}",
        f"forward passes in an optimizer step: at most {math.ceil(update_rows / micro_rows)}, "
        f"of at most {micro_rows} rows ({tokens} tokens)",
        f"the run: {train.steps} steps x {rollout.prompts_per_step} prompts = {prompts} prompts = "
        f"{prompts / problems:.2f} passes over {problems} problems; {train.steps * updates} optimizer steps",
    ]


# --------------------------------------------------------------------------------------------------------------------
# `atomrl pool fill`: groups for a pool, sampled as a run of the same config would sample them.


def fill(run: RLRun, groups: int | None = None, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Sample groups into the pool of a config, with the newest weights that its run has published.

    Several processes may do so at once: the pool gives each other prompts.

    Args:
        run: checked; it is not executed.
        groups: number to sample; None: until Ctrl-C or SIGTERM, after which the current batch is written.
        report: called with a line after each batch.

    Returns:
        Number of sampled groups and of new ones among them, version of the newest weights, and seconds of
        sampling, rewards and writing.

    Raises:
        PoolError: the pool is of another config, or cannot be written.
        ValueError: a problem has a value that a pool cannot keep.
    """
    config = run.config
    for problem in run.stream.problems:
        problem_json(problem)
    watch, drawn, new = Stopwatch(), 0, 0
    with ExitStack() as stack:
        stack.callback(run.rewards.close)
        pool = RolloutPool(config.pool_file, config.pool)
        stack.callback(pool.close)
        pool.check_identity(run.pool_identity)
        cluster = open_cluster(config, run.algorithm, stack, producer=True)
        if run.images is not None:
            run.images.write()
        engine = build.build_engine(config, run.path, run.tokenizer, cluster, images=run.image_reader)
        stack.callback(engine.close)
        source = EngineSource(**run.drawing(engine))
        follower = WeightFollower(engine, PublishedWeights(config.run_dir))
        stopped = stack.enter_context(stop_request())
        while not stopped() and (groups is None or drawn < groups):
            follower.update()
            count = config.rollout.prompts_per_step
            count = count if groups is None else min(count, groups - drawn)
            run.stream.position = pool.take_positions(count)
            made = source.draw(count, engine.version + 1, watch)
            with watch("put"):
                new += pool.put(made, follower.run)
            drawn += count
            report(f"{drawn} groups sampled, {new} new; weights of version {engine.version}")
        seconds = {name: round(value, 2) for name, value in watch.phases.items()}
        elapsed = round(time.perf_counter() - watch.started, 2)
        return {
            "pool": str(pool.path), "drawn": drawn, "new": new, "version": engine.version, "seconds": seconds,
            "wall_s": elapsed,
        }  # fmt: skip
