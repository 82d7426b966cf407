"""Which engine a run draws with where `rollout.engine` is `auto`, and its share of a GPU."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from atomrl.cluster.places import Wanted
from atomrl.config import ConfigError, RunConfig, read_yaml
from atomrl.engines.vllm import VLLMEngine
from atomrl.models.gpt import unsupported
from atomrl.models.loading import compute_dtype, model_config_only
from atomrl.models.memory import BESIDE, SHARDED
from atomrl.protocols import Algorithm
from atomrl.tracking.run_directory import installed_version, is_begun
from atomrl.trainer.build import ENGINES, chosen_class, device_name, train_sampling
from atomrl.trainer.memory import CONTEXT_GIB, USABLE, at_once, memory_estimate, sampling_bytes

log = logging.getLogger(__name__)
ENGINE = ("engine weights", "key-value cache")
MODELS = {"reference": ("reference",), "critic": ("critic", "critic activations"), "teacher": ("teacher",)}
"""The parts of the estimate that a role in an actor of its own takes with it."""
ALONE = 0.9
"""Share of a GPU that an engine has for itself."""
GIB = 2**30
ENGINE_OVERHEAD = 3 * GIB
"""Bytes of vLLM or SGLang beside weights and cache: a prefill's activations, CUDA graphs, workspaces. Not measured."""
CAPABILITY = (8, 0)
"""CUDA's compute capability from which vLLM is chosen: bfloat16, and FlashAttention."""


def with_engine(config: RunConfig, path: str) -> tuple[RunConfig, str]:
    """The config with an engine's name where `rollout.engine` is `auto`, and the reason.

    A run that goes on keeps the engine that it began with.

    Args:
        config: of a run that draws rollouts.
        path: of the policy.

    Raises:
        ConfigError: servers are given, and not which engine they run.
    """
    if config.rollout.engine != "auto":
        return config, "set in the config"
    if config.rollout.server:
        raise ConfigError("rollout.server: say what the servers run: rollout.engine=vllm-server or sglang")
    stored = config.run_dir / "config.yaml"
    begun = is_begun(config.run_dir) and stored.is_file()
    recorded = read_yaml(stored).get("rollout", {}).get("engine") if begun else None
    if recorded in ENGINES:
        name, reason = recorded, "the run began with it"
    elif why := why_not_vllm(config, path):
        name, reason = "native", f"auto: {why}"
    else:
        name, reason = "vllm", f"auto: on a GPU, vLLM {installed_version('vllm')} is installed and knows the model"
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": name})}), reason


def why_not_vllm(config: RunConfig, path: str) -> str | None:
    """Why `auto` does not choose vLLM; None where it does."""
    gpu, cluster, backend = _on_gpu(config), config.cluster, config.backend
    if gpu is None:
        return "there is no GPU"
    found, shape = installed_version("vllm"), model_config_only(path, config.model.trust_remote_code)
    if found is None or find_spec("vllm") is None or "cpu" in found:  # builds for CPUs have another name, or say it
        return "vLLM for GPUs is not installed (pip install 'atomrl[vllm]')"
    if Version(found) < Version(str(VLLMEngine.least_version)):
        return f"vLLM {found} is older than {VLLMEngine.least_version}"
    if cluster is None and backend is not None and backend.ranks != 1:
        return "vLLM cannot be in the process of one of several ranks (rollout.engine=vllm-server has its own)"
    if torch.cuda.is_available() and gpu != "elsewhere":
        if (has := torch.cuda.get_device_capability(torch.device(gpu))) < CAPABILITY:
            return f"the GPU has compute capability {has[0]}.{has[1]}, and vLLM is chosen from {CAPABILITY[0]}.0 on"
        if compute_dtype(config.model.dtype, gpu) == torch.float32:
            return "the model computes in float32"
    if reason := VLLMEngine.refusal(train_sampling(config)):
        return f"vLLM cannot draw so: {reason}"
    kinds = getattr(shape, "architectures", None) or []
    if not kinds or not {*kinds} <= known_architectures():
        return f"vLLM {found} does not know {', '.join(kinds) or 'the model'}"
    if unsupported(shape) is not None and config.model.lora is not None:
        return "whether vLLM takes adapters of this model is not known"
    return None


def _on_gpu(config: RunConfig) -> str | None:
    """The GPU that rollouts are drawn on, `elsewhere` of an actor's; None where it is a CPU."""
    cluster = config.cluster
    if config.model.device == "cpu":
        return None
    if cluster is not None and config.rollout.engine == "auto":
        said = cluster.resources["rollout"].num_gpus if "rollout" in cluster.resources else None
        if said == 0 or (said is None and cluster.placement is None):
            return None
        return "elsewhere" if cluster.address or not torch.cuda.is_available() else "cuda"
    device = device_name(config.model.device)
    return None if device == "cpu" else device


def takes_turns(config: RunConfig) -> bool:
    """Whether the engine sleeps while the trainer works: where both are on one GPU and the engine holds memory of its
    own, as vLLM and SGLang do."""
    if config.cluster is not None:
        return config.cluster.placement == "colocated"
    kind, here = chosen_class(config.rollout), device_name(config.model.device) != "cpu"
    return kind.package is not None and here and config.asynchronous is None


