"""`atomrl train`: reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.config import RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.stream import PromptStream
from atomrl.loop.evaluate import evaluate
from atomrl.loop.preflight import check_group_size, check_row_limit
from atomrl.loop.recovery import identity
from atomrl.loop.sync import Parts, run_step
from atomrl.models.loading import resolve_folder
from atomrl.protocols import RewardFunction
from atomrl.rewards.compute import build_rewards
from atomrl.runs.base import Evaluation, Run
from atomrl.runs.build import (
    build_engine,
    device_name,
    eval_sampling,
    load_split,
    model_path,
    policy_tokenizer,
    prompt_limit,
    scheduled,
    train_sampling,
)
from atomrl.runs.checks import check_critic, check_engine, check_teacher
from atomrl.runs.describe import batch_arithmetic, describe_samples
from atomrl.tracking.resume import model_identity
from atomrl.weights import InProcessTransfer


class RLRun(Run):
    """Rollouts, rewards, advantages, updates.

    Args:
        config: of the run.
        local_rewards: functions that exist in this process alone, by the name that the config has for them.
    """

    def __init__(self, config: RunConfig, local_rewards: Mapping[str, RewardFunction] | None = None) -> None:
        self.path = path = model_path(config)
        objective = config.algorithm
        assert not isinstance(objective, RewardModelObjective), "the kind of run is chosen by the algorithm"
        self.algorithm = objective.resolved(
            max_completion_tokens=config.rollout.max_completion_tokens, report_entropy=config.train.report_entropy
        )
        model = config.model
        self.rewards = build_rewards(
            config.reward,
            local_rewards,
            device=device_name(model.device),
            trust_remote_code=model.trust_remote_code,
        )
        self.tokenizer = policy_tokenizer(config)
        check_teacher(config, self.algorithm, path, self.tokenizer)
        check_engine(config, path)
        check_critic(config, self.algorithm, path, self.tokenizer)
        self.processor = DataProcessor(self.tokenizer, config.data, prompt_limit(config, path))
        self.held_out = load_split(config, self.processor, "eval")
        samples = load_split(config, self.processor, "train")
        self.stream = PromptStream(samples, seed=config.seed, shuffle=config.data.shuffle)
        self.rewards.check_sources([*samples, *self.held_out])
        self.config, self.schedule = scheduled(config, len(samples))
        check_row_limit([len(ids) for ids in self.processor.token_ids(samples)], config.train.max_row_tokens)
        check_group_size(self.algorithm, config.rollout.completions_per_prompt)
        self.temperature = config.rollout.temperature or 1.0

    @property
    def identity(self) -> dict[str, str]:
        config = self.config
        paths = [config.teacher.path] if config.teacher else []
        uses = [*config.reward.functions, *config.reward.by_data_source.values()]
        paths += [str(use.args["path"]) for use in uses if use.function == "reward_model"]
        judges = {f"model ({path})": model_identity(resolve_folder(path)) for path in paths}
        return identity(self.stream, self.processor, self.path) | judges

    def describe_data(self) -> Sequence[str]:
        held_out = describe_samples("eval", self.held_out, self.processor) if self.held_out else ["eval: none"]
        return [*describe_samples("train", self.stream.samples, self.processor), *held_out]

    def describe_batch(self) -> Sequence[str]:
        return batch_arithmetic(self.config, len(self.stream.samples))

    def open(self, stack: ExitStack) -> None:
        config = self.config
        stack.callback(self.rewards.close)
        self.engine = build_engine(self.path, self.tokenizer, config.rollout, config.model)
        stack.callback(self.engine.close)
        self.parts = Parts(
            engine=self.engine,
            transfer=InProcessTransfer(self.trainer, self.engine),
            trainer=self.trainer,
            algorithm=self.algorithm,
            stream=self.stream,
            processor=self.processor,
            rewards=self.rewards,
            sampling=train_sampling(config),
            record=self.record,
        )
        self.stream.position = self.progress.position
        if self.engine.version != self.progress.step:
            self.parts.transfer(self.progress.step)

    def step(self, number: int) -> dict[str, float]:
        metrics = run_step(self.parts, self.schedule, number, self.progress)
        self.progress.position = self.stream.position
        return metrics

    def evaluate(self) -> Evaluation | None:
        if not self.held_out:
            return None
        found = evaluate(self.engine, self.held_out, self.processor, self.rewards, eval_sampling(self.config))
        headline = {name: found.overall[name].mean for name in ("accuracy", "format", "reasoning_tokens")}
        return Evaluation(found.metrics(), headline, found.rows)
