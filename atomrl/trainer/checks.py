"""Checks of a run before weights are loaded: each raises a `ConfigError` that names the key, or logs a warning.

First the config itself, then models and back end, the engine, the environment and its tools, the data and the
learning signal.
"""

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from atomrl.common.errors import nearest, reraise_as
from atomrl.common.functions import subscripts
from atomrl.common.secrets import check_unmasked, register_secrets
from atomrl.config import ConfigError, RolloutConfig, RunConfig
from atomrl.data.images import ImageStore
from atomrl.data.problems import COMPLETIONS
from atomrl.data.tasks import is_generator
from atomrl.engines.episodes import ReplyTokens
from atomrl.engines.requests import eos_token_ids
from atomrl.environments.builtin import ENVIRONMENTS, python
from atomrl.environments.tool_calls import find_form
from atomrl.environments.tools import check_rows, find_schemas, gives_reward, has_objects
from atomrl.environments.worker import EpisodeError, find_environment
from atomrl.models.gpt import new_gpt, unsupported
from atomrl.models.loading import base_path, load_tokenizer, model_config_only, resolve_folder
from atomrl.models.lora import refuse_adapted, target_names
from atomrl.models.memory import empty_model
from atomrl.models.quantized import linears
from atomrl.models.reward_model import is_classifier
from atomrl.models.shapes import is_whole, text_config, tower_weights
from atomrl.models.transformers_model import check_causal, check_trainable
from atomrl.models.vision import why_no_images
from atomrl.objectives import PolicyObjective
from atomrl.objectives.base import Custom
from atomrl.protocols import Algorithm, RolloutEngine, needs_teacher
from atomrl.sandbox.running import limits_of
from atomrl.tracking.doctor.rules import EVALUATED
from atomrl.trainer.build import (
    ENGINES,
    device_name,
    engine_class,
    model_path,
    rank_total,
    ranked_kind,
    tool_schemas,
    train_sampling,
)
from atomrl.trainer.cluster import cluster_roles
from atomrl.trainer.own_functions import random_rows, with_inputs
from atomrl.trainer.pool_store import RolloutPool
from atomrl.types import Problem

log = logging.getLogger(__name__)
LARGE_GROUP = 8
"""Completions per prompt with which every algorithm has something to compare."""
SERVER_TIMEOUT_S = 10.0
"""Seconds to wait for an engine's server to answer its health check."""

# --------------------------------------------------------------------------------------------------------------------
# Config, models, optimizer and ranks.


def check_secrets(config: RunConfig) -> None:
    """Check that the config has its secrets: a run's own `config.yaml` can be looked at, but not trained with. Register
    them, so that messages do not contain them (`without_secrets`).

    Raises:
        ConfigError: a secret was left out.
    """
    try:
        check_unmasked(config.to_tree(secrets=True))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    register_secrets(config.secrets)


def check_unused(config: RunConfig) -> None:
    """Warn about settings in sections that this kind of run does not read."""
    tree = config.model_dump(mode="json", exclude_defaults=True, include=set(config.unused_sections))
    names = [f"{section}.{key}" for section, keys in tree.items() for key in (keys if isinstance(keys, dict) else [""])]
    if names:
        log.warning(
            "%s: without effect in this kind of run (%s)", ", ".join(name.rstrip(".") for name in names), config.kind
        )


def check_policy(config: RunConfig) -> None:
    """Check that the policy is a causal language model. A reward model may start from other models.

    Raises:
        ConfigError: it is not.
    """
    if config.model.path is not None and config.kind != "reward-model":
        try:
            shape = model_config_only(config.model.path, config.model.trust_remote_code)
            check_causal(shape, config.model.path)
            if unsupported(shape) is not None:
                empty = empty_model(shape, config.model.trust_remote_code)
                check_trainable(empty)
                tower_weights(empty)  # raises if it is not known
            if is_whole(shape) and text_config(shape) is not shape and why_no_images(shape, config.model.path):
                log.warning(
                    "model.path: %s has a vision tower: the run is on text only, and the tower is saved unchanged",
                    config.model.path,
                )
        except ConfigError as error:
            raise type(error)(f"model.path: {error}") from error


