"""Build the tokenizer, problems, rollout engine, algorithm and training back end that a config describes.

No other module knows the concrete classes of engines and back ends: a new one is a line in `ENGINES` or `RANKED`.
"""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import torch

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.algorithms.sft import PRETRAINING, SFT
from atomrl.backends.group import Ranks
from atomrl.backends.launcher import CONTENTS
from atomrl.backends.local import LocalBackend
from atomrl.backends.rank_actors import start_actors, start_rank_actors
from atomrl.backends.rank_group import start_ranks
from atomrl.backends.ranks import RankedKind, rank_count
from atomrl.backends.roles import RoleName
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.common.chat_template import set_template
from atomrl.common.errors import reraise_as
from atomrl.common.files import model_identity, sha256
from atomrl.common.launchers import launched
from atomrl.config import BackendConfig, ConfigError, ModelConfig, RolloutConfig, RunConfig
from atomrl.data.image_reader import ImageReader
from atomrl.data.images import ImageStore
from atomrl.data.processor import DataProcessor
from atomrl.engines.episodes import EpisodeEngine
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions, RequestEngine
from atomrl.engines.sglang import SGLangEngine
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.environments.builtin import ENVIRONMENTS
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import (
    base_path,
    compute_dtype,
    load_tokenizer,
    model_config_only,
    resolve_folder,
    save_model,
)
from atomrl.models.shapes import text_config
from atomrl.models.transformers_model import check_causal
from atomrl.models.vision import why_no_images
from atomrl.objectives import PolicyObjective, PreferenceObjective
from atomrl.objectives.token_weights import TokenTIS
from atomrl.protocols import Algorithm, FrozenBase, RolloutEngine, RoundedWeights, TrainingBackend
from atomrl.tracking.reading.lines import flat_tree
from atomrl.tracking.reading.token_records import IMAGES
from atomrl.tracking.run_directory import FRESH_MODEL, RunDirectory, is_begun
from atomrl.types import SAMPLING_KEYS, SamplingParams

log = logging.getLogger(__name__)
ENGINES: dict[str, type[RequestEngine]] = {
    "native": NativeEngine,
    "hf": HFEngine,
    "vllm": VLLMEngine,
    "vllm-server": VLLMServerEngine,
    "sglang": SGLangEngine,
}
RANKED = {"fsdp": "atomrl.backends.fsdp.FSDPBackend", "megatron": "atomrl.backends.megatron.backend.MegatronBackend"}
"""`backend.type` -> class of a rank's back end. Imported only by a run that needs it: an import takes 0.5 s or more."""


def model_path(config: RunConfig) -> str:
    """Return the folder or hub name of the policy; not for a model with fresh weights (`RunConfig.gpt`)."""
    assert config.model.path is not None, "a config without a path starts from a fresh model"
    return config.model.path


def policy_tokenizer(config: RunConfig) -> Any:
    """Load the policy's tokenizer (`model.tokenizer`, else the model's own) and set `data.chat_template`."""
    path, model = model_path(config), config.model
    tokenizer = load_tokenizer(model.tokenizer or path, model.trust_remote_code, path)
    if (template := config.data.chat_template) not in ("auto", "none", "messages_only"):
        with reraise_as(ConfigError, f"data.chat_template={template}", OSError, ValueError):
            set_template(tokenizer, template)
    return tokenizer


def context_tokens(path: str, config: RunConfig) -> int | None:
    """Return the model's context length in tokens; None if its config has none."""
    shape = text_config(model_config_only(path, config.model.trust_remote_code))
    return getattr(shape, "max_position_embeddings", None)


def prompt_limit(config: RunConfig, path: str) -> int:
    """Return the maximum length of a prompt: `data.max_prompt_tokens`, or less if the model's context is too short.

    The context must have room for the prompt and the longest completion of training or evaluation.

    Raises:
        ConfigError: the context leaves no room for a prompt.
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


def with_steps(config: RunConfig, items: int) -> RunConfig:
    """Compute `train.steps` from `train.total_epochs`, if that is set.

    Args:
        items: number of training examples: problems, demonstrations, preference pairs or windows.
    """
    if config.train.total_epochs is None:
        return config
    steps = max(1, math.ceil(config.train.total_epochs * items / config.items_per_step))
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def with_settings(config: RunConfig, changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Replace values of a config, by section and key. The values must be valid; they are not checked."""
    sections = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in changes.items()}
    return config.model_copy(update=sections)


def train_sampling(config: RunConfig) -> SamplingParams:
    """Sampling parameters of the completions that are trained on."""
    return SamplingParams(**config.rollout.model_dump(include=SAMPLING_KEYS), seed=config.seed)