def known_architectures() -> set[str]:
    """The architectures that the installed vLLM knows, read from its registry's source: an import takes seconds."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    file = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    if not file.is_file():
        return set()
    tables = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Dict))
    keys = (key.value for table in tables for key in table.keys if isinstance(key, ast.Constant))
    return {key for key in keys if isinstance(key, str)}


def with_share(config: RunConfig, algorithm: Algorithm) -> tuple[RunConfig, str | None]:
    """The config with a number where `rollout.gpu_memory_utilization` is `auto`, and the reason; None where the engine
    has no use for it.

    Args:
        config: of a run, with the name of its engine.
        algorithm: what it needs of memory.

    Raises:
        ConfigError: the trainer leaves no room for the engine.
    """
    rollout = config.rollout
    usual = rollout.model_copy(update={"gpu_memory_utilization": ALONE})
    if rollout.gpu_memory_utilization != "auto":
        return config, None
    if chosen_class(rollout).package is None or rollout.server or config.model.device == "cpu":
        return config.model_copy(update={"rollout": usual}), None
    capacity = None
    if torch.cuda.is_available():
        capacity = int(torch.cuda.get_device_properties(torch.device(_first_gpu(config))).total_memory)
    elif config.cluster is None:
        return config.model_copy(update={"rollout": usual}), None
    ranks = 1 if config.backend is None else config.backend.ranks or 1
    share, reason = engine_share(config, memory_estimate(config, algorithm, ranks), capacity)
    return config.model_copy(update={"rollout": rollout.model_copy(update={"gpu_memory_utilization": share})}), reason


def _first_gpu(config: RunConfig) -> str:
    device = config.model.device
    return "cuda" if device == "auto" or config.cluster is not None else device


def engine_share(
    config: RunConfig, parts: Mapping[str, int], capacity: int | None, wanted: Mapping[str, Wanted] | None = None
) -> tuple[float, str]:
    """`rollout.gpu_memory_utilization`, and the reason; by formulas where it is `auto`.

    An engine beside the trainer gets what that keeps while the engine draws, all of it where both work at once
    (`asynchronous`), and no more than weights, cache and `ENGINE_OVERHEAD` take.

    Args:
        config: of a run whose engine is vLLM or SGLang.
        parts: of `memory_estimate`.
        capacity: bytes of the GPU; None: not known.
        wanted: the actors of a cluster; None: as the config's section says.

    Raises:
        ConfigError: the trainer leaves no room for the engine.
    """
    rollout, cluster = config.rollout, config.cluster
    if rollout.gpu_memory_utilization != "auto":
        return rollout.gpu_memory_utilization, "set in the config"
    if cluster is not None and cluster.placement != "colocated":
        own = cluster.resources["rollout"].num_gpus if "rollout" in cluster.resources else None
        part = min(1.0, own or 1.0)
        return round(ALONE * part, 2), f"the engine has {part:g} of a GPU" if part < 1 else "the engine has its own GPU"
    engines = cluster.replicas if cluster else 1
    if capacity is None:
        share = round(0.5 / engines, 2)
        return share, "half of a GPU that is not seen from here, shared by the engines"
    mine = parts_of("trainer", parts, wanted or {})
    taken = at_once(mine) if config.asynchronous is not None else kept(mine)
    room = (capacity - CONTEXT_GIB * GIB) * USABLE - taken
    path = config.model.path
    assert path is not None, "of a fresh model nothing is drawn"
    drawing = sampling_bytes(config, int(model_config_only(path, config.model.trust_remote_code).vocab_size))
    need = ENGINE_OVERHEAD + 1.1 * sum(parts[part] for part in ENGINE) + drawing
    share = int(100 * min(room / engines, need) / capacity) / 100
    of = f"{taken / GIB:.1f} GiB of {capacity / GIB:.1f} are the trainer's, and the engine can use {need / GIB:.1f}"
    if share <= 0 or share * capacity < parts["engine weights"]:
        raise ConfigError(
            f"rollout.gpu_memory_utilization: by the formulas there is no room for the engine: {of}; take model.lora, "
            "model.quantization, cluster.placement=split, or set it to what you know to fit"
        )
    return share, of


def kept(parts: Mapping[str, int]) -> int:
    """Bytes of the trainer that stay while an engine draws."""
    return sum(size for part, size in parts.items() if part in SHARDED and part != "gradients")


def parts_of(role: str, parts: Mapping[str, int], wanted: Mapping[str, Any]) -> dict[str, int]:
    """What of the estimate is a role's; the trainer's is all that is neither an engine's nor another actor's."""
    if role != "trainer":
        return {part: parts.get(part, 0) for part in MODELS[role]}
    apart = {part for other in MODELS if other in wanted for part in MODELS[other]}
    return {part: size for part, size in parts.items() if part not in {*ENGINE, *apart, BESIDE, "total"}}