def check_adapters(config: RunConfig) -> None:
    """Check that the policy can have the LoRA adapters of `model.lora`.

    Raises:
        ConfigError: it cannot.
    """
    model = config.model
    if model.lora is None or model.path is None:
        return
    refuse_adapted(model.path)
    empty = empty_model(model_config_only(model.path, model.trust_remote_code), model.trust_remote_code)
    target_names(empty, empty.get_output_embeddings().weight, model.lora)


def check_companions(config: RunConfig, algorithm: Algorithm, path: str, tokenizer: Any) -> None:
    """Check that the teacher and the critic of an algorithm are available and have the policy's vocabulary.

    Args:
        config: config of the run.
        algorithm: decides whether there is a teacher or a critic.
        path: folder or hub name of the policy, from which the critic starts by default.
        tokenizer: the policy's tokenizer.

    Raises:
        ConfigError: `teacher.path` is missing; a model is not available; its vocabulary differs; or the critic's model
            is not supported (`check_critic`).
    """
    starts: dict[str, str] = {}
    if needs_teacher(algorithm):
        if config.teacher is None:
            raise ConfigError(f"teacher.path: is required by algorithm.name={algorithm.name}")
        starts["teacher.path"] = config.teacher.path
    if "values" in algorithm.needs:
        starts["critic.path"] = config.critic.path or path
    for key, start in starts.items():
        ours, trusted = tokenizer.get_vocab(), config.model.trust_remote_code
        with reraise_as(ConfigError, key, ConfigError):
            shape, folder = model_config_only(start, trusted), resolve_folder(start, weights=False)
            size, own = (text_config(each).vocab_size for each in (model_config_only(path, trusted), shape))
            has_tokenizer = key == "teacher.path" or any(folder.glob("tokenizer*"))  # optional for a critic
            theirs = load_tokenizer(start, trusted).get_vocab() if has_tokenizer else ours
        if key == "critic.path":
            check_critic(start, shape)
        if own != size or theirs != ours:
            differ = [word for word in ours.keys() | theirs.keys() if ours.get(word) != theirs.get(word)]
            token = min(differ, default=None)
            raise ConfigError(
                f"{key}: {start} must have the vocabulary of the policy {path}, whose tokens it reads: "
                + (
                    f"{own} embeddings instead of {size}"
                    if token is None
                    else f"{token!r} is token {theirs.get(token)} instead of {ours.get(token)}"
                )
                + "; use a model of the same family, or one that was trained from the policy"
            )


def check_critic(start: str, shape: Any) -> None:
    """Check that a critic can be initialized from a model.

    Raises:
        ConfigError: its architecture is not implemented in `atomrl.models`, or it has several labels.
    """
    if (reason := unsupported(shape)) is not None:
        raise ConfigError(f"critic.path: {start} cannot be used as a critic: {reason}")
    if is_classifier(shape) and shape.num_labels != 1:
        raise ConfigError(f"critic.path: {start} has {shape.num_labels} labels; a critic needs one")


def check_fresh_tokenizer(config: RunConfig, tokenizer: Any) -> None:
    """Check that transformers loads the tokenizer of a fresh model (`config.gpt`) unchanged.

    Raises:
        ConfigError: transformers replaces the tokenizers of this model family by its own class.
    """
    if (shape := config.gpt) is None:
        return
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": shape.family}), encoding="utf-8")
        loaded = load_tokenizer(folder).get_vocab()
    if loaded != tokenizer.get_vocab():
        raise ConfigError(
            f"{config.kind}.gpt.family={shape.family}: transformers replaces the tokenizer of this family with its "
            "own class; use family llama"
        )