def eval_sampling(config: RunConfig) -> SamplingParams:
    """Sampling parameters of an evaluation: those of training with the changes in `eval`, and the same seeds at every
    step, so that steps can be compared."""
    return replace(
        train_sampling(config),
        **config.eval.model_dump(include=SAMPLING_KEYS, exclude_none=True),
        completions_per_prompt=config.eval.samples_per_prompt,
        logprobs_over="none",
    )


def device_name(wanted: str = "auto") -> str:
    """Resolve `model.device`: `auto` is `cuda` if there is a GPU, else `cpu`.

    Raises:
        ConfigError: this machine does not have the device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "cuda" if gpus else "cpu"
    if wanted != "cpu" and int(wanted.partition(":")[2] or 0) >= gpus:
        raise ConfigError(f"model.device={wanted}: torch sees {gpus} CUDA devices on this machine")
    return wanted


def chosen_class(rollout: RolloutConfig) -> type[RequestEngine]:
    """Return the class of `rollout.engine`. `auto` is the native engine here; `auto.with_engine` resolves it.

    Raises:
        ConfigError: the engine is unknown.
    """
    name = "native" if rollout.engine == "auto" else rollout.engine
    if name not in ENGINES:
        raise ConfigError(f"rollout.engine: unknown engine {name!r}; valid: auto, {', '.join(ENGINES)}")
    return ENGINES[name]


def why_no_pictures(engine: type[RequestEngine], config: RunConfig) -> str | None:
    """Return why an engine cannot take the pictures of a run, beginning with the config key; None if it can."""
    key = f"rollout.engine={config.rollout.engine}"
    if not engine.supports_images:
        others = " or ".join(name for name, kind in ENGINES.items() if kind.supports_images)
        return f"{key}: {engine.__name__} does not take pictures, and the run has some: use rollout.engine={others}"
    if config.rollout.server and engine.package and engine.package_version() is None:
        return (
            f"rollout.server: pictures are sent in the encoding of {engine.package}, which is not installed here: "
            "install the version of the servers"
        )
    for url in config.rollout.server if config.cluster is None else ():  # actors may reach other servers
        if reason := engine.server_image_refusal(url):
            return f"rollout.server: {url} {reason}"
    try:
        engine.check_version(engine.images_version)
    except ImportError as error:
        return f"{key}, with pictures: {error}"
    reason = engine.image_refusal(train_sampling(config))
    return f"rollout.{reason}" if reason else None


def engine_class(rollout: RolloutConfig, path: str, model: ModelConfig) -> tuple[type[RequestEngine], str | None]:
    """Return the engine class for a model: `chosen_class`, or `HFEngine` with the reason if that does not support it.

    Raises:
        ConfigError: the engine is unknown; it does not support `rollout.server` or `rollout.server_weights`; or the
            model is not causal.
    """
    kind, name = chosen_class(rollout), rollout.engine
    if rollout.server and not kind.server:
        servers = " or ".join(other for other, engine in ENGINES.items() if engine.server)
        raise ConfigError(f"rollout.server: the engine {name} is not a server; use rollout.engine={servers}")
    if (way := rollout.server_weights) not in kind.weight_transfers:
        others = " or ".join(other for other, engine in ENGINES.items() if way in engine.weight_transfers)
        raise ConfigError(f"rollout.server_weights={way}: not supported by {name}; use rollout.engine={others}")
    shape = model_config_only(path, model.trust_remote_code)
    check_causal(shape, path)
    reason = kind.unsupported(shape)
    return (HFEngine if reason else kind), reason


def build_engine(
    config: RunConfig,
    path: str,
    tokenizer: Any,
    cluster: RayCluster | None = None,
    base: FrozenBase | None = None,
    rounded: RoundedWeights | None = None,
    images: ImageReader | None = None,
) -> RolloutEngine:
    """Build the engine of a run: in this process, or replicas in Ray actors if there is a `cluster`.

    If the config has an environment, the engine is wrapped in an `EpisodeEngine`.

    Args:
        path: folder or hub name of the engine's initial weights.
        base: the trainer's frozen weights, if the trainer is in this process.
        rounded: its trained weights, if the engine does not sample while it computes.
        images: reads the pictures of prompts; None: there are none.

    Raises:
        ConfigError: as `engine_class`.
    """
    rollout, model = config.rollout, config.model
    engine: RolloutEngine
    if cluster is not None:  # each actor calls this function without a cluster
        changes = {"model": actor_model(model), "environment": None}
        build = partial(build_engine, config.model_copy(update=changes), path, tokenizer, images=images)
        engine = ReplicatedEngine(build, cluster)
    else:
        kind, reason = engine_class(rollout, path, model)
        if reason:
            log.warning("using the hf engine for rollouts: %s", reason)
        device, share = device_name(model.device), rollout.gpu_memory_utilization
        options = EngineOptions(
            dtype=compute_dtype(model.dtype, device),
            device=device,
            trust_remote_code=model.trust_remote_code,
            lora_rank=model.lora.rank if model.lora else 0,
            max_concurrent_completions=rollout.concurrent_completions,
            whole_logprobs=rollout.temperature == 1 and rollout.logprobs_over == "vocabulary",
            gpu_memory_utilization=EngineOptions.gpu_memory_utilization if share == "auto" else share,
            base=base,
            rounded=rounded,
            images=images,
            **rollout.model_dump(
                include={"tensor_parallel", "engine_args", "server", "server_timeout_s", "server_weights"}
            ),
        )
        engine = kind.from_pretrained(str(resolve_folder(path)), tokenizer, options)
    if config.environment is None:
        return engine
    kwargs = config.data.chat_template_kwargs
    shown = images if config.environment.images else None
    return EpisodeEngine(engine, tokenizer, config.environment, tool_schemas(config), kwargs, shown)


def corrected(objective: PolicyObjective | PreferenceObjective, exact: bool) -> PolicyObjective | PreferenceObjective:
    """Add truncated importance sampling (`TokenTIS`) to an objective, unless the config sets `rollout_is` or
    `old_policy`.

    Args:
        exact: rollout log-probs equal those of the policy at the start of the step; then nothing is added.
    """
    if exact or isinstance(objective, PreferenceObjective) or {"rollout_is", "old_policy"} & objective.model_fields_set:
        return objective
    log.info("algorithm.rollout_is=token_tis, because the rollouts are off-policy; `none` turns it off")
    return objective.model_copy(update={"rollout_is": (TokenTIS(),)})


def algorithm_of(config: RunConfig) -> Algorithm:
    """Return the algorithm of a run; reads only the config."""
    if config.kind in ("sft", "pretrain"):
        return SFT if config.kind == "sft" else PRETRAINING
    if isinstance(config.algorithm, RewardModelObjective):
        return config.algorithm
    limit, entropy = config.rollout.max_completion_tokens, config.train.report_entropy
    return config.algorithm.resolved(max_completion_tokens=limit, report_entropy=entropy)


def rank_total(config: RunConfig) -> int:
    """Return the number of ranks that train.

    Raises:
        ConfigError: `backend.ranks` is missing or not possible on this machine.
    """
    if (backend := config.backend) is None:
        return 1
    if not in_actors(config):
        return rank_count(backend, device_name(config.model.device))
    if backend.ranks is None:
        raise ConfigError("backend.ranks: is required; it is the number of trainer actors")
    return backend.ranks


def in_actors(config: RunConfig) -> bool:
    """True if the trainer runs in Ray actors."""
    cluster = config.cluster
    return cluster is not None and (cluster.placement is not None or "trainer" in cluster.resources)


def actor_model(model: ModelConfig) -> ModelConfig:
    """Return the model config for a Ray actor, in which CUDA devices are renumbered from 0."""
    return model.model_copy(update={"device": model.device.partition(":")[0]})


def tool_schemas(config: RunConfig) -> Sequence[Mapping[str, Any]]:
    """Return the schemas of the tools in the prompt (set by `checks.with_tools`); empty without tools."""
    environment = config.environment
    builtin = None if environment is None else ENVIRONMENTS.get(environment.function)
    if environment is None or builtin is None or not builtin.shows_tools:
        return ()
    return environment.args.get("schemas", ())  # type: ignore[no-any-return]


def image_reader(config: RunConfig, path: str) -> ImageReader | None:
    """Return the reader of a run's pictures; None if the model reads text alone here (`why_no_images`)."""
    shape = model_config_only(path, config.model.trust_remote_code)
    if why_no_images(shape, path):
        return None
    folder, data = resolve_folder(base_path(path), weights=False), config.data
    return ImageReader(images_folder(config), folder, shape, data.min_pixels, data.max_pixels)


