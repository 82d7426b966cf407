"""Reinforcement learning: `RLRun` sets up a run on rollouts; its part of a step of `fit` is in `rollout_training`."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.common.files import model_identity, write_text
from atomrl.config import RunConfig, load_config
from atomrl.data.checks import repetitions
from atomrl.data.curriculum import CurriculumState
from atomrl.data.curriculum_setup import build_curriculum, check_classes, check_curriculum
from atomrl.data.images import ImageStore
from atomrl.data.problems import load_problems
from atomrl.data.processor import DataProcessor
from atomrl.data.prompt_lengths import read_lengths, write_lengths
from atomrl.models.loading import compute_dtype, model_config_only, resolve_folder
from atomrl.models.memory import count_parameters
from atomrl.objectives.choice import not_none
from atomrl.pool.store import RolloutPool
from atomrl.pool.weights import PublishedWeights
from atomrl.protocols import Algorithm, RewardFunction, RolloutEngine, WeightTransfer
from atomrl.rewards.actor import move_models
from atomrl.rewards.compute import Rewards, build_rewards
from atomrl.tracking.resuming import tokenizer_identity
from atomrl.trainer import build
from atomrl.trainer.async_source import AsyncRolloutSource
from atomrl.trainer.auto import with_engine, with_share
from atomrl.trainer.base import OpenRun, PreparedRun, identity
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
from atomrl.trainer.colocation import engine_sleeps, rounds_into_engine, why_two_copies
from atomrl.trainer.own_functions.sources import function_sources
from atomrl.trainer.own_functions.trial import check_own_functions
from atomrl.trainer.pool_source import PoolSource
from atomrl.trainer.rollout_training import HeldOut, RolloutTraining
from atomrl.trainer.sources import EngineSource, GroupSource
from atomrl.types import DISTRIBUTION_KEYS, Problem
from atomrl.weight_sync import InProcessTransfer

REWARD_TOTALS = "reward_totals.json"
"""File in the run's folder: requests to reward services and their cost, over all attempts of the run."""


# The set-up of a run in steps. Each returns what the next ones need: only a config that `choose_engine` returned has an
# algorithm that is corrected for its engine, and only one with tools can encode prompts.


class ChosenEngine(NamedTuple):
    """A config with its engine, and with the algorithm that is corrected for it. It is saved, and compared on
    resuming."""

    config: RunConfig
    path: str
    """Folder or hub name of the policy."""
    algorithm: Algorithm
    reason: str
    """Why this engine."""


class Encoder(NamedTuple):
    """A config with its tools, and what renders and encodes its prompts."""

    config: RunConfig
    tokenizer: Any
    images: ImageStore | None
    processor: DataProcessor


class SplitOfData(NamedTuple):
    """Problems whose prompts are short enough, and the numbers of tokens of these."""

    problems: Sequence[Problem]
    lengths: Sequence[int]
    measured: tuple[Path, str, Sequence[int]] | None
    """File, key and the numbers of tokens of all prompts, to be written when the run has a folder; None: they were read
    from there."""


def choose_engine(config: RunConfig) -> ChosenEngine:
    """Choose the engine: whether its log-probs are exact decides if the algorithm is corrected for them."""
    path = build.model_path(config)
    config, reason = with_engine(config, path)
    objective = config.algorithm
    assert not isinstance(objective, RewardModelObjective), "the kind of run is chosen by the algorithm"
    engine = check_engine(config, path)
    if instead := build.engine_class(config.rollout, path, config.model)[1]:
        reason += f"; the hf engine draws in its place: {instead}"
    check_correction(config, engine)
    on_policy = config.rollout.source == "engine" and not (config.asynchronous and config.asynchronous.max_staleness)
    exact = (engine.exact and on_policy) or config.rollout.logprobs_over == "none"
    corrected = config.model_copy(update={"algorithm": build.corrected(objective, exact)})
    return ChosenEngine(corrected, path, build.algorithm_of(corrected), reason)


def open_rewards(chosen: ChosenEngine, local: Mapping[str, RewardFunction] | None) -> Rewards:
    """Call the user's functions once on made-up numbers, and return the rewards. No file is read yet."""
    config = chosen.config
    device, trusted = build.device_name(config.model.device), config.model.trust_remote_code
    check_own_functions(chosen.algorithm, config, device)
    check_classes(config.curriculum)
    if config.cluster is not None and "reward" in config.cluster.resources:
        device = build.actor_model(config.model).device
    return build_rewards(config.reward, local, device=device, trust_remote_code=trusted)


def open_encoder(chosen: ChosenEngine) -> Encoder:
    """Load the tokenizer, and check the environment: prompts are rendered with their template and tools."""
    config, path = chosen.config, chosen.path
    tokenizer = build.policy_tokenizer(config)
    check_end(config, path, tokenizer)
    check_companions(config, chosen.algorithm, path, tokenizer)
    config = with_tools(config, tokenizer)
    check_environment(config, tokenizer)
    check_outcome(config)
    reader = build.image_reader(config, path)
    processor = build.processor(config, tokenizer, build.prompt_limit(config, path), reader)
    return Encoder(config, tokenizer, build.image_store(config, reader), processor)


