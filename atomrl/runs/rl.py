"""`atomrl train`: reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.config import RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.stream import PromptStream
from atomrl.loop.evaluate import EvalResult, evaluate
from atomrl.loop.preflight import check_group_size, check_row_limit
from atomrl.loop.recovery import identity
from atomrl.loop.sync import Parts, Progress, run_step
from atomrl.models.loading import load_tokenizer, resolve_folder
from atomrl.protocols import RewardFunction, TrainingBackend
from atomrl.rewards.compute import build_rewards
from atomrl.runs.base import Run, Steps
from atomrl.runs.build import (
    build_engine,
    device_name,
    eval_sampling,
    load_split,
    make_schedule,
    model_path,
    prompt_limit,
    train_sampling,
    with_steps,
)
from atomrl.runs.checks import check_critic, check_engine, check_teacher
from atomrl.runs.describe import batch_arithmetic, describe_samples, memory
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.resume import model_identity
from atomrl.tracking.run_directory import RunDirectory
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
        self.tokenizer = load_tokenizer(config.model.tokenizer or path, config.model.trust_remote_code, path)
        check_teacher(config, self.algorithm, path, self.tokenizer)
        check_engine(config, path)
        check_critic(config, self.algorithm, path, self.tokenizer)
        self.processor = DataProcessor(self.tokenizer, config.data, prompt_limit(config, path))
        self.held_out = load_split(config, self.processor, "eval")
        samples = load_split(config, self.processor, "train")
        self.stream = PromptStream(samples, seed=config.seed, shuffle=config.data.shuffle)
        self.rewards.check_sources([*samples, *self.held_out])
        self.config = with_steps(config, len(samples), config.rollout.prompts_per_step)
        self.schedule = make_schedule(self.config)
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

    def describe(self) -> Sequence[tuple[str, Sequence[str]]]:
        held_out = describe_samples("eval", self.held_out, self.processor) if self.held_out else ["eval: none"]
        return [
            ("data", [*describe_samples("train", self.stream.samples, self.processor), *held_out]),
            ("batch", batch_arithmetic(self.config, len(self.stream.samples))),
            ("memory", memory(self.config, self.algorithm)),
        ]

    def starting_model(self, directory: RunDirectory) -> str:
        return self.path

    @contextmanager
    def open(self, trainer: TrainingBackend, record: Recorder, progress: Progress) -> Iterator[Steps]:
        config = self.config
        with ExitStack() as stack:
            stack.callback(self.rewards.close)
            engine = build_engine(self.path, self.tokenizer, config.rollout, config.model)
            stack.callback(engine.close)
            transfer = InProcessTransfer(trainer, engine)
            parts = Parts(
                engine=engine,
                transfer=transfer,
                trainer=trainer,
                algorithm=self.algorithm,
                stream=self.stream,
                processor=self.processor,
                rewards=self.rewards,
                sampling=train_sampling(config),
                record=record,
            )
            self.stream.position = progress.position
            if engine.version != progress.step:
                transfer(progress.step)

            def step(number: int) -> dict[str, float]:
                metrics = run_step(parts, self.schedule, number, progress)
                progress.position = self.stream.position
                return metrics

            def evaluate_now(number: int) -> None:
                if self.held_out:
                    result = evaluate(engine, self.held_out, self.processor, self.rewards, eval_sampling(config))
                    record.log_evaluation(number, result.metrics(), result.rows)
                    progress.evaluations[str(number)] = headline(result)

            yield Steps(step, evaluate_now)


def headline(result: EvalResult) -> dict[str, float]:
    """The figures of an evaluation that a summary shows."""
    return {name: result.overall[name].mean for name in ("accuracy", "format", "reasoning_tokens")}