def images_folder(config: RunConfig) -> Path:
    """Return the folder of a run's pictures."""
    return config.run_dir.absolute() / IMAGES


def image_store(config: RunConfig, reader: ImageReader | None) -> ImageStore | None:
    """Return the store of a run's pictures; None if its model reads text alone."""
    replies = config.environment is not None and config.environment.images
    return None if reader is None else ImageStore(images_folder(config), config.data.images_field, reader, replies)


def processor(
    config: RunConfig, tokenizer: Any, max_prompt_tokens: int | None = None, images: ImageReader | None = None
) -> DataProcessor:
    """Build the `DataProcessor` that renders problems as prompts, with tool schemas and the environment's opening.

    Args:
        max_prompt_tokens: overrides `data.max_prompt_tokens`.
        images: reads the pictures of problems.
    """
    opening = config.environment is not None and config.environment.opening
    tools = tool_schemas(config)
    return DataProcessor(tokenizer, config.data, max_prompt_tokens, tools, opening, started(config), images)


def started(config: RunConfig) -> datetime:
    """Return the start time of the run, also of a resumed one.

    Some chat templates print the date. With a fixed date a resumed run has exactly the same prompts.
    """
    stored = config.run_dir / "env.json"
    if is_begun(config.run_dir) and stored.is_file():
        start = datetime.fromisoformat(json.loads(stored.read_text(encoding="utf-8"))["time"])
        return start.astimezone().replace(tzinfo=None)  # local time, as `datetime.now()`
    return datetime.now()


