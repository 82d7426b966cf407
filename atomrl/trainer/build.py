"""Engines and back ends from a config: the only place that names engines and back ends."""

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import Any, Literal, get_args

import torch

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.algorithms.sft import PRETRAINING, SFT
from atomrl.backends.base import LocalBackend
from atomrl.backends.group import Ranks
from atomrl.backends.ranks import RankActors, RankedBackend, RankedKind, RemoteBackend, rank_count
from atomrl.backends.roles import RoleName
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.common.chat_template import set_template
from atomrl.common.errors import said_as
from atomrl.config import BackendConfig, ConfigError, ModelConfig, RolloutConfig, RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import load_samples
from atomrl.engines.episodes import EpisodeEngine
from atomrl.engines.hf import HFEngine
from atomrl.engines.native import NativeEngine
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions, RequestEngine
from atomrl.engines.sglang import SGLangEngine
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import compute_dtype, load_tokenizer, model_config_only, resolve_folder, save_model
from atomrl.models.transformers_model import check_causal
from atomrl.objectives import PolicyObjective, PreferenceObjective
from atomrl.objectives.token_weights import TokenTIS
from atomrl.protocols import Algorithm, RolloutEngine, TrainingBackend
from atomrl.tracking.run_directory import FRESH_MODEL, RunDirectory, is_begun
from atomrl.types import Sample, SamplingParams

log = logging.getLogger(__name__)
ENGINES: dict[str, type[RequestEngine]] = {
    "native": NativeEngine,
    "hf": HFEngine,
    "vllm": VLLMEngine,
    "vllm-server": VLLMServerEngine,
    "sglang": SGLangEngine,
}
RANKED = {"fsdp": "atomrl.backends.fsdp.FSDPBackend", "megatron": "atomrl.backends.megatron.MegatronBackend"}
"""By `backend.type` the back end of a rank; imported where a run has one, since it takes half a second and more."""


def model_path(config: RunConfig) -> str:
    """The folder or hub name of the policy, where it is no fresh one (`RunConfig.gpt`)."""
    assert config.model.path is not None, "a config without a path starts from a fresh model"
    return config.model.path


def policy_tokenizer(config: RunConfig) -> Any:
    """Load the policy's tokenizer (`model.tokenizer`, or beside the model), with the `data.chat_template` named."""
    path, model = model_path(config), config.model
    tokenizer = load_tokenizer(model.tokenizer or path, model.trust_remote_code, path)
    if (named := config.data.chat_template) not in ("auto", "none"):
        with said_as(ConfigError, f"data.chat_template={named}", OSError, ValueError):
            set_template(tokenizer, named)
    return tokenizer


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


def with_settings(config: RunConfig, changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """A config with other values in some sections; these are valid, and are not checked again."""
    sections = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in changes.items()}
    return config.model_copy(update=sections)


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


def chosen_class(rollout: RolloutConfig) -> type[RequestEngine]:
    """The class of `rollout.engine`; of `auto` the native engine (`runs.engines.with_engine` chooses for a run).

    Raises:
        ConfigError: there is no such engine.
    """
    name = "native" if rollout.engine == "auto" else rollout.engine
    if name not in ENGINES:
        raise ConfigError(f"rollout.engine: unknown engine {name!r}; there are auto, {', '.join(ENGINES)}")
    return ENGINES[name]


def engine_class(rollout: RolloutConfig, path: str, model: ModelConfig) -> tuple[type[RequestEngine], str | None]:
    """The `chosen_class`; of a model that it does not know `hf`, and why.

    Raises:
        ConfigError: there is no such engine, or none that draws in a server, and one is given; or no causal model.
    """
    kind, name = chosen_class(rollout), rollout.engine
    if rollout.server and not kind.server:
        servers = " or ".join(other for other, engine in ENGINES.items() if engine.server)
        raise ConfigError(f"rollout.server: the engine {name} draws in this process; take rollout.engine={servers}")
    if (way := rollout.server_weights) not in kind.weight_ways:
        others = " or ".join(other for other, engine in ENGINES.items() if way in engine.weight_ways)
        raise ConfigError(f"rollout.server_weights={way}: {name} takes no weights so; take rollout.engine={others}")
    shape = model_config_only(path, model.trust_remote_code)
    check_causal(shape, path)
    reason = kind.unsupported(shape)
    return (HFEngine if reason else kind), reason


