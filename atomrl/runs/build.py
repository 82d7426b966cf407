"""Engines and back ends from a config: the only place that names engines and back ends."""

from __future__ import annotations

import logging
import math
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import torch

from atomrl.config import ConfigError, ModelConfig, RolloutConfig, RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import load_samples
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import compute_dtype, load_tokenizer, model_config_only, resolve_folder, save_model
from atomrl.models.spec import unsupported
from atomrl.objective import PolicyObjective, PreferenceObjective
from atomrl.objective.rollout_is import TokenTIS
from atomrl.protocols import Algorithm, RolloutEngine, TrainingBackend
from atomrl.rollout.hf import HFEngine
from atomrl.rollout.native import NativeEngine
from atomrl.rollout.replicas import PlacementError, ReplicatedEngine
from atomrl.rollout.vllm import VLLMEngine
from atomrl.tracking.run_directory import FRESH_MODEL, RunDirectory
from atomrl.training.local import LocalBackend
from atomrl.types import Sample, SamplingParams

log = logging.getLogger(__name__)
EngineClass = type[NativeEngine] | type[HFEngine] | type[VLLMEngine]
ENGINES: dict[str, EngineClass] = {"native": NativeEngine, "hf": HFEngine, "vllm": VLLMEngine}


def model_path(config: RunConfig) -> str:
    """The folder or hub name of the policy, where it is no fresh one (`RunConfig.gpt`)."""
    assert config.model.path is not None, "a config without a path starts from a fresh model"
    return config.model.path


def policy_tokenizer(config: RunConfig) -> Any:
    """The tokenizer of the policy: `model.tokenizer`, or the one beside it."""
    path, model = model_path(config), config.model
    return load_tokenizer(model.tokenizer or path, model.trust_remote_code, path)


def context_tokens(path: str, config: RunConfig) -> int | None:
    """The longest row that a model is made for, where its config tells."""
    return getattr(model_config_only(path, config.model.trust_remote_code), "max_position_embeddings", None)


def prompt_limit(config: RunConfig, path: str) -> int:
    """`data.max_prompt_tokens`, or what the model's context leaves beside a completion, if that is less.

    Raises:
        ConfigError: it leaves nothing.
    """
    context = context_tokens(path, config)
    limits = {"rollout": config.rollout.max_completion_tokens, "eval": config.eval.max_completion_tokens or 0}
    section, completion = max(limits.items(), key=lambda item: item[1])
    if context is not None and context <= completion:
        raise ConfigError(
            f"{section}.max_completion_tokens={completion} leaves no room for a prompt in the context of {path}, "
            f"{context} tokens"
        )
    limit = config.data.max_prompt_tokens
    return limit if context is None else min(limit, context - completion)


def load_split(config: RunConfig, processor: DataProcessor, split: Literal["train", "eval"]) -> list[Sample]:
    """The problems of a split that fit the limit on prompts; what is left out is said."""
    report = load_samples(config.data, split, config.seed)
    if report.problems:
        log.warning("%s: %d rows with problems were skipped", report.source, len(report.problems))
    kept, overlong = processor.filter_overlong(report.samples)
    if overlong:
        what = "left out" if config.data.overlong_prompt == "drop" else "cut to their last tokens"
        log.warning("%s: %d prompts over %d tokens were %s", report.source, overlong, processor.max_prompt_tokens, what)
    return kept


def with_steps(config: RunConfig, items: int) -> RunConfig:
    """The config with `train.steps` worked out from `train.total_epochs`, where that is given.

    Args:
        items: how many there are to train on.
    """
    if config.train.total_epochs is None:
        return config
    steps = max(1, math.ceil(config.train.total_epochs * items / config.items_per_step))
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def train_sampling(config: RunConfig) -> SamplingParams:
    """How the completions that are trained on are drawn."""
    shared = {field.name for field in fields(SamplingParams)}
    return SamplingParams(**config.rollout.model_dump(include=shared), seed=config.seed)