def starting_model(config: RunConfig, tokenizer: Any, directory: RunDirectory) -> str:
    """Return the folder or hub name that training starts from.

    That is `model.path`, or for a fresh model (`config.gpt`) a folder in the run's directory: a new run writes a GPT
    with random weights to it, a resumed run reads it.
    """
    shape, folder = config.gpt, directory.path / FRESH_MODEL
    if shape is None:
        return model_path(config)
    if directory.first_step == 1 or not folder.exists():
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        model = new_gpt(vocab_size=len(tokenizer), **shape.model_dump(), **special, seed=config.seed)
        save_model(model, tokenizer, folder)
    return str(folder)


def given_to_rank(config: RunConfig) -> dict[str, Any]:
    """Return what the ranks of a launcher compare: the keys of the config and, under `contents of PATH`, a hash of each
    data file and of the model, if they are on this machine."""
    given, data = flat_tree(config.to_tree()), config.data
    if launched() is None:
        return given
    files = [path for each in (data.train, data.eval) for path in ([each] if isinstance(each, str) else each or ())]
    for path in filter(os.path.isfile, files):
        given[CONTENTS + path] = sha256(Path(path))[:16]
    if config.model.path is not None and os.path.isdir(config.model.path):
        given[CONTENTS + config.model.path] = model_identity(Path(config.model.path))[:16]
    return given


def build_trainer(
    config: RunConfig,
    algorithm: Algorithm,
    path: str,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
    cluster: RayCluster | None = None,
    given: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
    **options: Any,
) -> TrainingBackend:
    """Build the training back end: in this process, on the ranks of `backend`, or in the cluster's `trainer` actors.

    Other processes call this function again, each for its part. A part also loads the other models that the algorithm
    needs (reference, critic, teacher). Log-probs are computed at the sampling temperature if the run has rollouts, else
    at 1.

    Args:
        path: folder or hub name of the policy's initial weights.
        ranks: the group of ranks, of which this process is one; None: a section `backend` starts them.
        device: of this rank; None: `model.device`.
        given: of `given_to_rank`, for the config as it was loaded.
        images: reads the pictures of rows; None: there are none.
        options: further arguments of `BaseBackend`: `tokenizer`, and the roles to load.
    """
    # Start ranks or actors.
    if ranks is None and config.backend is not None and not in_actors(config):
        build_rank = partial(build_trainer, config, algorithm, path, images=images)
        return start_ranks(build_rank, config.backend, device_name(config.model.device), given=given, **options)
    if cluster is not None and "trainer" in cluster.wanted:
        remote = config.model_copy(update={"model": actor_model(config.model)})
        build_part = partial(build_trainer, remote, algorithm, path, images=images)
        if config.backend is not None:
            return start_rank_actors(build_part, config.backend, remote.model.device, cluster=cluster, **options)
        apart = [role for role in get_args(RoleName) if role in cluster.wanted]
        return start_actors(partial(build_part, **options), cluster, apart)
    # Create the back end of this process: that of a rank, or a `LocalBackend`.
    kind = LocalBackend if config.backend is None else partial(ranked_kind(config.backend), config.backend)
    return kind(
        model=config.model.model_copy(update={"path": path}),
        train=config.train,
        algorithm=algorithm,
        total_updates=config.train.steps * config.updates_per_step,
        temperature=config.rollout.temperature if config.kind == "rl" else 1.0,
        critic=config.critic,
        teacher=config.teacher.path if config.teacher else None,
        seed=config.seed,
        collective=ranks,
        device=device or device_name(config.model.device),
        images=images,
        **options,
    )


def ranked_kind(settings: BackendConfig) -> RankedKind:
    """Import the back-end class of a section `backend`; it also validates settings and estimates memory."""
    module, _, name = RANKED[settings.type].rpartition(".")
    kind: RankedKind = getattr(import_module(module), name)
    return kind