def load_split(encoder: Encoder, split: Literal["train", "eval"]) -> SplitOfData:
    """Load the problems of a split."""
    config, processor = encoder.config, encoder.processor
    report = load_problems(config.data, split, config.seed, images=encoder.images)
    file = config.run_dir / f"prompt_lengths.{split}"
    versions = [version(name) for name in ("transformers", "tokenizers")]
    key = repr([report.problems.digest, tokenizer_identity(encoder.tokenizer), processor.settings, *versions])
    stored = read_lengths(file, key, len(report.problems))
    lengths = processor.lengths(report.problems) if stored is None else stored
    kept, kept_lengths = processor.filter_overlong(report.problems, report.source, lengths)
    return SplitOfData(kept, kept_lengths, (file, key, lengths) if stored is None else None)


def check_data(
    chosen: ChosenEngine, encoder: Encoder, rewards: Rewards, train: SplitOfData, held_out: SplitOfData
) -> None:
    """Check that rewards and environment have the columns that they need, and call the rewards once."""
    config, problems = encoder.config, train.problems
    check_held_out(config, problems, held_out.problems)
    rewards.check_sources(chain(problems, held_out.problems))
    check_columns(config, problems, held_out.problems)
    check_images(config, encoder.images, chosen.algorithm, chosen.path)
    if config.environment is None:
        with TemporaryDirectory() as folder:  # the run's own is not written yet
            first = problems[0] if encoder.images is None else encoder.images.in_folder(problems[0], folder)
            rewards.try_functions(first)


def with_checked_sizes(algorithm: Algorithm, encoder: Encoder, train: SplitOfData) -> RunConfig:
    """Return the config with its number of steps, which may depend on the number of problems, and check sizes."""
    config = build.with_steps(encoder.config, len(train.problems))
    check_row_limit(train.lengths, config.train.max_row_tokens)
    check_group_size(algorithm, config.rollout.completions_per_prompt)
    check_temperature(config)
    return config