def check_best(config: RunConfig) -> None:
    """Check that a best checkpoint by an evaluation metric (`checkpoint.keep_best`) is possible.

    Warns if some evaluations are at steps without a checkpoint.

    Raises:
        ConfigError: the run has no evaluations, or none at a step with a checkpoint.
    """
    name, steps = config.checkpoint.keep_best, config.train.steps
    if name is None or not name.startswith(EVALUATED):
        return
    key = f"checkpoint.keep_best={name}"
    every, saved_every = config.eval.every_steps, config.checkpoint.every_steps
    evaluated = [*(range(every, steps, every) if every else ()), *[steps] * config.eval.after]
    if config.data.eval is None and config.kind != "pretrain":
        raise ConfigError(f"{key} is a metric of evaluations; set data.eval")
    if not evaluated:
        raise ConfigError(
            f"{key} is a metric of evaluations, but eval.every_steps={every} with eval.after=false disables them"
        )
    without = [step for step in evaluated if step < steps and (not saved_every or step % saved_every)]
    settings = f"eval.every_steps={every}, checkpoint.every_steps={saved_every}"
    advice = f"use a checkpoint.every_steps that divides eval.every_steps ({settings})"
    if len(without) == len(evaluated):
        raise ConfigError(f"{key}: no step is both evaluated and saved; {advice}")
    if without:
        log.warning(
            "%s: %d of %d evaluations (the first after step %d) are at steps without a checkpoint and cannot be "
            "the best; %s",
            key, len(without), len(evaluated), without[0], advice,
        )  # fmt: skip


def check_savers(config: RunConfig) -> None:
    """Check the settings that save memory: quantization, activation offload and 8-bit optimizers.

    Raises:
        ConfigError: one is not possible here, or would save nothing.
    """
    model, kind = config.model, config.train.optimizer
    on_cpu = device_name(model.device) == "cpu"
    in_8_bits = kind != "adamw"
    if model.quantization and config.gpt is not None:
        raise ConfigError("model.quantization: a fresh model (gpt) cannot be quantised; remove it")
    if model.quantization and model.path is not None:
        shape = model_config_only(model.path, model.trust_remote_code)
        empty = empty_model(shape, model.trust_remote_code)
        linears(empty, empty.get_output_embeddings().weight, model.quantization)
    if model.activation_offload and on_cpu:
        raise ConfigError("model.activation_offload: has no effect on a CPU; remove it")
    if kind == "paged_adamw8bit" and on_cpu:
        raise ConfigError("train.optimizer=paged_adamw8bit: paging needs a GPU (CUDA); use adamw8bit")
    if in_8_bits and config.backend is not None:
        raise ConfigError(f"train.optimizer={kind}: bitsandbytes does not support sharding; with backend use adamw")
    if (in_8_bits or model.quantization == "nf4") and find_spec("bitsandbytes") is None:
        key = f"train.optimizer={kind}" if in_8_bits else f"model.quantization={model.quantization}"
        raise ConfigError(f"{key}: bitsandbytes is not installed: pip install 'atomrl[quant]'")


def check_ranks(config: RunConfig, algorithm: Algorithm) -> None:
    """Check that the ranks of `config.backend` can be started and can train the run.

    Raises:
        ConfigError: they cannot.
    """
    if (backend := config.backend) is None:
        return
    device = device_name(config.model.device)
    backend.check_count(rank_total(config))
    ranked_kind(backend).check(backend, config.model, used_models(config, algorithm), device)
    check_engine_beside(config, rank_total(config))
    if algorithm.update is not None:
        raise ConfigError(
            f"backend: algorithm.update of {algorithm.name} needs forward-mode derivatives of the whole policy; remove "
            "the section backend"
        )
    if config.model.compile:
        raise ConfigError("model.compile: not supported with sharded weights; remove it")
    roles = set(cluster_roles(config, algorithm)) - {"rollout", "reward", "trainer"}
    if roles:
        raise ConfigError(
            f"cluster.resources: with a backend of several ranks, {', '.join(sorted(roles))} run on the ranks; remove "
            "them"
        )
    if config.cluster is not None and config.cluster.placement == "colocated":
        raise ConfigError(
            "cluster.placement=colocated needs a single trainer process; set cluster.resources.trainer to what each "
            "rank needs, or use split"
        )