def eval_sampling(config: RunConfig) -> SamplingParams:
    """How the completions of an evaluation are drawn: the same seeds at every step, so that steps compare."""
    settings = config.eval
    return replace(
        train_sampling(config),
        **settings.model_dump(include={"temperature", "top_p", "top_k"}),
        completions_per_prompt=settings.samples_per_prompt,
        max_completion_tokens=settings.max_completion_tokens or config.rollout.max_completion_tokens,
        logprobs_over="none",
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


def engine_class(rollout: RolloutConfig, path: str, model: ModelConfig) -> tuple[EngineClass, str | None]:
    """The class of `rollout.engine`; of a model that `native` does not know `hf`, and why.

    Raises:
        ConfigError: there is no engine of this name.
    """
    name = rollout.engine
    if name not in ENGINES:
        raise ConfigError(f"rollout.engine: unknown engine {name!r}; there are {', '.join(ENGINES)}")
    reason = unsupported(model_config_only(path, model.trust_remote_code)) if name == "native" else None
    return ENGINES["hf" if reason else name], reason


def build_engine(path: str, tokenizer: Any, rollout: RolloutConfig, model: ModelConfig) -> RolloutEngine:
    """The rollout engine of a config in this process, with the weights of the model at `path`.

    Raises:
        ConfigError: there is no engine of this name.
    """
    kind, reason = engine_class(rollout, path, model)
    if reason:
        log.warning("rollouts come from the hf engine, because native does not know this model: %s", reason)
    options: dict[str, Any] = {}
    if kind is VLLMEngine:
        rank = model.lora.rank if model.lora else 0
        options = {"lora_rank": rank, "gpu_memory_utilization": rollout.gpu_memory_utilization}
    return kind.from_pretrained(
        str(resolve_folder(path)),
        tokenizer,
        dtype=compute_dtype(model.dtype, device_name(model.device)),
        device=device_name(model.device),
        max_concurrent_completions=rollout.max_concurrent_completions,
        trust_remote_code=model.trust_remote_code,
        **options,
    )


def corrected(objective: PolicyObjective | PreferenceObjective, exact: bool) -> PolicyObjective | PreferenceObjective:
    """The objective, with truncated importance sampling where the log-probs of rollouts are not those of the policy at
    the start of the step (`exact`), unless the config says something of `rollout_is`."""
    if exact or isinstance(objective, PreferenceObjective) or "rollout_is" in objective.model_fields_set:
        return objective
    log.info("algorithm.rollout_is=token_tis: rollouts are not the policy's own; `none` turns it off")
    return objective.model_copy(update={"rollout_is": (TokenTIS(),)})


def build_rollout(config: RunConfig, path: str, tokenizer: Any) -> RolloutEngine:
    """The engine of a run: in this process, or replicas of it in Ray actors where there is a `cluster`.

    Raises:
        ConfigError: there is no engine of this name, or the cluster has no room for the replicas.
    """
    build, cluster = partial(build_engine, path, tokenizer, config.rollout, config.model), config.cluster
    if cluster is None:
        return build()
    try:
        return ReplicatedEngine(build, cluster)
    except PlacementError as error:
        raise ConfigError(f"cluster: {error}") from None


def starting_model(config: RunConfig, tokenizer: Any, directory: RunDirectory) -> str:
    """The folder or hub name that training starts from: `model.path`, or a GPT with fresh weights in the run's folder,
    which is taken again when the run goes on."""
    shape, folder = config.gpt, directory.path / FRESH_MODEL
    if shape is None:
        return model_path(config)
    if directory.first_step == 1 or not folder.exists():
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        model = new_gpt(vocab_size=len(tokenizer), **shape.model_dump(), **special, seed=config.seed)
        save_model(model, tokenizer, folder)
    return str(folder)


def build_trainer(
    config: RunConfig, algorithm: Algorithm, path: str, tokenizer: Any, temperature: float
) -> TrainingBackend:
    """The training back end, with the models that the algorithm needs beside the policy.

    Args:
        path: the policy that training starts from.
        temperature: at which log-probs are taken.
    """
    return LocalBackend(
        config.model.model_copy(update={"path": path}),
        config.train,
        algorithm,
        total_updates=config.train.steps * config.updates_per_step,
        tokenizer=tokenizer,
        device=device_name(config.model.device),
        temperature=temperature,
        critic=config.critic,
        teacher=config.teacher.path if config.teacher else None,
        seed=config.seed,
    )