def build_engine(path: str, tokenizer: Any, rollout: RolloutConfig, model: ModelConfig) -> RolloutEngine:
    """The rollout engine of a config in this process, with the weights of the model at `path`.

    Raises:
        ConfigError: there is no engine of this name.
    """
    kind, reason = engine_class(rollout, path, model)
    if reason:
        log.warning("rollouts come from the hf engine: %s", reason)
    device, share = device_name(model.device), rollout.gpu_memory_utilization
    options = EngineOptions(
        dtype=compute_dtype(model.dtype, device),
        device=device,
        trust_remote_code=model.trust_remote_code,
        lora_rank=model.lora.rank if model.lora else 0,
        max_concurrent_completions=rollout.concurrent_completions,
        whole_logprobs=rollout.temperature == 1 and rollout.logprobs_over == "vocabulary",
        gpu_memory_utilization=EngineOptions.gpu_memory_utilization if share == "auto" else share,
        **rollout.model_dump(
            include={
                "tensor_parallel",
                "engine_args",
                "server",
                "server_timeout_s",
                "server_weights",
            }
        ),
    )
    return kind.from_pretrained(str(resolve_folder(path)), tokenizer, options)


def corrected(objective: PolicyObjective | PreferenceObjective, exact: bool) -> PolicyObjective | PreferenceObjective:
    """The objective, with truncated importance sampling where the log-probs of rollouts are not those of the policy at
    the start of the step (`exact`), unless the config says something of `rollout_is`."""
    if exact or isinstance(objective, PreferenceObjective) or "rollout_is" in objective.model_fields_set:
        return objective
    log.info("algorithm.rollout_is=token_tis: rollouts are not the policy's own; `none` turns it off")
    return objective.model_copy(update={"rollout_is": (TokenTIS(),)})


def algorithm_of(config: RunConfig) -> Algorithm:
    """The algorithm of a run, from its config alone."""
    if config.kind in ("sft", "pretrain"):
        return SFT if config.kind == "sft" else PRETRAINING
    if isinstance(config.algorithm, RewardModelObjective):
        return config.algorithm
    limit, entropy = config.rollout.max_completion_tokens, config.train.report_entropy
    return config.algorithm.resolved(max_completion_tokens=limit, report_entropy=entropy)


def rank_total(config: RunConfig) -> int:
    """Processes that train.

    Raises:
        ConfigError: they cannot be so many.
    """
    if (backend := config.backend) is None:
        return 1
    if not in_actors(config):
        return rank_count(backend, device_name(config.model.device))
    if backend.ranks is None:
        raise ConfigError("backend.ranks: say how many actors of the role trainer there are to be")
    return backend.ranks


def in_actors(config: RunConfig) -> bool:
    """Whether the trainer is in Ray actors."""
    cluster = config.cluster
    return cluster is not None and (cluster.placement is not None or "trainer" in cluster.resources)


def actor_model(model: ModelConfig) -> ModelConfig:
    """Of an actor, which sees the GPUs that Ray gave it, numbered from 0."""
    return model.model_copy(update={"device": model.device.partition(":")[0]})


def tool_schemas(config: RunConfig) -> Sequence[Mapping[str, Any]]:
    """Of the tools that the prompt shows (`checks.with_tools`)."""
    args = config.environment.args if config.tools and config.environment else {}
    return args.get("schemas", ())  # type: ignore[no-any-return]


def processor(config: RunConfig, tokenizer: Any, max_prompt_tokens: int | None = None) -> DataProcessor:
    """What makes prompts of problems: with the tools that the model may call, and as the environment goes on with them.

    Args:
        max_prompt_tokens: overrides the config's.
    """
    opening = config.environment is not None and config.environment.opening
    return DataProcessor(tokenizer, config.data, max_prompt_tokens, tool_schemas(config), opening, started(config))