class RLRun(PreparedRun):
    """A run that trains on sampled completions.

    Args:
        config: of the run.
        local_rewards: reward functions that exist only in this process, by their names in the config.
    """

    def __init__(self, config: RunConfig, local_rewards: Mapping[str, RewardFunction] | None = None) -> None:
        self._local_rewards = local_rewards or {}
        self.chosen = chosen = choose_engine(config)
        self.algorithm = chosen.algorithm
        self.rewards = open_rewards(chosen, local_rewards)
        encoder = open_encoder(chosen)
        self.tokenizer, self.images, self.processor = encoder.tokenizer, encoder.images, encoder.processor
        self.held_out = load_split(encoder, "eval")  # usually the smaller one, so its errors come sooner
        self.train = load_split(encoder, "train")
        self.problems = self.train.problems
        settings, problems, data = encoder.config.curriculum, self.train.problems, encoder.config.data
        self.curriculum = build_curriculum(
            settings, problems, encoder.config.seed, data.shuffle, self.algorithm.keeps_group
        )
        check_curriculum(settings, problems)
        check_data(chosen, encoder, self.rewards, self.train, self.held_out)
        self.config = with_checked_sizes(self.algorithm, encoder, self.train)
        if self.config.rollout.source == "pool":
            check_pool(self.config, self.pool_identity)

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
        return identity(self.curriculum.stream, self.processor, self.chosen.path) | judges

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
        held_out = describe_problems("eval", self.held_out) if self.held_out.problems else ["eval: none"]
        pictures = self.images.describe() if self.images is not None else []
        return [*describe_problems("train", self.train), *held_out, *pictures]

    def describe_batch(self) -> Sequence[str]:
        """Describe prompts x completions -> rows -> optimizer steps -> micro-batches, passes, engine."""
        drawn = f"rollout.engine={self.config.rollout.engine} ({self.chosen.reason})"
        return [*batch_lines(self.config, len(self.train.problems)), drawn]

    def open(self, run: OpenRun, stack: ExitStack) -> RolloutTraining:
        config, progress = run.config, run.progress
        for split in (self.held_out, self.train):
            if split.measured is not None:
                write_lengths(*split.measured)
        totals = partial(save_totals, self.rewards, run.directory.path / REWARD_TOTALS)
        stack.callback(self.rewards.close)
        stack.callback(totals)
        if run.cluster is not None and "reward" in run.cluster.wanted:
            move_models(self.rewards, run.cluster)
        self.curriculum.load(CurriculumState(progress.position, progress.pending, progress.curriculum))
        # A run that reads a pool needs an engine only for evaluations.
        pooled, held_out = config.rollout.source == "pool", self.held_out.problems
        direct = None if pooled and not held_out else self._open_engine(run, stack)
        engine = None if direct is None else direct.engine
        if pooled:
            source, transfer = self._open_pool(run, stack, direct)
        else:
            source, transfer = self._open_source(run, not_none(direct))
        stack.callback(source.close)
        if (kept := run.directory.path / REWARD_TOTALS).exists():
            self.rewards.restore(json.loads(kept.read_text(encoding="utf-8")))
        return RolloutTraining(
            source=source,
            transfer=transfer,
            trainer=run.trainer,
            algorithm=self.algorithm,
            processor=self.processor,
            record=run.record,
            config=config,
            progress=progress,
            sleeper=engine if engine_sleeps(config, build.device_name(config.model.device)) else None,
            held_out=HeldOut(engine, held_out, self.rewards) if engine is not None and held_out else None,
            totals=totals,
            says_right=self.rewards.says_right,
        )

    def _open_engine(self, run: OpenRun, stack: ExitStack) -> InProcessTransfer:
        """Start the engine, and return the transfer of weights to it."""
        config, path = run.config, self.chosen.path
        engine_config, share = with_share(config, self.algorithm)
        rollout = engine_config.rollout
        run.note(f"rollout.engine={rollout.engine} ({self.chosen.reason})")
        if share is not None:
            run.note(f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} ({share})")
        device = build.device_name(config.model.device).partition(":")[0]
        shape = model_config_only(path, config.model.trust_remote_code)
        compute = compute_dtype(config.model.dtype, device).itemsize
        reason = why_two_copies(config, shape, device, compute)
        base = run.trainer.frozen_base() if reason is None else None
        rounded = run.trainer.rounded_weights() if rounds_into_engine(config, shape) else None
        engine = build.build_engine(engine_config, path, self.tokenizer, run.cluster, base, rounded, self.image_reader)
        stack.callback(engine.close)
        if rounded is not None and rounded.bytes:
            run.note(f"updates round weights into the engine's: {rounded.bytes / 2**30:.2f} GiB are held once")
        if base is not None:
            run.note(f"the engine uses the trainer's base weights: {base.bytes / 2**30:.2f} GiB are held once")
        elif config.model.lora is not None:
            size = f"{count_parameters(shape) * compute / 2**30:.2f} GiB in the engine"
            run.note(f"trainer and engine each hold the base weights, {size}: {reason}")
        return InProcessTransfer(run.trainer, engine, run.record.progress.note, shared=base is not None)

    def _open_source(self, run: OpenRun, direct: InProcessTransfer) -> tuple[GroupSource, WeightTransfer]:
        """Return a source that samples with the engine, and the transfer of each step."""
        config, engine, step = run.config, direct.engine, run.progress.step
        # The engine has loaded the weights of the folder that training starts from.
        if engine.version != step or config.model.quantization:
            direct(step)
        if config.asynchronous is None:
            return EngineSource(**self.drawing(engine)), direct
        source = AsyncRolloutSource(
            **self.drawing(engine),
            transfer=direct,
            settings=config.asynchronous,
            groups=config.items_per_step,
            steps=config.train.steps,
            done=step,
        )
        return source, source.update

    def drawing(self, engine: RolloutEngine) -> dict[str, Any]:
        """Return the arguments that `EngineSource` and `AsyncRolloutSource` share."""
        return {
            "engine": engine,
            "algorithm": self.algorithm,
            "curriculum": self.curriculum,
            "processor": self.processor,
            "rewards": self.rewards,
            "sampling": build.train_sampling(self.config),
        }

    def _open_pool(
        self, run: OpenRun, stack: ExitStack, direct: InProcessTransfer | None
    ) -> tuple[GroupSource, WeightTransfer]:
        """Return a source that reads a pool, and a transfer that publishes weights for the processes that fill it."""
        config, step = run.config, run.progress.step
        pool = RolloutPool(config.pool_file, config.pool)
        stack.callback(pool.close)
        pool.check_identity(self.pool_identity)
        reader = pool.start_run(config.run_name, resumed=step > 0)
        checkpoints = config.run_dir / "checkpoints"
        source = PoolSource(pool, reader, self.algorithm, self.curriculum, checkpoints, done=step)
        published = PublishedWeights(config.run_dir)

        def transfer(version: int) -> None:
            published.write(run.trainer, version, reader)
            if direct is not None:
                direct(version)

        transfer(step)
        return source, transfer


def save_totals(rewards: Rewards, file: Path) -> dict[str, float]:
    """Save the totals of reward services, also after a failed step: the cost has been spent."""
    if totals := rewards.totals():
        write_text(file, json.dumps(totals, indent=1) + "\n")
    return totals


def describe_problems(name: str, split: SplitOfData) -> list[str]:
    """Describe a split: number of problems, their sources, prompt lengths."""
    problems, lengths = split.problems, sorted(split.lengths)
    sources = Counter(problem.data_source for problem in problems)
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