def used_models(config: RunConfig, algorithm: Algorithm) -> dict[str, Any]:
    """Return the transformers configs of the trainer's models: path (config key for a fresh model) -> config."""
    shapes, paths = {}, [config.model.path]
    if config.gpt is not None:
        with torch.device("meta"):
            shapes[f"{config.kind}.gpt"] = new_gpt(vocab_size=1, **config.gpt.model_dump()).config
    if "values" in algorithm.needs:
        paths.append(config.critic.path)
    if needs_teacher(algorithm) and config.teacher is not None:
        paths.append(config.teacher.path)
    trusted = config.model.trust_remote_code
    return shapes | {path: model_config_only(path, trusted) for path in paths if path is not None}


# --------------------------------------------------------------------------------------------------------------------
# The rollout engine.


def check_engine(config: RunConfig, path: str) -> type[RolloutEngine]:
    """Check that the engine is installed, accepts its arguments, and supports adapters and the sampling parameters.

    Returns:
        The engine's class.

    Raises:
        ConfigError: it is not, or does not; or the engine is unknown.
    """
    rollout = config.rollout
    engine, _ = engine_class(rollout, path, config.model)
    key = f"rollout.engine={rollout.engine}"
    if config.model.lora is not None and not engine.supports_lora:
        others = " or ".join(name for name, kind in ENGINES.items() if kind.supports_lora and not kind.package)
        raise ConfigError(
            f"model.lora: {key} does not support LoRA adapters ({engine.__name__}.supports_lora is False): use "
            f"rollout.engine={others}, or remove model.lora"
        )
    if reason := engine.refusal(train_sampling(config)):
        raise ConfigError(f"rollout.{reason}")
    if rollout.server:
        for name in ("engine_args", "tensor_parallel"):
            if name in rollout.model_fields_set:
                raise ConfigError(f"rollout.{name}: has no effect on running servers (rollout.server); remove it")
    elif engine.package:
        if find_spec(engine.package) is None:
            raise ConfigError(f"{key}: {engine.package} is not installed: pip install 'atomrl[{engine.package}]'")
        with reraise_as(ConfigError, key, ImportError):
            engine.check_version()
    elif rollout.tensor_parallel > 1:
        raise ConfigError(
            f"rollout.tensor_parallel={rollout.tensor_parallel}: {key} uses one device; use vllm or sglang"
        )
    engine.check_arguments(rollout.engine_args)
    gpus = torch.cuda.device_count() if device_name(config.model.device) != "cpu" and config.cluster is None else None
    if gpus is not None and rollout.tensor_parallel > gpus:
        raise ConfigError(f"rollout.tensor_parallel={rollout.tensor_parallel}: this machine has {gpus} GPUs")
    needs_engine = rollout.source == "engine" or config.data.eval is not None
    if engine.server and needs_engine and config.cluster is None:  # actors may be on machines that reach other servers
        check_servers(rollout, engine.health_path)
    if rollout.gpu_memory_utilization != "auto" and (engine.package is None or rollout.server):
        name = "a running server" if rollout.server else key
        log.warning(
            "rollout.gpu_memory_utilization=%g has no effect on %s, only on vLLM and SGLang that the run starts",
            rollout.gpu_memory_utilization, name,
        )  # fmt: skip
    return engine


def check_servers(rollout: RolloutConfig, health_path: str) -> None:
    """Check that the servers of `rollout.server` are running. A run would wait for them for `rollout.server_timeout_s`.

    Raises:
        ConfigError: an address cannot be reached, or another program answers there.
    """
    if not rollout.server:
        return
    with reraise_as(ConfigError, "rollout.server needs: pip install 'atomrl[http]'", ImportError):
        import httpx
    for url in rollout.server:
        try:
            status = httpx.get(url + health_path, timeout=SERVER_TIMEOUT_S, trust_env=False).status_code
        except httpx.TimeoutException:  # busy
            continue
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"rollout.server: cannot connect to {url}: {error}; start the server, or correct the address"
            ) from error
        if 400 <= status < 500:
            raise ConfigError(
                f"rollout.server: {url} answers {health_path} with status {status}: not a server of "
                f"rollout.engine={rollout.engine}"
            )