def started(config: RunConfig) -> datetime:
    """When the run began, also where it is resumed: the date of chat templates that print one, so that its prompts stay
    the same to the token."""
    stored = config.run_dir / "env.json"
    if is_begun(config.run_dir) and stored.is_file():
        began = datetime.fromisoformat(json.loads(stored.read_text(encoding="utf-8"))["time"])
        return began.astimezone().replace(tzinfo=None)  # as the clock says it
    return datetime.now()


def build_rollout(config: RunConfig, path: str, tokenizer: Any, cluster: RayCluster | None) -> RolloutEngine:
    """The engine of a run: in this process, or replicas of it in Ray actors where there is a `cluster`; with an
    environment, where the config has one.

    Raises:
        ConfigError: there is no engine of this name.
    """
    if cluster is None:
        engine = build_engine(path, tokenizer, config.rollout, config.model)
    else:
        build = partial(build_engine, path, tokenizer, config.rollout, actor_model(config.model))
        engine = ReplicatedEngine(build, cluster)
    if config.environment is None:
        return engine
    kwargs = config.data.chat_template_kwargs
    return EpisodeEngine(engine, tokenizer, config.environment, tool_schemas(config), kwargs)


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
    config: RunConfig, algorithm: Algorithm, path: str, tokenizer: Any, cluster: RayCluster | None
) -> TrainingBackend:
    """The training back end, with the models that the algorithm needs beside the policy: in this process, on the ranks
    of `backend`, or in Ray actors where the cluster has a role `trainer`.

    Args:
        path: the policy that training starts from.
    """
    if config.backend is not None and not in_actors(config):
        return RankedBackend(
            partial(rank_trainer, config, algorithm, path), config.backend, device_name(config.model.device), tokenizer
        )
    if cluster is None or "trainer" not in cluster.wanted:
        return local_trainer(config, algorithm, path, tokenizer)
    there = config.model_copy(update={"model": actor_model(config.model)})
    if config.backend is not None:
        ranked = partial(rank_trainer, there, algorithm, path)
        return RankActors(ranked, config.backend, there.model.device, tokenizer, cluster)
    build = partial(local_trainer, there, algorithm, path, tokenizer)
    return RemoteBackend(build, cluster, [role for role in get_args(RoleName) if role in cluster.wanted])


def local_trainer(
    config: RunConfig, algorithm: Algorithm, path: str, tokenizer: Any, roles: Collection[RoleName] | None = None
) -> TrainingBackend:
    """A training back end in this process, with the models of all roles, or of some."""
    device = device_name(config.model.device)
    return LocalBackend(tokenizer=tokenizer, device=device, roles=roles, **_trainer_settings(config, algorithm, path))


def rank_trainer(
    config: RunConfig, algorithm: Algorithm, path: str, ranks: Ranks, device: torch.device
) -> TrainingBackend:
    """The training back end of a rank."""
    assert config.backend is not None
    settings = {"collective": ranks, "device": device, **_trainer_settings(config, algorithm, path)}
    return ranked_kind(config.backend)(config.backend, **settings)


def ranked_kind(settings: BackendConfig) -> RankedKind:
    """The class of a section `backend`, which also says what can be and what it takes."""
    module, _, name = RANKED[settings.type].rpartition(".")
    kind: RankedKind = getattr(import_module(module), name)
    return kind


def _trainer_settings(config: RunConfig, algorithm: Algorithm, path: str) -> dict[str, Any]:
    """What all back ends are told. They take log-probs at the temperature of sampling where a run draws rollouts, and
    at 1 elsewhere."""
    return {
        "model": config.model.model_copy(update={"path": path}),
        "train": config.train,
        "algorithm": algorithm,
        "total_updates": config.train.steps * config.updates_per_step,
        "temperature": config.rollout.temperature if config.kind == "rl" else 1.0,
        "critic": config.critic,
        "teacher": config.teacher.path if config.teacher else None,
        "seed": config.seed,
    }
