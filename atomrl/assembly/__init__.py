"""From a config to concrete objects: the only place that names engines and back ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from atomrl.algorithms.table import build_algorithm, refuse_given_preferences
from atomrl.assembly.critic import check_critic
from atomrl.assembly.teacher import check_teacher, needs_teacher
from atomrl.config import ConfigError, ModelConfig, RolloutConfig, RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import load_samples
from atomrl.data.stream import PromptStream
from atomrl.loop.evaluate import EvalResult, evaluate
from atomrl.loop.recovery import identity, open_run, saver
from atomrl.loop.sync import Parts, Progress, Schedule
from atomrl.loop.sync import train as run_training
from atomrl.models.loading import compute_dtype, load_tokenizer, model_config_only, resolve_folder
from atomrl.protocols import Algorithm, RewardFunction, RolloutEngine, TrainingBackend
from atomrl.rewards.compute import build_rewards
from atomrl.rollout.hf import HFEngine
from atomrl.rollout.native import NativeEngine
from atomrl.stages import Sample, SamplingParams
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.resume import model_identity
from atomrl.tracking.run_directory import RunDirectory
from atomrl.training.local import LocalBackend

log = logging.getLogger(__name__)
ENGINES = {"native": NativeEngine, "hf": HFEngine}


def train(
    config: RunConfig,
    resume: bool = False,
    allow_changes: bool = False,
    local_rewards: Mapping[str, RewardFunction] | None = None,
) -> dict[str, Any]:
    """`atomrl train`: reinforcement learning from a config to a summary.

    Config, data, rewards and the model's tokenizer are checked before weights are loaded.

    Args:
        resume: go on from the newest checkpoint of the run, whose folder must exist.
        allow_changes: resume although config, data, tokenizer or model differ.
        local_rewards: functions that exist in this process alone, by the name that the config has for them.

    Returns:
        What is in the run's `summary.json`.

    Raises:
        ConfigError, DataError, ValueError: what is wrong, where, and what to do.
    """
    started = time.perf_counter()
    refuse_given_preferences(config.algorithm.name)
    path = model_path(config)
    algorithm = build_algorithm(
        config.algorithm.name,
        config.algorithm.axes,
        report_entropy=config.train.report_entropy,
        max_completion_tokens=config.rollout.max_completion_tokens,
    )
    rewards = build_rewards(config.reward, local_rewards, device=device_name(config.model.device))
    tokenizer = load_tokenizer(config.model.tokenizer or path, config.model.trust_remote_code)
    check_teacher(config, algorithm, path, tokenizer)
    check_kept(config, path)
    check_critic(config, algorithm, path, tokenizer)
    processor = DataProcessor(tokenizer, config.data, prompt_limit(config, path))
    held_out = load_split(config, processor, "eval")
    stream = PromptStream(load_split(config, processor, "train"), seed=config.seed, shuffle=config.data.shuffle)
    rewards.check_sources([*stream.samples, *held_out])
    schedule = make_schedule(config)
    now = identity(stream, processor, path) | judges(config)
    run, progress = open_run(config, resume, now, allow_changes)
    earlier_s = progress.wall_s
    trainer = build_trainer(config, path, tokenizer, schedule, algorithm)
    engine = build_engine(config.rollout.engine, path, tokenizer, config.model.dtype, config.rollout, config.model)
    with closing_all(trainer, engine, rewards), Recorder(config, run) as record:

        def evaluate_now(version: int) -> dict[str, float]:
            if not held_out:
                return {}
            result = evaluate(engine, held_out, processor, rewards, eval_sampling(config))
            record.log_evaluation(version, result.metrics(), list(result.rows))
            progress.evaluations[str(version)] = headline(result)
            return result.metrics()

        if progress.step:
            trainer.load(run.checkpoint_folder(progress.step))
        elif config.eval.before:
            evaluate_now(0)
        parts = Parts(
            engine=engine,
            trainer=trainer,
            algorithm=algorithm,
            stream=stream,
            processor=processor,
            rewards=rewards,
            sampling=train_sampling(config),
            record=record,
            evaluate=evaluate_now,
        )
        done = run_training(parts, schedule, progress, saver(trainer, now))
        if done and config.eval.after:
            evaluate_now(progress.step)
    return finish(run, config, progress, done, earlier_s + time.perf_counter() - started)


def judges(config: RunConfig) -> dict[str, str]:
    """Hashes of the models beside the policy that what it learns depends on throughout: teacher and reward models."""
    paths = [config.teacher.path] if config.teacher else []
    uses = [*config.reward.functions, *config.reward.by_data_source.values()]
    paths += [str(use.args["path"]) for use in uses if use.function == "reward_model"]
    return {f"model ({path})": model_identity(resolve_folder(path)) for path in paths}


def model_path(config: RunConfig) -> str:
    """The policy's folder or hub name.

    Raises:
        ConfigError: there is none.
    """
    if config.model.path is None:
        raise ConfigError("model.path: is required (a folder in Hugging Face layout, or a hub name)")
    return config.model.path


def context_tokens(path: str, config: RunConfig) -> int | None:
    """The longest row that a model is made for, where its config tells."""
    return getattr(model_config_only(path, config.model.trust_remote_code), "max_position_embeddings", None)


def prompt_limit(config: RunConfig, path: str) -> int:
    """`data.max_prompt_tokens`, or what the model's context leaves beside a completion, if that is less.

    Raises:
        ConfigError: it leaves nothing.
    """
    context = context_tokens(path, config)
    completion = max(config.rollout.max_completion_tokens, config.eval.max_completion_tokens or 0)
    if context is not None and context <= completion:
        raise ConfigError(
            f"max_completion_tokens={completion} leaves no room for a prompt in the context of {path}, {context} tokens"
        )
    limit = config.data.max_prompt_tokens
    return limit if context is None else min(limit, context - completion)


def load_split(config: RunConfig, processor: DataProcessor, split: Literal["train", "eval"]) -> list[Sample]:
    """The problems of a split that fit the limit on prompts; what is left out is said."""
    report = load_samples(config.data, split, config.seed)
    if report.skipped:
        log.warning("%s: %d rows with problems were skipped", report.source, report.skipped)
    kept, overlong = processor.filter_overlong(report.samples)
    if overlong:
        what = "left out" if config.data.overlong_prompt == "drop" else "cut to their last tokens"
        log.warning("%s: %d prompts over %d tokens were %s", report.source, overlong, processor.max_prompt_tokens, what)
    return kept


def make_schedule(config: RunConfig) -> Schedule:
    """How many of everything; one update per pass unless `train.rows_per_update` says otherwise."""
    rollout, train = config.rollout, config.train
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    return Schedule(
        steps=train.steps,
        prompts_per_step=rollout.prompts_per_step,
        updates_per_epoch=max(1, rows // (train.rows_per_update or rows)),
        epochs_per_step=train.epochs_per_step,
        max_row_tokens=train.max_row_tokens,
        eval_every_steps=config.eval.every_steps,
        save_every_steps=config.checkpoint.every_steps,
        seed=config.seed,
    )


def train_sampling(config: RunConfig) -> SamplingParams:
    """How the completions that are trained on are drawn."""
    rollout = config.rollout
    return SamplingParams(
        completions_per_prompt=rollout.completions_per_prompt,
        max_completion_tokens=rollout.max_completion_tokens,
        min_completion_tokens=rollout.min_completion_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        logprobs_over=rollout.logprobs_over,
        seed=config.seed,
    )


def eval_sampling(config: RunConfig) -> SamplingParams:
    """How the completions of an evaluation are drawn: the same seeds at every step, so that steps compare."""
    settings = config.eval
    return replace(
        train_sampling(config),
        completions_per_prompt=settings.samples_per_prompt,
        max_completion_tokens=settings.max_completion_tokens or config.rollout.max_completion_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=0,
        logprobs_over="vocabulary",
    )


def device_name(wanted: str = "auto") -> str:
    """The device of `model.device`: of `auto`, `cuda` where there is one, else `cpu`.

    Raises:
        ConfigError: this machine does not have it.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "cuda" if found else "cpu"
    if wanted != "cpu" and int(wanted.partition(":")[2] or 0) >= found:
        raise ConfigError(f"model.device={wanted}: torch sees {found} CUDA devices on this machine")
    return wanted