def check_engine_beside(config: RunConfig, ranks: int) -> None:
    """Check that the engine can run in the process of rank 0.

    vLLM and SGLang cannot: they would use the trainer's ranks as their own workers, and hang.

    Raises:
        ConfigError: it cannot.
    """
    needs_engine = config.rollout.source == "engine" or config.data.eval is not None
    if ranks == 1 or config.kind != "rl" or config.cluster is not None or not needs_engine:
        return
    name, kind = config.rollout.engine, engine_class(config.rollout, model_path(config), config.model)[0]
    if kind.package and not kind.server:
        server = next(other for other, engine in ENGINES.items() if engine.server and engine.package == kind.package)
        raise ConfigError(
            f"rollout.engine={name}: in the process of rank 0 it would use the {ranks} ranks of the trainer as "
            "its workers and hang: run it in its own process, with cluster.replicas=1 (or more) "
            f"or rollout.engine={server}"
        )


def check_correction(config: RunConfig, engine: type[RolloutEngine]) -> None:
    """Check that the engine returns log-probs if importance correction needs them; warn if the gap is not measured.

    Args:
        engine: class of the run's engine.

    Raises:
        ConfigError: `algorithm.rollout_is` is set, and `rollout.logprobs_over=none`.
    """
    if config.rollout.logprobs_over != "none":
        return
    if parts := getattr(config.algorithm, "rollout_is", ()):
        correction = " + ".join(part.type for part in parts)
        raise ConfigError(
            f"rollout.logprobs_over=none: algorithm.rollout_is={correction} needs the engine's log-probs; use "
            "vocabulary, or algorithm.rollout_is=none"
        )
    if not engine.exact:
        log.warning(
            "rollout.logprobs_over=none: the mismatch between engine and trainer is neither measured nor corrected"
        )


