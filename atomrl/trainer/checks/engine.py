"""Checks of the rollout engine."""

import logging
from importlib.util import find_spec
from typing import Any

import torch

from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError, RolloutConfig, RunConfig
from atomrl.engines.stop_rule import eos_token_ids
from atomrl.models.loading import base_path, model_config_only, resolve_folder
from atomrl.protocols import RolloutEngine
from atomrl.trainer.build import ENGINES, device_name, engine_class, model_path, train_sampling

log = logging.getLogger(__name__)


SERVER_TIMEOUT_S = 10.0
"""Seconds to wait for an engine's server to answer its health check."""


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
    here = engine.updates_parts and config.cluster is None and rollout.source != "pool"
    if config.model.lora is not None and config.model.lora.modules_to_save and not here:
        others = " or ".join(name for name, kind in ENGINES.items() if kind.updates_parts)
        raise ConfigError(
            "model.lora.modules_to_save: only an engine in the process of the run gets weights beside adapters: use "
            f"rollout.engine={others}, without the section cluster and rollout.source=pool"
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
        ConfigError: `algorithm.rollout_is` or `old_policy` needs log-probs, and `rollout.logprobs_over=none`.
    """
    if config.rollout.logprobs_over != "none":
        return
    if reader := getattr(config.algorithm, "reads_rollout", ""):
        raise ConfigError(
            f"rollout.logprobs_over=none: algorithm.{reader} needs the engine's log-probs; use vocabulary, or "
            "algorithm.rollout_is=none and old_policy=trainer"
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