def build_trainer(
    config: RunConfig, path: str, tokenizer: Any, schedule: Schedule, algorithm: Algorithm
) -> TrainingBackend:
    """The training back end, with the models that the algorithm needs beside the policy."""
    return LocalBackend(
        config.model.model_copy(update={"path": path}),
        config.train,
        total_updates=schedule.steps * schedule.updates_per_epoch * schedule.epochs_per_step,
        tokenizer=tokenizer,
        device=device_name(config.model.device),
        temperature=config.rollout.temperature,
        needs_reference="ref_logprobs" in algorithm.needs,
        forward_mode=algorithm.update is not None,
        scores="scores" in algorithm.outputs,
        critic=config.critic if "values" in algorithm.needs else None,
        teacher=config.teacher.path if config.teacher and needs_teacher(algorithm) else None,
        seed=config.seed,
    )


def build_engine(
    name: str, path: str, tokenizer: Any, dtype: str, rollout: RolloutConfig, model: ModelConfig
) -> RolloutEngine:
    """The rollout engine of a name. A model that `native` does not know falls to `hf`, saying so.

    Raises:
        ConfigError: there is no engine of this name.
    """
    settings = {
        "dtype": compute_dtype(dtype, device_name(model.device)),
        "device": device_name(model.device),
        "max_concurrent_completions": rollout.max_concurrent_completions,
    }
    return engine_class(name, path, model).from_pretrained(str(resolve_folder(path)), tokenizer, **settings)