def check_end(config: RunConfig, path: str, tokenizer: Any) -> None:
    """Warn if completions end only at `rollout.max_completion_tokens`: no EOS token, stop token or stop string."""
    shape = model_config_only(path, config.model.trust_remote_code)
    folder = str(resolve_folder(base_path(path), weights=False))
    if not (config.rollout.stop or config.rollout.stop_token_ids or eos_token_ids(folder, shape, tokenizer)):
        log.warning(
            "%s has no end-of-sequence token, so every completion has rollout.max_completion_tokens=%d tokens: set "
            "rollout.stop_token_ids or rollout.stop, or the token in the model's config.json "
            "(eos_token_id)",
            path, config.rollout.max_completion_tokens,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------------
# The environment and its tools.


def with_tools(config: RunConfig, tokenizer: Any) -> RunConfig:
    """Complete the arguments of the environment `tools`: the tools' schemas, and the model's format of tool calls.

    Connects to MCP servers to read the schemas, and disconnects again.

    Raises:
        ConfigError: no tools are given, a tool cannot be used, an MCP server does not answer, or the chat template does
            not support tools.
    """
    if not config.tools:
        if config.environment is not None and config.environment.function == "tools":
            raise ConfigError("environment.function=tools: no tools; add the section tools")
        return config
    assert config.environment is not None, "a config with tools has the environment `tools`"
    if config.data.chat_template == "none":
        raise ConfigError("tools: cannot be added to prompts with data.chat_template=none")
    if any(tool.mcp for tool in config.tools) and find_spec("mcp") is None:
        raise ConfigError("tools: mcp is not installed: pip install 'atomrl[mcp]'")
    over = [tool for tool in config.tools if tool.function and tool.timeout_s >= config.environment.timeout_s]
    if over:
        log.warning(
            "tools: %s: timeout_s=%g is not below environment.timeout_s=%g, which ends the whole episode first",
            over[0].function, over[0].timeout_s, config.environment.timeout_s,
        )  # fmt: skip
    tools = [tool.model_dump(mode="json") for tool in config.tools]
    with reraise_as(ConfigError, "tools", ValueError, OSError):
        schemas = find_schemas(tools)
        form = find_form(tokenizer, schemas, config.data.chat_template_kwargs)
    changes = {"args": {"tools": tools, "schemas": schemas, "form": form}, "opening": has_objects(tools)}
    return config.model_copy(update={"environment": config.environment.model_copy(update=changes)})


def check_environment(config: RunConfig, tokenizer: Any) -> None:
    """Check that the environment can be called, and that the chat template supports its replies.

    The role of the replies is the environment's argument `role`. An environment without it is not checked for that.

    Raises:
        ConfigError: it cannot be called, or the template does not support the role.
    """
    if (settings := config.environment) is None:
        return
    try:
        function = find_environment(settings.function, settings.args)
    except EpisodeError as error:
        raise ConfigError(f"environment.{error}") from error
    parameters = inspect.signature(function).parameters
    if function is python:
        wall_s = limits_of(settings.args.get("timeout_s", parameters["timeout_s"].default), 1).wall_s
        if wall_s >= settings.timeout_s:
            log.warning(
                "environment.args.timeout_s: a program may need twice this in wall-clock time, %g s, which is not "
                "below environment.timeout_s=%g, which ends the whole episode first", wall_s, settings.timeout_s,
            )  # fmt: skip
    role = settings.args.get("role", parameters["role"].default) if "role" in parameters else ""
    role = "tool" if config.tools else role
    builtin = ENVIRONMENTS.get(settings.function)
    if role and builtin and builtin.begins and not settings.opening:
        raise ConfigError(
            f"environment.opening: {settings.function} sends the first message, which belongs to the prompt: set it to "
            "true, or without a chat template environment.args.role to ''"
        )
    with reraise_as(ConfigError, "environment", ValueError):
        if settings.opening and config.data.chat_template == "none":
            raise ValueError("opening: needs messages, but data.chat_template is none; remove one of the two")
        replies = ReplyTokens(tokenizer, tool_schemas(config), config.data.chat_template_kwargs)
        for warning in replies.check(role or "user", settings.opening) if role or settings.opening else ():
            log.warning("environment: %s", warning)


def check_outcome(config: RunConfig) -> None:
    """Check that the environment gives a reward if the config has no other.

    Raises:
        ConfigError: it gives none.
    """
    settings = config.environment
    if settings is None or [item.function for item in config.reward.functions] != ["environment"]:
        return
    if config.tools and not gives_reward(settings.args["tools"]):
        raise ConfigError(
            "reward.functions: tools only give a reward if they are a class with get_reward; set a reward"
        )
    builtin = ENVIRONMENTS.get(settings.function)
    if builtin and builtin.scored_by:
        raise ConfigError(
            f"reward.functions: {settings.function} does not score the answer; set a reward (e.g. {builtin.scored_by})"
        )


def check_columns(config: RunConfig, *splits: Sequence[Problem]) -> None:
    """Check that the data have the columns that the environment reads.

    Those are `problem.columns["name"]` in the source of a user's own environment, and the parameters of `reset` of
    tools that are classes.

    Raises:
        ConfigError: a column is missing.
    """
    if (settings := config.environment) is None:
        return
    function = find_environment(settings.function, settings.args)
    parameter = next(iter(inspect.signature(function).parameters), "")
    if inspect.isclass(function):
        function = function.reset  # type: ignore[attr-defined]
        parameter = [*inspect.signature(function).parameters, "", ""][1]  # after self
    reads = subscripts(function, f"{parameter}.columns")
    places: dict[tuple[str, ...], str] = {}
    for problem in chain(*splits):
        places.setdefault(tuple(problem.columns), problem.problem_id)
    for columns, place in places.items():
        if config.tools:
            with reraise_as(ConfigError, f"tools: {place}", ValueError):
                check_rows(settings.args["tools"], columns)
        if missing := [name for name in reads if name not in columns]:
            near = nearest(missing[0], columns)
            raise ConfigError(
                f"environment.function={settings.function}: it reads {parameter}.columns[{missing[0]!r}]; {place} has "
                f"the columns {', '.join(map(repr, columns)) or 'none'}: "
                + (f"did you mean {near!r}?" if near else "use a name in the data, or add the column")
            )


# --------------------------------------------------------------------------------------------------------------------
# Problems, groups and the rollout pool: can anything be learned?


def check_held_out(config: RunConfig, train: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    """Warn if evaluation problems are in the training data too. Generated tasks are not checked."""
    if not held_out or is_generator(config.data.eval or ""):
        return

    def content(problem: Problem) -> str:
        return repr((problem.prompt, [image.name for image in problem.images], problem.columns.get(COMPLETIONS)))

    # Collect only training problems that are held out too: the training data may be large.
    contents = {content(problem) for problem in held_out}
    trained = {key for problem in train if (key := content(problem)) in contents}
    both = [problem.problem_id for problem in held_out if content(problem) in trained]
    if both:
        log.warning(
            "data.eval: %d of %d problems are in data.train as well (such as %s), so evaluations do not measure "
            "generalization",
            len(both), len(held_out), both[0],
        )  # fmt: skip


def check_image_engine(config: RunConfig) -> None:
    """Check that the engine of a run takes pictures.

    Raises:
        ConfigError: it does not.
    """
    engine, _ = engine_class(config.rollout, model_path(config), config.model)
    if not engine.supports_images:
        others = " or ".join(name for name, kind in ENGINES.items() if kind.supports_images)
        raise ConfigError(
            f"rollout.engine={config.rollout.engine}: {engine.__name__} does not take pictures, and the data have "
            f"some: use rollout.engine={others}"
        )
    if engine.package and config.cluster is not None:
        raise ConfigError(f"cluster: {engine.__name__} takes pictures in the trainer's process alone; remove cluster")
    if not config.rollout.server:
        with reraise_as(ConfigError, f"rollout.engine={config.rollout.engine}, with pictures", ImportError):
            engine.check_version(engine.images_version)
    if reason := engine.image_refusal(train_sampling(config)):
        raise ConfigError(f"rollout.{reason}")


def check_images(config: RunConfig, images: ImageStore | None, algorithm: Algorithm, path: str | None) -> None:
    """Check that all parts of a run support the pictures of its data.

    Args:
        images: those of the data; None: the model reads text alone.

    Raises:
        ConfigError: a part does not, or a setting of pictures has nothing to apply to.
    """
    data, model, backend = config.data, config.model, config.backend
    if not images:
        keys = {"data.images_field": data.images_field, "data.min_pixels": data.min_pixels}
        keys |= {"data.max_pixels": data.max_pixels, "model.freeze_vision": None if model.freeze_vision else False}
        if key := next((key for key, value in keys.items() if value is not None), None):
            why = None if path is None else why_no_images(model_config_only(path, model.trust_remote_code), path)
            raise ConfigError(f"{key}: {why or 'no row of the data has a picture'}; remove the key")
        return
    if config.kind == "rl":
        check_image_engine(config)
    if config.kind == "reward-model":
        raise ConfigError("algorithm.name=reward_model: reward models read text alone; remove the pictures of the data")
    if "values" in algorithm.needs | algorithm.outputs:
        raise ConfigError(
            f"algorithm.name={algorithm.name}: a critic reads text alone; use an algorithm without one, such as grpo"
        )
    if algorithm.update is not None:
        raise ConfigError("algorithm.update: a trust region does not support pictures; use update: optimizer")
    if backend is not None and not ranked_kind(backend).supports_images:
        raise ConfigError(f"backend.type={backend.type}: trains on text alone; use backend.type=fsdp")
    if backend is not None and backend.ranks_per_row > 1:
        raise ConfigError(
            "backend.sequence, backend.tensor: rows with pictures are not split over ranks; remove them (ranks then "
            "share the rows)"
        )
    if model.pack_rows:
        raise ConfigError("model.pack_rows=true: rows with pictures are padded; remove it")
    if needs_teacher(algorithm) and config.teacher is not None:
        theirs = model_config_only(config.teacher.path, model.trust_remote_code)
        ours = model_config_only(str(path), model.trust_remote_code)
        why = why_no_images(theirs, config.teacher.path)
        if why is None and (theirs.model_type, theirs.image_token_id) != (ours.model_type, ours.image_token_id):
            why = f"{config.teacher.path} reads pictures otherwise than {path}; use a model of the same family"
        if why:
            raise ConfigError(f"teacher.path: {why}")


def check_row_limit(prompt_tokens: Sequence[int], max_row_tokens: int | None) -> None:
    """Check that `train.max_row_tokens` leaves room for completions; warn if it does not for some prompts.

    Args:
        prompt_tokens: length of every prompt.
        max_row_tokens: `train.max_row_tokens`.

    Raises:
        ConfigError: it leaves none for any prompt.
    """
    over = sum(tokens >= max_row_tokens for tokens in prompt_tokens) if max_row_tokens is not None else 0
    if not over:
        return
    if over == len(prompt_tokens):
        raise ConfigError(
            f"train.max_row_tokens={max_row_tokens}: every prompt is at least this long "
            f"({min(prompt_tokens)} to {max(prompt_tokens)}), so no completion would be trained on; raise it above "
            "the length of prompt plus completion"
        )
    log.warning(
        "train.max_row_tokens=%d: %d of %d prompts are at least this long; their completions are not trained on",
        max_row_tokens, over, len(prompt_tokens),
    )  # fmt: skip


def check_group_size(algorithm: Algorithm, completions_per_prompt: int) -> None:
    """Check that groups of this size can have advantages other than 0.

    Calls `algorithm.advantages` on rows with random rewards and inputs: with this group size and, if all advantages
    are 0, with `LARGE_GROUP`. If those are 0 too, the loss does not use advantages, and the group size is fine.

    Raises:
        ConfigError: all advantages would be 0.
        ValueError: the algorithm itself refuses groups of this size.
    """
    if _has_advantage(algorithm, completions_per_prompt) is False and _has_advantage(algorithm, LARGE_GROUP):
        raise ConfigError(
            f"rollout.completions_per_prompt={completions_per_prompt}: {algorithm.name} compares the completions of a "
            "prompt; in groups of this size every advantage would be 0; "
            "use larger groups, or an algorithm.advantage that does not compare"
        )


def _has_advantage(algorithm: Algorithm, group_size: int) -> bool | None:
    """True if random rewards in groups of this size give an advantage that is not 0.

    None if the advantage is the user's own function and fails on these rows. `check_own_functions` has already called
    it with the rows of this run.
    """
    is_custom = isinstance(algorithm, PolicyObjective) and isinstance(algorithm.advantage, Custom)
    rows = with_inputs(random_rows(groups=4, group_size=group_size), algorithm.advantage_inputs)
    try:
        return bool(algorithm.advantages(rows).advantages.any())
    except Exception:
        if is_custom:
            return None
        raise


def check_temperature(config: RunConfig) -> None:
    """Warn if all completions of a prompt would be the same."""
    rollout = config.rollout
    if rollout.temperature == 0 and rollout.completions_per_prompt > 1 and config.environment is None:
        log.warning(
            "rollout.temperature=0: all %d completions of a prompt will be the same, so their advantages are 0; use "
            "rollout.temperature=1",
            rollout.completions_per_prompt,
        )


def check_pool(config: RunConfig, identity: Mapping[str, str]) -> None:
    """Check that an existing rollout pool was filled with the same tokenizer, model and so on (`identity`).

    Raises:
        PoolError: it was not, or the file is not a pool.
    """
    if config.pool_file.exists():
        with closing(RolloutPool(config.pool_file, config.pool)) as pool:
            pool.check_identity(identity, adopt=False)