def engine_class(name: str, path: str, model: ModelConfig) -> Any:
    """What `build_engine` makes an engine of."""
    if name not in ENGINES:
        raise ConfigError(f"rollout.engine: unknown engine {name!r}; there are {', '.join(ENGINES)}")
    if name == "native":
        reason = NativeEngine.supports(model_config_only(path, model.trust_remote_code))
        if reason:
            log.warning("rollouts come from the hf engine, because native does not know this model: %s", reason)
            name = "hf"
    return ENGINES[name]


def check_kept(config: RunConfig, path: str) -> None:
    """That the engine can tell what top-p and top-k kept, where log-probs are to be over that.

    Raises:
        ConfigError: it cannot.
    """
    if config.rollout.logprobs_over == "kept":
        engine = engine_class(config.rollout.engine, path, config.model)
        if not engine.returns_kept:
            raise ConfigError(f"rollout.logprobs_over=kept: {engine.__name__} does not tell which tokens were kept")


def headline(result: EvalResult) -> dict[str, float]:
    """The figures of an evaluation that a summary shows."""
    names = {"accuracy": "accuracy", "format": "format", "reasoning_tokens": "reasoning_tokens"}
    return {short: result.overall[name].mean for short, name in names.items()}


def finish(run: RunDirectory, config: RunConfig, progress: Progress, done: bool, seconds: float) -> dict[str, Any]:
    """Write and return the summary: `accuracy_before`, `accuracy_after`, `format_before`, ..., `wall_s`."""
    before, after = progress.evaluations.get("0", {}), progress.evaluations.get(str(progress.step), {})
    summary = {
        "run": str(run.path),
        "finished": done,
        "steps": progress.step,
        "seed": config.seed,
        "wall_s": round(seconds, 2),
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in (after if progress.step else {}).items()},
        "model": str(run.path / "model") if progress.step else None,
    }
    run.finish(summary)
    return summary


@contextmanager
def closing_all(*parts: Any) -> Iterator[None]:
    """Close everything on the way out."""
    try:
        yield
    finally:
        for part in parts:
            part.close()
